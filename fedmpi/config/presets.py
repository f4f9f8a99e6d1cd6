"""Published methods: one TOML file each, in fedmpi/presets."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from fedmpi.common.errors import UserError, suggestion


@dataclass(frozen=True)
class Preset:
    """A published method. Presets with equal fields are equal and have the same hash, for sets and keys of dicts.

    Attributes
    ----------
    name, title, paper, example : str
        One line on it, where it was published, a command that runs it.
    table : dict
        Its components, with the paper's numbers.
    digits : dict
        Their replacements on the embedded digits, whose 20 clients have 72 samples each; empty where they suit.
    """

    name: str
    title: str
    paper: str
    example: str
    table: dict[str, Any] = field(hash=False)
    digits: dict[str, Any] = field(hash=False)


def presets() -> list[Preset]:
    """Return every published method, in order of name."""
    return [_read(name) for name in _names()]


def preset_named(name: str) -> Preset:
    """The preset of a name; an unknown one raises UserError with the nearest."""
    known = _names()
    if name not in known:
        listed = f"there are {', '.join(known)}"
        raise UserError(f"unknown preset {name!r}; {suggestion(name, known, listed)}")
    return _read(name)


@cache
def _names() -> list[str]:
    folder = files("fedmpi") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _read(name: str) -> Preset:
    table = tomllib.loads((files("fedmpi") / "presets" / f"{name}.toml").read_text(encoding="utf-8"))
    about, digits = table.pop("about"), table.pop("digits", {})
    return Preset(name, about["title"], about["paper"], about["example"], table, digits)
