"""Files that are whole or absent, also after the power fails: written under a temporary name, synced, renamed, and the
folder synced.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedmpi.common.errors import RunFailure, UserError

WITHOUT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)
"""What file systems answer that cannot sync a folder."""

REMEDIES = (
    ((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room there"),
    ((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable"),
    ((errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV), "see where the folder has gone and put it back"),
)
"""What helps, by what the system says."""


def read_plain(path: Path, most: int | None = None) -> bytes:
    """The content of a plain file: a fifo, a socket or a device would be waited for, or read, without an end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    with open(handle, "rb") as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def plain_or_absent(path: Path) -> bool:
    """Whether a file may be made or written on here: there is a plain one, or nothing at all."""
    return os.path.isfile(path) or not os.path.lexists(path)


def names_a_file(path: Path) -> bool:
    """Whether a file can have this path: a plain one or none is there, in a folder that is."""
    return plain_or_absent(path) and path.parent.is_dir()


def named_folder(text: str) -> Path:
    """The folder that a command line names; UserError for an empty name, which would be the working directory."""
    if not text.strip():
        raise UserError("the name of a folder is empty: give one, or . for the working directory")
    if "\0" in text:
        raise UserError(f"the name of a folder holds a zero byte, which no file system knows: {text!r}")
    return Path(text)


def refuse_unwritable(folder: Path, writing: bool = False) -> None:
    """Refuse a folder that is a file, or lies in one; if it is for `writing`, also where nothing may be written."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one))
    if not there.is_dir():
        raise UserError(f"cannot write {folder} ({there} is no folder): choose another --out")
    if writing and not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {folder} ({there} may not be written): choose another --out")


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write the parts, one behind the other, as one file: readers see all of it or what was there before.

    The content reaches the disk before the name does, and the name before this returns.
    """
    with whole_file(path) as file:
        for part in parts:
            file.write(part)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which has its name once all is written; see `write_whole`."""
    temporary = partial_name(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def partial_name(path: Path) -> Path:
    """Where a file is written before it has its name."""
    return path.with_name(f".{path.name}.partial")


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing; their names are on the disk when this returns."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def make_inner_folder(folder: Path) -> None:
    """Make a folder in one that is there, as `make_folder`; FileNotFoundError where that one has vanished."""
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where its file system can do that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in WITHOUT_SYNC:
            raise
    finally:
        os.close(handle)


@contextmanager
def writing(run: Path) -> Iterator[None]:
    """Within: a run folder that can no longer be written, such as on a full disk, is said in one sentence."""
    try:
        yield
    except OSError as error:
        raise RunFailure(
            f"writing to the run folder {run} failed ({error.strerror or error}): {remedy(error)}, then go on with "
            f"--resume --out {run}"
        ) from error


def remedy(error: OSError) -> str:
    """What helps."""
    return next((words for numbers, words in REMEDIES if error.errno in numbers), "see to the disk")
