"""Features that differ by client: python -m data_prep digits --feature-shift feature_shift:contrast."""

import numpy as np


def contrast(clients, generator, *, least: float = 0.5):
    """Give every client a camera with its own contrast.

    Parameters
    ----------
    least : float
        Lowest contrast, between 0 and 1.
    """
    factors = generator.uniform(least, 1, clients)

    def seen(x: np.ndarray, client: int, generator) -> np.ndarray:
        return (x * factors[client]).astype(x.dtype)

    return seen
