"""The shard writer: a partitioned data set becomes a folder of schema "fedmpi-shards/1", streamed, whole or absent.

Memory is bounded by one chunk of features; the manifest is written last, so a folder with a manifest is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.files import entry, store, whole_h5, write_text
from data_prep.folder import claim, release
from data_prep.holdout import balanced_rows, hold_out
from data_prep.partitions.common import Int64Array, Partition
from data_prep.raw import AnyArray, RawDataset
from data_prep.shard import make_plan, row_bytes, write_rows, write_shard
from fedmpi.data.schema import (
    EXTRAS,
    FEATURES,
    LABELS,
    MANIFEST,
    TEST,
    VALIDATION,
    VOCABULARY,
    DataDescription,
    Manifest,
    ShardFile,
)
from fedmpi.errors import UserError
from fedmpi.streams import Purpose, Streams

_HOLD_OUT_STREAM = 1  # the partition itself draws from stream 0

Progress = Callable[[int, int], None]


def write_shards(
    raw: RawDataset,
    partition: Partition,
    out: Path | str,
    shards: int,
    seed: int,
    command: str,
    val_fraction: float = 0.0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the shards of a partitioned data set and their manifest.

    Parameters
    ----------
    raw : RawDataset
    partition : Partition
    out : Path
        The folder; made if it is missing. Must be empty, hold an interrupted preparation, or, with `overwrite`, a
        prepared one.
    shards : int
        Number of training shards, of nearly equal samples; at most one a client is written.
    seed : int
        Seed of the partition; also decides the validation part. The same input and seed give the same bytes.
    command : str
        The command that made the folder, for the manifest.
    val_fraction : float
        Share of every client's samples, in [0, 1), that goes to val.h5; no client is emptied.
    progress : callable, optional
        ``progress(done, total)`` after every chunk, in bytes of features.

    Returns
    -------
    dict
        The manifest as written.

    Raises
    ------
    UserError
        The folder holds something else or cannot be written, or an argument is impossible.
    """
    if shards < 1:
        raise UserError(f"--shards {shards} is impossible: ask for at least one")
    if not 0.0 <= val_fraction < 1.0:
        raise UserError(f"--val {val_fraction} is impossible: give a fraction of at least 0 and below 1")
    _check(raw)
    folder = Path(out)
    claim(folder, overwrite)
    try:
        manifest = _write_all(
            raw, partition, folder, shards, seed, command, val_fraction, progress or (lambda *_: None)
        )
    except OSError as error:
        raise UserError(
            f"writing to {folder} failed ({error}): free space or choose another --out, then repeat"
        ) from error
    release(folder)
    return manifest


def _write_all(
    raw: RawDataset,
    partition: Partition,
    folder: Path,
    shards: int,
    seed: int,
    command: str,
    val_fraction: float,
    progress: Progress | None,
) -> dict[str, Any]:
    generator = Streams(seed).generator(Purpose.PARTITION, _HOLD_OUT_STREAM)
    rows, offsets, held = hold_out(partition.rows, partition.offsets, val_fraction, generator)
    plan = make_plan(raw, partition, rows, offsets, shards)
    ticks = _Ticks(progress, (len(rows) + len(held)) * row_bytes(raw))
    train = [write_shard(plan, index, folder, ticks.add) for index in range(len(plan.starts) - 1)]
    test = balanced_rows(raw.test_y, raw.classes) if partition.balanced_test else np.arange(len(raw.test_y))
    test_file = _write_part(raw, folder / TEST, raw.test_x[test], raw.test_y[test])
    val_file = write_rows(plan, folder / VALIDATION, held, ticks.add) if len(held) else None
    manifest = Manifest(
        dataset=raw.name,
        partition=partition.law,
        partition_options=dict(partition.options),
        seed=seed,
        clients=partition.clients,
        samples=len(rows),
        classes=raw.classes,
        class_names=raw.class_names,
        description=_describe(raw),
        train=tuple(train),
        test=test_file,
        val=val_file,
        extras=_write_extras(raw, folder),
        words=_write_vocabulary(raw, folder),
        empty_clients=int(np.count_nonzero(np.diff(offsets) == 0)),
        dropped=len(raw.labels) - len(partition.rows),
        skipped=raw.skipped,
        licence=raw.licence,
        citation=raw.citation,
        command=command,
        notes=partition.notes,
    )
    write_text(folder / MANIFEST, manifest.to_json())
    return manifest.as_dict()


def _write_part(raw: RawDataset, path: Path, x: AnyArray, y: Int64Array) -> ShardFile:
    with whole_h5(path) as h5:
        store(h5, LABELS, y.astype(np.int64))
        store(h5, FEATURES, x.astype(raw.dtype, copy=False))
    return entry(path, samples=len(y))


def _write_extras(raw: RawDataset, folder: Path) -> ShardFile | None:
    if not raw.extras:
        return None
    with whole_h5(folder / EXTRAS) as h5:
        for name in sorted(raw.extras):
            store(h5, name, raw.extras[name])
    return entry(folder / EXTRAS)


def _write_vocabulary(raw: RawDataset, folder: Path) -> ShardFile | None:
    if not raw.vocabulary:
        return None
    write_text(folder / VOCABULARY, "".join(word + "\n" for word in raw.vocabulary))
    return entry(folder / VOCABULARY)


def _describe(raw: RawDataset) -> DataDescription:
    return DataDescription(
        raw.feature_shape, raw.dtype, raw.classes, raw.task, len(raw.vocabulary), tuple(raw.mean), tuple(raw.std)
    )


def _check(raw: RawDataset) -> None:
    if raw.task == "text" and not raw.vocabulary:
        raise UserError(f"{raw.name} is text without a vocabulary, so a model could not size its embedding: give one")
    for part, labels in (("training", raw.labels), ("test", raw.test_y)):
        if len(labels) and not 0 <= labels.min() <= labels.max() < raw.classes:
            raise UserError(
                f"{raw.name} has {part} labels from {labels.min()} to {labels.max()} but {raw.classes} classes: "
                f"labels must lie in 0 to {raw.classes - 1}"
            )


class _Ticks:
    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total, self._done = progress, total, 0

    def add(self, amount: int) -> None:
        self._done += amount
        if self._progress is not None:
            self._progress(self._done, self._total)
