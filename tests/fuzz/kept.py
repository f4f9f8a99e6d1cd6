"""Folders that stay for the whole of a process, and go with it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


@cache
def _held(name: str) -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix=f"fedmpi-fuzz-{name}-", ignore_cleanup_errors=True)


def kept_folder(name: str) -> Path:
    """An empty folder, the same one for a name."""
    return Path(_held(name).name)
