"""How many files a command may have open: a rank keeps its shards open, several descriptors each."""

from __future__ import annotations

import resource
from contextlib import suppress

OPEN_FILES = 65_536
"""Enough for any folder of shards; systems that allow more are not asked for it."""


def allow_many_files() -> None:
    """Raise this process's own limit, often 1,024, to what the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # less is allowed than was said
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
