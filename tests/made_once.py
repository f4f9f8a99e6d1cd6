"""Files that several tests read and that take seconds to make: made once for all processes of pytest-xdist."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder of this name that all of them share, filled by `make` in whichever asks first; the others wait for it.

    Where `make` fails, the next one to ask tries again in another folder.
    """
    base = factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    made = shared / f"{name}.made"  # names the folder once it is whole
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder = factory.mktemp(name)
            make(folder)
            made.write_text(str(folder))
    return Path(made.read_text())
