"""Output of a preparation: the folder, and its HDF5 files, whose content does not depend on the clock.

A folder is marked until its manifest, which is written last, describes all files. So they need no temporary names.
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
from fedmpi.common.files import LOCK, lock_folder, refuse_unwritable, sync_folder
from fedmpi.common.types import AnyArray
from fedmpi.data.schema import EXTRAS, MANIFEST, PREPARING, TEST, VALIDATION, VECTORS, VOCABULARY, ShardFile

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_ALIGNMENT = 64  # every array starts at a multiple of this, so that it can be mapped as its dtype
_SINGLE = (TEST, VALIDATION, EXTRAS, VOCABULARY, VECTORS, MANIFEST)
_OWN = re.compile(rf"(train-\d{{5,}}\.h5|{'|'.join(map(re.escape, _SINGLE))})")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error codes for no space, no quota, or a limit on the length of files."""


class SparedFile(io.FileIO):
    """File for HDF5 to write to, which hides write errors such as a full disk, and interruptions, from HDF5.

    HDF5 cannot close a file whose writes fail: its destructor retries at the end of the process and crashes. This class
    keeps the first error and drops all later writes.
    """

    error: BaseException | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of the data, or keep the error."""
        left = memoryview(data).cast("B")
        length = len(left)
        try:
            while len(left) and self.error is None:
                left = left[os.write(self.fileno(), left) :]
        except (OSError, KeyboardInterrupt) as error:
            self.error = error
        return length

    def truncate(self, size: int | None = None, /) -> int:
        """Set the length, unless a write failed."""
        return super().truncate(size) if self.error is None else size or 0


@contextmanager
def new_h5(path: Path) -> Iterator[h5py.File]:
    """Open a new HDF5 file to write to."""
    with (
        closing(SparedFile(path, "w+")) as file,
        h5py.File(file, "w", alignment_threshold=1, alignment_interval=_ALIGNMENT) as h5,
    ):
        yield h5
    if file.error is not None:
        raise file.error


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
    """Flush a finished file to the disk; return its entry of the manifest, with size and sha256."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ShardFile(path.name, path.stat().st_size, digest, first_client, clients, samples)


@contextmanager
def preparing(folder: Path, overwrite: bool) -> Iterator[None]:
    """Lock a folder and clear it for a preparation, or raise an error; if the block fails, nothing of it remains.

    An empty or missing folder is used. A folder whose preparation was interrupted is cleared of its files; a prepared
    one only with `overwrite`. Files that a preparation does not write are never touched.
    """
    check_folder(folder, overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except OSError as error:
        raise UserError(
            f"the output folder {folder} cannot be written ({error.strerror}). Choose another --out"
        ) from None
    try:
        check_folder(folder, overwrite)  # others may have written before they released the lock
        (folder / PREPARING).touch()
        sync_folder(folder)
        _clear(folder)
        try:
            yield
        except BaseException:
            _clear(folder)
            raise
        finally:
            sync_folder(folder)
            (folder / PREPARING).unlink()
            sync_folder(folder)
    finally:
        lock.release()


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise the errors that can be found without writing anything."""
    refuse_unwritable(folder, writing=True)
    present = {path.name for path in folder.iterdir()} - {LOCK} if folder.is_dir() else set()
    if MANIFEST in present and not overwrite and PREPARING not in present:
        raise UserError(f"{folder} holds a prepared data set already. Choose another --out, or add --overwrite")
    if present and MANIFEST not in present and PREPARING not in present:
        raise UserError(f"{folder} holds something else ({min(present)}). Choose an empty or new folder with --out")


def _clear(folder: Path) -> None:
    """Remove the files of an earlier preparation, the manifest first, so that it never describes missing files."""
    ours = [path for path in folder.iterdir() if _OWN.fullmatch(path.name.removeprefix(".").removesuffix(".partial"))]
    for path in sorted(ours, key=lambda path: (path.name != MANIFEST, path.name)):
        with suppress(FileNotFoundError):
            path.unlink()
