import numpy as np

import fedmpi


def blobs(*, clients: int = 12, classes: int = 4, seed: int = 3):
    """Gaussian clouds; each client sees them turned by its own angle."""
    g = np.random.default_rng(seed)
    centres = g.normal(size=(classes, 2)) * 3
    xs, ys, owner = [], [], []
    for k in range(clients):
        n = int(g.integers(20, 80))
        y = g.integers(0, classes, n)
        a = g.normal() * 0.3
        turn = np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]])
        xs.append((centres[y] + g.normal(size=(n, 2))) @ turn)
        ys.append(y)
        owner += [f"hospital {k}"] * n
    yt = g.integers(0, classes, 200)
    xt = centres[yt] + g.normal(size=(200, 2))
    return fedmpi.ClientArrays(
        np.concatenate(xs).astype(np.float32), np.concatenate(ys), owner, test=(xt.astype(np.float32), yt)
    )
