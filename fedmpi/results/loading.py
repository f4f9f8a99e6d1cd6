"""Runs of a study from their folders: `fedmpi.load_runs`, and all their records as one table, `fedmpi.frame`."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedmpi.api import Run, load_run
from fedmpi.common.errors import UserError
from fedmpi.results.gather import OneRun, differing, read_runs, runs_in
from fedmpi.results.grouping import shortened, source_notes

if TYPE_CHECKING:
    from pandas import DataFrame


def load_runs(pattern: str | Path, unfinished: bool = False) -> list[Run]:
    """Read the finished runs in the folders that a pattern names, as `runs/fedavg-*`, or below them.

    Runs that are not finished are left out, and a warning names them. A warning also names the source files of custom
    components that differ between the runs.

    Parameters
    ----------
    pattern : str or Path
    unfinished : bool
        Whether to return the others as well; `Run.finished` distinguishes them.

    Returns
    -------
    list of Run
        In the order of their names, numbers in them by value.

    Raises
    ------
    UserError
        There is no such run.
    """
    runs = _read(pattern)
    kept = [run for run in runs if unfinished or run.state == "finished"]
    if not kept:
        listed = shortened([run.where for run in runs])
        raise UserError(f"no run of {pattern} is finished: {listed}. Continue them, or set unfinished=True")
    if left := [run.where for run in runs if run.state != "finished" and not unfinished]:
        warnings.warn(f"left out, not finished: {shortened(left)}. unfinished=True returns them too", stacklevel=2)
    _warn_of_sources(kept)
    return [load_run(run.folder) for run in kept]


def frame(pattern: str | Path) -> DataFrame:
    """Return all records of a study as one tidy pandas table: one row per run and round.

    Parameters
    ----------
    pattern : str or Path
        A folder that holds runs at any depth, or a pattern such as `runs/fedavg-*`.

    Returns
    -------
    pandas.DataFrame
        `run` (the folder, from the folder that holds all of them), `seed`, `finished`; each configuration key in which
        the runs differ, such as `local.lr`, and `plugins/FILE` for source files of custom components that differ;
        `round`, and what the records hold, numbers in tables of theirs as `table.name`.

    Raises
    ------
    UserError
        There is no run, or none has a record.
    """
    from pandas import json_normalize  # slow to import

    runs = [run for run in _read(pattern) if run.records]
    if not runs:
        raise UserError(f"no run of {pattern} has finished a round yet: nothing to show")
    if left := [run.where for run in runs if run.state != "finished"]:
        warnings.warn(f"not finished: {shortened(left)}; their rows have finished = False", stacklevel=2)
    _warn_of_sources(runs)
    above = os.path.commonpath([run.folder.resolve().parent for run in runs])
    keys = [key for key in differing([run.table for run in runs]) if key != "seed"]
    rows = []
    for run in runs:
        name = Path(os.path.relpath(run.folder.resolve(), above)).as_posix()
        facts = {"run": name, "seed": run.seed, "finished": run.state == "finished"}
        facts |= {key: str(value) if isinstance(value := run.table.get(key), list) else value for key in keys}
        rows += [facts | record for record in run.records]
    return json_normalize(rows)


def _read(pattern: str | Path) -> list[OneRun]:
    """The runs that a pattern names, or that are below what it names."""
    whole = Path(pattern)
    named = [whole] if whole.is_dir() else [path for path in map(Path, glob.glob(str(pattern))) if path.is_dir()]
    found = runs_in(*named) if named else []
    if not found:
        raise UserError(f"no folder named {pattern} holds a run, or folders of runs")
    return read_runs(found)


def _warn_of_sources(runs: Sequence[OneRun]) -> None:
    for note in source_notes(runs):
        warnings.warn(note, stacklevel=3)
