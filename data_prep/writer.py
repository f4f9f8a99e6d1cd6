"""Shard writer: writes a partitioned data set atomically as a folder of schema "fedmpi-shards/1", in a stream.

Memory is bounded by one chunk of features. The manifest is written last, so a folder with a manifest is complete. With
several processes, each writes some of the training shards, and rank 0 writes everything else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.holdout import balanced_rows, hold_out_validation
from data_prep.output import (
    abandon,
    claim,
    complete,
    entry,
    growing_h5,
    nothing_partial,
    release,
    reserve,
    store,
)
from data_prep.partitions import Partition, class_count_blocks
from data_prep.raw import RawDataset, described, row_bytes
from fedmpi.common.errors import UserError
from fedmpi.common.files import whole_file, write_whole
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.arrays import ClientArrays
from fedmpi.data.assignment import inverse_of, ownership
from fedmpi.data.schema import (
    CLASS_COUNTS,
    CLIENT_IDS,
    EXTRAS,
    FEATURES,
    LABELS,
    MANIFEST,
    OFFSETS,
    TEST,
    VALIDATION,
    VECTORS,
    VOCABULARY,
    DataDescription,
    Manifest,
    ShardFile,
    read_manifest,
    shard_name,
    wrong_target,
)
from fedmpi.data.statistics import TESTING, TRAINING, Hashes, class_notes, duplicate_notes, duplicates, sample_hashes
from fedmpi.data.statistics import VALIDATION as VALIDATION_PART
from fedmpi.mpi import Cluster
from fedmpi.mpi.launch import read_launch
from fedmpi.mpi.ranks import on_server

_HOLD_OUT_STREAM = 1  # the partition itself draws from stream 0

CHUNK_BYTES = 8 << 20  # larger ones leave the allocator's reuse, and each fresh page costs a fault
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
    cluster: Cluster | None = None,
    held: tuple[Ints, Ints | None] | None = None,
) -> Manifest:
    """Write the shards of a partitioned data set and their manifest.

    `held` gives validation rows and the offsets of their clients, instead of a share of every client's rows.
    """
    check_numbers(shards, val_fraction)
    _check(raw)
    team, folder = cluster or alone(), Path(out)
    size = len(partition.rows) + len(raw.test_y) + (0 if held is None else len(held[0]))
    hold = on_server(team, lambda: claim(folder, overwrite))
    with ExitStack() as after:
        if hold is not None:
            after.callback(hold.release)
            after.enter_context(nothing_partial(*(folder / name for name in (TEST, VALIDATION, EXTRAS))))
        plan = _planned(raw, partition, shards, seed, val_fraction, held)
        try:
            written = _write_samples(plan, folder, progress, team)
            if hold is not None:
                hold.check()
                text = _write_rest(plan, written, folder, seed, command).to_json()
                write_whole(folder / MANIFEST, text.encode("utf-8", "backslashreplace"))
                release(folder)
        except OSError as error:
            if team.size == 1:
                abandon(folder)  # other processes may still be writing: the folder stays marked as interrupted
            room = f"{size * row_bytes(raw) / 1e6:,.1f} MB"
            raise UserError(
                f"writing to {folder} failed ({error.strerror or error}): about {room} are needed there; make room or "
                "choose another --out, then repeat"
            ) from error
    team.barrier()
    return read_manifest(folder)


@dataclass(frozen=True)
class ShardPlan:
    """All inputs that determine the bytes of the files."""

    raw: RawDataset  # The data set with the labels that the clients get
    true: RawDataset  # The same with the true labels
    partition: Partition
    rows: Ints  # (n,): Training rows of the clients without the validation part
    offsets: Ints
    held: Ints  # Rows of the validation part
    held_offsets: Ints | None  # Their clients' offsets, if they belong to clients
    client_ids: AnyArray  # (N,): int64 or bytes
    starts: Ints  # (shards + 1,): First client of every shard
    count_dtype: np.dtype[Any]


def _planned(
    raw: RawDataset,
    partition: Partition,
    shards: int,
    seed: int,
    fraction: float,
    held: tuple[Ints, Ints | None] | None,
) -> ShardPlan:
    """Hold out the validation part, fit the data set to the rest, and divide the clients into shards."""
    rows, offsets, held_offsets = partition.rows, partition.offsets, None
    if held is not None:
        held_rows, held_offsets = held
    else:
        generator = Streams(seed).generator(Purpose.PARTITION, _HOLD_OUT_STREAM)
        rows, offsets, held_rows, held_offsets = hold_out_validation(rows, offsets, fraction, generator)
        raw = _after_hold_out(raw, rows, held_rows, fraction)
    sizes, clients, largest = np.diff(offsets), len(offsets) - 1, 0
    given = raw if raw.given_labels is None else replace(raw, labels=raw.given_labels)
    if raw.has_classes:
        blocks = class_count_blocks(Partition(rows, offsets), given.labels, raw.classes)
        largest = max(int(block.max(initial=0)) for block in blocks)
    return ShardPlan(
        given,
        raw,
        partition,
        rows,
        offsets,
        held_rows,
        held_offsets,
        _client_ids(raw, partition),
        # shards of nearly equal samples, each with at least one client
        ownership(sizes, np.array([0, clients]), min(shards, clients)) if shards > 1 else np.array([0, clients]),
        np.min_scalar_type(largest),
    )


def _after_hold_out(raw: RawDataset, rows: Ints, held: Ints, fraction: float) -> RawDataset:
    """Fit the data set to the training rows that are not held out, and add notes about them."""
    if len(held) and raw.refit is not None:
        fitted = raw.refit(np.setdiff1d(np.arange(len(raw.labels)), held))
        notes = (*fitted.notes, *(note for note in raw.notes if note not in fitted.notes))
        raw = replace(fitted, given_labels=raw.given_labels, extras=raw.extras, notes=notes)
    notes, samples = raw.notes, len(rows) + len(held)
    if len(held) <= fraction * samples - 1:
        share = f"the validation part is {len(held) / samples:.1%} of the samples, not {fraction:.1%}"
        notes = (*notes, f"{share}: every client keeps a sample to train on")
    if raw.given_labels is not None:
        wrong = int((raw.given_labels[rows] != raw.labels[rows]).sum())
        notes = (*notes, f"{wrong:,} of {len(rows):,} training labels are not the true ones")
    return replace(raw, notes=notes)


@dataclass
class _Written:
    """Training shards, validation part, and the hashes of their samples."""

    train: list[ShardFile]
    val: ShardFile | None
    hashes: dict[str, Hashes]


def _write_samples(plan: ShardPlan, folder: Path, progress: Progress | None, team: Cluster) -> _Written:
    """Write this process's share of the training shards; rank 0 also writes the validation part, with true labels.

    While one shard is filled, the previous one is flushed and its checksum is computed. Rank 0 lists all files.
    """
    mine = range(team.rank, len(plan.starts) - 1, team.size)
    samples = sum(int(plan.offsets[plan.starts[index + 1]] - plan.offsets[plan.starts[index]]) for index in mine)
    held = plan.held if team.is_server else plan.held[:0]
    total, done = (samples + len(held)) * row_bytes(plan.raw), 0

    def tick(amount: int) -> None:
        nonlocal done
        done += amount
        if progress is not None:
            progress(done, total)

    paths = {index: folder / shard_name(index) for index in mine}
    with nothing_partial(*paths.values()), ThreadPoolExecutor(1) as finisher:
        pending, hashes = [], [np.zeros(0, np.uint64)]
        for index, path in paths.items():
            hashes.append(_fill_shard(plan, index, path, tick))
            first, last = int(plan.starts[index]), int(plan.starts[index + 1])
            count = int(plan.offsets[last] - plan.offsets[first])
            pending.append(finisher.submit(complete, path, first, last - first, count))
        files = [file.result() for file in pending]
    written = team.gather(np.frombuffer(json.dumps([asdict(file) for file in files]).encode(), np.uint8))
    listed = [ShardFile(**file) for part in written or [] for file in json.loads(part.tobytes())]
    joined = np.concatenate(hashes)
    found = _Written(sorted(listed, key=lambda file: file.first_client), None, {})
    found.hashes[TRAINING] = np.concatenate(team.gather(joined) or [joined])
    if len(held):
        offsets, path = plan.held_offsets, folder / VALIDATION
        with growing_h5(path) as h5:
            if offsets is not None:
                store(h5, OFFSETS, offsets)
                store(h5, CLIENT_IDS, plan.client_ids)
            found.hashes[VALIDATION_PART] = _stream(h5, plan.true, held, target_dtype(plan.raw), tick)
        found.val = complete(path, 0, 0 if offsets is None else len(offsets) - 1, len(held))
    return found


def _fill_shard(plan: ShardPlan, index: int, path: Path, tick: Callable[[int], None]) -> Hashes:
    first, last = int(plan.starts[index]), int(plan.starts[index + 1])
    offsets = plan.offsets[first : last + 1] - plan.offsets[first]
    mine = Partition(plan.rows[plan.offsets[first] : plan.offsets[last]], offsets)
    with growing_h5(path) as h5:
        store(h5, OFFSETS, offsets)
        store(h5, CLIENT_IDS, plan.client_ids[first:last])
        if plan.raw.has_classes:
            counts = reserve(h5, CLASS_COUNTS, (last - first, plan.raw.classes), plan.count_dtype)
            filled = 0
            for block in class_count_blocks(mine, plan.raw.labels, plan.raw.classes):
                counts[filled : filled + len(block)] = block.astype(plan.count_dtype)
                filled += len(block)
        return _stream(h5, plan.raw, mine.rows, target_dtype(plan.raw), tick)


def _write_rest(plan: ShardPlan, written: _Written, folder: Path, seed: int, command: str) -> Manifest:
    """Write the test part and the data that belong to the whole data set; return the manifest."""
    raw, partition, hashes = plan.raw, plan.partition, written.hashes
    test = np.arange(len(raw.test_y))
    if partition.balanced_test and raw.has_classes:
        test = balanced_rows(raw.test_y, raw.classes, partition.test_total)
    tested = replace(
        raw,
        labels=np.asarray(raw.test_y),
        read=lambda rows: raw.test_x[rows].astype(raw.dtype, copy=False),
        read_targets=None if raw.has_classes else lambda rows: np.asarray(raw.test_y)[rows],
    )
    with growing_h5(folder / TEST) as h5:
        dtype = np.dtype(np.int64) if raw.has_classes else target_dtype(raw)
        hashes[TESTING] = _stream(h5, tested, test, dtype, lambda amount: None)
    test_file = complete(folder / TEST, samples=len(test))
    shared = duplicates(hashes)
    notes = duplicate_notes(shared, {part: len(samples) for part, samples in hashes.items()})
    if raw.has_classes:
        true = plan.true.labels
        labels = {TRAINING: true[plan.rows], VALIDATION_PART: true[plan.held], TESTING: raw.test_y[test]}
        notes = (*class_notes(labels, raw.class_names), *notes)
    return Manifest(
        dataset=raw.name,
        partition=partition.law,
        partition_options=dict(partition.options),
        seed=seed,
        clients=partition.clients,
        samples=len(plan.rows),
        classes=raw.classes,
        class_names=raw.class_names,
        description=describe(raw),
        train=tuple(written.train),
        test=test_file,
        val=written.val,
        **_write_beside(raw, folder),
        empty_clients=int(np.count_nonzero(np.diff(plan.offsets) == 0)),
        dropped=len(raw.labels) - len(plan.rows) - len(plan.held),
        skipped=raw.skipped,
        licence=raw.licence,
        citation=raw.citation,
        command=command,
        notes=(*raw.notes, *partition.notes, *notes),
        understood=raw.understood,
        duplicates=shared,
    )


def _write_beside(raw: RawDataset, folder: Path) -> dict[str, Any]:
    """Write further arrays, the vocabulary and word vectors, if there are any; return their entries of the manifest."""
    found = {}
    if raw.extras:
        with growing_h5(folder / EXTRAS) as h5:
            for name in sorted(raw.extras):
                store(h5, name, raw.extras[name])
        found["extras"] = complete(folder / EXTRAS)
    if raw.vocabulary:
        words = "".join(word + "\n" for word in raw.vocabulary)
        write_whole(folder / VOCABULARY, words.encode("utf-8", "backslashreplace"))
        found["words"] = entry(folder / VOCABULARY)
    if raw.vectors is not None:
        with whole_file(folder / VECTORS) as stream:
            np.save(stream, raw.vectors)
        found["vectors"] = entry(folder / VECTORS)
    return found


def check_numbers(shards: int, val_fraction: float) -> None:
    """Check the number of shards and the share of validation samples; raise `UserError` if one is invalid."""
    if shards < 1:
        raise UserError(f"--shards {shards} is impossible. Ask for at least one")
    if not 0.0 <= val_fraction < 1.0:
        raise UserError(f"--val {val_fraction} is impossible. Give a fraction of at least 0 and below 1")


def _check(raw: RawDataset) -> None:
    if raw.task == "text" and not raw.vocabulary:
        raise UserError(f"{raw.name} is text without a vocabulary, so a model could not size its embedding. Give one")
    if raw.test_x.shape[1:] != raw.feature_shape:
        raise UserError(
            f"training samples of {raw.name} have the shape {raw.feature_shape}, test samples {raw.test_x.shape[1:]}: "
            "these files do not belong together"
        )
    if not raw.has_classes:
        try:
            describe(raw).check()
        except ValueError as error:
            raise UserError(f"the data set {raw.name} cannot be described: {error}") from None
        if np.shape(raw.test_y)[1:] != tuple(raw.target_shape):
            raise UserError(
                f"training targets of {raw.name} have the shape {tuple(raw.target_shape)}, test targets "
                f"{np.shape(raw.test_y)[1:]}: these files do not belong together"
            )
        return
    for part, labels in (("training", raw.labels), ("test", raw.test_y)):
        if len(labels) and not 0 <= labels.min() <= labels.max() < raw.classes:
            raise UserError(
                f"{raw.name} has {part} labels from {labels.min()} to {labels.max()} but {raw.classes} classes: "
                f"labels must lie in 0 to {raw.classes - 1}"
            )


def _stream(
    h5: h5py.File, raw: RawDataset, rows: Ints, label_dtype: np.dtype[Any], tick: Callable[[int], None]
) -> Hashes:
    labels = reserve(h5, LABELS, (len(rows), *raw.target_shape), label_dtype)
    features = reserve(h5, FEATURES, (len(rows), *raw.feature_shape), raw.dtype)
    hashes = np.empty(len(rows), np.uint64)
    step = max(1, CHUNK_BYTES // row_bytes(raw))
    for low in range(0, len(rows), step):
        part = rows[low : low + step]
        order = np.argsort(part, kind="stable")  # the source is read front to back
        x, y = np.asarray(raw.read(part[order])), raw.targets_of(part[order])
        if x.shape != (len(part), *raw.feature_shape) or x.dtype != np.dtype(raw.dtype):
            expected = f"{raw.dtype} {(len(part), *raw.feature_shape)}"
            raise ValueError(f"the reader of {raw.name} gave {x.dtype} {x.shape} instead of {expected}")
        x, y = (values.take(inverse_of(order), axis=0) for values in (x, y))
        labels[low : low + len(part)] = _kept_as(raw, y, label_dtype)
        features[low : low + len(part)] = x
        hashes[low : low + len(part)] = sample_hashes(x)
        tick(len(part) * row_bytes(raw))
    return hashes


def target_dtype(raw: RawDataset) -> np.dtype[Any]:
    """Return the stored dtype of targets: small whole numbers for classes and tokens, else 0 and 1 or floats."""
    if raw.has_classes:
        return np.min_scalar_type(raw.classes - 1) if raw.classes <= 256 else np.dtype(np.int32)
    if raw.targets == "tokens":
        return np.dtype(np.int16 if raw.classes <= 1 << 15 else np.int32)
    whole = raw.targets == "multilabel" and np.asarray(raw.test_y).dtype.kind in "bui"
    return np.dtype(np.uint8 if whole else np.float32)


def _kept_as(raw: RawDataset, y: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Convert targets to their stored dtype."""
    if not raw.has_classes:
        wrong = wrong_target(y, describe(raw))
        fits = dtype.kind == "f" or y.dtype.kind in "bui" or bool((y == np.floor(y)).all())
        if wrong is not None or not fits:
            what = "some are fractions, those of the test part are not" if wrong is None else f"one is {wrong[1]}"
            raise UserError(f"{raw.name} has targets that are no {raw.targets}: {what}")
    return y.astype(dtype)


