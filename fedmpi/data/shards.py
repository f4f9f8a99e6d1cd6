"""The shard store: every client of a prepared folder, or of data in memory, as arrays.

The files of a folder are checked once when they are opened, and mapped into memory when they are first read.
Contiguous datasets are mapped at their offset in the file: four times quicker per client than reading through HDF5, and
the processes of a machine share the pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.assignment import inverse_of
from fedmpi.data.schema import (
    CLASS_COUNTS,
    CLIENT_IDS,
    FEATURES,
    LABELS,
    OFFSETS,
    REPREPARE,
    DataDescription,
    Manifest,
    ShardFile,
    read_manifest,
    wrong_target,
)

Samples = tuple[AnyArray, AnyArray]
VALUES_AT_ONCE = 1 << 22
"""Bound of the memory of passes over large populations, in values."""
KINDS = {"whole numbers": "iu", "whole numbers or texts": "iuS", "numbers": "biuf"}
"""Kinds of dtypes of the datasets that have no fixed one."""
H5_ERRORS = (KeyError, RuntimeError, OSError, AttributeError, TypeError, ValueError)
"""Errors that h5py raises for damaged files."""


@dataclass(frozen=True)
class Section:
    """Position of a contiguous dataset in its file."""

    path: Path
    byte: int | None  # None where the dataset is empty
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def map(self) -> AnyArray:
        """Return the dataset as a read-only array over the mapped file (n, ...)."""
        if self.byte is None:
            return np.empty(self.shape, self.dtype)
        try:
            return np.asarray(np.memmap(self.path, self.dtype, "r", self.byte, self.shape))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} can no longer be read ({error}). Check it, and `ulimit -n`") from None


class ShardData:
    """Arrays of one file, mapped when they are first read, or arrays in memory."""

    def __init__(
        self, arrays: Mapping[str, Section | AnyArray], description: DataDescription, offsets: Ints | None = None
    ):
        self._arrays, self._description = arrays, description
        # (clients + 1,): Client k's samples are rows ``[k] ... [k + 1] - 1``; None where clients are unknown
        self.offsets = offsets

    def _array(self, name: str) -> AnyArray:
        found = self._arrays[name]
        return found.map() if isinstance(found, Section) else found

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return int(self._arrays[LABELS].shape[0])

    @cached_property
    def x(self) -> AnyArray:
        """Features (n, ...) as stored."""
        return self._array(FEATURES)

    @cached_property
    def y(self) -> AnyArray:
        """Targets (n, ...) as stored; those of a file are checked."""
        section, targets = self._arrays[LABELS], self._array(LABELS)
        if isinstance(section, Section) and (wrong := wrong_target(targets, self._description)):
            raise _damaged(section.path, f"has a damaged label: that of row {wrong[0]} is {wrong[1]}")
        return targets

    @cached_property
    def class_counts(self) -> AnyArray:
        """Samples of every client and class (clients, C), in a small unsigned type; where each sample has a class."""
        return self._array(CLASS_COUNTS)

    @cached_property
    def client_ids(self) -> AnyArray:
        """Names of the clients (clients,): int64 or str."""
        stored = self._array(CLIENT_IDS)
        return np.char.decode(stored, "utf-8", "replace") if stored.dtype.kind == "S" else stored


def shard_in_memory(
    x: AnyArray, y: AnyArray, description: DataDescription, offsets: Ints | None = None, ids: AnyArray | None = None
) -> ShardData:
    """Return samples in memory, client after client where `offsets` are given, as the data of a shard."""
    arrays = {FEATURES: x, LABELS: y}
    if offsets is not None:
        clients, classes = len(offsets) - 1, description.classes
        arrays[CLIENT_IDS] = np.arange(clients) if ids is None else ids
        if description.labeled:
            owner = np.repeat(np.arange(clients), np.diff(offsets))
            counts = np.bincount(owner * classes + y, minlength=clients * classes)
            arrays[CLASS_COUNTS] = counts.reshape(clients, classes)
    return ShardData(arrays, description, offsets)


class ShardStore:
    """The clients of one data set; reading is lazy, sharing is by the operating system's page cache."""

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[ShardData],
        test: ShardData,
        validation: ShardData | None = None,
        folder: Path | None = None,
    ):
        self.manifest = manifest
        self.folder = folder
        self.name = manifest.dataset
        self.description: DataDescription = manifest.description
        starts = [shard.offsets for shard in shards if shard.offsets is not None]
        self.sizes: Ints = np.concatenate([np.diff(offsets) for offsets in starts])
        self.offsets: Ints = np.concatenate(([0], np.cumsum(self.sizes)))
        self.shard_starts: Ints = np.cumsum([0] + [len(offsets) - 1 for offsets in starts])
        self._shards = shards
        self._test, self._validation = test, validation
        self._sample_starts = self.offsets[self.shard_starts]

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
            raise _damaged(path, f"cannot be read ({error})") from None

    @cached_property
    def extras(self) -> dict[str, AnyArray]:
        """Further arrays stored beside the shards, in memory; empty where there are none."""
        extras = self.manifest.extras
        if self.folder is None or extras is None:
            return {}
        with _reading(self.folder / extras.name) as h5:
            return {name: h5[name][...] for name in h5}

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
        step = max(1, VALUES_AT_ONCE // self.description.classes)
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
        data, start = self._shards[shard], self._sample_starts[shard]
        whole = slice(self.offsets[client] - start, self.offsets[client + 1] - start)
        x, y = data.x[whole], data.y[whole]
        return (x, y) if rows is None else (x.take(rows, axis=0), y.take(rows, axis=0))

    def labels(self, client: int) -> AnyArray:
        """Targets of one client, as stored."""
        return self.client(client)[1]

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

    def test(self) -> Samples:
        """Features and labels of the test part, in the stored dtypes."""
        return self._test.x, self._test.y

    def validation(self) -> Samples | None:
        """Features and labels of the validation part, where the folder has one."""
        return None if self._validation is None else (self._validation.x, self._validation.y)

    @property
    def validation_offsets(self) -> Ints | None:
        """Client k's validation samples are rows ``[k] ... [k + 1] - 1`` of `validation`, int64 (N + 1,).

        None without a validation part, and for folders written before it knew its clients.
        """
        return None if self._validation is None else self._validation.offsets

    def part_samples(self, name: str) -> int:
        """Samples of the "test" or the "val" part; 0 where there is none."""
        part = self._test if name == "test" else self._validation
        return 0 if part is None else part.samples


def open_folder(folder: Path, verify: bool = False) -> ShardStore:
    """Open a folder written by data_prep; `verify` compares the checksums of all files."""
    manifest = read_manifest(folder)
    for file in manifest.files():
        _check_file(folder / file.name, file, verify)
    described = manifest.description
    shards = [_open(folder, file, described, train=True) for file in manifest.train]
    test = _open(folder, manifest.test, described)
    val = None if manifest.val is None else _open(folder, manifest.val, described)
    return ShardStore(manifest, shards, test, val, folder)


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} {what}. Copy it again, or {REPREPARE}")


