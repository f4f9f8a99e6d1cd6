"""Amazon reviews with fewer of the largest class; a reader for [prepare]. Start it in the repository."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from data_prep.datasets import DATASETS
from data_prep.raw import RawDataset, ReadOptions, Tally
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints


def thinned(raw: Path, *, reviews: str, share: float = 0.6, draw: int = 0) -> RawDataset:
    """Reviews of which the largest class has at most a given share, of the training and of the test texts.

    Parameters
    ----------
    raw : Path
        The folder of the reviews.
    reviews : str
        The name of their file.
    share : float
        Of the largest class, in (0, 1); whose texts beyond it are left out at random.
    draw : int
        Seed of what is left out.
    """
    data = DATASETS["amazon"].read(raw / reviews, ReadOptions(split="texts"), Tally())
    largest = int(np.bincount(data.y[data.train]).argmax())
    generator = Streams(draw).generator(Purpose.PARTITION)
    train, test = (rows[kept(data.y[rows], largest, share, generator)] for rows in (data.train, data.test))
    return replace(data, train=train, test=test)


def kept(labels: Ints, largest: int, share: float, generator: np.random.Generator) -> Ints:
    """Rows, in order: all but those of the class `largest`, and as many of it as come to `share` of the rows kept."""
    others = np.flatnonzero(labels != largest)
    same = np.flatnonzero(labels == largest)
    count = min(len(same), round(len(others) * share / (1 - share)))
    return np.sort(np.concatenate([others, generator.choice(same, count, replace=False)]))