def describe(raw: RawDataset) -> DataDescription:
    """Describe the data set for models."""
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
    return np.array([raw.user_names[user].encode("utf-8", "replace") for user in partition.users])


def join_team() -> Cluster:
    """Return the processes that were launched together; a single process does not load MPI."""
    launch = read_launch()
    return Cluster.connect() if launch is not None and launch.size > 1 else alone()


def alone() -> Cluster:
    """Return this process as a team of one."""
    return Cluster(None, "none")


def write_arrays(arrays: ClientArrays, out: Path, shards: int, overwrite: bool) -> Path:
    """Write the samples of `arrays` as shards, in their order and with their description."""
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise UserError(f"shards = {shards!r} is impossible. Give a whole number of at least 1")
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
    write_shards(
        raw, partition, out, min(shards, clients), 0, "fedmpi.ClientArrays.save", overwrite=overwrite, held=held
    )
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
        class_names=tuple(manifest.class_names),
        labels=y if has_classes else np.zeros(len(y), np.int64),
        users=None,
        user_names=tuple(map(str, arrays.client_ids.tolist())) if named else None,
        read=read,
        test_x=test_x,
        test_y=test_y,
        skipped=0,
        licence="",
        citation="",
        vocabulary=tuple(map(str, range(description.vocabulary))),
        read_targets=None if has_classes else lambda rows: y[rows],
        **described(description),
    )
