"""Values of `data.source` other than a folder: the embedded digits, data in memory, a function that makes data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DIGITS = "digits"
"""Name of the embedded data set."""

ARRAYS = "ClientArrays"
"""Prefix of the names of data given as arrays, which no name can restore."""


def is_digits(choice: Any) -> bool:
    """Check whether a value of `data.source` names the embedded digits: "digits" or "digits:key=value,..."."""
    return isinstance(choice, str) and choice.partition(":")[0] == DIGITS


def in_memory(where: Any) -> bool:
    """Check whether `data.source` names data in memory: no text, or "package.module:function" and not a folder."""
    if not isinstance(where, str):
        return not isinstance(where, Path)
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[\w.<>-]+(\(\.\.\.\))?", where)) and not Path(where).exists()


def makes_data(where: Any) -> bool:
    """Check whether a value of `data.source` makes data with options: the digits, a function, or the name of one."""
    return is_digits(where) or (in_memory(where) and not (isinstance(where, str) and where.startswith(f"{ARRAYS}:")))
