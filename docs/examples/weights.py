"""Aggregation weights: server.weights = "weights:power"."""

import numpy as np

from fedmpi import weights


@weights(per_sample=False, normalized=True)
def power(cohort, sizes, *, exponent: float = 0.5) -> np.ndarray:
    """Weight clients by a power of their size: 0 is uniform, 1 is by samples.

    Parameters
    ----------
    exponent : float
        The power.
    """
    return sizes[cohort.clients].astype(float) ** exponent
