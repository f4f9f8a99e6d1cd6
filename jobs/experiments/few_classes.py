"""MNIST with its first classes only; a reader for [prepare] and `fedmpi prepare`. Start it in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from data_prep.datasets import DATASETS
from data_prep.raw import ReadOptions, Tally


def mnist(raw: Path, *, classes: int = 5) -> dict[str, NDArray[Any]]:
    """The digits below `classes`.

    Parameters
    ----------
    raw : Path
        The official files.
    classes : int
        How many digits.
    """
    images = DATASETS["mnist"].read(raw, ReadOptions(), Tally())
    train, test = (rows[images.y[rows] < classes] for rows in (images.train, images.test))
    return {
        "x": images.read(train)[:, 0],
        "y": images.y[train],
        "x_test": images.read(test)[:, 0],
        "y_test": images.y[test],
    }
