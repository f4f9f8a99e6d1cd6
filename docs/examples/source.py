"""A data source: data.source = "source:clouds"."""

import numpy as np

import fedmpi


def clouds(*, clients: int = 20, distance: float = 2.0, seed: int = 0) -> fedmpi.ClientArrays:
    """Return points of three classes, one of which is rare at each client.

    Parameters
    ----------
    clients : int
        Number of clients, with 30 points each.
    distance : float
        Standard deviation of the class centers.
    seed : int
        Seed of the points.
    """
    generator = np.random.default_rng(seed)
    owner = np.repeat(np.arange(clients), 30)
    y = (owner + generator.choice(3, len(owner), p=[0.45, 0.45, 0.1])) % 3
    x = distance * generator.standard_normal((3, 8))[y] + generator.standard_normal((len(y), 8))
    held = np.arange(len(y)) % 6 == 0
    x = x.astype(np.float32)
    return fedmpi.ClientArrays(x[~held], y[~held], owner[~held], test=(x[held], y[held]))
