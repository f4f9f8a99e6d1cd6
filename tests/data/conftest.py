"""A small shard folder of images whose pixels name their row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedmpi import ClientArrays
from fedmpi.data.shards import Samples, ShardStore

CLASSES = 3


def written(sizes: list[int], folder: Path, shards: int = 2) -> Path:
    """Write clients of the given sizes; row i is a (2, 2, 2) uint8 image filled with i, of class i % 3."""
    images = np.repeat(np.arange(sum(sizes), dtype=np.uint8), 8).reshape(-1, 2, 2, 2)
    labels = np.arange(len(images)) % CLASSES
    arrays = ClientArrays(
        images,
        labels,
        np.repeat(np.arange(len(sizes)), sizes),
        test=(images[:9], labels[:9]),
        clients=len(sizes),
        mean=(0.25, 0.5),
        std=(0.5, 0.25),
        name="small",
    )
    return arrays.save(folder, shards=shards)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes clients of the given sizes into a new folder."""
    return lambda sizes, shards=2: written(sizes, tmp_path / "shards", shards)


def validation_of(store: ShardStore, client: int) -> Samples:
    """Return the features and labels that are held out of one client, in the stored types."""
    part, offsets = store.validation(), store.validation_offsets
    assert part is not None and offsets is not None
    rows = slice(offsets[client], offsets[client + 1])
    return part[0][rows], part[1][rows]
