"""Atomic files and locked folders.

Files are atomic even if the power fails: written under a temporary name, synced, renamed; then the folder is synced.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fedmpi.common.errors import RunFailure, UserError

if TYPE_CHECKING:
    from filelock import SoftFileLock

WITHOUT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)
"""Error codes of file systems that cannot sync a folder."""

REMEDIES = (
    ((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room there"),
    ((errno.EROFS, errno.EACCES, errno.EPERM), "Make it writable"),
    ((errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV), "See where the folder has gone and put it back"),
)
"""Remedy for each error code of the system."""
LOCK = ".lock"
"""File in a locked folder that names the process and the host of its owner."""
LOCK_SECONDS = 1.5
"""Seconds to wait for a lock: rank 0 may end shortly after its launcher."""


def read_plain(path: Path, most: int | None = None) -> bytes:
    """Return the content of a plain file; reading a fifo, a socket or a device might never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    with open(handle, "rb") as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def named_folder(text: str) -> Path:
    """Return the folder named on a command line; UserError for an empty name, which would be the working directory."""
    if not text.strip():
        raise UserError("the name of a folder is empty. Give one, or . for the working directory")
    if "\0" in text:
        raise UserError(f"the name of a folder holds a zero byte, which no file system knows: {text!r}")
    return Path(text)


def refuse_unwritable(folder: Path, writing: bool = False) -> None:
    """Reject a folder that is a file or inside one and, if `writing`, one without write permission."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one))
    if not there.is_dir():
        raise UserError(f"cannot write {folder} ({there} is no folder). Choose another --out")
    if writing and not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {folder} ({there} may not be written). Choose another --out")


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write the parts, concatenated, as one file: readers see all of it or the previous content.

    The content reaches the disk before the name, and the name before this function returns.
    """
    with whole_file(path) as file:
        for part in parts:
            file.write(part)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which gets its name once all is written; see `write_whole`."""
    temporary = path.with_name(f".{path.name}.partial")
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


def check_named(path: Path) -> None:
    """Reject a name that no file can have."""
    if not path.parent.is_dir() or (os.path.lexists(path) and not os.path.isfile(path)):
        raise UserError(f"cannot write {path}. Name a file in an existing folder")


def write_named(path: Path, content: bytes) -> None:
    """Write a file that the user named, as `write_whole`; UserError if that fails."""
    check_named(path)
    try:
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}). {remedy(error)}") from None


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents; their names are on the disk when this returns."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def make_inner_folder(folder: Path) -> None:
    """Make a folder in an existing one, as `make_folder`; FileNotFoundError if that one has vanished."""
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk if its file system supports that."""
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
    """Report a run folder that cannot be written any more, e.g. on a full disk, in one sentence within the context."""
    try:
        yield
    except OSError as error:
        raise RunFailure(
            f"writing to the run folder {run} failed ({error.strerror or error}). {remedy(error)}, then continue with "
            f"--resume --out {run}"
        ) from error


def remedy(error: OSError) -> str:
    """Return the remedy for an error."""
    return next((words for numbers, words in REMEDIES if error.errno in numbers), "Check the disk")


class FolderInUse(UserError):
    """Another process has locked a folder."""


def lock_folder(folder: Path) -> SoftFileLock:
    """Lock a folder, so that one process writes to it; the lock of an ended process of this host is taken over."""
    from filelock import SoftFileLock, Timeout  # takes 14 ms, for many commands in vain

    lock = SoftFileLock(folder / LOCK, timeout=LOCK_SECONDS, thread_local=False)
    try:
        lock.acquire(poll_interval=LOCK_SECONDS / 10)
    except Timeout:
        owner = "another run"
        with suppress(OSError, ValueError):
            number, host, *_ = read_plain(folder / LOCK, 4096).decode().splitlines()
            owner = f"process {number} on {host.partition('?')[0]}"
        raise FolderInUse(
            f"{folder} is in use by {owner}. Choose another --out, or end that run first. If it is gone, remove "
            f"{folder / LOCK}"
        ) from None
    return lock


def is_locked(folder: Path) -> bool:
    """Check whether another process has locked a folder."""
    if (folder / LOCK).exists():
        try:
            lock_folder(folder).release()
        except FolderInUse:
            return True
    return False
