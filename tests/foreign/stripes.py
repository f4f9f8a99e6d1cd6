import numpy as np

from fedmpi import data_sampler


@data_sampler(pooled=True)
def stripes(pool, *, every: int = 2) -> np.ndarray:
    """Every k-th sample of the cohort's axis, another stripe each round."""
    first = pool.start + (pool.round - pool.start) % every
    return np.arange(first, pool.stop, every)
