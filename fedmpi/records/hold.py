"""Folder lock: a file RUN/.lock with the process and the host of its owner, so that one run writes to a folder.

The lock of a process of this host that has ended is taken over. Only the user can know about other hosts.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from filelock import SoftFileLock, Timeout

from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.files import read_plain

FOLDER = ".lock"
SECONDS = 1.5
"""Seconds to wait for a lock: rank 0 may end shortly after its launcher."""


class Hold:
    """Lock of a folder, from the construction until `release`."""

    def __init__(self, run: Path):
        self.run, self.path = run, run / FOLDER
        before = _described(self.path) if self.path.exists() else None
        self._lock = SoftFileLock(self.path, timeout=SECONDS, thread_local=False)
        try:
            self._lock.acquire(poll_interval=SECONDS / 10)
        except Timeout:
            raise UserError(
                f"{run} is in use by {_described(self.path)}. Choose another --out, or end that run first. If it is "
                f"gone, remove {self.path}"
            ) from None
        self.before = before  # Previous owner of the lock
        self._made = self.path.stat().st_ino

    def check(self) -> None:
        """Require before a write that the folder and its lock are still there."""
        with suppress(OSError):
            if self.path.stat().st_ino == self._made:
                return
        if not self.run.is_dir():
            raise RunFailure(
                f"the run folder {self.run} has vanished. Put a copy back and continue with --resume --out {self.run}"
            )
        raise RunFailure(
            f"{self.path} was removed during the run, so another run may write to {self.run}. Continue with --resume "
            f"--out {self.run}"
        )

    def release(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            self._lock.release()


def owner_of(run: Path) -> str | None:
    """Return the owner of a folder's lock in words; None if it is free."""
    try:
        refuse_held(run)
    except UserError:
        return _described(run / FOLDER)
    return None


def refuse_held(run: Path) -> None:
    """Reject a folder that another run writes to."""
    if (run / FOLDER).exists():
        try:
            Hold(run).release()
        except OSError as error:
            raise UserError(f"the folder {run} cannot be used ({error.strerror}). Choose another --out") from error


def _described(path: Path) -> str:
    """Return the owner in the lock file: process, host and start."""
    try:
        number, host, *_ = read_plain(path, 4096).decode().splitlines()
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(path.stat().st_mtime))
    except (OSError, ValueError):
        return "another run"
    return f"process {number} on {host.partition('?')[0]}, there since {since}"
