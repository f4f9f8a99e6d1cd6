"""A sampler that measures candidates: clients.sampler = "two_stage_sampler:Steepest"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(measures=("gradient_norm",))
class Steepest:
    """Select the candidates with the longest gradient of the current model."""

    def __init__(self, *, candidates: int = 8):
        self.size = candidates

    def candidates(self, view) -> np.ndarray:
        count = min(max(self.size, view.count), len(view.available))
        return np.sort(view.generator.choice(view.available, count, replace=False))

    def draw(self, view) -> Cohort:
        norm = view.fresh("gradient_norm")  # NaN for all but the candidates
        measured = np.flatnonzero(~np.isnan(norm))
        order = np.argsort(-norm[measured], kind="stable")
        return Cohort(np.sort(measured[order[: view.count]]))
