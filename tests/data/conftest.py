"""A small shard folder, written by the real writer from generated images whose pixels name their row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi.common.apportionment import offsets_of

CLASSES = 3


def small_raw(rows: int = 60) -> RawDataset:
    """Row i is a (2, 2, 2) uint8 image filled with i, of class i % 3."""
    images = np.repeat(np.arange(rows, dtype=np.uint8), 8).reshape(rows, 2, 2, 2)
    labels = np.arange(rows) % CLASSES
    return RawDataset(
        name="small",
        task="image",
        classes=CLASSES,
        class_names=("a", "b", "c"),
        feature_shape=(2, 2, 2),
        dtype="uint8",
        mean=(0.25, 0.5),
        std=(0.5, 0.25),
        labels=labels,
        users=None,
        user_names=None,
        read=lambda wanted: images[wanted],
        test_x=images[:9],
        test_y=labels[:9],
        skipped=0,
        licence="none",
        citation="none",
    )


def written(sizes: list[int], folder: Path, shards: int = 2) -> Path:
    """The folder with clients of the given sizes (rows 0, 1, 2, ... client after client)."""
    partition = Partition(np.arange(sum(sizes)), offsets_of(np.array(sizes)), "given", {})
    write_shards(small_raw(max(60, sum(sizes))), partition, folder, shards, 0, "test")
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes clients of the given sizes into a new folder."""

    def writer(sizes: list[int], shards: int = 2, name: str = "shards") -> Path:
        return written(sizes, tmp_path / name, shards)

    return writer
