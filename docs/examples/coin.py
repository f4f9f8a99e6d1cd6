"""A pooled data sampler: samples.sampler = "coin:coin"."""

import numpy as np

from fedmpi import data_sampler

BLOCK = 1 << 16


@data_sampler(pooled=True)
def coin(pool, *, share: float = 0.5) -> np.ndarray:
    """Use each sample of the selected clients with the same probability.

    Parameters
    ----------
    share : float
        Probability of a sample.
    """
    found = [np.zeros(0, np.int64)]
    for block in range(pool.start // BLOCK, -(-pool.stop // BLOCK)):
        drawn = pool.generator(block).random(BLOCK) < share
        found.append(BLOCK * block + np.flatnonzero(drawn))
    return pool.restrict(np.concatenate(found))
