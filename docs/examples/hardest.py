"""A data sampler that sees the model: samples.sampler = "hardest:hardest"."""

import numpy as np

from fedmpi import data_sampler


@data_sampler(needs=("sample_loss",))
def hardest(client, *, share: float = 0.5) -> np.ndarray:
    """Select the samples that the global model predicts worst.

    Parameters
    ----------
    share : float
        Share of the samples.
    """
    loss = client.fresh("sample_loss")
    order = np.argsort(-loss, kind="stable")
    return np.sort(order[: int(np.ceil(share * len(loss)))])
