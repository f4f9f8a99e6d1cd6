"""Room on disks: asked for before it is needed, its lack said in a sentence, and HDF5 files that survive that."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import h5py

from fedmpi.common.errors import UserError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, no quota, or a limit on the length of files."""
SPARE = 1 << 20
"""Bytes for what is small: the vocabulary, the manifest, the headers of files."""


def megabytes(count: int) -> str:
    """Bytes in words."""
    return f"{count / 1e6:,.1f} MB"


def free_bytes(folder: Path) -> int:
    """What the file system of a folder, or of the first one above it that exists, has left for this user."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    room = os.statvfs(there)
    return room.f_bavail * room.f_frsize


def require_room(folder: Path, needed: int, replaced: int) -> None:
    """Refuse to begin what cannot fit."""
    free = free_bytes(folder) + replaced
    if free < needed + SPARE:
        raise UserError(
            f"the disk of {folder} has {megabytes(free)} left, but {megabytes(needed + SPARE)} are needed: make room "
            "or choose another --out"
        )


@contextmanager
def temporary_room(folder: str, written: int, more: int) -> Iterator[None]:
    """Within: a temporary folder that cannot be written is told from damaged input."""
    try:
        yield
    except OSError as error:
        why = "is full" if error.errno in FULL else f"cannot be written ({error.strerror or error})"
        raise UserError(
            f"the temporary folder {folder} {why}: at least {megabytes(written + more)} are needed there; make room or "
            "set TMPDIR to a folder with more"
        ) from error


class SparedFile(io.RawIOBase):
    """A file for HDF5 to write to, which never learns that the disk is full.

    HDF5 cannot close a file whose writes fail: its destructor tries again at the end of the process and crashes. Here
    the first error is kept, and from then on writes are dropped.
    """

    def __init__(self, path: Path):
        self._file = open(path, "wb+", buffering=0)  # noqa: SIM115  (closed by `close`)
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a place."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """The place."""
        return self._file.tell()

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read what is there."""
        return self._file.readinto(buffer)

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of the data, or keep the error."""
        left = memoryview(data).cast("B")
        length = len(left)
        try:
            while len(left) and self.error is None:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
        return length

    def truncate(self, size: int | None = None, /) -> int:
        """Set the length, or keep the error."""
        try:
            if self.error is None:
                self._file.truncate(size)
        except OSError as error:
            self.error = error
        return size or 0

    def close(self) -> None:
        """Close the file; an error counts as one of writing."""
        if not self.closed:
            try:
                self._file.close()
            except OSError as error:
                self.error = self.error or error
        super().close()


class GrowingFile(h5py.File):  # type: ignore[misc]  # h5py has no types
    """An HDF5 file being filled, whose first failed write can be asked for."""

    def __init__(self, file: SparedFile, alignment: int):
        super().__init__(file, "w", alignment_threshold=1, alignment_interval=alignment)
        self._spared = file

    def check(self) -> None:
        """Raise the OSError of the first write that failed, if one did."""
        if self._spared.error is not None:
            raise self._spared.error
