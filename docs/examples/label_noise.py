"""Label noise of some clients: python -m data_prep digits --label-noise label_noise:careless."""

import numpy as np


def careless(labels, owners, classes, generator, *, share: float = 0.3, often: float = 0.5) -> np.ndarray:
    """Let some clients confuse a class with the one before it.

    Parameters
    ----------
    share : float
        Share of careless clients.
    often : float
        Share of their labels that are wrong.
    """
    clients = int(owners.max()) + 1
    wrong = (generator.random(clients) < share)[owners] & (generator.random(len(labels)) < often)
    return np.where(wrong & (owners >= 0), (labels + classes - 1) % classes, labels)  # -1: no owner
