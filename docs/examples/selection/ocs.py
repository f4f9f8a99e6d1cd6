"""Optimal client sampling: clients.sampler = "ocs:Optimal", server.weights = "unbiased"."""

import numpy as np

from fedmpi import Cohort, client_sampler, proportional_inclusion


@client_sampler(measures=("update_norm",))
class Optimal:
    """Select clients independently, with the probabilities of least variance (Chen et al. 2022, Eq 7).

    Parameters
    ----------
    least : float
        Updates with smaller weighted norms are not sent.
    """

    def __init__(self, *, least: float = 1e-9):
        self.least = least

    def candidates(self, view) -> np.ndarray:
        return view.available  # all train, and report the norms of their updates

    def draw(self, view) -> Cohort:
        norms = view.fresh("update_norm") * view.sizes
        clients = np.flatnonzero(norms > self.least)
        inclusion = proportional_inclusion(norms[clients], view.count)
        selected = view.generator.random(len(clients)) < inclusion
        return Cohort(clients[selected], inclusion[selected])
