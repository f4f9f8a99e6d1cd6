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
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedmpi.api import Run, load_run
from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.files import make_folder, read_plain, refuse_unwritable, write_whole
from fedmpi.common.terminal import console, paragraph, readable_duration, show_table
from fedmpi.config import config_toml
from fedmpi.config.base import written
from fedmpi.mpi.device import MOST_THREADS, cores_allowed
from fedmpi.process.children import ends_with_parent, how_it_ended, last_words, launcher, this_fedmpi
from fedmpi.process.signals import STOPPED_AFTER_SAVING
from fedmpi.records.history import read_summary
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
    seconds: float = 0.0  # Time of this start; 0 if it was finished before
    why: str = ""  # Last words of a failed run

    @property
    def rounds(self) -> str:
        """Recorded rounds of how many."""
        return f"{_recorded(self.run)}/{self.run.config.rounds}"

    @property
    def score(self) -> str:
        """Final score of a finished run, with its name."""
        final = read_summary(self.run.folder / "summary.json").get("final", {}) if self.ending == "finished" else {}
        key = judged([final])
        return f"{key.replace('_', ' ')} {final[key]:.4f}" if final.get(key) is not None else ""


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
    return bool(final.get("round", -1) + 1 >= run.config.rounds)


def unfinished(sweep: Sweep, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that are not finished; reject every error that can be found before one starts."""
    refuse_unwritable(sweep.out)
    waiting = [run for run in runs if not is_finished(run)]
    for run in waiting:
        refuse_unwritable(run.folder, writing=True)
    for data in _shards(waiting):
        data.check()
    return waiting


def other_sources(sweep: Sweep, waiting: Sequence[PlannedRun]) -> str:
    """Return a note about components of the waiting runs whose sources other runs had in another version."""
    present: dict[str, str] = {}
    for run in waiting:
        present |= digests(part_sources(run.config))
    changed: dict[str, list[str]] = {}
    for run in sweep.runs:
        for file, digest in kept_digests(run.folder).items():
            if present.get(file, digest) != digest:
                changed.setdefault(file, []).append(run.name)
    words = [f"{file} is not the file that {shortened(names)} ran with" for file, names in changed.items()]
    return f"{'; '.join(words)}. `fedmpi compare` keeps such runs apart" if words else ""


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


def _recorded(run: PlannedRun) -> int:
    """Return the number of rounds that a run has recorded."""
    try:
        return read_plain(run.folder / "metrics.jsonl").count(b"\n")
    except OSError:
        return 0


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
    waiting = deque(unfinished(sweep, runs))
    write_notes(runs)
    if note := other_sources(sweep, waiting):
        say(f"note: {note}")
    begun = {run.index for run in waiting}
    outcomes = {run.index: Outcome(run, "finished") for run in runs if run.index not in begun}
    started: list[_Started] = []

    def settle(outcome: Outcome) -> None:
        outcomes[outcome.run.index] = outcome
        say(f"{len(outcomes)}/{len(runs)} {outcome.run.name}: {_ending_text(outcome)}")

    def signal_all() -> None:
        for one in started:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGUSR1)

    stopping = not prepare_shards(waiting, say, stop)
    try:
        while waiting or started:
            if not stopping and stop():
                stopping = True
                signal_all()
            while waiting and (stopping or len(started) < jobs):
                run = waiting.popleft()
                if stopping:
                    settle(Outcome(run, "stopped"))
                    continue
                try:
                    started.append(_start(sweep, run, jobs))
                except (OSError, UserError) as error:
                    settle(Outcome(run, "failed", why=f"cannot be started ({error})"))
            for one in [one for one in started if one.process.poll() is not None]:
                started.remove(one)
                settle(_ended(one))
            if started:
                time.sleep(POLLED)
    finally:
        signal_all()
        for one in started:
            one.process.wait()
    return [outcomes[run.index] for run in runs]


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if a run failed, 75 if one was stopped, else 0."""
    endings = {one.ending for one in outcomes}
    return 1 if "failed" in endings else STOPPED_AFTER_SAVING if "stopped" in endings else 0


def command(run: PlannedRun, ranks: int) -> list[str]:
    """Return the command that starts a run."""
    words = ["train", str(run.folder / CONFIGURATION), "--out", str(run.folder), "--resume"]
    return [*launcher(ranks), *this_fedmpi(), *words]


@dataclass(frozen=True)
class _Started:
    """A running run; its output begins after that of earlier starts, at byte `begin`."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    since: float
    begin: int


def _start(sweep: Sweep, run: PlannedRun, jobs: int) -> _Started:
    environ = dict(os.environ)
    if jobs > 1:
        environ[MOST_THREADS] = str(max(1, cores_allowed() // (jobs * sweep.ranks)))
    with open(run.folder / OUTPUT, "ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command(run, sweep.ranks),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            process_group=0,
            preexec_fn=ends_with_parent(),
        )
    return _Started(run, process, time.monotonic(), begin)


def _ended(one: _Started) -> Outcome:
    code, seconds = one.process.returncode, time.monotonic() - one.since
    if code == 0:
        return Outcome(one.run, "finished", seconds)
    if code in (STOPPED_AFTER_SAVING, -signal.SIGUSR1, -signal.SIGTERM):  # the signals: before it heeds them
        return Outcome(one.run, "stopped", seconds)
    return Outcome(one.run, "failed", seconds, how_it_ended(code, last_words(one.run.folder / OUTPUT, one.begin)))


# --- what a sweep shows ---


def show_plan(sweep: Sweep, runs: Sequence[PlannedRun]) -> None:
    """Print the table of --dry-run: folder and state of each run; and the shards."""
    ranks = f", {sweep.ranks} ranks each" if sweep.ranks > 1 else ""
    rows = []
    for run in runs:
        begun = f"continues at round {count} of {run.config.rounds}" if (count := _recorded(run)) else "new"
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
    counts = [f"{endings.count(ending)} {ending}" for ending in ("finished", "failed", "stopped") if ending in endings]
    print(", ".join(counts))
    for one in outcomes:
        if one.ending == "failed":
            print(paragraph(f"{one.run.name}: {one.why} (see {one.run.folder})", "failed  ", "    "))
    if endings.count("finished") > 1:
        print(paragraph(f"results in {sweep.out}: fedmpi compare {sweep.out}"))


def _ending_text(outcome: Outcome) -> str:
    if outcome.ending == "failed":
        return f"failed: {outcome.why}"
    if outcome.ending == "stopped":
        return f"stopped, {outcome.rounds} rounds done"
    return ", ".join(filter(None, (f"finished in {readable_duration(outcome.seconds)}", outcome.score)))
