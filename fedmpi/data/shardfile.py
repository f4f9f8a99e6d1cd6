"""One HDF5 file of a shard folder: checked once when opened, mapped into memory when first read.

Contiguous datasets are mapped with np.memmap at their offset in the file: four times quicker a client than reading
through HDF5, and the processes of a machine share the pages.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.read_ahead import Request
from fedmpi.data.schema import CLASS_COUNTS, CLIENT_IDS, FEATURES, LABELS, OFFSETS, REPREPARE, ShardFile


@dataclass(frozen=True)
class Section:
    """Where a contiguous dataset lies in its file."""

    path: Path
    byte: int | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def map(self) -> AnyArray:
        """The dataset as a read-only array over the mapped file (n, ...)."""
        if self.byte is None or 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.frombuffer(self._mapping, self.dtype, math.prod(self.shape), self._lead).reshape(self.shape)

    def request(self, first: Ints, last: Ints) -> Request:
        """The bytes of the rows first[i] … last[i] − 1 of the dataset, which must not be empty."""
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        return Request(self._mapping, self._lead + first * row, self._lead + last * row)

    @property
    def _lead(self) -> int:
        """Bytes before the dataset in the mapping, which begins where a page may."""
        assert self.byte is not None
        return self.byte % mmap.ALLOCATIONGRANULARITY

    @cached_property
    def _mapping(self) -> mmap.mmap:
        assert self.byte is not None
        start, length = self.byte - self._lead, self._lead + self.dtype.itemsize * math.prod(self.shape)
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path} can no longer be read ({error}): check that it was not moved or changed"
            ) from None


class ShardData:
    """Samples of the clients of one shard, mapped on first use.

    Parameters
    ----------
    sections : dict of Section
        By dataset name.
    offsets : int64 (clients + 1,)
        Client k of the shard holds rows ``offsets[k] : offsets[k + 1]``.
    """

    def __init__(self, sections: dict[str, Section], offsets: Ints):
        self._sections = sections
        self.offsets = offsets

    @cached_property
    def x(self) -> AnyArray:
        """Features (n, ...) as stored."""
        return self._sections[FEATURES].map()

    @cached_property
    def y(self) -> AnyArray:
        """Labels (n,) as stored."""
        return self._sections[LABELS].map()

    def requests(self, clients: Ints) -> list[Request]:
        """Where the samples of these clients of the shard lie, those without any left out; none in memory."""
        full = clients[self.offsets[clients] < self.offsets[clients + 1]]
        if not len(full) or not self._sections:
            return []
        rows = self.offsets[full], self.offsets[full + 1]
        return [self._sections[name].request(*rows) for name in (FEATURES, LABELS)]

    @cached_property
    def class_counts(self) -> AnyArray:
        """Samples of every client and class (clients, C), in a small unsigned type."""
        return self._sections[CLASS_COUNTS].map()

    @cached_property
    def client_ids(self) -> AnyArray:
        """Names of the clients (clients,): int64 or str."""
        stored = self._sections[CLIENT_IDS].map()
        return np.char.decode(stored, "utf-8") if stored.dtype.kind == "S" else stored


def open_train(path: Path, file: ShardFile, feature_shape: tuple[int, ...], dtype: str, classes: int) -> ShardData:
    """Check a training shard against the manifest's entry and shapes.

    Raises
    ------
    UserError
        The file is missing, truncated, no HDF5, or disagrees with the manifest.
    """
    check_size(path, file)
    with _opened(path) as h5:
        sections = {name: _section(h5, path, name) for name in (FEATURES, LABELS, OFFSETS, CLIENT_IDS, CLASS_COUNTS)}
        _expect(sections, FEATURES, (file.samples, *feature_shape), path, dtype)
        _expect(sections, LABELS, (file.samples,), path)
        _expect(sections, OFFSETS, (file.clients + 1,), path)
        _expect(sections, CLIENT_IDS, (file.clients,), path)
        _expect(sections, CLASS_COUNTS, (file.clients, classes), path)
        offsets = h5[OFFSETS][:].astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != file.samples or (np.diff(offsets) < 0).any():
        raise UserError(
            f"the offsets in {path} do not describe its {file.samples} samples: the shard is damaged; {REPREPARE}"
        )
    return ShardData(sections, offsets)


def open_part(path: Path, file: ShardFile, feature_shape: tuple[int, ...], dtype: str) -> tuple[Section, Section]:
    """Check test.h5 or val.h5; the sections of x and y. Raises `UserError` as `open_train` does."""
    check_size(path, file)
    with _opened(path) as h5:
        sections = {name: _section(h5, path, name) for name in (FEATURES, LABELS)}
    _expect(sections, FEATURES, (file.samples, *feature_shape), path, dtype)
    _expect(sections, LABELS, (file.samples,), path)
    return sections[FEATURES], sections[LABELS]


def part_offsets(path: Path, file: ShardFile, clients: int) -> Ints | None:
    """Where the samples of every client begin in val.h5, int64 (clients + 1,); None where the file does not say.

    Raises
    ------
    UserError
        They do not describe the file's samples.
    """
    check_size(path, file)
    with _opened(path) as h5:
        if OFFSETS not in h5:
            return None
        offsets: Ints = h5[OFFSETS][:].astype(np.int64)
    whole = len(offsets) == clients + 1 and offsets[0] == 0 and offsets[-1] == file.samples
    if not whole or (np.diff(offsets) < 0).any():
        raise UserError(
            f"the offsets in {path} do not describe its {file.samples} samples of {clients} clients: it is damaged; "
            f"{REPREPARE}"
        )
    return offsets


def read_arrays(path: Path, file: ShardFile) -> dict[str, AnyArray]:
    """All datasets of extras.h5, in memory."""
    check_size(path, file)
    with _opened(path) as h5:
        return {name: h5[name][...] for name in h5}


def check_size(path: Path, file: ShardFile) -> None:
    """Raise `UserError` unless the file exists with the size that the manifest states."""
    try:
        size = path.stat().st_size
    except OSError:
        raise UserError(
            f"{path} is missing although the manifest lists it: copy the whole folder again, or {REPREPARE}"
        ) from None
    if size != file.bytes:
        kind = "truncated" if size < file.bytes else "longer than it should be"
        raise UserError(
            f"{path} is {kind} ({size} bytes, the manifest says {file.bytes}): copy it again, or {REPREPARE}"
        )


def check_checksum(path: Path, file: ShardFile) -> None:
    """Raise `UserError` unless the file's sha256 is the manifest's."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != file.sha256:
        raise UserError(
            f"the checksum of {path} differs from the manifest's: its content changed; copy it again, or {REPREPARE}"
        )


