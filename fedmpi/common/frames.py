"""Which lines of a traceback are the user's."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary

NOT_THEIRS = (
    Path(__file__).resolve().parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
)
"""Folders of code that is not the user's: fedmpi, Python, installed packages."""


def innermost(frames: Iterable[FrameSummary], source: Path | None = None, typed_in: bool = False) -> str:
    """ "file:line" of the last of the lines that somebody but fedmpi, Python and installed packages wrote."""
    found = ""
    for frame in frames:
        path = Path(frame.filename).resolve()
        if frame.filename.startswith("<"):
            theirs = typed_in
        else:
            there = any(place.is_file() for place in (path, *path.parents))  # a file, or one in an archive
            there = there or (typed_in and bool(frame.line))
            theirs = path == source or (there and not any(path.is_relative_to(home) for home in NOT_THEIRS))
        found = f"{frame.filename}:{frame.lineno}" if theirs else found
    return found
