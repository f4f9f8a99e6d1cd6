"""A small picture of a partition: clients from left to right, classes from top to bottom, colour is samples.

`fedmpi inspect --plot` draws a larger one with axes; this one needs no plotting library, which would slow every start.
"""

from __future__ import annotations

import numpy as np

from fedmpi.common.types import AnyArray, Ints

MOST_CLIENTS, MOST_CLASSES = 100, 100
SIDE = 480
"""Pixels of the longer side, about."""
VIRIDIS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float64)
"""Five colours of matplotlib's scale, evenly spaced; between them colours are mixed."""


def clients_shown(clients: int, most: int = MOST_CLIENTS) -> Ints:
    """The clients that are drawn: all, or as many as there is room for, evenly spaced."""
    return np.unique(np.linspace(0, clients - 1, min(clients, most)).astype(np.int64))


def picture(class_counts: Ints) -> AnyArray:
    """Samples of each class that each client holds, as colours from violet (none) to yellow (most of all).

    Parameters
    ----------
    class_counts : int64 (c, C)

    Returns
    -------
    uint8 (height, width, 3)
        Cells of equal sides; of more than 100 classes as many, evenly spaced.
    """
    counts = class_counts[:, clients_shown(class_counts.shape[1], MOST_CLASSES)].T.astype(np.float64)
    place = counts / max(1.0, counts.max()) * (len(VIRIDIS) - 1)
    low = np.minimum(place.astype(np.int64), len(VIRIDIS) - 2)
    part = (place - low)[..., None]
    colours = np.rint((1 - part) * VIRIDIS[low] + part * VIRIDIS[low + 1]).astype(np.uint8)
    cell = max(1, SIDE // max(counts.shape))
    drawn: AnyArray = colours.repeat(cell, 0).repeat(cell, 1)
    return drawn
