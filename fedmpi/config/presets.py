"""The published systems: one TOML file each, in fedmpi/presets."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

from fedmpi.common.errors import UserError


@dataclass(frozen=True)
class Preset:
    """A published system: name, paper, one line on it, a runnable example and its table of parts."""

    name: str
    title: str
    paper: str
    example: str
    table: dict[str, Any]


def presets() -> list[Preset]:
    """Every published system, by name."""
    folder = files("fedmpi") / "presets"
    names = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return [_read(name) for name in names]


def preset_table(name: str) -> dict[str, Any]:
    """The parts of a preset; an unknown name raises UserError with the nearest one."""
    known = [preset.name for preset in presets()]
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
        raise UserError(f"unknown preset {name!r}{hint}")
    return _read(name).table


def _read(name: str) -> Preset:
    table = tomllib.loads((files("fedmpi") / "presets" / f"{name}.toml").read_text(encoding="utf-8"))
    about = table.pop("about")
    return Preset(name, about["title"], about["paper"], about["example"], table)
