"""A data sampler: samples.sampler = "rare_first:rare_first"."""

import numpy as np

from fedmpi import data_sampler


@data_sampler
def rare_first(client, *, share: float = 0.5) -> np.ndarray:
    """Select a share of the client's samples, rare classes first.

    Parameters
    ----------
    share : float
        Share of the samples.
    """
    labels = client.labels
    counts = np.bincount(labels)
    by_chance = client.generator.permutation(len(labels))
    order = by_chance[np.argsort(counts[labels[by_chance]], kind="stable")]
    return np.sort(order[: int(np.ceil(share * len(labels)))])