def _check_file(path: Path, file: ShardFile, verify: bool) -> None:
    """Raise `UserError` unless the file exists with the size, and on request the checksum, that the manifest states."""
    try:
        found = path.stat().st_size
    except OSError:
        raise _damaged(path, "is missing although the manifest lists it") from None
    if found != file.bytes:
        kind = "truncated" if found < file.bytes else "longer than it should be"
        raise _damaged(path, f"is {kind} ({found} bytes, the manifest says {file.bytes})")
    if verify:
        with path.open("rb") as stream:
            checksum = hashlib.file_digest(stream, "sha256").hexdigest()
        if checksum != file.sha256:
            raise _damaged(path, "has changed, since its checksum is not the manifest's")


@contextmanager
def _reading(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file; errors of h5py within the context name it."""
    try:
        with h5py.File(path, "r", locking=False) as h5:
            yield h5
    except H5_ERRORS as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise _damaged(path, f"is not a readable HDF5 file with the datasets of a shard ({reason})") from None


def _open(folder: Path, file: ShardFile, description: DataDescription, train: bool = False) -> ShardData:
    """Check the datasets of a file against the manifest; a validation part may name the clients of its samples."""
    path, clients = folder / file.name, file.clients
    counted = "whole numbers" if description.counted else "numbers"
    expected: dict[str, tuple[tuple[int, ...], str]] = {
        FEATURES: ((file.samples, *description.feature_shape), description.dtype),
        LABELS: ((file.samples, *description.target_shape), counted),
    }
    if train:
        expected[CLIENT_IDS] = (clients,), "whole numbers or texts"
        if description.labeled:
            expected[CLASS_COUNTS] = (clients, description.classes), "whole numbers"
    sections = {}
    with _reading(path) as h5:
        for name, (shape, kind) in expected.items():
            found = h5[name]
            fits = found.dtype.kind in KINDS[kind] if kind in KINDS else found.dtype == np.dtype(kind)
            if found.shape != shape or not fits:
                raise _damaged(
                    path,
                    f"has the dataset {name!r} of {found.dtype} {found.shape}, but the manifest says {kind} {shape}",
                )
            byte = found.id.get_offset()
            if byte is None and found.size:
                raise _damaged(path, f"has a dataset {name!r} that is not stored contiguously, so it cannot be mapped")
            sections[name] = Section(path, byte, shape, found.dtype)
        offsets = h5[OFFSETS][...].astype(np.int64) if train or OFFSETS in h5 else None
    if offsets is not None:
        right = offsets.shape == (clients + 1,) and offsets[0] == 0 and offsets[-1] == file.samples
        if not right or (np.diff(offsets) < 0).any():
            raise _damaged(path, f"has offsets that do not describe its {file.samples} samples")
    return ShardData(sections, description, offsets)
