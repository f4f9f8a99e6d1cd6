"""The C library's memory: what is freed stays with the process, so that the next round finds it without page faults.

By default glibc gives the top of its heap back to the system whenever more than some megabytes of it are free, and
blocks above 32 MiB, however often they are taken, come from the system and go back to it: every backward pass then
takes its activations and the gradients of large weights anew, page by page.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4  # malloc.h
NOTHING = -1
"""Of the heap's top goes back to the system."""
KEPT_BYTES = 1 << 30
"""Free memory that a process keeps when a run is over."""
GROWTH_BYTES = 16 << 20
LARGEST_FROM_HEAP = 32 << 20  # the most that glibc allows
BLOCKS_FROM_SYSTEM = 65536  # glibc's own limit of their number
USERS_OWN = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)
IN_A_RUN = ((MMAP_THRESHOLD, LARGEST_FROM_HEAP), (TOP_PAD, GROWTH_BYTES), (MMAP_MAX, 0), (TRIM_THRESHOLD, NOTHING))
BEHIND_IT = ((MMAP_MAX, BLOCKS_FROM_SYSTEM), (TRIM_THRESHOLD, KEPT_BYTES))


_runs: list[bool] = []
"""Those that go on, one within another (`on_round` may start one); threads wait for one another."""


class _Counts(ctypes.Structure):
    """What glibc counts of its memory (struct mallinfo2)."""

    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Within, glibc keeps all memory that is freed; behind, at most `KEPT_BYTES` of it stay with the process.

    Says whether it does: other C libraries, and users who have set glibc's own environment variables, are left alone.
    """
    library = _library()
    kept = library is not None and _set(library, IN_A_RUN)
    _runs.append(kept)
    try:
        yield kept
    finally:
        _runs.pop()
        if library is not None and kept and not _runs:
            _set(library, BEHIND_IT)
            _give_back(library)


@cache
def _library() -> Any:
    """The C library, if it is glibc and no setting of the user's governs it."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USERS_OWN):
        return None
    return ctypes.CDLL(None)


def _set(library: Any, wanted: tuple[tuple[int, int], ...]) -> bool:
    return all(library.mallopt(option, value) == 1 for option, value in wanted)


def _give_back(library: Any) -> None:
    """Give the system all free memory where it is more than `KEPT_BYTES` (glibc reports it from 2.33 on)."""
    if hasattr(library, "mallinfo2"):
        mallinfo2 = library.mallinfo2
        mallinfo2.restype = _Counts
        if mallinfo2().fordblks > KEPT_BYTES:
            library.malloc_trim(0)
