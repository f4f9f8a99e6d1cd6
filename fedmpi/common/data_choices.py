"""What `data.shards` may say beside a folder: the embedded digits, data in memory, a function that makes data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DIGITS = "digits"
"""The name of the embedded data set."""

ARRAYS = "ClientArrays"
"""What begins the names of data that were given as arrays, and that no name brings back."""


def is_digits(choice: Any) -> bool:
    """Whether a choice of `data.shards` names the embedded digits: "digits" or "digits:key=value,..."."""
    return isinstance(choice, str) and choice.partition(":")[0] == DIGITS


def in_memory(where: Any) -> bool:
    """Whether `data.shards` names data in memory: no text, or "package.module:function" and not a folder."""
    if not isinstance(where, str):
        return not isinstance(where, Path)
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[\w.<>-]+(\(\.\.\.\))?", where)) and not Path(where).exists()


def makes_data(where: Any) -> bool:
    """Whether a choice of `data.shards` makes data, with options: the digits, a function, or the name of one."""
    return is_digits(where) or (in_memory(where) and not (isinstance(where, str) and where.startswith(f"{ARRAYS}:")))
