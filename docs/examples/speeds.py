"""Speeds of devices: devices.speed = "speeds:by_size"."""

import numpy as np


def by_size(view, *, fast: float = 2000.0, sigma: float = 0.5) -> np.ndarray:
    """Give clients with more samples faster devices, at random.

    Parameters
    ----------
    fast : float
        Samples per second of the client with the most samples.
    sigma : float
        Standard deviation of the logarithm of the random factor.
    """
    rank = view.sizes.argsort().argsort() / (len(view.sizes) - 1)
    return fast * rank.clip(0.01) * np.exp(sigma * view.generator.standard_normal(len(rank)))
