"""Data in memory as a folder of shards: the implementation of `fedmpi.ClientArrays.save`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.arrays import ClientArrays

COMMAND = "fedmpi.ClientArrays.save"


def write_arrays(arrays: ClientArrays, out: Path, shards: int, overwrite: bool) -> Path:
    """Write the samples of `arrays` as shards, in their order and with their description."""
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise UserError(f"shards = {shards!r} is impossible: give a whole number of at least 1")
    clients, samples = len(arrays.offsets) - 1, len(arrays.x)
    named = arrays.client_ids.dtype.kind == "U"
    partition = Partition(
        rows=np.arange(samples),
        offsets=arrays.offsets,
        law="given",
        options={},
        users=np.arange(clients) if named else None,
    )
    held = None
    if arrays.val is not None:
        held = np.arange(samples, samples + len(arrays.val[0])), arrays.val_offsets
    raw = _raw(arrays, named)
    write_shards(raw, partition, out, min(shards, clients), 0, COMMAND, overwrite=overwrite, held=held)
    return out


def _raw(arrays: ClientArrays, named: bool) -> RawDataset:
    """Return the arrays in the form that the writer reads: training rows, then validation rows."""
    description, manifest = arrays.description, arrays.store.manifest
    x = [arrays.x, *(arrays.val or ())[:1]]
    y = np.concatenate([arrays.y, *(arrays.val or ())[1:]])
    test_x, test_y = arrays.test

    def read(rows: Ints) -> AnyArray:
        found = np.empty((len(rows), *x[0].shape[1:]), x[0].dtype)
        held = rows >= len(x[0])
        found[~held] = x[0][rows[~held]]
        if held.any():
            found[held] = x[1][rows[held] - len(x[0])]
        return found

    has_classes = description.targets == "classification"
    return RawDataset(
        name=arrays.name,
        task=cast(Any, description.task),
        classes=description.classes,
        class_names=tuple(manifest.class_names),
        feature_shape=tuple(description.feature_shape),
        dtype=cast(Any, description.dtype),
        mean=description.mean,
        std=description.std,
        labels=y if has_classes else np.zeros(len(y), np.int64),
        users=None,
        user_names=tuple(map(str, arrays.client_ids.tolist())) if named else None,
        read=read,
        test_x=test_x,
        test_y=test_y,
        skipped=0,
        licence="",
        notes=arrays.notes,
        citation="",
        vocabulary=tuple(map(str, range(description.vocabulary))),
        targets=description.targets,
        target_shape=tuple(description.target_shape),
        read_targets=None if has_classes else lambda rows: y[rows],
    )
