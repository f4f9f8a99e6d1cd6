"""Labels without images, for what depends on the labels alone; a reader for `fedmpi prepare`.

    fedmpi prepare jobs.experiments.labels_alone:equal --raw . --partition astraea --variant LTRF2 --total 230752 \\
        --test-total 18800 --clients 500 --seed 0 --out shards/labels-0
    python -m benchmarks.mediator_balance shards/labels-0 --most 1
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def equal(raw: Path, *, classes: int = 47, each: int = 20_000, test_each: int = 400) -> dict[str, NDArray[Any]]:
    """As many samples of every class, each an image of one black pixel.

    Parameters
    ----------
    raw : Path
        Nothing is read from it.
    classes, each, test_each : int
        Classes (EMNIST's split bymerge has 47), and training and test samples of each.
    """
    y, y_test = np.repeat(np.arange(classes), each), np.repeat(np.arange(classes), test_each)
    return {
        "x": np.zeros((len(y), 1, 1), np.uint8),
        "y": y,
        "x_test": np.zeros((len(y_test), 1, 1), np.uint8),
        "y_test": y_test,
    }
