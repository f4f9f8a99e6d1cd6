"""The shard writer: a partitioned data set becomes a folder of schema "fedmpi-shards/1", streamed, whole or absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.partitions.common import Partition
from data_prep.raw import RawDataset


def write_shards(
    raw: RawDataset,
    partition: Partition,
    out: Path | str,
    shards: int,
    seed: int,
    command: str,
    val_fraction: float = 0.0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the shards and their manifest; returns the manifest.

    `progress(done, total)` is called after every chunk with bytes of features written so far and in all.
    """
    raise NotImplementedError("being written")
