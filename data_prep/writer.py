"""The shard writer: a partitioned data set becomes a folder of schema "fedmpi-shards/1", streamed, whole or absent.

Memory is bounded by one chunk of features; the manifest is written last, so a folder with a manifest is complete.
Under several processes every one writes some of the training shards, rank 0 all the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from data_prep.folder import abandon, claim, release
from data_prep.hdf5_files import complete, entry, growing_h5, nothing_partial, reserve, store, whole_file, write_text
from data_prep.holdout import balanced_rows, hold_out_validation
from data_prep.partitions.common import Partition
from data_prep.raw import RawDataset
from data_prep.room import SPARE, megabytes
from data_prep.shard import (
    ShardPlan,
    chunks,
    describe,
    kept_as,
    make_plan,
    row_bytes,
    target_dtype,
    write_training,
    write_validation,
)
from fedmpi.cluster import Cluster, read_launch
from fedmpi.cluster.on_server import on_server
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.data.overlap import TESTING, TRAINING, Hashes, class_notes, duplicate_notes, duplicates, sample_hashes
from fedmpi.data.overlap import VALIDATION as VALIDATION_PART
from fedmpi.data.schema import (
    EXTRAS,
    FEATURES,
    LABELS,
    MANIFEST,
    TEST,
    VALIDATION,
    VECTORS,
    VOCABULARY,
    Manifest,
    ShardFile,
    read_manifest,
)

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
    cluster: Cluster | None = None,
    held: tuple[Ints, Ints | None] | None = None,
) -> Manifest:
    """Write the shards of a partitioned data set and their manifest."""
    check_numbers(shards, val_fraction)
    _check(raw)
    test = np.arange(len(raw.test_y))
    if partition.balanced_test and raw.has_classes:
        test = balanced_rows(raw.test_y, raw.classes, partition.test_total)
    team = cluster or alone()
    folder = Path(out)
    needed = _bytes_needed(raw, len(partition.rows) + (0 if held is None else len(held[0])))
    hold = on_server(team, lambda: claim(folder, overwrite, needed))
    with ExitStack() as after:
        if hold is not None:
            after.callback(hold.release)
            after.enter_context(nothing_partial(*(folder / name for name in (TEST, VALIDATION, EXTRAS))))
        generator = Streams(seed).generator(Purpose.PARTITION, _HOLD_OUT_STREAM)
        rows, offsets = partition.rows, partition.offsets
        if held is None:
            rows, offsets, *drawn = hold_out_validation(rows, offsets, val_fraction, generator)
            held = drawn[0], drawn[1]
            raw = _after_hold_out(raw, rows, held[0], val_fraction)
        given = raw if raw.given_labels is None else replace(raw, labels=raw.given_labels)
        plan = make_plan(given, partition, rows, offsets, shards)
        try:
            written = _write_samples(plan, raw, held[0], held[1], folder, progress, team)
            if hold is not None:
                hold.check()
                dropped = len(raw.labels) - len(rows) - len(held[0])
                _write_rest(plan, raw, partition, dropped, test, held[0], written, folder, seed, command)
                release(folder)
        except OSError as error:
            if team.size == 1:
                abandon(folder)  # among several the others may still be writing: the folder stays marked as interrupted
            raise UserError(
                f"writing to {folder} failed ({error.strerror or error}): about {megabytes(needed + SPARE)} are needed "
                "there; make room or choose another --out, then repeat"
            ) from error
    team.barrier()
    return read_manifest(folder)


def _after_hold_out(raw: RawDataset, rows: Ints, held: Ints, fraction: float) -> RawDataset:
    """The data set fitted to its training rows without those held out, with notes of what there is to say."""
    if len(held) and raw.refit is not None:
        fitted = raw.refit(np.setdiff1d(np.arange(len(raw.labels)), held))
        notes = (*fitted.notes, *(note for note in raw.notes if note not in fitted.notes))
        raw = replace(fitted, given_labels=raw.given_labels, extras=raw.extras, notes=notes)
    notes = (*raw.notes, *_shortfall(len(held), len(rows) + len(held), fraction))
    if raw.given_labels is not None:
        wrong = int((raw.given_labels[rows] != raw.labels[rows]).sum())
        notes = (*notes, f"{wrong:,} of {len(rows):,} training labels are not the true ones")
    return replace(raw, notes=notes)


def _shortfall(held: int, samples: int, fraction: float) -> tuple[str, ...]:
    """What to say where clients of few samples, who keep their last one, leave the validation part too small."""
    if held > fraction * samples - 1:
        return ()
    share = f"the validation part is {held / samples:.1%} of the samples, not {fraction:.1%}"
    return (f"{share}: every client keeps a sample to train on",)


def _bytes_needed(raw: RawDataset, rows: int) -> int:
    """About what a preparation writes: features and labels of the training and test rows, and what lies beside them."""
    beside = sum(array.nbytes for array in raw.extras.values()) + (0 if raw.vectors is None else raw.vectors.nbytes)
    return (rows + len(raw.test_y)) * (row_bytes(raw) + 1) + beside


@dataclass
class _Written:
    """Training shards, validation part, and the hashes of their samples."""

    train: list[ShardFile]
    val: ShardFile | None
    hashes: dict[str, Hashes]


def _write_samples(
    plan: ShardPlan,
    true: RawDataset,
    held: Ints,
    held_offsets: Ints | None,
    folder: Path,
    progress: Progress | None,
    team: Cluster,
) -> _Written:
    """Every process writes its share of the training shards, rank 0 also the validation part, which has true labels.

    All are listed on rank 0.
    """
    mine = range(team.rank, len(plan.starts) - 1, team.size)
    samples = sum(int(plan.offsets[plan.starts[index + 1]] - plan.offsets[plan.starts[index]]) for index in mine)
    held = held if team.is_server else held[:0]
    ticks = _Ticks(progress, (samples + len(held)) * row_bytes(plan.raw))
    files, hashes = write_training(plan, mine, folder, ticks.add)
    written = team.gather(np.frombuffer(json.dumps([asdict(file) for file in files]).encode(), np.uint8))
    listed = [ShardFile(**file) for part in written or [] for file in json.loads(part.tobytes())]
    found = _Written(sorted(listed, key=lambda file: file.first_client), None, {})
    found.hashes[TRAINING] = np.concatenate(team.gather(hashes) or [hashes])
    if len(held):
        truly = replace(plan, raw=true)
        val = write_validation(truly, folder / VALIDATION, held, held_offsets, ticks.add)
        found.val, found.hashes[VALIDATION_PART] = val
    return found


def _write_rest(
    plan: ShardPlan,
    true: RawDataset,
    partition: Partition,
    dropped: int,
    test: Ints,
    held: Ints,
    written: _Written,
    folder: Path,
    seed: int,
    command: str,
) -> None:
    """The test part, what belongs to the whole data set, and last the manifest."""
    raw, hashes = plan.raw, written.hashes
    test_file, hashes[TESTING] = _write_test(raw, folder / TEST, test)
    shared = duplicates(hashes)
    notes = duplicate_notes(shared, {part: len(samples) for part, samples in hashes.items()})
    if raw.has_classes:
        labels = {TRAINING: true.labels[plan.rows], VALIDATION_PART: true.labels[held], TESTING: raw.test_y[test]}
        notes = (*class_notes(labels, raw.class_names), *notes)
    manifest = Manifest(
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
        extras=_write_extras(raw, folder),
        words=_write_vocabulary(raw, folder),
        vectors=_write_vectors(raw, folder),
        empty_clients=int(np.count_nonzero(np.diff(plan.offsets) == 0)),
        dropped=dropped,
        skipped=raw.skipped,
        licence=raw.licence,
        citation=raw.citation,
        command=command,
        notes=(*raw.notes, *partition.notes, *notes),
        understood=raw.understood,
        duplicates=shared,
    )
    write_text(folder / MANIFEST, manifest.to_json())


def _write_test(raw: RawDataset, path: Path, rows: Ints) -> tuple[ShardFile, Hashes]:
    hashes = np.empty(len(rows), np.uint64)
    with growing_h5(path) as h5:
        y, dtype = np.asarray(raw.test_y)[rows], np.dtype(np.int64) if raw.has_classes else target_dtype(raw)
        store(h5, LABELS, kept_as(raw, y, dtype))
        features = reserve(h5, FEATURES, (len(rows), *raw.feature_shape), raw.dtype)
        for low, part in chunks(raw, rows):
            features[low : low + len(part)] = x = raw.test_x[part].astype(raw.dtype, copy=False)
            hashes[low : low + len(part)] = sample_hashes(x)
            h5.check()
    return complete(path, samples=len(rows)), hashes


def _write_extras(raw: RawDataset, folder: Path) -> ShardFile | None:
    if not raw.extras:
        return None
    with growing_h5(folder / EXTRAS) as h5:
        for name in sorted(raw.extras):
            store(h5, name, raw.extras[name])
    return complete(folder / EXTRAS)


def _write_vocabulary(raw: RawDataset, folder: Path) -> ShardFile | None:
    if not raw.vocabulary:
        return None
    write_text(folder / VOCABULARY, "".join(word + "\n" for word in raw.vocabulary))
    return entry(folder / VOCABULARY)


def _write_vectors(raw: RawDataset, folder: Path) -> ShardFile | None:
    if raw.vectors is None:
        return None
    with whole_file(folder / VECTORS) as partial, partial.open("wb") as stream:
        np.save(stream, raw.vectors)
        stream.flush()
        os.fsync(stream.fileno())
    return entry(folder / VECTORS)


def check_numbers(shards: int, val_fraction: float) -> None:
    """Refuse numbers of shards, and shares of validation samples, that are none; raises `UserError`."""
    if shards < 1:
        raise UserError(f"--shards {shards} is impossible: ask for at least one")
    if not 0.0 <= val_fraction < 1.0:
        raise UserError(f"--val {val_fraction} is impossible: give a fraction of at least 0 and below 1")


def _check(raw: RawDataset) -> None:
    if raw.task == "text" and not raw.vocabulary:
        raise UserError(f"{raw.name} is text without a vocabulary, so a model could not size its embedding: give one")
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


class _Ticks:
    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total, self._done = progress, total, 0

    def add(self, amount: int) -> None:
        self._done += amount
        if self._progress is not None:
            self._progress(self._done, self._total)


def join_team() -> Cluster:
    """The processes that were launched together; for one process alone MPI is not even loaded."""
    launch = read_launch()
    return Cluster.connect() if launch is not None and launch.size > 1 else alone()


def alone() -> Cluster:
    """This process as a team of one."""
    return Cluster(None, "none")
