"""POSIX semaphores in memory that processes share: a process that waits sleeps in the kernel and takes no core.

The C library's own (`sem_init` with `pshared`): no file, nothing that is left behind.
"""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache

from fedmpi.common.types import Bytes

BYTES = 64
"""That a semaphore takes: a cache line; a `sem_t` is 32 bytes in glibc and musl, and smaller elsewhere."""
CALLS = ("sem_init", "sem_post", "sem_trywait", "sem_clockwait")


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _library() -> ctypes.CDLL | None:
    """The C library, where it has all of `CALLS`: glibc from 2.30 on has."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None
    sized = ctypes.sizeof(ctypes.c_long) == 8
    return library if sized and all(hasattr(library, name) for name in CALLS) else None


def semaphores_work() -> bool:
    """Whether this system has such semaphores."""
    library = _library()
    if library is None:
        return False
    tried = ctypes.create_string_buffer(BYTES)
    return int(library.sem_init(tried, 1, 0)) == 0


class Semaphore:
    """One semaphore; its memory belongs to the caller and lives longer."""

    def __init__(self, memory: Bytes, made: bool):
        library = _library()
        if library is None:
            raise RuntimeError("this system has no semaphores between processes")
        self._library, self._memory = library, memory
        self._address = ctypes.c_void_p(memory.ctypes.data)
        if made and library.sem_init(self._address, 1, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self) -> None:
        """Wake who waits, or who will wait next."""
        self._library.sem_post(self._address)

    def reset(self) -> None:
        """Forget what was posted."""
        while self._library.sem_trywait(self._address) == 0:
            pass

    def wait(self, seconds: float) -> None:
        """Sleep until it is posted, at most so long; a signal ends the sleep, too."""
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + round(1e9 * seconds)
        limit = _Time(until // 10**9, until % 10**9)
        self._library.sem_clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(limit))
