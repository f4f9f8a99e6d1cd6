"""FedBalancer's sample selection: samples.sampler = "fedbalancer:fedbalancer"."""

import numpy as np

from fedmpi import data_sampler


@data_sampler(needs=("sample_loss",))
def fedbalancer(client, *, window: int = 20, step: float = 0.05) -> np.ndarray:
    """Select the samples with a loss above a threshold that rises with the rounds (Shin et al. 2022).

    Parameters
    ----------
    window : int
        Rounds after which the threshold rises.
    step : float
        Its rise, as a share of the way from the lowest loss to the 80th percentile.
    """
    loss = client.fresh("sample_loss")
    low, high = loss.min(), np.percentile(loss, 80)
    ratio = min(1.0, step * (client.round // window))
    return np.flatnonzero(loss >= min(low + ratio * (high - low), loss.max()))
