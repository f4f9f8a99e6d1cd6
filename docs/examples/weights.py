"""Weights of the updates: aggregation.weights = "weights:power"."""

import numpy as np

from fedmpi import weights


@weights(per_sample=False, normalised=True)
def power(cohort, sizes, *, exponent: float = 0.5) -> np.ndarray:
    """A power of each participant's samples: 0 counts all alike, 1 counts samples.

    Parameters
    ----------
    exponent : float
    """
    return sizes[cohort.clients].astype(float) ** exponent
