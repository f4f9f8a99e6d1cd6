"""FedCor (Tang et al. 2022): clients.sampler = "fedcor:Correlated"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(measures=("loss",))
class Correlated:
    """Select one by one the client that explains most of the remaining covariance of the losses' changes.

    Parameters
    ----------
    noise : float
        Standard deviation added to every client's change.
    """

    state = ("losses",)

    def __init__(self, *, noise: float = 0.01):
        self.noise, self.losses = noise, np.zeros((0, 0))

    def candidates(self, view) -> np.ndarray:
        return view.available

    def draw(self, view) -> Cohort:
        self.losses = np.vstack([self.losses.reshape(-1, len(view.sizes)), view.fresh("loss")])[-30:]
        changes = np.nan_to_num(np.diff(self.losses, axis=0))
        covariance = np.cov(changes.T, bias=True) if len(changes) > 1 else np.eye(len(view.sizes))
        covariance = covariance + self.noise**2 * np.eye(len(covariance))
        share, chosen = view.sizes / view.sizes.sum(), []
        for _ in range(min(view.count, len(view.available))):
            rest = np.setdiff1d(view.available, chosen).astype(int)
            k = rest[np.argmax((share @ covariance / np.sqrt(np.maximum(np.diag(covariance), 1e-12)))[rest])]
            covariance = covariance - np.outer(covariance[:, k], covariance[k]) / covariance[k, k]
            chosen.append(k)
        return Cohort(np.sort(chosen))
