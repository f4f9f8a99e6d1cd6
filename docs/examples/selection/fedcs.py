"""FedCS: clients.sampler = "fedcs:FedCS", devices = true."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(measures=("seconds", "download_seconds", "upload_seconds"))
class FedCS:
    """Select as many candidates as can upload in turn before a deadline (Nishio and Yonetani 2019, Algorithm 3).

    Parameters
    ----------
    deadline : float
        Seconds of a round.
    """

    def __init__(self, *, deadline: float = 1.0):
        self.deadline = deadline

    def candidates(self, view) -> np.ndarray:
        return np.sort(view.generator.choice(view.available, min(view.count, len(view.available)), replace=False))

    def draw(self, view) -> Cohort:
        down, up = view.fresh("download_seconds"), view.fresh("upload_seconds")
        compute = view.fresh("seconds") - down - up
        left = np.flatnonzero(~np.isnan(compute)).tolist()
        selected, distribution, elapsed = [], 0.0, 0.0
        while left:
            ends = {k: max(distribution, down[k]) + up[k] + max(elapsed, compute[k]) for k in left}
            best = min(left, key=ends.get)
            left.remove(best)
            if ends[best] < self.deadline:
                selected.append(best)
                distribution = max(distribution, down[best])
                elapsed = ends[best] - distribution
        return Cohort(np.array(sorted(selected), np.int64))
