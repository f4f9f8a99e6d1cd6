"""One HDF5 file of a shard folder: checked once when opened, mapped into memory when first read.

Contiguous datasets are mapped at their offset in the file: four times quicker per client than reading through HDF5, and
the processes of a machine share the pages. The operating system can read ahead what is needed soon.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import (
    CLASS_COUNTS,
    CLIENT_IDS,
    FEATURES,
    LABELS,
    OFFSETS,
    REPREPARE,
    DataDescription,
    ShardFile,
    wrong_target,
)

MOST_RANGES = 256
"""Largest number of clients per shard whose samples are read ahead."""
WHOLE, NAMES, NUMBERS = "iu", "iuS", "biuf"
KINDS = {WHOLE: "whole numbers", NAMES: "whole numbers or texts", NUMBERS: "numbers"}
"""Kinds of dtypes, and their names."""
H5_ERRORS = (KeyError, RuntimeError, OSError, AttributeError, TypeError, ValueError)
"""Errors that h5py raises for damaged files."""


@dataclass(frozen=True)
class Section:
    """Position of a contiguous dataset in its file."""

    path: Path
    byte: int | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def length(self) -> int:
        """Length in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def map(self) -> AnyArray:
        """Return the dataset as a read-only array over the mapped file (n, ...)."""
        if self.byte is None or 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.asarray(self._mapping)

    def read_ahead(self, first: int, last: int) -> None:
        """Let the system begin to read the rows first … last - 1 of the dataset; does not wait."""
        assert self.byte is not None
        row, lead = self.dtype.itemsize * math.prod(self.shape[1:]), self.byte % mmap.ALLOCATIONGRANULARITY
        start = (lead + first * row) // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping._mmap.madvise(mmap.MADV_WILLNEED, start, lead + last * row - start)

    @cached_property
    def _mapping(self) -> Any:
        try:
            return np.memmap(self.path, self.dtype, "r", self.byte or 0, self.shape)
        except (OSError, ValueError) as error:
            full = isinstance(error, OSError) and error.errno == errno.EMFILE
            advice = "raise `ulimit -n`, or write fewer --shards" if full else "check that it was not moved or changed"
            raise UserError(f"{self.path} can no longer be read ({error}): {advice}") from None


class ShardData:
    """Samples of the clients of one shard, mapped on first use."""

    def __init__(self, sections: dict[str, Section], offsets: Ints, description: DataDescription):
        self._sections = sections
        self._description = description
        self.offsets = offsets

    @cached_property
    def x(self) -> AnyArray:
        """Features (n, ...) as stored."""
        return self._sections[FEATURES].map()

    @cached_property
    def y(self) -> AnyArray:
        """Targets (n, ...) as stored, all of them checked."""
        return targets_of(self._sections[LABELS], self._description)

    def read_ahead(self, clients: Ints) -> None:
        """Let the system begin to read the samples of these clients of the shard, the first ones if there are many."""
        full = clients[self.offsets[clients] < self.offsets[clients + 1]]
        for client in full[:MOST_RANGES].tolist() if self._sections else ():
            for name in (FEATURES, LABELS):
                self._sections[name].read_ahead(int(self.offsets[client]), int(self.offsets[client + 1]))

    @cached_property
    def class_counts(self) -> AnyArray:
        """Samples of every client and class (clients, C), in a small unsigned type; where each sample has a class."""
        return self._sections[CLASS_COUNTS].map()

    @cached_property
    def client_ids(self) -> AnyArray:
        """Names of the clients (clients,): int64 or str."""
        stored = self._sections[CLIENT_IDS].map()
        return np.char.decode(stored, "utf-8", "replace") if stored.dtype.kind == "S" else stored


def open_train(path: Path, file: ShardFile, description: DataDescription) -> ShardData:
    """Check a training shard against the manifest's entry and shapes."""
    check_size(path, file)
    counted = (CLASS_COUNTS,) if description.labeled else ()
    sections = _sections(path, (FEATURES, LABELS, OFFSETS, CLIENT_IDS, *counted))
    _expect_samples(sections, file, description, path)
    _expect(sections, OFFSETS, (file.clients + 1,), path, WHOLE)
    _expect(sections, CLIENT_IDS, (file.clients,), path, NAMES)
    if counted:
        _expect(sections, CLASS_COUNTS, (file.clients, description.classes), path, WHOLE)
    return ShardData(sections, _offsets(sections[OFFSETS], path, file.samples), description)


def open_part(path: Path, file: ShardFile, description: DataDescription) -> tuple[Section, Section]:
    """Check test.h5 or val.h5; the sections of x and y. Raises `UserError` as `open_train` does."""
    check_size(path, file)
    sections = _sections(path, (FEATURES, LABELS))
    _expect_samples(sections, file, description, path)
    return sections[FEATURES], sections[LABELS]


