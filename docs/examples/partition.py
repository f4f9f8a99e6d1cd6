"""A partition scheme: python -m data_prep digits --partition partition:home_class."""

import numpy as np


def home_class(labels, clients, generator, *, share: float = 0.5) -> np.ndarray:
    """A share of every class goes to the clients whose home it is, the rest to anybody.

    Parameters
    ----------
    share : float
        Of each class's rows.
    """
    owner = generator.integers(0, clients, len(labels))
    classes = int(labels.max()) + 1
    at_home = (generator.random(len(labels)) < share) & (labels < clients)
    homes = (clients - 1 - labels) // classes + 1  # clients label, label + classes, ...
    turn = generator.integers(0, np.maximum(homes, 1))
    return np.where(at_home, labels + classes * turn, owner)
