"""Runs as their folders tell: configuration, records, summary, and what a sweep has noted beside them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedmpi.common.errors import UserError
from fedmpi.config.loading import dotted
from fedmpi.records.history import Record
from fedmpi.records.reading import read_records, read_summary

CONFIGURATION, OF_A_SWEEP, NOTE = "config.toml", "sweep.toml", "sweep.json"
"""Files of a run: of `fedmpi train`, and those that a sweep adds."""


@dataclass(frozen=True)
class FolderOfRun:
    """A run as its folder tells.

    Attributes
    ----------
    folder : Path
    config : dict
        {"part.key": value}, complete.
    labels : dict
        What differs between the runs of its sweep, by key; empty without one.
    records : list of dict
    summary : dict
        Empty while it is not finished.
    failure : str
        Why it failed last, where a sweep has noted that.
    """

    folder: Path
    config: Record
    labels: Record
    records: list[Record]
    summary: Record
    failure: str

    @property
    def seed(self) -> int:
        """The seed of its random numbers."""
        return int(self.config.get("seed", 0))

    @property
    def state(self) -> Literal["finished", "failed", "unfinished", "not begun"]:
        """How far it is."""
        if self.summary:
            return "finished"
        if self.failure:
            return "failed"
        return "unfinished" if self.records else "not begun"

    @property
    def where(self) -> str:
        """Its folder, and how far it is."""
        return f"{self.folder} ({len(self.records)} of {self.config.get('rounds')} rounds)"

    @property
    def told(self) -> str:
        """How far it is, in words."""
        return f"{self.where} {f'failed: {self.failure}' if self.state == 'failed' else f'is {self.state}'}"


def find_runs(paths: Sequence[Path]) -> list[FolderOfRun]:
    """The runs of folders: each itself one, or a folder that holds them at any depth.

    Raises
    ------
    UserError
        One is missing or holds no run, or a file of a run is damaged.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is no folder: name folders of runs, or one that holds them")
        here = [path] if _is_run(path) else [child for child in sorted(path.rglob("*")) if _is_run(child)]
        if not here:
            raise UserError(f"{path} holds no run: there is no {CONFIGURATION} in it")
        found |= dict.fromkeys(here)
    return [read_run(path) for path in found]


def read_run(folder: Path) -> FolderOfRun:
    """The run of a folder.

    Raises
    ------
    UserError
        A file of it is damaged.
    """
    path = next(folder / name for name in (CONFIGURATION, OF_A_SWEEP) if (folder / name).is_file())
    try:
        config = dotted(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    note = _note(folder / NOTE)
    return FolderOfRun(
        folder,
        config,
        dict(note.get("labels", {})),
        read_records(folder),
        read_summary(folder / "summary.json"),
        str(note.get("failure", "")),
    )


def _is_run(folder: Path) -> bool:
    return (folder / CONFIGURATION).is_file() or (folder / OF_A_SWEEP).is_file()


def _note(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(found, dict) or not isinstance(found.get("labels", {}), dict):
            raise ValueError("there should be keys and values")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    return found
