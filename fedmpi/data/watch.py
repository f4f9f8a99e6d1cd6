"""The files of the data stay as they were when a run began: seen by size, time of modification and place on the disk.

Shards are mapped into memory, so that a file which is written over under a run would be trained on, half old and half
new, and one that is cut off would end the process by a signal.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from fedmpi.common.errors import RunFailure
from fedmpi.data.shards import ShardStore

SECONDS = 5.0
"""Between two looks at the files; before a checkpoint and at the end they are always looked at."""


@dataclass(frozen=True)
class Mark:
    """What tells that a file was changed: size in bytes, time of modification in ns, and the inode."""

    size: int
    modified: int
    inode: int


class DataWatch:
    """Watches the files that a store reads; for data in memory there is nothing to watch."""

    latest: DataWatch | None = None  # The one of the process's latest run

    def __init__(self, store: ShardStore):
        folder, files = store.folder, store.manifest.files()
        self._sums = {} if folder is None else {folder / file.name: file.sha256 for file in files}
        self._marks = {path: _mark(path) for path in self._sums}
        self._looked = time.monotonic()
        DataWatch.latest = self

    def look(self) -> None:
        """As `check`, at most every few seconds."""
        if time.monotonic() - self._looked >= SECONDS:
            self.check()

    def check(self) -> None:
        """Compare all files with what they were.

        One with another time or place but the same content, such as one that was copied back, is none that changed.
        """
        for path, mark in self._marks.items():
            now = _mark(path)
            if now == mark:
                continue
            if now.size != mark.size or _digest(path) != self._sums[path]:
                sizes = f" ({now.size} bytes, {mark.size} before)" if now.size != mark.size else ""
                raise _changed(path, f"was changed since this run began{sizes}")
            self._marks[path] = now
        self._looked = time.monotonic()


def _mark(path: Path) -> Mark:
    try:
        found = path.stat()
    except OSError as error:
        raise _changed(path, f"can no longer be read ({error.strerror})") from None
    return Mark(found.st_size, found.st_mtime_ns, found.st_ino)


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _changed(path, f"can no longer be read ({error.strerror})") from None


def _changed(path: Path, how: str) -> RunFailure:
    return RunFailure(
        f"{path} {how}: rounds since the last checkpoint are dropped; put the file back as it was and go on with "
        "--resume, or start a new run on the new data with another --out"
    )
