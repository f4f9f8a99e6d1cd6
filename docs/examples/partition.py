"""A partition scheme: python -m data_prep digits --partition partition:home_class."""

import numpy as np


def home_class(labels, clients, generator, *, share: float = 0.5) -> np.ndarray:
    """Assign a share of each class to its home clients, and the rest at random.

    Parameters
    ----------
    share : float
        Share of the samples of each class.
    """
    owner = generator.integers(0, clients, len(labels))
    classes = int(labels.max()) + 1
    at_home = (generator.random(len(labels)) < share) & (labels < clients)
    homes = (clients - 1 - labels) // classes + 1  # clients label, label + classes, ...
    turn = generator.integers(0, np.maximum(homes, 1))
    return np.where(at_home, labels + classes * turn, owner)
