"""MNIST with its first classes only, or every image several times; a reader for [prepare] and `fedmpi prepare`, to be
started in the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.registry import DATASETS


def mnist(raw: Path, *, classes: int = 5, times: int = 1) -> dict[str, NDArray[Any]]:
    """The digits below `classes`.

    Parameters
    ----------
    raw : Path
        The official files.
    classes : int
        How many digits.
    times : int
        How often every training image is there.
    """
    images = DATASETS["mnist"].read(raw, ReadOptions(), Tally())
    train, test = (labels < classes for labels in (images.labels, images.test_y))
    rows = np.repeat(train.nonzero()[0], times)
    return {
        "x": images.read(rows)[:, 0],
        "y": images.labels[rows],
        "x_test": images.test_x[test][:, 0],
        "y_test": images.test_y[test],
    }
