"""HDF5 files that are whole or absent, and byte-identical when written again.

A file grows under a temporary name, is flushed to the disk and renamed; nothing in it depends on the clock.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.room import GrowingFile, SparedFile
from fedmpi.common.files import sync_folder
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import PARTIAL, ShardFile

_ALIGNMENT = 64  # every array starts at a multiple, so that it can be mapped as its dtype


@contextmanager
def growing_h5(path: Path) -> Iterator[GrowingFile]:
    """An HDF5 file to fill under a temporary name, removed when the block fails; `complete` gives it its own."""
    partial = partial_of(path)
    try:
        with closing(SparedFile(partial)) as file, GrowingFile(file, _ALIGNMENT) as h5:
            yield h5
        if file.error is not None:
            raise file.error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def nothing_partial(*paths: Path) -> Iterator[None]:
    """Within: files are grown and completed; none stays under its temporary name where the block is broken off."""
    try:
        yield
    except BaseException:
        for path in paths:
            partial_of(path).unlink(missing_ok=True)
        raise


def complete(path: Path, first_client: int = 0, clients: int = 0, samples: int = 0) -> ShardFile:
    """Flush a grown file to the disk and let it appear under `path`; the manifest's entry of it, with its sha256."""
    with whole_file(path) as partial, partial.open("rb+") as stream:
        os.fsync(stream.fileno())
    return entry(path, first_client, clients, samples)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path whose file is renamed to `path` when the block ends well and removed otherwise."""
    partial = partial_of(path)
    try:
        yield partial
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def partial_of(path: Path) -> Path:
    """The name of a file while it is being written."""
    return path.with_name(path.name + PARTIAL)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or absent, flushed to the disk; half characters, which JSON may hold, as codes."""
    with whole_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def reserve(h5: h5py.File, name: str, shape: tuple[int, ...], dtype: Any) -> h5py.Dataset:
    """A contiguous dataset whose space is allotted now and written once, without a filling pass."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    kind, space = h5py.h5t.py_create(np.dtype(dtype), logical=True), h5py.h5s.create_simple(shape)
    return h5py.Dataset(h5py.h5d.create(h5.id, name.encode(), kind, space, creation))


def store(h5: h5py.File, name: str, values: AnyArray) -> None:
    """Write an array as a contiguous dataset."""
    dataset = reserve(h5, name, values.shape, values.dtype)
    if values.size:
        dataset[...] = values


def entry(path: Path, first_client: int = 0, clients: int = 0, samples: int = 0) -> ShardFile:
    """The manifest's entry of a finished file, with size and sha256."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ShardFile(path.name, path.stat().st_size, digest, first_client, clients, samples)


def smallest_unsigned(largest: int) -> np.dtype[Any]:
    """The smallest unsigned integer dtype that holds 0 ... largest."""
    return np.min_scalar_type(max(int(largest), 0))


def shard_starts(sizes: Ints, shards: int) -> Ints:
    """First client of every shard, then N: shards of nearly equal samples, each with a client, at most one a client."""
    from fedmpi.data.assignment import ownership

    clients = len(sizes)
    return ownership(sizes, np.array([0, clients]), min(shards, clients)) if shards > 1 else np.array([0, clients])
