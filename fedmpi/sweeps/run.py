"""Running a sweep: each run in a separate process, started by the command that a user would give.

Finished runs are skipped, stopped and failed ones continue. A run that fails stops no other. A signal is passed on: the
runs save, and the sweep started again continues with them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedmpi.api import Run, load_run
from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.files import make_folder, write_whole
from fedmpi.common.terminal import console, paragraph, show_table
from fedmpi.config import config_toml
from fedmpi.config.base import written
from fedmpi.mpi.device import MOST_THREADS, cores_allowed
from fedmpi.process.children import ends_with_parent, how_it_ended, last_words, launcher, this_fedmpi
from fedmpi.process.signals import STOPPED_AFTER_SAVING
from fedmpi.records.history import BestRound, read_records, read_summary
from fedmpi.records.provenance import changes_since, digests, kept_digests, part_sources
from fedmpi.results.comparison import judged
from fedmpi.results.loading import NOTE, shortened
from fedmpi.sweeps.plan import PlannedRun, Sweep, plan_sweep
from fedmpi.sweeps.shards import Preparation

CONFIGURATION, OUTPUT = "sweep.toml", "output.log"
"""Files in a run's folder: its configuration, and its output."""
POLLED = 0.1
"""Seconds between two looks at processes."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run."""

    run: PlannedRun
    ending: Literal["finished", "failed", "stopped"]
    why: str = ""  # Last words of a failed run

    @property
    def text(self) -> str:
        """Name and ending of the run; why it failed, or its final score."""
        words = self.why
        if self.ending == "finished":
            final = read_summary(self.run.folder / "summary.json").get("final", {})
            key = judged([final])
            words = f"{key.replace('_', ' ')} {final[key]:.4f}" if final.get(key) is not None else ""
        return f"{self.run.name}: {self.ending}{words and ': '}{words}"


# --- runs as their folders show them ---


def is_finished(run: PlannedRun) -> bool:
    """Check whether a run is finished; reject a folder that contains another run."""
    path = run.folder / "config.toml"
    try:
        if path.exists():
            changes_since(path, run.config)
        final = read_summary(run.folder / "summary.json").get("final", {})
    except UserError as error:
        raise UserError(f"run {run.name}: {error}") from error
    rounds = final.get("round", -1) + 1
    return rounds >= run.config.rounds or BestRound(run.config, read_records(run.folder, rounds)).exhausted


def unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that are not finished; reject every error that can be found before one starts."""
    waiting = [run for run in runs if not is_finished(run)]
    for data in _shards(waiting):
        data.check()
    return waiting


def other_sources(sweep: Sweep, waiting: Sequence[PlannedRun]) -> str:
    """Return a note about runs that had other versions of the components of the waiting runs."""
    present: dict[str, str] = {}
    for run in waiting:
        present |= digests(part_sources(run.config))
    kept = {run.name: kept_digests(run.folder) for run in sweep.runs}
    old = [name for name, files in kept.items() if any(present.get(file, own) != own for file, own in files.items())]
    return f"{shortened(old)} ran with other sources; `fedmpi compare` keeps such runs apart" if old else ""


def write_notes(runs: Iterable[PlannedRun]) -> None:
    """Write into each run's folder its configuration and the values that differ in it, for `fedmpi compare`."""
    for run in runs:
        note = {"labels": {key: written(value) for key, value in run.labels.items()}}
        try:
            make_folder(run.folder)
            write_whole(run.folder / CONFIGURATION, config_toml(run.config).encode())
            write_whole(run.folder / NOTE, (json.dumps(note, indent=1, default=str) + "\n").encode())
        except OSError as error:
            raise UserError(f"cannot write {run.folder} ({error.strerror or error}). Choose another --out") from error


def _shards(runs: Iterable[PlannedRun]) -> list[Preparation]:
    return list({run.data.folder: run.data for run in runs if run.data is not None}.values())


# --- running ---


def sweep(
    given: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int = 1,
    ranks: int = 1,
    progress: bool = False,
    stop: Callable[[], bool] | None = None,
) -> list[Run]:
    """Run all runs of a sweep, each in a separate process; finished ones are only read.

    Parameters
    ----------
    given : str, Path or mapping
        The file of `fedmpi sweep`, or its tables: {"rounds": 20, "sweep": {"preset": ["fedavg", "fedprox"]}}.
    out : str or Path, optional
        The folder of the runs' folders.
    jobs : int
        Runs at the same time.
    ranks : int
        Ranks of every run.
    progress : bool
        Show one line per run.
    stop : callable, optional
        Called all the time; true has the runs save and stop.

    Returns
    -------
    list of Run
        In the order of `fedmpi sweep --dry-run`, read from their folders.

    Raises
    ------
    UserError
        Wrong input, before any run is started.
    RunFailure
        Runs failed; they are named, and all others are finished.
    """
    planned = plan_sweep(given, None if out is None else Path(out), ranks=ranks)
    say = show_line if progress else lambda text: None
    outcomes = run_sweep(planned, planned.runs, jobs, stop or (lambda: False), say)
    if progress:
        show_outcomes(planned, outcomes)
    failed = [f"{one.run.name} ({one.why})" for one in outcomes if one.ending == "failed"]
    if failed:
        raise RunFailure(f"{len(failed)} of {len(outcomes)} runs failed: {'; '.join(failed)}")
    return [load_run(one.run.folder) for one in outcomes if (one.run.folder / "config.toml").exists()]


