"""What has become of a sweep's runs, as their folders show, and the two files that a sweep puts beside a run's own."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedmpi.common.errors import UserError
from fedmpi.common.files import make_folder, read_plain, write_whole
from fedmpi.config import config_toml
from fedmpi.config.base import written
from fedmpi.records.changes import changes_since
from fedmpi.records.hold import Holder
from fedmpi.records.reading import read_summary
from fedmpi.sweeps.planned_runs import PlannedRun, Sweep

CONFIGURATION, NOTE, OUTPUT = "sweep.toml", "sweep.json", "output.log"
"""In a run's folder: what it is started with; what differs in it, and why it failed last; what it printed."""

RunState = Literal["new", "begun", "finished", "busy"]


@dataclass(frozen=True)
class Standing:
    """How far a run is."""

    state: RunState  # "busy" where another process works on it
    rounds: int = 0  # Recorded
    summary: dict[str, Any] | None = None  # Of a finished run
    holder: str = ""  # Who works on it


def look(run: PlannedRun) -> Standing:
    """How far a run is."""
    path = run.folder / "config.toml"
    holder = Holder.of(run.folder) if run.folder.is_dir() else None
    rounds = recorded(run.folder)
    try:
        changed = {key for key, _, _ in changes_since(path, run.config).keys} if path.exists() else set()
        summary = read_summary(run.folder / "summary.json")
    except UserError as error:
        raise UserError(f"run {run.name}: {error}") from error
    if rounds > run.config.rounds and "rounds" in changed:
        raise UserError(
            f"run {run.name}: {run.folder} has done {rounds} rounds already, more than rounds = {run.config.rounds}: "
            "give as many, or choose another --out"
        )
    if holder is not None and holder.alive():
        return Standing("busy", rounds, holder=str(holder))
    final = summary.get("final", {})
    if not isinstance(final, dict) or not isinstance(last := final.get("round", -1), int):
        raise UserError(
            f"run {run.name}: {run.folder / 'summary.json'} does not say how many rounds there were: remove it"
        )
    if summary and last + 1 >= run.config.rounds:
        return Standing("finished", rounds, summary)
    return Standing("begun" if path.exists() else "new", rounds)


def recorded(folder: Path) -> int:
    """Rounds that a run has recorded."""
    try:
        return read_plain(folder / "metrics.jsonl").count(b"\n")
    except OSError:
        return 0


def write_notes(sweep: Sweep, runs: tuple[PlannedRun, ...]) -> None:
    """Leave in each run's folder what it is started with and what differs in it."""
    for run in runs:
        try:
            make_folder(run.folder)
            _put(run.folder / CONFIGURATION, config_toml(run.config))
            note(run, None)
        except OSError as error:
            raise UserError(f"cannot write {run.folder} ({error.strerror or error}): choose another --out") from error


def note(run: PlannedRun, failure: str | None) -> None:
    """What differs in a run, and why it failed last, for `fedmpi compare`."""
    labels = {key: written(value) for key, value in run.labels.items()}
    content = {"labels": labels, **({} if failure is None else {"failure": failure})}
    _put(run.folder / NOTE, json.dumps(content, indent=1, default=str) + "\n")


def _put(path: Path, text: str) -> None:
    content = text.encode()
    with suppress(OSError):  # what is none yet, or no file, is said where it is written
        if read_plain(path) == content:
            return
    try:
        write_whole(path, content)
    except FileNotFoundError:  # another sweep of the same file has just put it there
        if not path.exists():
            raise
