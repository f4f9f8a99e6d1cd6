"""DivFL: clients.sampler = "divfl:Diverse"."""

import numpy as np
from scipy.spatial.distance import cdist

from fedmpi import Cohort, client_sampler


@client_sampler(needs=("update_sketch",), measures=("update_sketch",))
class Diverse:
    """Minimize Σ_k min_{i ∈ S} |g_k − g_i| greedily (Balakrishnan et al. 2022); g_k is k's last known update.

    Parameters
    ----------
    sketch_size : int
        Values that represent an update.
    """

    state = ("updates",)

    def __init__(self, *, sketch_size: int = 64):
        self.updates = None

    def candidates(self, view) -> np.ndarray:
        before = np.nan if self.updates is None else self.updates
        self.updates = np.where(np.isnan(view.sketches), before, view.sketches)
        return view.eligible[np.isnan(self.updates[view.eligible, 0])]

    def draw(self, view) -> Cohort:
        fresh = view.fresh("update_sketch")
        self.updates = np.where(np.isnan(fresh), self.updates, fresh)
        known = self.updates[view.eligible]
        distances = cdist(known, known)
        nearest, chosen = np.full(len(known), np.inf), []
        for _ in range(min(view.count, len(known))):
            cost = np.minimum(distances, nearest).sum(1)
            chosen.append(int(cost.argmin()))
            nearest = np.minimum(nearest, distances[chosen[-1]])
        return Cohort(view.eligible[np.unique(chosen).astype(int)])
