"""One HDF5 file of a shard folder: checked once when opened, mapped into memory when first read.

Contiguous datasets are mapped at their offset in the file: four times quicker per client than reading through HDF5, and
the processes of a machine share the pages. The operating system can be asked to read ahead what is needed soon.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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

NEIGHBOURS = 64 << 10
"""Ranges closer than this, in bytes, are asked for as one: a request costs more than so much more data."""
MOST_RANGES = 256
MOST_BYTES = 256 << 20
"""What is asked for at once at most: pages that nobody has room for would be dropped before they are read."""


WHOLE, NAMES, NUMBERS = "iu", "iuS", "biuf"
KINDS = {WHOLE: "whole numbers", NAMES: "whole numbers or texts", NUMBERS: "numbers"}
"""Kinds of dtypes, and their names."""
H5_ERRORS = (KeyError, RuntimeError, OSError, AttributeError, TypeError, ValueError)
"""What h5py raises when a file is damaged."""


@dataclass(frozen=True)
class ReadRequest:
    """Ranges of a mapped file."""

    mapping: mmap.mmap
    starts: Ints  # (k,): Bytes of the mapping, starts ascending
    stops: Ints

    def joined(self) -> ReadRequest:
        """Neighbouring ranges made one, beginning on pages."""
        ends = np.maximum.accumulate(self.stops)
        first = np.concatenate([[True], self.starts[1:] - ends[:-1] > NEIGHBOURS])
        starts = self.starts[first] // mmap.PAGESIZE * mmap.PAGESIZE
        return ReadRequest(self.mapping, starts, np.append(ends[:-1][first[1:]], ends[-1]))


def read_ahead(requests: Sequence[ReadRequest]) -> None:
    """Have the system begin to read the ranges, the first ones only where they are many or large; does not wait."""
    ranges, room = MOST_RANGES, MOST_BYTES
    for request in map(ReadRequest.joined, requests):
        for start, stop in zip(request.starts.tolist(), request.stops.tolist(), strict=True):
            if not ranges or room <= 0:
                return
            length = min(stop - start, room)
            request.mapping.madvise(mmap.MADV_WILLNEED, start, length)
            ranges, room = ranges - 1, room - length


@cache
def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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

    @property
    def length(self) -> int:
        """In bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def request(self, first: Ints, last: Ints) -> ReadRequest:
        """The bytes of the rows first[i] … last[i] − 1 of the dataset, which must not be empty."""
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        return ReadRequest(self._mapping, self._lead + first * row, self._lead + last * row)

    @property
    def _lead(self) -> int:
        """Bytes before the dataset in the mapping, which begins where a page may."""
        assert self.byte is not None
        return self.byte % mmap.ALLOCATIONGRANULARITY

    @cached_property
    def _mapping(self) -> mmap.mmap:
        assert self.byte is not None
        start, length = self.byte - self._lead, self._lead + self.length
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
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
        """Targets (n, ...) as stored, all of them looked at once."""
        return targets_of(self._sections[LABELS], self._description)

    def requests(self, clients: Ints) -> list[ReadRequest]:
        """Where the samples of these clients of the shard lie, those without any left out; none in memory."""
        full = clients[self.offsets[clients] < self.offsets[clients + 1]]
        if not len(full) or not self._sections:
            return []
        rows = self.offsets[full], self.offsets[full + 1]
        return [self._sections[name].request(*rows) for name in (FEATURES, LABELS)]

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
    counted = (CLASS_COUNTS,) if description.labelled else ()
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
    """Refuse features or targets of another shape or type than the manifest's."""
    _expect(sections, FEATURES, (file.samples, *description.feature_shape), path, description.dtype)
    numbers = WHOLE if description.counted else NUMBERS
    _expect(sections, LABELS, (file.samples, *description.target_shape), path, numbers)


def targets_of(section: Section, description: DataDescription) -> AnyArray:
    """The targets of a section, mapped, once all are known to be what targets are; raises `UserError` otherwise."""
    targets = section.map()
    wrong = wrong_target(targets, description)
    if wrong is not None:
        raise UserError(
            f"the label of row {wrong[0]} of {section.path} is {wrong[1]}: the shard is damaged; {REPREPARE}"
        )
    return targets


def part_offsets(path: Path, file: ShardFile, clients: int) -> Ints | None:
    """Where the samples of every client begin in val.h5, int64 (clients + 1,); None where the file does not say."""
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
    """All datasets of extras.h5, in memory."""
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
    """Where the datasets of these names lie; each within the file and apart from the others."""
    with _opened(path) as h5:
        sections = {name: _section(h5, path, name) for name in names}
    end = 0
    for section in sorted(sections.values(), key=lambda section: section.byte or 0):
        if section.length and section.byte is not None:
            if section.byte < end:
                raise UserError(f"datasets of {path} overlap: the file is damaged; {REPREPARE}")
            end = section.byte + section.length
    if end > path.stat().st_size:
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
    """Refuse a dataset of another shape or type: a dtype, or kinds of them such as whole numbers ("iu")."""
    found = sections[name]
    fits = found.dtype.kind in dtype if dtype in KINDS else found.dtype == np.dtype(dtype)
    if found.shape != shape or not fits:
        wanted = f"{KINDS.get(dtype, dtype)} {shape}"
        raise UserError(
            f"the dataset {name!r} of {path} is {found.dtype} {found.shape} but the manifest says {wanted}: {REPREPARE}"
        )


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
