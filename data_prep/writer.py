"""Shard writer: writes a partitioned data set as a folder of schema "fedmpi-shards/1", in a stream.

Memory is bounded by one chunk of features. The manifest is written last, so a folder with a manifest is complete.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.holdout import balanced_rows, hold_out_validation
from data_prep.output import entry, new_h5, preparing, reserve, store
from data_prep.partitions import Partition, class_count_blocks
from data_prep.raw import RawDataset, row_bytes, rows_of
from fedmpi.common.errors import UserError
from fedmpi.common.files import whole_file, write_whole
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints
from fedmpi.config.tables import RebalanceTable
from fedmpi.data.assignment import inverse_of, ownership
from fedmpi.data.augmentation import ORIGINAL_COUNTS, AugmentedStore, Rebalancing, rebalance
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
    Manifest,
    ShardFile,
    read_manifest,
    shard_name,
    wrong_target,
)
from fedmpi.data.shards import ShardStore, open_folder
from fedmpi.data.statistics import class_notes

COPIED = ("alpha", "copies", "rotation", "shear", "shift", "zoom")
"""Keys of `[rebalance]` that determine the copies."""
DESCRIBED = ("task", "classes", "feature_shape", "dtype", "mean", "std", "targets", "inputs")
"""Fields of the description of shards that `RawDataset` has, too."""
_HOLD_OUT_STREAM = 1  # the partition itself draws from stream 0

CHUNK_BYTES = 8 << 20  # larger ones leave the allocator's reuse, and each fresh page costs a fault


def write_shards(
    raw: RawDataset,
    partition: Partition,
    out: Path | str,
    shards: int,
    seed: int,
    command: str,
    val_fraction: float = 0.0,
    overwrite: bool = False,
    held: tuple[Ints, Ints | None] | None = None,
) -> Manifest:
    """Write the shards of a partitioned data set and their manifest.

    Rows of the partition are numbers of rows for training. `held` gives validation rows and the offsets of their
    clients, instead of a share of every client's rows.
    """
    folder = Path(out)
    plan = _planned(raw, partition, shards, seed, val_fraction, held)
    _check(plan.raw)
    with preparing(folder, overwrite):
        try:
            manifest = json.dumps(_write(plan, folder, seed, command).as_dict(), indent=1) + "\n"
            write_whole(folder / MANIFEST, manifest.encode("utf-8", "backslashreplace"))
        except OSError as error:
            size = (len(partition.rows) + len(raw.test) + (0 if held is None else len(held[0]))) * row_bytes(raw)
            raise UserError(
                f"writing to {folder} failed ({error.strerror or error}). Make room for about {size / 1e6:,.1f} MB "
                "there, or choose another --out"
            ) from error
    return read_manifest(folder)


@dataclass(frozen=True)
class ShardPlan:
    """All inputs that determine the bytes of the files."""

    raw: RawDataset  # Fitted to the rows for training
    partition: Partition
    rows: Ints  # (n,): Rows of the clients without the validation part
    offsets: Ints
    held: Ints  # Rows of the validation part
    held_offsets: Ints | None  # Their clients' offsets, if they belong to clients
    client_ids: AnyArray  # (N,): int64 or bytes
    starts: Ints  # (shards + 1,): First client of every shard

    @cached_property
    def count_dtype(self) -> np.dtype[Any]:
        """Stored dtype of class counts."""
        blocks = class_count_blocks(Partition(self.rows, self.offsets), self.raw.y, self.raw.classes)
        return np.min_scalar_type(max(int(block.max(initial=0)) for block in blocks))


def _planned(
    raw: RawDataset,
    partition: Partition,
    shards: int,
    seed: int,
    fraction: float,
    held: tuple[Ints, Ints | None] | None,
) -> ShardPlan:
    """Hold out the validation part, fit the data set to the rest, and divide the clients into shards."""
    rows, offsets = raw.train[partition.rows], partition.offsets
    if held is not None:
        held_rows, held_offsets = held
    else:
        generator = Streams(seed).generator(Purpose.PARTITION, _HOLD_OUT_STREAM)
        rows, offsets, held_rows, held_offsets = hold_out_validation(rows, offsets, fraction, generator)
        kept = np.zeros(len(raw.y), bool)
        kept[raw.train], kept[held_rows] = True, False
        raw, samples = raw.fitted(np.flatnonzero(kept)), len(partition.rows)
        notes = raw.notes
        if len(held_rows) <= fraction * samples - 1:
            share = f"the validation part is {len(held_rows) / samples:.1%} of the samples, not {fraction:.1%}"
            notes = (*notes, f"{share}: every client keeps a sample to train on")
        raw = replace(raw, notes=notes)
    clients = partition.clients
    # shards of nearly equal samples, each with at least one client
    bounds = np.array([0, clients])
    starts = ownership(np.diff(offsets), bounds, min(shards, clients)) if shards > 1 else bounds
    ids: AnyArray = np.arange(clients) if partition.users is None else partition.users
    if partition.users is not None and raw.user_names is not None:
        ids = np.array([raw.user_names[user].encode("utf-8", "replace") for user in partition.users])
    return ShardPlan(raw, partition, rows, offsets, held_rows, held_offsets, ids, starts)


def _write(plan: ShardPlan, folder: Path, seed: int, command: str) -> Manifest:
    """Write all files except the manifest, which is returned.

    While one shard is filled, the previous one is flushed and its checksum is computed.
    """
    raw, partition = plan.raw, plan.partition
    with ThreadPoolExecutor(1) as finisher:
        pending = []
        for index, (first, last) in enumerate(zip(plan.starts.tolist(), plan.starts[1:].tolist(), strict=False)):
            path, count = folder / shard_name(index), int(plan.offsets[last] - plan.offsets[first])
            _fill_shard(plan, first, last, path)
            pending.append(finisher.submit(entry, path, first, last - first, count))
        train = tuple(file.result() for file in pending)
    val: ShardFile | None = None
    if len(plan.held):
        offsets, path = plan.held_offsets, folder / VALIDATION
        with new_h5(path) as h5:
            if offsets is not None:
                store(h5, OFFSETS, offsets)
                store(h5, CLIENT_IDS, plan.client_ids)
            _stream(h5, raw, plan.held, target_dtype(raw))
        val = entry(path, 0, 0 if offsets is None else len(offsets) - 1, len(plan.held))
    tested = raw.test
    if partition.balanced_test and raw.has_classes:
        tested = raw.test[balanced_rows(raw.y[raw.test], raw.classes, partition.test_total)]
    with new_h5(folder / TEST) as h5:
        dtype = np.dtype(np.int64) if raw.has_classes else target_dtype(raw)
        _stream(h5, raw, tested, dtype)
    test = entry(folder / TEST, samples=len(tested))
    parts = {"training": plan.rows, "validation": plan.held, "test": tested}
    labels = {part: raw.y[rows] for part, rows in parts.items()}
    return Manifest(
        dataset=raw.name,
        partition=partition.law,
        partition_options=dict(partition.options),
        seed=seed,
        clients=partition.clients,
        samples=len(plan.rows),
        classes=raw.classes,
        class_names=raw.class_names,
        description=raw.description,
        train=train,
        test=test,
        val=val,
        **_write_beside(raw, folder),
        empty_clients=int(np.count_nonzero(np.diff(plan.offsets) == 0)),
        dropped=len(raw.train) - len(partition.rows),
        skipped=raw.skipped,
        licence=raw.licence,
        citation=raw.citation,
        command=command,
        notes=(*raw.notes, *partition.notes, *(class_notes(labels, raw.class_names) if raw.has_classes else ())),
        understood=raw.understood,
    )


def _fill_shard(plan: ShardPlan, first: int, last: int, path: Path) -> None:
    """Write the samples of the clients from `first` to `last` - 1."""
    raw, offsets = plan.raw, plan.offsets[first : last + 1] - plan.offsets[first]
    mine = Partition(plan.rows[plan.offsets[first] : plan.offsets[last]], offsets)
    with new_h5(path) as h5:
        store(h5, OFFSETS, offsets)
        store(h5, CLIENT_IDS, plan.client_ids[first:last])
        if raw.has_classes:
            counts = reserve(h5, CLASS_COUNTS, (last - first, raw.classes), plan.count_dtype)
            filled = 0
            for block in class_count_blocks(mine, raw.y, raw.classes):
                counts[filled : filled + len(block)] = block.astype(plan.count_dtype)
                filled += len(block)
        _stream(h5, raw, mine.rows, target_dtype(raw))


def _stream(h5: h5py.File, raw: RawDataset, rows: Ints, target_dtype: np.dtype[Any]) -> None:
    """Write features and targets of rows in blocks."""
    labels = reserve(h5, LABELS, (len(rows), *raw.y.shape[1:]), target_dtype)
    features = reserve(h5, FEATURES, (len(rows), *raw.feature_shape), raw.dtype)
    step = max(1, CHUNK_BYTES // row_bytes(raw))
    for low in range(0, len(rows), step):
        part = rows[low : low + step]
        order = np.argsort(part, kind="stable")  # the source is read front to back
        x = np.asarray(raw.read(part[order]))
        if x.shape != (len(part), *raw.feature_shape) or x.dtype != np.dtype(raw.dtype):
            expected = f"{raw.dtype} {(len(part), *raw.feature_shape)}"
            raise ValueError(f"the reader of {raw.name} gave {x.dtype} {x.shape} instead of {expected}")
        labels[low : low + len(part)] = raw.y[part].astype(target_dtype)
        features[low : low + len(part)] = x.take(inverse_of(order), axis=0)


def _write_beside(raw: RawDataset, folder: Path) -> dict[str, Any]:
    """Write further arrays, the vocabulary and word vectors, if there are any; return their entries of the manifest."""
    found = {}
    if raw.extras:
        with new_h5(folder / EXTRAS) as h5:
            for name in sorted(raw.extras):
                store(h5, name, raw.extras[name])
        found["extras"] = entry(folder / EXTRAS)
    if raw.vocabulary:
        words = "".join(word + "\n" for word in raw.vocabulary)
        write_whole(folder / VOCABULARY, words.encode("utf-8", "backslashreplace"))
        found["words"] = entry(folder / VOCABULARY)
    if raw.vectors is not None:
        with whole_file(folder / VECTORS) as stream:
            np.save(stream, raw.vectors)
        found["vectors"] = entry(folder / VECTORS)
    return found


def _check(raw: RawDataset) -> None:
    """Reject a data set that does not fit its own description."""
    for which, rows in (("training", raw.train), ("test", raw.test)):
        if wrong := wrong_target(raw.y[rows], raw.description):
            raise UserError(
                f"{raw.name} has {which} targets that are no {raw.targets}; one is {wrong[1]}. Correct the data "
                "or choose other --targets"
            )


def target_dtype(raw: RawDataset) -> np.dtype[Any]:
    """Return the stored dtype of targets: small whole numbers for classes and tokens, else 0 and 1 or floats."""
    if raw.has_classes:
        return np.min_scalar_type(raw.classes - 1) if raw.classes <= 256 else np.dtype(np.int32)
    if raw.targets == "tokens":
        return np.dtype(np.int16 if raw.classes <= 1 << 15 else np.int32)
    whole = raw.targets == "multilabel" and raw.y.dtype.kind in "bui"
    return np.dtype(np.uint8 if whole else np.float32)


def write_again(
    store: ShardStore,
    samples: ShardStore | AugmentedStore,
    out: Path,
    shards: int,
    seed: int,
    command: str,
    overwrite: bool,
    extras: dict[str, AnyArray] | None = None,
    **drawn: Any,
) -> None:
    """Write these samples of the clients of a store, and its other parts, as new shards.

    `extras` are further arrays, `drawn` the other fields of `Partition` than rows, offsets and users.
    """
    manifest, val, ids = store.manifest, store.validation(), store.client_ids
    parts = [store.test(), *([] if val is None else [val])]
    count = int(samples.offsets[-1])
    rows = np.arange(count + sum(len(y) for _, y in parts))
    test, held = np.split(rows[count:], [len(parts[0][1])])
    others = rows_of(*(x for x, _ in parts))

    def read(wanted: Ints) -> AnyArray:
        mine = wanted < count
        found = np.empty((len(wanted), *store.description.feature_shape), store.description.dtype)
        found[mine], found[~mine] = samples.rows(wanted[mine])[0], others(wanted[~mine] - count)
        return found

    named = ids.dtype.kind == "U"
    labels = [samples.labels(client) for client in range(store.clients)]
    raw = RawDataset(
        name=manifest.dataset,
        class_names=tuple(manifest.class_names),
        read=read,
        y=np.concatenate([*labels, *(y for _, y in parts)]),
        train=rows[:count],
        test=test,
        user_names=tuple(map(str, ids.tolist())) if named else None,
        skipped=manifest.skipped,
        licence=manifest.licence,
        citation=manifest.citation,
        extras=extras or {},
        vocabulary=tuple(map(str, range(store.description.vocabulary))),
        understood=manifest.understood,
        **{name: getattr(store.description, name) for name in DESCRIBED},
    )
    partition = Partition(
        rows[:count],
        samples.offsets,
        users=np.arange(store.clients) if named else ids,
        **{"law": manifest.partition, **drawn},
    )
    beside = None if val is None else (held, store.validation_offsets)
    write_shards(raw, partition, out, shards, seed, command, overwrite=overwrite, held=beside)


def write_augmented(
    folder: Path, out: Path, part: RebalanceTable, seed: int = 0, overwrite: bool = False, command: str = ""
) -> Rebalancing:
    """Write the shards of a folder again, with the augmented copies of every client after its samples.

    The copies are those that runs with `rebalance.mode = "virtual"` and this seed make while reading (Duan et al. 2019,
    Algorithm 2). Runs on the new folder use "stored" and the same α. `overhead` of the result is that of Fig 9.
    """
    if out.resolve() == folder.resolve():
        raise UserError(f"{out} is the folder to be augmented. Choose another --out")
    store = open_folder(folder)
    if store.validation() is not None:
        raise UserError(f"{folder} has a validation part, which would be lost. Prepare it again without --val")
    if ORIGINAL_COUNTS in store.extras:
        raise UserError(f"{folder} holds augmented copies already. Name the folder that it was made from")
    streams, manifest = Streams(seed), store.manifest
    rebalancing = rebalance(store.class_counts(), part.alpha, part.copies, streams)
    used = {"seed": seed} | {name: getattr(part, name) for name in COPIED}
    write_again(
        store,
        AugmentedStore(store, rebalancing, streams, part),
        out,
        len(store.shard_starts) - 1,
        manifest.seed,
        command,
        overwrite,
        {**store.extras, ORIGINAL_COUNTS: rebalancing.original_counts.astype(np.int32)},
        options=manifest.partition_options | {f"augment_{name}": value for name, value in used.items()},
        notes=(f"augmented: {int(rebalancing.added.sum())} copies, {rebalancing.overhead:.1%} of the samples",),
    )
    return rebalancing
