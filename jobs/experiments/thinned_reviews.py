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
    data = DATASETS["amazon"].read(raw, ReadOptions(files=(reviews,), split="texts"), Tally())
    assert data.users is not None and data.user_names is not None
    largest = int(np.bincount(data.labels).argmax())
    generator = Streams(draw).generator(Purpose.PARTITION)
    train = kept(data.labels, largest, share, generator)
    test = kept(data.test_y, largest, share, generator)
    there, users = np.unique(data.users[train], return_inverse=True)
    return replace(
        data,
        labels=data.labels[train],
        users=users,
        user_names=tuple(data.user_names[user] for user in there),
        read=lambda rows: data.read(train[rows]),
        test_x=data.test_x[test],
        test_y=data.test_y[test],
    )


def kept(labels: Ints, largest: int, share: float, generator: np.random.Generator) -> Ints:
    """Rows, in order: all but those of the class `largest`, and as many of it as come to `share` of the rows kept."""
    others = np.flatnonzero(labels != largest)
    same = np.flatnonzero(labels == largest)
    count = min(len(same), round(len(others) * share / (1 - share)))
    return np.sort(np.concatenate([others, generator.choice(same, count, replace=False)]))
