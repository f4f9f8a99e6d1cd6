"""MNIST in five fixed pairs of digits; a reader for [prepare] and `fedmpi prepare`. Start it in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets import DATASETS
from data_prep.raw import ReadOptions, Tally
from fedmpi.common.streams import Purpose, Streams


def mnist(raw: Path, *, users: int = 100, draw: int = 0) -> dict[str, NDArray[Any]]:
    """Clients of one size: a fifth of them hold 0 and 1, a fifth 2 and 3, … as many of either; the rest is left out.

    Parameters
    ----------
    raw : Path
        The official files.
    users : int
        Clients, a multiple of five.
    draw : int
        Seed of who gets which images.
    """
    images = DATASETS["mnist"].read(raw, ReadOptions(), Tally())
    generator = Streams(draw).generator(Purpose.PARTITION)
    holders, labels = users // 5, images.y[images.train]
    each = int(np.bincount(labels).min()) // holders
    rows = [
        generator.permutation(np.flatnonzero(labels == label))[: holders * each].reshape(holders, each)
        for label in range(images.classes)
    ]
    dealt = np.concatenate([np.concatenate(rows[pair : pair + 2], axis=1) for pair in range(0, images.classes, 2)])
    return {
        "x": images.read(dealt.reshape(-1))[:, 0],
        "y": images.y[dealt.reshape(-1)],
        "user": np.repeat(np.arange(len(dealt)), 2 * each),
        "x_test": images.read(images.test)[:, 0],
        "y_test": images.y[images.test],
    }
