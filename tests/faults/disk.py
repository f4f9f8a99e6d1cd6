"""A disk on which one chosen call goes wrong: every call of Python's that changes anything below a folder is counted.

The real files are written. At the chosen call the process dies, or writes half and dies, or the power fails, or the
disk is full from then on. When the power fails, what was not synced is lost: of files the latter half of what was
written since, of folders all names made, changed and removed since.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

Mode = Literal["count", "crash", "torn", "power", "full"]
DIED = 9
"""Exit code of a process that died at the chosen call."""


class Disk:
    """The calls below a folder, and what becomes of the one with the number `at`."""

    def __init__(self, folder: Path, mode: Mode = "count", at: int = -1):
        self.folder, self.mode, self.at = os.path.abspath(folder), mode, at
        self.calls: list[str] = []
        self._one_at_a_time = threading.RLock()
        self.synced: dict[str, int] = {}
        self.undo: list[tuple[str, Callable[[], object]]] = []

    def inside(self, path: Any) -> bool:
        """Return True if a call is about something in the folder, or the folder itself."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        return os.path.abspath(os.fsdecode(path)).startswith(self.folder)

    def call(self, name: str, path: Any, work: Callable[[], Any], half: Callable[[], Any], needs_room: bool) -> Any:
        """Do it, unless its number has come up; `half` is what is left of it then."""
        with self._one_at_a_time:  # no thread does anything after a death
            return self._call(name, path, work, half, needs_room)

    def _call(self, name: str, path: Any, work: Callable[[], Any], half: Callable[[], Any], needs_room: bool) -> Any:
        number = len(self.calls)
        self.calls.append(f"{name} {os.path.relpath(os.path.abspath(os.fsdecode(path)), self.folder)}")
        if self.mode == "full" and number >= self.at and needs_room:
            half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if number == self.at and self.mode in ("crash", "torn", "power"):
            if self.mode == "torn":
                half()
            if self.mode == "power":
                self._lose_what_is_not_synced()
            os._exit(DIED)
        return work()

    def named(self, path: Any, undo: Callable[[], object]) -> None:
        """A name in a folder was made, changed or removed, which lasts once the folder is synced."""
        self.undo.append((os.path.dirname(os.path.abspath(os.fsdecode(path))), undo))

    def sync(self, path: str) -> None:
        """A file or folder is on the disk as it is."""
        if os.path.isdir(path):
            self.undo = [(folder, undo) for folder, undo in self.undo if folder != path]
        else:
            self.synced[path] = os.path.getsize(path)

    def _lose_what_is_not_synced(self) -> None:
        for folder, _, names in os.walk(self.folder):
            for path in (os.path.join(folder, name) for name in names):
                kept = self.synced.get(path)
                if kept is not None and kept < (size := os.path.getsize(path)):
                    os.truncate(path, (kept + size) // 2)
        for _, undo in reversed(self.undo):
            with suppress(OSError):
                undo()


@contextmanager
def faulty(disk: Disk) -> Iterator[Disk]:
    """Context in which Python's calls go through the disk, which regards as synced what it was called to sync."""
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "mkdir", "utime", "unlink", "rename")}
    replace, opened = os.replace, io.open

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            content = bytes(data)
            write = super().write
            self.flush()
            return disk.call(
                "write", self.name, lambda: write(content), lambda: write(content[: len(content) // 2]), True
            )

    def open_(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        if not disk.inside(file) or not set(mode) & set("wax+"):
            return opened(file, mode, buffering, *more, **named)
        path, binary = os.path.abspath(os.fsdecode(file)), mode.replace("b", "").replace("t", "")
        new = not os.path.exists(path)
        raw = disk.call("open", path, lambda: Raw(path, binary), lambda: Raw(path, binary), new or "w" in mode)
        if new:
            disk.named(path, lambda: real["unlink"](path))
        disk.synced[path] = 0 if "w" in mode else disk.synced.get(path, os.path.getsize(path))
        whole = io.BufferedWriter(raw)
        if "b" in mode:
            return whole
        encoding = named.get("encoding") or (more[0] if more else None)
        return io.TextIOWrapper(whole, encoding=encoding, errors=named.get("errors"), write_through=True)

    def os_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if (
            not disk.inside(path)
            or not flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
            or flags & os.O_TMPFILE == os.O_TMPFILE
        ):
            return real["open"](path, flags, *more, **named)
        work = lambda: real["open"](path, flags, *more, **named)  # noqa: E731
        handle: int = disk.call("open", path, work, work, True)
        disk.named(path, lambda: real["unlink"](path))
        disk.synced[os.path.abspath(os.fsdecode(path))] = 0
        return handle

    def os_write(handle: int, data: Any) -> int:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if not disk.inside(path):
            return real["write"](handle, data)  # type: ignore[no-any-return]
        content = bytes(data)
        half = lambda: real["write"](handle, content[: len(content) // 2])  # noqa: E731
        return disk.call("write", path, lambda: real["write"](handle, content), half, True)  # type: ignore[no-any-return]

    def fsync(handle: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}")
        if not disk.inside(path):
            return real["fsync"](handle)  # type: ignore[no-any-return]

        def work() -> None:
            disk.sync(path)

        return disk.call("fsync", path, work, work, False)  # type: ignore[no-any-return]

    def mkdir(path: Any, *more: Any, **named: Any) -> None:
        if not disk.inside(path) or os.path.isdir(path):
            return real["mkdir"](path, *more, **named)  # type: ignore[no-any-return]
        work = lambda: real["mkdir"](path, *more, **named)  # noqa: E731
        disk.call("mkdir", path, work, work, True)
        disk.named(path, lambda: os.rmdir(path))

    def unlink(path: Any, *more: Any, **named: Any) -> None:
        if not disk.inside(path) or not os.path.exists(path):
            return real["unlink"](path, *more, **named)  # type: ignore[no-any-return]
        content, found = Path(path).read_bytes(), os.stat(path)
        work = lambda: real["unlink"](path, *more, **named)  # noqa: E731
        disk.call("unlink", path, work, work, False)

        def undo() -> None:
            Path(path).write_bytes(content)
            real["utime"](path, ns=(found.st_atime_ns, found.st_mtime_ns))

        disk.named(path, undo)

    def rename(source: Any, target: Any, *more: Any, **named: Any) -> None:
        if not disk.inside(target):
            return replace(source, target, *more, **named)
        there = Path(target).read_bytes() if os.path.exists(target) else None
        work = lambda: replace(source, target, *more, **named)  # noqa: E731
        disk.call("rename", target, work, work, False)
        before, after = os.path.abspath(os.fsdecode(source)), os.path.abspath(os.fsdecode(target))
        disk.synced[after] = disk.synced.pop(before, 0)

        def undo() -> None:
            replace(target, source)
            if there is not None:
                Path(target).write_bytes(there)

        disk.named(target, undo)

    def utime(path: Any, *more: Any, **named: Any) -> None:
        if not disk.inside(path):
            return real["utime"](path, *more, **named)  # type: ignore[no-any-return]
        work = lambda: real["utime"](path, *more, **named)  # noqa: E731
        return disk.call("utime", path, work, work, False)  # type: ignore[no-any-return]

    changed = {"open": os_open, "write": os_write, "fsync": fsync, "mkdir": mkdir, "utime": utime, "unlink": unlink}
    for name, function in {**changed, "rename": rename, "replace": rename}.items():
        setattr(os, name, function)
    builtins.open = io.open = open_  # type: ignore[assignment]
    try:
        yield disk
    finally:
        for name, function in {**real, "replace": replace}.items():
            setattr(os, name, function)
        builtins.open = io.open = opened  # type: ignore[assignment]
