"""Values of `data.source` other than a folder: the embedded digits, data in memory, a function that makes data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError

DIGITS = "digits"
"""Name of the embedded data set."""

ARRAYS = "ClientArrays"
"""Prefix of the names of data given as arrays, which no name can restore."""


def is_digits(choice: Any) -> bool:
    """Check whether a value of `data.source` names the embedded digits: "digits" or "digits:key=value,..."."""
    return isinstance(choice, str) and choice.partition(":")[0] == DIGITS


def options_in_name(choice: str) -> dict[str, str]:
    """Return the options in a name such as "digits:clients=50,partition=iid"."""
    items = [item.strip().partition("=") for item in choice.partition(":")[2].split(",") if item.strip()]
    if wrong := [key for key, equals, _ in items if not equals]:
        raise UserError(f"{wrong[0]!r} in data.source = {choice!r} is not key=value: write e.g. digits:clients=50")
    return {key.strip(): value.strip() for key, _, value in items}


def in_memory(where: Any) -> bool:
    """Check whether `data.source` names data in memory: no text, or "package.module:function" and not a folder."""
    if not isinstance(where, str):
        return not isinstance(where, Path)
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[\w.<>-]+(\(\.\.\.\))?", where)) and not Path(where).exists()


def makes_data(where: Any) -> bool:
    """Check whether a value of `data.source` makes data with options: the digits, a function, or the name of one."""
    arrays = str(getattr(where, "config_name", where) if not isinstance(where, Path) else where).startswith(
        f"{ARRAYS}:"
    )
    return is_digits(where) or (in_memory(where) and not arrays)
