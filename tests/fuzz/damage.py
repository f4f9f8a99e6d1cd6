"""Damage to files, and its allowed outcomes: a sentence for the user, or a result."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from hypothesis import strategies as st

from fedmpi import ClientFailure, ComponentFailure, UserError
from fedmpi.common.errors import LONGEST_SENTENCE

Result = TypeVar("Result")
REFUSED = "refused"
DIVERGED = ("diverge", "not finite", "overflow")
WHERE = st.floats(0, 1, exclude_max=True)
KINDS = ("folder", "fifo", "gone", "empty", "link to itself", "link to a device")
DAMAGE = st.one_of(
    st.tuples(st.just("flip"), WHERE, st.integers(0, 7)),
    st.tuples(st.just("cut"), WHERE, st.just(0)),
    st.tuples(st.just("write"), WHERE, st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("kind"), st.just(0.0), st.sampled_from(KINDS)),
)
"""Kind of damage to a file, its position, and its bytes."""


class Finding(AssertionError):
    """An input that was neither rejected in a sentence nor used rightly."""


@cache
def folder_of(name: str) -> tuple[Path, TemporaryDirectory[str]]:
    """Return the folder of this name, the same one for the whole process, and what keeps it."""
    held = TemporaryDirectory(prefix=f"fedmpi-fuzz-{name}-", ignore_cleanup_errors=True)
    return Path(held.name), held


def outcome(use: Callable[[], Result], failures: bool = False) -> Result | str:
    """Return the result of an input, or `REFUSED`; `failures` of components count as rejected, too."""
    try:
        return use()
    except UserError as error:
        if "\n" in str(error) or not 20 <= len(str(error)) <= LONGEST_SENTENCE + 3:
            raise Finding(f"this is no sentence: {error!s}") from error
        return REFUSED
    except (ComponentFailure, ClientFailure) as error:
        if failures or (isinstance(error, ClientFailure) and any(word in str(error) for word in DIVERGED)):
            return REFUSED
        raise Finding(f"a component or a client failed: {error}") from error
    except Finding:
        raise
    except BaseException as error:
        raise Finding(f"{type(error).__name__}: {error}") from error


def damage(path: Path, what: str, where: float, how: object) -> None:
    """Flip a bit, cut the file, overwrite bytes, or put something else in its place."""
    if what == "kind":
        path.unlink()
        make_kind(path, str(how))
        return
    content = bytearray(path.read_bytes())
    place = int(where * len(content))
    if what == "flip" and content:
        content[place] ^= 1 << int(how)  # type: ignore[call-overload]
    elif what == "cut":
        del content[place:]
    elif what == "write":
        content[place : place + len(how)] = how  # type: ignore[arg-type, call-overload]
    path.write_bytes(content)


def make_kind(path: Path, kind: str) -> None:
    """Make something that is not a plain file with content."""
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
