"""Sweeps from Python: `fedmpi.sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedmpi.api import Run, load_run
from fedmpi.common.errors import RunFailure, UserError
from fedmpi.sweeps.display import SweepDisplay
from fedmpi.sweeps.planned_runs import plan_sweep
from fedmpi.sweeps.runner import refuse_mixed_sources, run_sweep


def sweep(
    given: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int = 1,
    ranks: int | None = None,
    progress: bool = False,
    stop: Callable[[], bool] | None = None,
    mix_sources: bool = False,
) -> list[Run]:
    """Bring all runs of a sweep to their end, each in a process of its own; finished ones are only read.

    Parameters
    ----------
    given : str, Path or mapping
        The file of `fedmpi sweep`, or its tables: {"rounds": 20, "sweep": {"preset": ["fedavg", "fedprox"]}}.
    out : str or Path, optional
        The folder of the runs' folders.
    jobs : int
        Runs at work at the same time.
    ranks : int, optional
        Ranks of every run, in the place of those that the file asks for.
    progress : bool
        Show a line a run.
    stop : callable, optional
        Asked all the time; true has the runs save and stop.
    mix_sources : bool
        Whether to start runs although others in the folder ran with another source of the same component.

    Returns
    -------
    list of Run
        In the order of `fedmpi sweep --dry-run`, read from their folders.

    Raises
    ------
    UserError
        Wrong input, before anything is started.
    RunFailure
        Runs failed; they are named, and all others have come to their end.
    """
    if jobs < 1:
        raise UserError(f"jobs = {jobs}: give 1 or more")
    planned = plan_sweep(given, None if out is None else Path(out), ranks=ranks)
    refuse_mixed_sources(planned, planned.runs, lambda words: mix_sources)
    ask = stop or (lambda: False)
    if progress:
        with SweepDisplay(len(planned.runs)) as shown:
            outcomes = run_sweep(planned, planned.runs, jobs, ask, shown.show_line, shown.done, shown.working)
        shown.table(planned, outcomes)
    else:
        outcomes = run_sweep(planned, planned.runs, jobs, ask)
    failed = [f"{one.run.name} ({one.why})" for one in outcomes if one.ending == "failed"]
    if failed:
        raise RunFailure(f"{len(failed)} of {len(outcomes)} runs failed: {'; '.join(failed)}")
    return [load_run(one.run.folder) for one in outcomes if (one.run.folder / "config.toml").exists()]
