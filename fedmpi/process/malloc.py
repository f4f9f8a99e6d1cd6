"""Memory of the C library: freed memory stays with the process, so that the next round causes no page faults.

By default glibc returns the top of its heap to the system whenever more than some megabytes of it are free. Blocks
above 32 MiB always come from the system and return to it. Every backward pass then requests new pages for its
activations and the gradients of large weights.
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
"""Value of a threshold that returns nothing of the heap's top to the system."""
GROWTH_BYTES = 16 << 20
LARGEST_FROM_HEAP = 32 << 20  # the maximum of glibc
BLOCKS_FROM_SYSTEM, DEFAULT_TRIM_THRESHOLD = 65536, 128 << 10  # glibc's defaults
USERS_OWN = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)
IN_A_RUN = ((MMAP_THRESHOLD, LARGEST_FROM_HEAP), (TOP_PAD, GROWTH_BYTES), (MMAP_MAX, 0), (TRIM_THRESHOLD, NOTHING))
AFTERWARDS = ((MMAP_MAX, BLOCKS_FROM_SYSTEM), (TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD))


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Make glibc keep all freed memory within the context; afterwards it returns to the system.

    The context gives whether this works: other C libraries, and users' own glibc settings, are left unchanged.
    """
    library = _library()
    kept = library is not None and _set(library, IN_A_RUN)
    try:
        yield kept
    finally:
        if library is not None and kept:
            _set(library, AFTERWARDS)
            library.malloc_trim(0)


@cache
def _library() -> Any:
    """Return the C library if it is glibc without the user's own settings."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USERS_OWN):
        return None
    return ctypes.CDLL(None)


def _set(library: Any, wanted: tuple[tuple[int, int], ...]) -> bool:
    return all(library.mallopt(option, value) == 1 for option, value in wanted)
