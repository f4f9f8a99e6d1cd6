"""FedGS on labels: clients.sampler = "fedgs:FedGS"."""

import numpy as np
from scipy.sparse.csgraph import floyd_warshall

from fedmpi import Cohort, client_sampler


@client_sampler
class FedGS:
    """Select clients with different labels, all about equally often (Wang et al. 2023, without their exchange steps).

    Parameters
    ----------
    alpha : float
        Weight of the distances between selected clients against equal participation.
    """

    state = ("times",)

    def __init__(self, *, alpha: float = 0.1):
        self.alpha, self.times, self.far = alpha, None, None

    def draw(self, view) -> Cohort:
        if self.far is None:  # shortest paths on a graph whose edges join clients with similar labels
            unit = view.class_counts / np.maximum(np.linalg.norm(view.class_counts, axis=1, keepdims=True), 1)
            similarity = unit @ unit.T
            self.far = floyd_warshall(np.where(similarity > 0.1, np.exp(-(similarity**2) / 0.1), np.inf))
            self.far[np.isinf(self.far)] = self.far[np.isfinite(self.far)].max()
        if self.times is None:
            self.times = np.zeros(len(view.sizes), np.int64)
        order, count = view.generator.permutation(view.available), min(view.count, len(view.available))
        value, chosen = -2 * (self.times[order] - self.times.mean()) / len(self.times), []
        for _ in range(count):
            chosen.append(int(np.argmax(value)))
            value += 2 * self.alpha / max(count * (count - 1), 1) * self.far[order, order[chosen[-1]]]
            value[chosen] = -np.inf
        self.times[order[chosen]] += 1
        return Cohort(np.sort(order[chosen]))
