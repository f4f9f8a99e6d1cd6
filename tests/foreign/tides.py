import numpy as np


def tides(view, *, period: int = 4, low: float = 0.4):
    """Clients come and go like the tide: a wave over their indices is the probability that one is available."""
    n = len(view.sizes)
    wave = 0.5 + 0.5 * np.cos(2 * np.pi * (np.arange(n) / n + view.round / period))
    return low + (1 - low) * wave
