"""A disk on which one chosen call goes wrong: every call of Python's that changes anything below a folder is counted.

The real files are written. At the chosen call the process dies, or writes half and dies, or the disk is full from then
on.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Mode = Literal["count", "crash", "torn", "full"]
DIED = 9
"""Exit code of a process that died at the chosen call."""
NEED_ROOM = ("open", "write", "mkdir")


class Disk:
    """The calls below a folder, and what becomes of the one with the number `at`."""

    def __init__(self, folder: Any, mode: Mode = "count", at: int = -1):
        self.folder, self.mode, self.at = os.path.abspath(folder), mode, at
        self.calls: list[str] = []
        self._one_at_a_time = threading.RLock()

    def inside(self, path: Any) -> bool:
        """Return True if a call is about something in the folder, or the folder itself."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        return os.path.abspath(os.fsdecode(path)).startswith(self.folder)

    def call(self, name: str, path: Any, work: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Do it, unless its number has come up; `half` is what is left of it then."""
        with self._one_at_a_time:  # no thread does anything after a death
            number = len(self.calls)
            self.calls.append(f"{name} {os.path.relpath(os.path.abspath(os.fsdecode(path)), self.folder)}")
            if self.mode == "full" and number >= self.at and name in NEED_ROOM:
                if half is not None:
                    half()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if number == self.at and self.mode in ("crash", "torn"):
                if self.mode == "torn":
                    (half or work)()
                os._exit(DIED)
            return work()


@contextmanager
def faulty(disk: Disk) -> Iterator[Disk]:
    """Context in which Python's calls go through the disk."""
    names = ("open", "write", "fsync", "mkdir", "utime", "unlink", "rename", "replace")
    real, opened = {name: getattr(os, name) for name in names}, io.open

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            content, write = bytes(data), super().write
            self.flush()
            return disk.call("write", self.name, lambda: write(content), lambda: write(content[: len(content) // 2]))

    def open_(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        if not disk.inside(file) or not set(mode) & set("wax+"):
            return opened(file, mode, buffering, *more, **named)
        path, binary = os.path.abspath(os.fsdecode(file)), mode.replace("b", "").replace("t", "")
        whole = io.BufferedWriter(disk.call("open", path, lambda: Raw(path, binary)))
        if "b" in mode:
            return whole
        encoding = named.get("encoding") or (more[0] if more else None)
        return io.TextIOWrapper(whole, encoding=encoding, errors=named.get("errors"), write_through=True)

    def os_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
        def work() -> Any:
            return real["open"](path, flags, *more, **named)

        writes = flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) and flags & os.O_TMPFILE != os.O_TMPFILE
        return disk.call("open", path, work) if disk.inside(path) and writes else work()  # type: ignore[no-any-return]

    def os_write(handle: int, data: Any) -> int:
        path, content = os.readlink(f"/proc/self/fd/{handle}"), bytes(data)
        if not disk.inside(path):
            return real["write"](handle, data)  # type: ignore[no-any-return]
        half = content[: len(content) // 2]
        return disk.call(  # type: ignore[no-any-return]
            "write", path, lambda: real["write"](handle, content), lambda: real["write"](handle, half)
        )

    def fsync(handle: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}")
        return disk.call("fsync", path, lambda: None) if disk.inside(path) else real["fsync"](handle)  # type: ignore[no-any-return]

    def other(name: str) -> Callable[..., Any]:
        def called(path: Any, *more: Any, **named: Any) -> Any:
            target = more[0] if name in ("rename", "replace") else path
            work = lambda: real[name](path, *more, **named)  # noqa: E731
            changes = not os.path.isdir(target) if name == "mkdir" else name != "unlink" or os.path.exists(target)
            return disk.call(name, target, work) if disk.inside(target) and changes else work()

        return called

    changed: dict[str, Any] = {"open": os_open, "write": os_write, "fsync": fsync}
    for name in names:
        setattr(os, name, changed.get(name) or other(name))
    builtins.open = io.open = open_  # type: ignore[assignment]
    try:
        yield disk
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        builtins.open = io.open = opened  # type: ignore[assignment]
