"""LEAF's JSON (Caldas et al. 2018): files of users, each with a list x of samples and a list y of targets.

The files are read user by user, so memory holds one user's samples.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from data_prep.datasets.json_stream import members
from data_prep.datasets.raw_files import files_below, open_bytes
from fedmpi.common.errors import UserError

PARTS = ("train", "test")
PATTERNS = ("{}/*.json", "{}/*.json.gz")
HINT = "LEAF's train/*.json and test/*.json"
CITATION = "S. Caldas et al., LEAF: a benchmark for federated settings, 2018"
PAGE = "https://leaf.cmu.edu"
DAMAGED = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError, RecursionError, MemoryError)
"""What reading content of another form raises."""
Converted = TypeVar("Converted")


def leaf_files(folder: Path, patterns: tuple[str, ...] = PATTERNS) -> tuple[list[Path], list[Path]] | None:
    """The training and test files below a folder; None where there are not both."""
    for pattern in patterns:
        train, test = (files_below(folder, pattern.format(part)) for part in PARTS)
        if train and test:
            return train, test
    return None


def require_leaf(folder: Path, more: str = "") -> tuple[list[Path], list[Path]]:
    """The training and test files below a folder."""
    found = leaf_files(folder)
    if found is None:
        raise UserError(f"no LEAF files in {folder}; --raw must hold {HINT}{more}")
    return found


def pairs(name: str, x: Any, y: Any) -> tuple[str, list[tuple[Any, Any]]]:
    """A user's name, and its samples each with its target; for `leaf_users`."""
    if type(x) is not list or type(y) is not list:
        raise ValueError("x and y are not lists")
    return name, list(zip(x, y, strict=True))


def leaf_users(path: Path, convert: Callable[[str, Any, Any], Converted], person: str = "user") -> Iterator[Converted]:
    """The users of a file, in its order."""
    name, users, seen = "none yet", None, set()
    try:
        with open_bytes(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
            for key, value in members(text, "user_data"):
                if key == ("users",):
                    users = set(value)
                elif key[0] == "user_data":
                    name = key[1]
                    if name in seen:
                        raise ValueError("it has two entries in user_data")
                    seen.add(name)
                    yield convert(name, value["x"], value["y"])
        if users != seen:
            raise ValueError(f"users names {len(users or ())} {person}s, user_data holds {len(seen)}, not the same")
    except DAMAGED as error:
        raise UserError(
            f"{path}, {person} {name}: not LEAF's format (users, user_data with x and y each): {error!r}; fetch it "
            "again"
        ) from error
