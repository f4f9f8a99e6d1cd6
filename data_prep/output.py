"""Output of a preparation: the folder, and HDF5 files that are written atomically.

A file is written under a temporary name, flushed to the disk and renamed. Its content does not depend on the clock.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.files import partial_name, refuse_unwritable, sync_folder
from fedmpi.common.types import AnyArray
from fedmpi.data.schema import (
    EXTRAS,
    MANIFEST,
    PARTIAL,
    PREPARING,
    TEST,
    VALIDATION,
    VECTORS,
    VOCABULARY,
    ShardFile,
)
from fedmpi.records.hold import FOLDER, Hold

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_ALIGNMENT = 64  # every array starts at a multiple of this, so that it can be mapped as its dtype
_SINGLE = (TEST, VALIDATION, EXTRAS, VOCABULARY, VECTORS, MANIFEST)
_OWN = re.compile(rf"(train-\d{{5,}}\.h5|{'|'.join(map(re.escape, _SINGLE))})")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error codes for no space, no quota, or a limit on the length of files."""


@contextmanager
def temporary_room(folder: str) -> Iterator[None]:
    """Report a temporary folder that cannot be written as such, not as damaged input."""
    try:
        yield
    except OSError as error:
        why = "is full" if error.errno in FULL else f"cannot be written ({error.strerror or error})"
        raise UserError(
            f"the temporary folder {folder} {why}. Make room there, or set TMPDIR to a folder with more"
        ) from error


class SparedFile(io.FileIO):
    """File for HDF5 to write to, which hides write errors such as a full disk from HDF5.

    HDF5 cannot close a file whose writes fail: its destructor retries at the end of the process and crashes. This class
    keeps the first error and drops all later writes.
    """

    error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of the data, or keep the error."""
        left = memoryview(data).cast("B")
        length = len(left)
        try:
            while len(left) and self.error is None:
                left = left[os.write(self.fileno(), left) :]
        except OSError as error:
            self.error = error
        return length

    def truncate(self, size: int | None = None, /) -> int:
        """Set the length, unless a write failed."""
        return super().truncate(size) if self.error is None else size or 0


@contextmanager
def growing_h5(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file under a temporary name, removed if the block fails; `complete` gives it its final name."""
    partial = partial_name(path)
    try:
        with (
            closing(SparedFile(partial, "w+")) as file,
            h5py.File(file, "w", alignment_threshold=1, alignment_interval=_ALIGNMENT) as h5,
        ):
            yield h5
        if file.error is not None:
            raise file.error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def nothing_partial(*paths: Path) -> Iterator[None]:
    """Remove files that still have their temporary names if the block fails."""
    try:
        yield
    except BaseException:
        for path in paths:
            partial_name(path).unlink(missing_ok=True)
        raise


def complete(path: Path, first_client: int = 0, clients: int = 0, samples: int = 0) -> ShardFile:
    """Flush a growing file to the disk and rename it to `path`; return its entry of the manifest, with its sha256."""
    temporary = partial_name(path)
    with temporary.open("rb+") as stream:
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
    return entry(path, first_client, clients, samples)


def reserve(h5: h5py.File, name: str, shape: tuple[int, ...], dtype: Any) -> h5py.Dataset:
    """Create a contiguous dataset whose space is allocated now and written once, without a fill pass."""
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
    """Return the manifest's entry of a finished file, with size and sha256."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ShardFile(path.name, path.stat().st_size, digest, first_client, clients, samples)


def claim(folder: Path, overwrite: bool) -> Hold:
    """Lock `folder` and make it ready to be written, or raise an error.

    An empty or missing folder is used. A folder whose preparation was interrupted is cleared of its files; a prepared
    one only with `overwrite`. Files that a preparation does not write are never touched.
    """
    hold = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse(folder, overwrite)
        hold = Hold(folder)
        _refuse(folder, overwrite)  # others may have written before they released the lock
        ours = own_files(folder)
        (folder / PREPARING).touch()
        sync_folder(folder)
        for path in ours:  # the manifest first, so that it never describes missing files
            path.unlink()
    except BaseException as error:
        if hold is not None:
            hold.release()
            hold.path.unlink(missing_ok=True)
        with suppress(OSError):  # another process has the lock already, or it is gone
            (folder / FOLDER).rmdir()
        if isinstance(error, OSError):
            raise UserError(
                f"the output folder {folder} cannot be written ({error.strerror}). Choose another --out"
            ) from None
        raise
    return hold


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise the errors of `claim` that can be found without writing anything."""
    refuse_unwritable(folder, writing=True)
    if folder.is_dir():
        _refuse(folder, overwrite)


def _refuse(folder: Path, overwrite: bool) -> None:
    present = {path.name for path in folder.iterdir()} - {FOLDER}
    if MANIFEST in present and not overwrite and PREPARING not in present:
        raise UserError(f"{folder} holds a prepared data set already. Choose another --out, or add --overwrite")
    if present and MANIFEST not in present and PREPARING not in present:
        other = sorted(present)[0]
        raise UserError(f"{folder} holds something else ({other}). Choose an empty or new folder with --out")


def own_files(folder: Path) -> list[Path]:
    """Return the files of earlier preparations in a folder, complete or not; the manifest first."""
    present = folder.iterdir() if folder.is_dir() else ()
    ours = [path for path in present if _OWN.fullmatch(path.name.removeprefix(".").removesuffix(PARTIAL))]
    return sorted(ours, key=lambda path: (path.name != MANIFEST, path.name))


def abandon(folder: Path) -> None:
    """Remove from the folder all that a failed preparation wrote."""
    for path in own_files(folder):
        path.unlink(missing_ok=True)
    release(folder)


def release(folder: Path) -> None:
    """Mark the preparation as complete."""
    with suppress(FileNotFoundError):
        (folder / PREPARING).unlink()
    sync_folder(folder)