def prepare_shards(runs: Sequence[PlannedRun], say: Say, stop: Callable[[], bool]) -> bool:
    """Prepare the shards of the runs; return False if stopped."""
    return all(data.ensure(say, stop) for data in _shards(runs))


def run_sweep(
    sweep: Sweep,
    runs: Sequence[PlannedRun],
    jobs: int = 1,
    stop: Callable[[], bool] = lambda: False,
    say: Say = lambda text: None,
) -> list[Outcome]:
    """Run the runs, at most `jobs` at the same time."""
    launcher(sweep.ranks)
    waiting = unfinished(runs)
    write_notes(runs)
    if note := other_sources(sweep, waiting):
        say(f"note: {note}")
    outcomes = {run.index: Outcome(run, "stopped" if run in waiting else "finished") for run in runs}
    left, done = iter(waiting), len(runs) - len(waiting)
    started: dict[int, subprocess.Popen[bytes]] = {}
    stopping = not prepare_shards(waiting, say, stop)
    try:
        while not stopping or started:
            if not stopping and stop():
                stopping = True
                _signal(started.values())
            while not stopping and len(started) < jobs and (run := next(left, None)) is not None:
                started[run.index] = _start(sweep, run, jobs)
            if not started:
                break
            time.sleep(POLLED)
            for index in [index for index, process in started.items() if process.poll() is not None]:
                outcomes[index] = _outcome(sweep.runs[index], started.pop(index).returncode)
                done += 1
                say(f"{done}/{len(runs)} {outcomes[index].text}")
    finally:
        _signal(started.values())
        for process in started.values():
            process.wait()
    return list(outcomes.values())


def _signal(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if a run failed, 75 if one was stopped, else 0."""
    endings = {one.ending for one in outcomes}
    return 1 if "failed" in endings else STOPPED_AFTER_SAVING if "stopped" in endings else 0


def command(run: PlannedRun, ranks: int) -> list[str]:
    """Return the command that starts a run."""
    words = ["train", str(run.folder / CONFIGURATION), "--out", str(run.folder), "--resume"]
    return [*launcher(ranks), *this_fedmpi(), *words]


def _start(sweep: Sweep, run: PlannedRun, jobs: int) -> subprocess.Popen[bytes]:
    environ = dict(os.environ)
    if jobs > 1:
        environ[MOST_THREADS] = str(max(1, cores_allowed() // (jobs * sweep.ranks)))
    with open(run.folder / OUTPUT, "wb") as output:
        return subprocess.Popen(
            command(run, sweep.ranks),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            process_group=0,
            preexec_fn=ends_with_parent(),
        )


def _outcome(run: PlannedRun, code: int) -> Outcome:
    if code == 0:
        return Outcome(run, "finished")
    if code in (STOPPED_AFTER_SAVING, -signal.SIGUSR1, -signal.SIGTERM):  # the signals: before it heeds them
        return Outcome(run, "stopped")
    return Outcome(run, "failed", how_it_ended(code, last_words(run.folder / OUTPUT)))


# --- what a sweep shows ---


def show_plan(sweep: Sweep, runs: Sequence[PlannedRun]) -> None:
    """Print the table of --dry-run: folder and state of each run; and the shards."""
    ranks = f", {sweep.ranks} ranks each" if sweep.ranks > 1 else ""
    rows = []
    for run in runs:
        begun = "begun" if (run.folder / "config.toml").exists() else "new"
        rows.append([str(run.index), run.name, "finished" if is_finished(run) else begun])
    title = f"{sweep.origin}: {len(runs)} runs{ranks}, folders in {sweep.out}"
    show_table(console(), ["#", "folder", "state"], rows, title, left=3)
    for data in _shards(runs):
        state = "prepared" if data.ready() else "to be prepared"
        print(paragraph(f"{state}: fedmpi prepare {' '.join(data.command)}", "shards  ", "    "))


def show_line(text: str) -> None:
    """Print a line about a run."""
    print(paragraph(text), flush=True)


def show_outcomes(sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
    """Print how many runs ended in which way, and the reasons of failures."""
    endings = [one.ending for one in outcomes]
    print(", ".join(f"{endings.count(ending)} {ending}" for ending in dict.fromkeys(endings)))
    for one in outcomes:
        if one.ending == "failed":
            print(paragraph(f"{one.text} (see {one.run.folder})", "", "    "))
    if endings.count("finished") > 1:
        print(paragraph(f"results in {sweep.out}: fedmpi compare {sweep.out}"))