def _expect_samples(sections: dict[str, Section], file: ShardFile, description: DataDescription, path: Path) -> None:
    """Reject features or targets of another shape or type than the manifest's."""
    _expect(sections, FEATURES, (file.samples, *description.feature_shape), path, description.dtype)
    numbers = WHOLE if description.counted else NUMBERS
    _expect(sections, LABELS, (file.samples, *description.target_shape), path, numbers)


def targets_of(section: Section, description: DataDescription) -> AnyArray:
    """Return the mapped targets of a section; raise `UserError` if one is invalid."""
    targets = section.map()
    wrong = wrong_target(targets, description)
    if wrong is not None:
        raise UserError(
            f"the label of row {wrong[0]} of {section.path} is {wrong[1]}: the shard is damaged; {REPREPARE}"
        )
    return targets


def part_offsets(path: Path, file: ShardFile, clients: int) -> Ints | None:
    """Return the offsets of the clients' samples in val.h5, int64 (clients + 1,); None if the file has none."""
    check_size(path, file)
    with _opened(path) as h5:
        if OFFSETS not in _keys(h5, path):
            return None
    sections = _sections(path, (OFFSETS,))
    _expect(sections, OFFSETS, (clients + 1,), path, WHOLE)
    return _offsets(sections[OFFSETS], path, file.samples)


def _offsets(section: Section, path: Path, samples: int) -> Ints:
    offsets: Ints = section.map().astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != samples or (offsets[1:] < offsets[:-1]).any():
        raise UserError(
            f"the offsets in {path} do not describe its {samples} samples: the shard is damaged; {REPREPARE}"
        )
    return offsets


def read_arrays(path: Path, file: ShardFile) -> dict[str, AnyArray]:
    """Return all datasets of extras.h5, in memory."""
    check_size(path, file)
    with _opened(path) as h5:
        names = tuple(_keys(h5, path))
    return {name: np.array(section.map()) for name, section in _sections(path, names).items()}


def check_size(path: Path, file: ShardFile) -> None:
    """Raise `UserError` unless the file exists with the size that the manifest states."""
    try:
        found = path.stat()
    except OSError:
        raise UserError(
            f"{path} is missing although the manifest lists it: copy the whole folder again, or {REPREPARE}"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is no file: copy the whole folder again, or {REPREPARE}")
    size = found.st_size
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
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{path} is not a readable HDF5 file ({_short(error)}): copy it again, or {REPREPARE}"
        ) from None


def _keys(h5: h5py.File, path: Path) -> list[str]:
    try:
        return list(h5.keys())
    except H5_ERRORS as error:
        raise UserError(
            f"the names in {path} cannot be read ({_short(error)}): the file is damaged; {REPREPARE}"
        ) from None


def _sections(path: Path, names: Iterable[str]) -> dict[str, Section]:
    """Return the positions of the datasets of these names, each within the file."""
    with _opened(path) as h5:
        sections = {name: _section(h5, path, name) for name in names}
    size = path.stat().st_size
    if any(section.byte is not None and section.byte + section.length > size for section in sections.values()):
        raise UserError(f"a dataset of {path} ends beyond the file: it is damaged; {REPREPARE}")
    return sections


def _section(h5: h5py.File, path: Path, name: str) -> Section:
    try:
        link = h5.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise UserError(f"{name!r} in {path} is a link to elsewhere, not a dataset of the file itself: {REPREPARE}")
        dataset = h5[name]
        byte, shape, dtype = dataset.id.get_offset(), dataset.shape, dataset.dtype
        creation = dataset.id.get_create_plist()
        contiguous = creation.get_layout() == h5py.h5d.CONTIGUOUS and not creation.get_external_count()
    except H5_ERRORS as error:
        raise UserError(
            f"{path} lacks the dataset {name!r} ({_short(error)}): the shard is damaged; {REPREPARE}"
        ) from None
    if not contiguous or shape is None or dtype.hasobject or not dtype.itemsize or (byte is None and 0 not in shape):
        raise UserError(
            f"the dataset {name!r} of {path} is not stored contiguously, so it cannot be mapped: {REPREPARE}"
        )
    return Section(path, byte, tuple(map(int, shape)), dtype)


def _expect(sections: dict[str, Section], name: str, shape: tuple[int, ...], path: Path, dtype: str) -> None:
    """Reject a dataset of another shape or type: a dtype, or kinds of them such as whole numbers ("iu")."""
    found = sections[name]
    fits = found.dtype.kind in dtype if dtype in KINDS else found.dtype == np.dtype(dtype)
    if found.shape != shape or not fits:
        wanted = f"{KINDS.get(dtype, dtype)} {shape}"
        raise UserError(
            f"the dataset {name!r} of {path} is {found.dtype} {found.shape} but the manifest says {wanted}: {REPREPARE}"
        )


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
