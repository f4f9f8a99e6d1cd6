"""The shard store: every client of a prepared folder, or of the embedded digits, as arrays mapped into memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.assignment import inverse_of
from fedmpi.data.schema import REPREPARE, DataDescription, Manifest, ShardFile, read_manifest
from fedmpi.data.shardfile import (
    Section,
    ShardData,
    check_checksum,
    check_size,
    open_part,
    open_train,
    part_offsets,
    read_arrays,
    targets_of,
)

Samples = tuple[AnyArray, AnyArray]
_VALUES_AT_ONCE = 1 << 22  # bounds the memory of passes over whole files and populations


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_features(path: Path, x: AnyArray, description: DataDescription) -> None:
    """Reject features (n, …) that are not finite, or token ids outside the vocabulary."""
    if x.dtype == np.uint8 or not x.size:
        return
    step = max(1, _VALUES_AT_ONCE // max(1, x[0].size))
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
    """Reject class counts (clients, C) that are not those of the labels."""
    sizes: Ints = np.diff(shard.offsets)
    step = max(1, _VALUES_AT_ONCE // classes)
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


class ShardStore:
    """The clients of one data set; reading is lazy, sharing is by the operating system's page cache."""

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[ShardData],
        parts: Mapping[str, tuple[Section | AnyArray, Section | AnyArray]],
        folder: Path | None = None,
        validation_offsets: Ints | None = None,
    ):
        self.manifest = manifest
        self.folder = folder
        self.name = manifest.dataset
        self.description: DataDescription = manifest.description
        self.sizes: Ints = np.concatenate([np.diff(shard.offsets) for shard in shards])
        self.offsets: Ints = np.concatenate(([0], np.cumsum(self.sizes)))
        self.shard_starts: Ints = np.cumsum([0] + [len(shard.offsets) - 1 for shard in shards])
        self._shards = shards
        self._parts = dict(parts)
        self._validation_offsets = validation_offsets
        self._sample_starts = self.offsets[self.shard_starts]
        self._sample_bytes = math.prod(self.description.feature_shape) * np.dtype(self.description.dtype).itemsize
        self._announced = np.zeros(len(self.sizes), bool)

    @property
    def clients(self) -> int:
        """N."""
        return len(self.sizes)

    @property
    def samples(self) -> int:
        """Training samples of all clients."""
        return int(self.offsets[-1])

    @cached_property
    def client_ids(self) -> AnyArray:
        """Names of the clients as stored (N,), int64 or str."""
        return np.concatenate([shard.client_ids for shard in self._shards])

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The words of the token ids; empty unless the data set is text."""
        words = self.manifest.words
        if self.folder is None or words is None:
            return ()
        path = self.folder / words.name
        try:
            return tuple(path.read_text(encoding="utf-8").split("\n")[:-1])
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read ({error}): {REPREPARE}") from None

    @cached_property
    def extras(self) -> dict[str, AnyArray]:
        """Further arrays stored beside the shards; empty where there are none."""
        extras = self.manifest.extras
        if self.folder is None or extras is None:
            return {}
        return read_arrays(self.folder / extras.name, extras)

    def class_counts(self, clients: Ints | None = None) -> Ints:
        """Samples of every class held by the clients (all of them when None), int64 (m, C)."""
        self._need_classes()
        if clients is None:
            return np.concatenate([shard.class_counts for shard in self._shards]).astype(np.int64)
        wanted = np.asarray(clients, np.int64)
        counts = np.empty((len(wanted), self.description.classes), np.int64)
        home = np.searchsorted(self.shard_starts, wanted, side="right") - 1
        for shard in np.unique(home):
            mine = home == shard
            counts[mine] = self._shards[shard].class_counts[wanted[mine] - self.shard_starts[shard]]
        return counts

    def class_count_blocks(self) -> Iterator[AnyArray]:
        """Class counts (m, C) of all clients in blocks, as stored: for passes over a large population."""
        self._need_classes()
        step = max(1, _VALUES_AT_ONCE // self.description.classes)
        for shard in self._shards:
            counts = shard.class_counts
            yield from (counts[low : low + step] for low in range(0, len(counts), step))

    def _need_classes(self) -> None:
        if not self.description.labeled:
            raise UserError(
                f"the samples of {self.name} have no class each (targets: {self.description.targets}), so nothing can "
                "be chosen by how many samples of a class a client holds"
            )

    def client(self, client: int, rows: Ints | None = None) -> Samples:
        """Features and labels of one client in the stored dtypes: read-only views of all, or copies of some rows."""
        shard = int(np.searchsorted(self.shard_starts, client, side="right")) - 1
        data = self._shards[shard]
        local = client - self.shard_starts[shard]
        whole = slice(data.offsets[local], data.offsets[local + 1])
        x, y = data.x[whole], data.y[whole]
        return (x, y) if rows is None else (x.take(rows, axis=0), y.take(rows, axis=0))

    def labels(self, client: int) -> AnyArray:
        """Targets of one client, as stored."""
        return self.client(client)[1]

    def unannounced(self, clients: Ints) -> Ints:
        """Return the clients of (m,) that were not announced lately; they count as announced from now on.

        All are forgotten once the announced samples exceed a quarter of the machine's memory.
        """
        fresh = clients[~self._announced[clients]]
        self._announced[fresh] = True
        if int(self.sizes[self._announced].sum()) * self._sample_bytes > physical_memory() // 4:
            self._announced[:] = False
        return fresh

    def expect(self, clients: Ints) -> None:
        """Let the system begin to read the samples of these clients (m,), sorted, which are needed soon."""
        cuts = np.searchsorted(clients, self.shard_starts)
        for shard in np.flatnonzero(np.diff(cuts)).tolist():
            self._shards[shard].read_ahead(clients[cuts[shard] : cuts[shard + 1]] - self.shard_starts[shard])

    def rows(self, positions: Ints) -> Samples:
        """Features and labels at global sample positions (r,), copied, in the stored dtypes."""
        if len(self._shards) == 1:
            data = self._shards[0]
            return data.x.take(positions, axis=0), data.y.take(positions, axis=0)
        if len(positions) > 1 and (np.diff(positions) < 0).any():
            order = np.argsort(positions, kind="stable")  # files are read front to back
            x, y = self.rows(positions[order])
            back = inverse_of(order)
            return x.take(back, axis=0), y.take(back, axis=0)
        if len(positions) and not 0 <= positions[0] <= positions[-1] < self.samples:
            raise IndexError(f"sample positions must lie in 0 ... {self.samples - 1}")
        x = np.empty((len(positions), *self.description.feature_shape), self.description.dtype)
        numbers = np.int64 if self.description.counted else np.float32
        y = np.empty((len(positions), *self.description.target_shape), numbers)
        cuts = np.searchsorted(positions, self._sample_starts)
        for shard in np.flatnonzero(np.diff(cuts)).tolist():
            mine = slice(cuts[shard], cuts[shard + 1])
            local = positions[mine] - self._sample_starts[shard]
            # With "clip" take writes into x directly; the positions are in range.
            self._shards[shard].x.take(local, axis=0, out=x[mine], mode="clip")
            y[mine] = self._shards[shard].y.take(local, axis=0)
        return x, y

    def span(self, start: int, stop: int) -> list[Samples]:
        """Views of the global sample positions start ... stop - 1, one pair a shard."""
        pieces = []
        for shard, data in enumerate(self._shards):
            low, high = np.clip((start, stop), *self._sample_starts[shard : shard + 2]) - self._sample_starts[shard]
            if low < high:
                pieces.append((data.x[low:high], data.y[low:high]))
        return pieces

    def test(self) -> Samples:
        """Features and labels of the test part, in the stored dtypes."""
        return self._part("test")

    def validation(self) -> Samples | None:
        """Features and labels of the validation part, where the folder has one."""
        return self._part("val") if "val" in self._parts else None

    @cached_property
    def validation_offsets(self) -> Ints | None:
        """Client k's validation samples are rows ``[k] ... [k + 1] - 1`` of `validation`, int64 (N + 1,).

        None without a validation part, and for folders written before it knew its clients.
        """
        file = self.manifest.val
        if self.folder is None or file is None:
            return self._validation_offsets
        return part_offsets(self.folder / file.name, file, self.clients)

    def part_samples(self, name: str) -> int:
        """Samples of the "test" or the "val" part; 0 where there is none."""
        if name not in self._parts:
            return 0
        y = self._parts[name][1]
        return int(y.shape[0])

    def check(self) -> None:
        """Look at every value of the folder's files."""
        folder, manifest = self.folder or Path(), self.manifest
        for file, shard in zip(manifest.train, self._shards, strict=True):
            check_features(folder / file.name, shard.x, self.description)
            if self.description.labeled:
                check_counts(folder / file.name, shard, self.description.classes)
        for name, held in (("test", manifest.test), ("val", manifest.val)):
            if held is not None and name in self._parts:
                check_features(folder / held.name, self._part(name)[0], self.description)

    def _part(self, name: str) -> Samples:
        x, y = self._parts[name]
        if isinstance(x, Section):
            x = x.map()
        if isinstance(y, Section):
            y = targets_of(y, self.description)
        self._parts[name] = x, y
        return x, y


def open_folder(folder: Path, verify: bool = False) -> ShardStore:
    """Open a folder written by data_prep."""
    manifest = read_manifest(folder)
    described = manifest.description
    shards = [open_train(folder / file.name, file, described) for file in manifest.train]
    named: dict[str, ShardFile | None] = {"test": manifest.test, "val": manifest.val}
    parts = {name: open_part(folder / file.name, file, described) for name, file in named.items() if file is not None}
    for file in manifest.files():
        check_size(folder / file.name, file)
        if verify:
            check_checksum(folder / file.name, file)
    store = ShardStore(manifest, shards, parts, folder)
    _check_empty(store, folder)
    if verify:
        store.check()
    return store


def _check_empty(store: ShardStore, folder: Path) -> None:
    empty = np.flatnonzero(store.sizes == 0)
    if len(empty) != store.manifest.empty_clients:
        first = f", the first is client {empty[0]}" if len(empty) else ""
        expected = f"the manifest says {store.manifest.empty_clients}"
        raise UserError(f"{len(empty)} clients of {folder} hold no sample{first}, but {expected}: {REPREPARE}")
