"""What only a look at every value of a folder of shards can tell: `data.verify` and `fedmpi inspect --verify`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import REPREPARE, DataDescription
from fedmpi.data.shardfile import ShardData

VALUES_AT_ONCE = 1 << 22


def check_features(path: Path, x: AnyArray, description: DataDescription) -> None:
    """Refuse features (n, …) that are not finite, or token ids outside the vocabulary."""
    if x.dtype == np.uint8 or not x.size:
        return
    step = max(1, VALUES_AT_ONCE // max(1, x[0].size))
    for start in range(0, len(x), step):
        block = x[start : start + step].reshape(len(x[start : start + step]), -1)
        good = np.isfinite(block) if x.dtype.kind == "f" else (block >= 0) & (block < description.vocabulary)
        if not good.all():
            row, value = np.argwhere(~good)[0].tolist()
            what = (
                "not a finite number" if x.dtype.kind == "f" else f"no word of the {description.vocabulary} there are"
            )
            raise UserError(f"row {start + row} of {path} holds {block[row, value]}, which is {what}: {REPREPARE}")


def check_counts(path: Path, shard: ShardData, classes: int) -> None:
    """Refuse class counts (clients, C) that are not those of the labels."""
    sizes: Ints = np.diff(shard.offsets)
    step = max(1, VALUES_AT_ONCE // classes)
    for first in range(0, len(sizes), step):
        clients = sizes[first : first + step]
        owner = np.repeat(np.arange(len(clients)), clients)
        labels = shard.y[shard.offsets[first] : shard.offsets[first] + clients.sum()].astype(np.int64)
        counted = np.bincount(owner * classes + labels, minlength=len(clients) * classes).reshape(len(clients), classes)
        wrong = np.flatnonzero((counted != shard.class_counts[first : first + step]).any(axis=1))
        if len(wrong):
            raise UserError(
                f"the class counts of client {first + wrong[0]} in {path} are not those of its labels: {REPREPARE}"
            )
