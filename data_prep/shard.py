"""One training shard: what decides its bytes, and its streaming to a file in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.hdf5_files import complete, growing_h5, nothing_partial, reserve, shard_starts, smallest_unsigned, store
from data_prep.partitions.common import Partition, class_count_blocks
from data_prep.raw import RawDataset
from data_prep.room import GrowingFile
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.assignment import inverse_of
from fedmpi.data.schema import (
    CLASS_COUNTS,
    CLIENT_IDS,
    FEATURES,
    LABELS,
    OFFSETS,
    DataDescription,
    ShardFile,
    shard_name,
    wrong_target,
)
from fedmpi.data.statistics import Hashes, sample_hashes

LONGEST_NAME = 4000
CHUNK_BYTES = 8 << 20  # larger ones leave the allocator's reuse, and each fresh page costs a fault


@dataclass(frozen=True)
class ShardPlan:
    """Everything that decides the bytes of the training shards."""

    raw: RawDataset
    rows: Ints  # (n,): Training rows of the clients after the validation part was taken
    offsets: Ints
    client_ids: AnyArray  # (N,): int64 or bytes
    starts: Ints  # (shards + 1,): First client of every shard
    label_dtype: np.dtype[Any]  # Of y and class_counts (which are written where each row has a class)
    count_dtype: np.dtype[Any]


def make_plan(raw: RawDataset, partition: Partition, rows: Ints, offsets: Ints, shards: int) -> ShardPlan:
    """The plan of a partition whose clients keep `rows` (n,) at `offsets` (N + 1,); at most one shard a client."""
    draft = ShardPlan(
        raw,
        rows,
        offsets,
        _client_ids(raw, partition),
        shard_starts(np.diff(offsets), shards),
        target_dtype(raw),
        np.dtype(np.uint8),
    )
    if not raw.has_classes:
        return draft
    blocks = class_count_blocks(Partition(rows, offsets, "", {}), raw.labels, raw.classes)
    largest = max(int(block.max(initial=0)) for block in blocks)
    return replace(draft, count_dtype=smallest_unsigned(largest))


def write_training(
    plan: ShardPlan, indices: range, folder: Path, tick: Callable[[int], None]
) -> tuple[list[ShardFile], Hashes]:
    """Write some of the training shards; shards are independent, so several processes may each write some.

    While one shard is filled the one before is flushed and its checksum is computed. Also returns the hashes of their
    samples.
    """
    with nothing_partial(*(folder / shard_name(index) for index in indices)), ThreadPoolExecutor(1) as finisher:
        files, hashes = [], [np.zeros(0, np.uint64)]
        for index in indices:
            hashes.append(_fill_shard(plan, index, folder, tick))
            first, last = int(plan.starts[index]), int(plan.starts[index + 1])
            samples = int(plan.offsets[last] - plan.offsets[first])
            files.append(finisher.submit(complete, folder / shard_name(index), first, last - first, samples))
        return [file.result() for file in files], np.concatenate(hashes)


def _fill_shard(plan: ShardPlan, index: int, folder: Path, tick: Callable[[int], None]) -> Hashes:
    first, last = int(plan.starts[index]), int(plan.starts[index + 1])
    rows = plan.rows[plan.offsets[first] : plan.offsets[last]]
    with growing_h5(folder / shard_name(index)) as h5:
        store(h5, OFFSETS, plan.offsets[first : last + 1] - plan.offsets[first])
        store(h5, CLIENT_IDS, plan.client_ids[first:last])
        if plan.raw.has_classes:
            counts = reserve(h5, CLASS_COUNTS, (last - first, plan.raw.classes), plan.count_dtype)
            mine = Partition(rows, plan.offsets[first : last + 1] - plan.offsets[first], "", {})
            filled = 0
            for block in class_count_blocks(mine, plan.raw.labels, plan.raw.classes):
                counts[filled : filled + len(block)] = block.astype(plan.count_dtype)
                filled += len(block)
        return _stream(h5, plan.raw, rows, plan.label_dtype, tick)


def write_validation(
    plan: ShardPlan, path: Path, rows: Ints, offsets: Ints | None, tick: Callable[[int], None]
) -> tuple[ShardFile, Hashes]:
    """Write the rows held out of every client: those of client k are ``rows[offsets[k] : offsets[k + 1]]``.

    Without offsets they are nobody's. Also returns the hashes of their samples.
    """
    with growing_h5(path) as h5:
        if offsets is not None:
            store(h5, OFFSETS, offsets)
            store(h5, CLIENT_IDS, plan.client_ids)
        hashes = _stream(h5, plan.raw, rows, plan.label_dtype, tick)
    return complete(path, 0, 0 if offsets is None else len(offsets) - 1, len(rows)), hashes


def _stream(
    h5: GrowingFile, raw: RawDataset, rows: Ints, label_dtype: np.dtype[Any], tick: Callable[[int], None]
) -> Hashes:
    labels = reserve(h5, LABELS, (len(rows), *raw.target_shape), label_dtype)
    features = reserve(h5, FEATURES, (len(rows), *raw.feature_shape), raw.dtype)
    hashes = np.empty(len(rows), np.uint64)
    for low, part in chunks(raw, rows):
        labels[low : low + len(part)] = kept_as(raw, _read_targets(raw, part), label_dtype)
        features[low : low + len(part)] = x = _read(raw, part)
        hashes[low : low + len(part)] = sample_hashes(x)
        h5.check()
        tick(len(part) * row_bytes(raw))
    return hashes


def chunks(raw: RawDataset, rows: Ints) -> Iterator[tuple[int, Ints]]:
    """The rows in parts of at most `CHUNK_BYTES` of features, each with the place of its first row."""
    step = max(1, CHUNK_BYTES // row_bytes(raw))
    for low in range(0, len(rows), step):
        yield low, rows[low : low + step]


def _read(raw: RawDataset, rows: Ints) -> AnyArray:
    """Features of rows in the order given; the source is read front to back."""
    order = np.argsort(rows, kind="stable")
    x = np.asarray(raw.read(rows[order]))
    if x.shape != (len(rows), *raw.feature_shape) or x.dtype != np.dtype(raw.dtype):
        expected = f"{raw.dtype} {(len(rows), *raw.feature_shape)}"
        raise ValueError(f"the reader of {raw.name} gave {x.dtype} {x.shape} instead of {expected}")
    return x.take(inverse_of(order), axis=0)


def _read_targets(raw: RawDataset, rows: Ints) -> AnyArray:
    """Targets of rows in the order given; the source is read front to back."""
    if raw.read_targets is None:
        return raw.labels[rows]
    order = np.argsort(rows, kind="stable")
    y = raw.targets_of(rows[order])
    if y.shape != (len(rows), *raw.target_shape):
        raise ValueError(f"the reader of {raw.name} gave targets {y.shape}, not {(len(rows), *raw.target_shape)}")
    return y.take(inverse_of(order), axis=0)


def target_dtype(raw: RawDataset) -> np.dtype[Any]:
    """How targets are stored: classes and tokens in a small type of whole numbers, the others as 0 and 1 or floats."""
    if raw.has_classes:
        return smallest_unsigned(raw.classes - 1) if raw.classes <= 256 else np.dtype(np.int32)
    if raw.targets == "tokens":
        return np.dtype(np.int16 if raw.classes <= 1 << 15 else np.int32)
    whole = raw.targets == "multilabel" and np.asarray(raw.test_y).dtype.kind in "bui"
    return np.dtype(np.uint8 if whole else np.float32)


def kept_as(raw: RawDataset, y: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Targets in the type they are stored in."""
    if not raw.has_classes:
        wrong = wrong_target(y, describe(raw))
        fits = dtype.kind == "f" or y.dtype.kind in "bui" or bool((y == np.floor(y)).all())
        if wrong is not None or not fits:
            what = "some are fractions, those of the test part are not" if wrong is None else f"one is {wrong[1]}"
            raise UserError(f"{raw.name} has targets that are no {raw.targets}: {what}")
    return y.astype(dtype)


def describe(raw: RawDataset) -> DataDescription:
    """What a model has to know of the data set."""
    return DataDescription(
        raw.feature_shape,
        raw.dtype,
        raw.classes,
        raw.task,
        len(raw.vocabulary),
        tuple(raw.mean),
        tuple(raw.std),
        raw.targets,
        tuple(raw.target_shape),
    )


def _client_ids(raw: RawDataset, partition: Partition) -> AnyArray:
    if partition.users is None:
        return np.arange(partition.clients)
    if raw.user_names is None:
        return partition.users
    names = [raw.user_names[user].encode("utf-8", "replace") for user in partition.users]
    longest = max(map(len, names))
    if longest > LONGEST_NAME:
        raise UserError(
            f"{raw.name} names a user with {longest:,} bytes, and all names take as much room as the longest: shorten "
            f"those beyond {LONGEST_NAME:,}"
        )
    return np.array(names)


def row_bytes(raw: RawDataset) -> int:
    """Bytes of the features of one row."""
    return int(np.prod(raw.feature_shape, dtype=np.int64)) * np.dtype(raw.dtype).itemsize
