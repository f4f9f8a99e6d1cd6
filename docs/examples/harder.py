"""Weights that depend on the training: server.weights = "harder:Harder"."""

import numpy as np

from fedmpi import weights


@weights(normalized=True)
class Harder:
    """Weight clients by their training loss."""

    def __call__(self, cohort, sizes) -> np.ndarray:
        return np.ones(len(cohort.clients))

    def after(self, work) -> float:
        return work.coefficient * work.loss