def _opened(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise UserError(
            f"{path} is not a readable HDF5 file ({_short(error)}): copy it again, or {REPREPARE}"
        ) from None


def _section(h5: h5py.File, path: Path, name: str) -> Section:
    try:
        dataset = h5[name]
        byte, shape, dtype, chunks = dataset.id.get_offset(), dataset.shape, dataset.dtype, dataset.chunks
    except (KeyError, RuntimeError, OSError, AttributeError) as error:
        raise UserError(
            f"{path} lacks the dataset {name!r} ({_short(error)}): the shard is damaged; {REPREPARE}"
        ) from None
    if chunks is not None or dtype.hasobject or (byte is None and 0 not in shape):
        raise UserError(
            f"the dataset {name!r} of {path} is not stored contiguously, so it cannot be mapped: {REPREPARE}"
        )
    return Section(path, byte, shape, dtype)


def _expect(
    sections: dict[str, Section], name: str, shape: tuple[int, ...], path: Path, dtype: str | None = None
) -> None:
    found = sections[name]
    if found.shape != shape or (dtype is not None and found.dtype != np.dtype(dtype)):
        said = f"{dtype or ''} {shape}".strip()
        raise UserError(
            f"the dataset {name!r} of {path} is {found.dtype} {found.shape} but the manifest says {said}: {REPREPARE}"
        )


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
