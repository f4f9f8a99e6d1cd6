"""Bringing the runs of a sweep to their end, each in a process of its own: the command that a user would give.

Finished runs are passed over, stopped and failed ones continued; what another process works on is waited for. A run
that fails stops no other. A signal is handed on: the runs save, and the sweep started again goes on with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedmpi.common.errors import MissingFiles, RunFailure, UserError
from fedmpi.common.files import refuse_unwritable
from fedmpi.config.writing import flat_table
from fedmpi.process.signals import STOPPED_AFTER_SAVING
from fedmpi.records.plugin_files import digests, foreign_choices, has_trained, kept_digests, part_sources
from fedmpi.results.grouping import components_from, shortened
from fedmpi.sweeps.planned_runs import PlannedRun, Sweep
from fedmpi.sweeps.prepared import Preparation, Stopped, ensure_shards
from fedmpi.sweeps.queue import Outcome, RunQueue, Started, launcher
from fedmpi.sweeps.standing import Standing, look, write_notes

POLLED, POLLED_OTHERS = 0.1, 1.0
"""Seconds between two looks at own processes, and at runs of others."""


def check_runs(sweep: Sweep, runs: Sequence[PlannedRun]) -> list[Standing]:
    """How far each run is; whatever can be refused is refused here, before anything is started."""
    standings, missing = look_over(sweep, runs)
    if missing:
        raise missing[0]
    return standings


def refuse_mixed_sources(sweep: Sweep, runs: Sequence[PlannedRun], agreed: Callable[[str], bool]) -> None:
    """Ask before runs are started whose components have other sources than in runs of the sweep that are done."""
    chosen = {run.index: set(map(repr, foreign_choices(run.config))) for run in sweep.runs}
    waiting = [
        choice for run in runs if chosen[run.index] and look(run).state != "finished" for choice in chosen[run.index]
    ]
    changed: dict[str, list[PlannedRun]] = {}
    for run in sweep.runs:
        if chosen[run.index].isdisjoint(waiting) or not has_trained(run.folder):
            continue
        before = kept_digests(run.folder)
        for file, digest in digests(part_sources(run.config)).items():
            if before.get(file, digest) != digest:  # an older version kept fewer files
                changed.setdefault(file, []).append(run)
    words = "; ".join(
        f"{file} of {components_from(file, [flat_table(run.config) for run in ran])} is not the file that "
        f"{shortened([run.name for run in ran])} ran with"
        for file, ran in changed.items()
    )
    if changed and not agreed(words):
        advice = f"Choose another --out, or add --mix-sources to continue in {sweep.out}"
        raise UserError(f"{words}. {advice}: `fedmpi compare` keeps such runs apart")


def look_over(sweep: Sweep, runs: Sequence[PlannedRun]) -> tuple[list[Standing], list[MissingFiles]]:
    """How far each run is, and which files of data sets are missing; all else is refused as in `check_runs`."""
    standings = check_folders(sweep, runs)
    missing = []
    for data in _shards([run for run, now in zip(runs, standings, strict=True) if now.state != "finished"]):
        try:
            data.check()
        except MissingFiles as error:
            missing.append(error)
    if sweep.ranks > 1:
        launcher(sweep.ranks)
    return standings, missing


def check_folders(sweep: Sweep, runs: Sequence[PlannedRun]) -> list[Standing]:
    """How far each run is, where their folders are, or can be made."""
    refuse_unwritable(sweep.out)
    standings = [look(run) for run in runs]
    for run, now in zip(runs, standings, strict=True):
        if now.state != "finished":
            refuse_unwritable(run.folder, writing=True)
    return standings


def run_sweep(
    sweep: Sweep,
    runs: Sequence[PlannedRun],
    jobs: int = 1,
    stop: Callable[[], bool] = lambda: False,
    show_line: Callable[[str], None] = lambda text: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
    working: Callable[[Sequence[Started]], None] = lambda started: None,
) -> list[Outcome]:
    """Bring the runs to their end."""
    standings = check_runs(sweep, runs)
    write_notes(sweep, tuple(runs))
    queue = RunQueue(sweep, jobs, show_line, done)
    for run, standing in zip(runs, standings, strict=True):
        queue.add(run, standing)
    lacking, _ = _prepared(_shards(queue.waiting), show_line, stop)
    queue.drop(lacking)
    try:
        while queue.goes_on:
            if stop():
                queue.stop()
            queue.settle_waiting()
            queue.start_free()
            queue.tell_who_blocks()
            blocked = queue.blocked
            working(queue.started)
            queue.collect()
            if queue.goes_on:
                time.sleep(POLLED_OTHERS if blocked else POLLED)
    finally:
        queue.close()
    return [queue.outcomes[run.index] for run in runs]


def prepare_shards(runs: Sequence[PlannedRun], show_line: Callable[[str], None], stop: Callable[[], bool]) -> int:
    """Prepare what the runs need and train nothing; the exit code. What cannot be prepared keeps nothing else back."""
    shards = _shards(runs)
    for data in shards:
        data.check()
    lacking, stopped = _prepared(shards, show_line, stop)
    failed = list(lacking.values())
    if len(failed) > 1:
        kind = RunFailure if any(isinstance(one, RunFailure) for one in failed) else UserError
        raise kind(f"{len(failed)} of {len(shards)} cannot be prepared: {'; '.join(map(str, failed))}")
    if failed:
        raise failed[0]
    return STOPPED_AFTER_SAVING if stopped else 0


def refuse_unprepared(run: PlannedRun, sweep: Sweep) -> None:
    """Refuse a run whose shards are missing where they cannot be prepared: in a job of several ranks."""
    if run.data is not None and not run.data.ready():
        raise UserError(
            f"{run.data.folder} is not prepared, which one process has to do: fedmpi sweep {sweep.origin} --out "
            f"{sweep.out} --index {run.index} --prepare"
        )


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 where a run failed, 75 where one was stopped, else 0."""
    endings = {one.ending for one in outcomes}
    return 1 if "failed" in endings else STOPPED_AFTER_SAVING if "stopped" in endings else 0


def _prepared(
    shards: Sequence[Preparation], show_line: Callable[[str], None], stop: Callable[[], bool]
) -> tuple[dict[Path, UserError], bool]:
    """Prepare the shards; folders of those that could not be, with the reason, and whether it was asked to stop."""
    lacking: dict[Path, UserError] = {}
    for data in shards:
        try:
            ensure_shards(data, show_line, stop)
        except Stopped:
            return lacking, True
        except UserError as error:  # RunFailure is one
            lacking[data.folder] = error
    return lacking, False


def _shards(runs: Iterable[PlannedRun]) -> list[Preparation]:
    return list({run.data.folder: run.data for run in runs if run.data is not None}.values())
