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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedmpi.api import Run, load_run
from fedmpi.common.errors import MissingFiles, RunFailure, UserError
from fedmpi.common.files import make_folder, read_plain, refuse_unwritable, write_whole
from fedmpi.common.terminal import console, paragraph, readable_duration, show_table
from fedmpi.config import config_toml
from fedmpi.config.base import written
from fedmpi.config.writing import flat_table
from fedmpi.mpi.device import MOST_THREADS, cores_allowed
from fedmpi.process.children import ends_with_parent, how_it_ended, last_words, launcher, this_fedmpi
from fedmpi.process.signals import STOPPED_AFTER_SAVING
from fedmpi.records.history import read_summary
from fedmpi.records.provenance import changes_since, digests, foreign_choices, has_trained, kept_digests, part_sources
from fedmpi.results.loading import components_from, shortened
from fedmpi.sweeps.plan import PlannedRun, Sweep, labels_text, plan_sweep
from fedmpi.sweeps.shards import Preparation, Stopped, ensure_shards

CONFIGURATION, NOTE, OUTPUT = "sweep.toml", "sweep.json", "output.log"
"""Files in a run's folder: its configuration; its labels and last failure; its output."""
POLLED = 0.1
"""Seconds between two looks at processes."""
SCORES = {
    "test_accuracy": "test accuracy",
    "val_accuracy": "validation accuracy",
    "test_loss": "test loss",
    "val_loss": "validation loss",
}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run."""

    run: PlannedRun
    ending: Literal["finished", "failed", "stopped"]
    seconds: float = 0.0  # Time of this start; 0 if it was finished before
    why: str = ""  # Last words of a failed run

    @property
    def score(self) -> str:
        """Final score of a finished run, with its name."""
        final = read_summary(self.run.folder / "summary.json").get("final", {}) if self.ending == "finished" else {}
        return next((f"{name} {final[key]:.4f}" for key, name in SCORES.items() if final.get(key) is not None), "")


# --- states of runs, as their folders show them ---


def look(run: PlannedRun) -> Literal["new", "begun", "finished"]:
    """Return the state of a run; reject a folder that contains another run."""
    path = run.folder / "config.toml"
    try:
        if path.exists():
            changes_since(path, run.config)
        final = read_summary(run.folder / "summary.json").get("final", {})
    except UserError as error:
        raise UserError(f"run {run.name}: {error}") from error
    if final.get("round", -1) + 1 >= run.config.rounds:
        return "finished"
    return "begun" if path.exists() else "new"


def recorded(folder: Path) -> int:
    """Return the number of rounds that a run has recorded."""
    try:
        return read_plain(folder / "metrics.jsonl").count(b"\n")
    except OSError:
        return 0


def write_notes(runs: Iterable[PlannedRun]) -> None:
    """Write into each run's folder its configuration and the values that differ in it, for `fedmpi compare`."""
    for run in runs:
        try:
            make_folder(run.folder)
            write_whole(run.folder / CONFIGURATION, config_toml(run.config).encode())
            _write_note(run)
        except OSError as error:
            raise UserError(f"cannot write {run.folder} ({error.strerror or error}). Choose another --out") from error


def _write_note(run: PlannedRun, **further: str) -> None:
    content = {"labels": {key: written(value) for key, value in run.labels.items()}, **further}
    write_whole(run.folder / NOTE, (json.dumps(content, indent=1, default=str) + "\n").encode())


# --- checks before anything is started ---


def look_over(sweep: Sweep, runs: Sequence[PlannedRun]) -> tuple[list[str], list[MissingFiles]]:
    """Return the state of each run, and missing files of data sets; reject other errors that can be found now."""
    refuse_unwritable(sweep.out)
    states = [look(run) for run in runs]
    waiting = [run for run, state in zip(runs, states, strict=True) if state != "finished"]
    for run in waiting:
        refuse_unwritable(run.folder, writing=True)
    missing = []
    for data in _shards(waiting):
        try:
            data.check()
        except MissingFiles as error:
            missing.append(error)
    return list(states), missing


def check_runs(sweep: Sweep, runs: Sequence[PlannedRun]) -> list[str]:
    """Return the state of each run; reject every error that can be found before a run starts."""
    states, missing = look_over(sweep, runs)
    if missing:
        raise missing[0]
    return states


def refuse_mixed_sources(sweep: Sweep, runs: Sequence[PlannedRun], mixed: bool) -> None:
    """Reject runs if their components' sources differ from those of finished runs, unless mixing is allowed."""
    chosen = {run.index: set(map(repr, foreign_choices(run.config))) for run in sweep.runs}
    waiting = set().union(*(chosen[run.index] for run in runs if chosen[run.index] and look(run) != "finished"))
    changed: dict[str, list[PlannedRun]] = {}
    for run in sweep.runs:
        if chosen[run.index].isdisjoint(waiting) or not has_trained(run.folder):
            continue
        before = kept_digests(run.folder)
        for file, digest in digests(part_sources(run.config)).items():
            if before.get(file) != digest:
                changed.setdefault(file, []).append(run)
    words = "; ".join(
        f"{file} of {components_from(file, [flat_table(run.config) for run in ran])} is not the file that "
        f"{shortened([run.name for run in ran])} ran with"
        for file, ran in changed.items()
    )
    if changed and not mixed:
        advice = f"Choose another --out, or add --mix-sources to continue in {sweep.out}"
        raise UserError(f"{words}. {advice}: `fedmpi compare` keeps such runs apart")


def refuse_unprepared(run: PlannedRun, sweep: Sweep) -> None:
    """Reject a run with missing shards in a job of several ranks, which cannot prepare them."""
    if run.data is not None and not run.data.ready():
        raise UserError(
            f"{run.data.folder} is not prepared, which one process has to do: fedmpi sweep {sweep.origin} --out "
            f"{sweep.out} --index {run.index} --prepare"
        )


# --- running ---


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
    """Run all runs of a sweep, each in a separate process; finished ones are only read.

    Parameters
    ----------
    given : str, Path or mapping
        The file of `fedmpi sweep`, or its tables: {"rounds": 20, "sweep": {"preset": ["fedavg", "fedprox"]}}.
    out : str or Path, optional
        The folder of the runs' folders.
    jobs : int
        Runs at the same time.
    ranks : int, optional
        Ranks of every run, instead of those that the file asks for.
    progress : bool
        Show one line per run.
    stop : callable, optional
        Called all the time; true has the runs save and stop.
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
        Runs failed; they are named, and all others are finished.
    """
    planned = plan_sweep(given, None if out is None else Path(out), ranks=ranks)
    refuse_mixed_sources(planned, planned.runs, mix_sources)
    say = show_line if progress else lambda text: None
    outcomes = run_sweep(planned, planned.runs, jobs, stop or (lambda: False), say)
    if progress:
        show_outcomes(planned, outcomes)
    failed = [f"{one.run.name} ({one.why})" for one in outcomes if one.ending == "failed"]
    if failed:
        raise RunFailure(f"{len(failed)} of {len(outcomes)} runs failed: {'; '.join(failed)}")
    return [load_run(one.run.folder) for one in outcomes if (one.run.folder / "config.toml").exists()]


@dataclass(frozen=True)
class _Started:
    """A running run; its output begins after that of earlier starts, at byte `begin`."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    since: float
    begin: int


def run_sweep(
    sweep: Sweep,
    runs: Sequence[PlannedRun],
    jobs: int = 1,
    stop: Callable[[], bool] = lambda: False,
    say: Say = lambda text: None,
) -> list[Outcome]:
    """Run the runs, at most `jobs` at the same time."""
    if jobs < 1:
        raise UserError(f"jobs = {jobs} is impossible. Give 1 or more")
    launcher(sweep.ranks)
    states = check_runs(sweep, runs)
    write_notes(runs)
    outcomes: dict[int, Outcome] = {}
    started: list[_Started] = []
    stopping = False

    def settle(outcome: Outcome) -> None:
        outcomes[outcome.run.index] = outcome
        if outcome.ending == "failed":
            with suppress(OSError):
                _write_note(outcome.run, failure=outcome.why)
        if outcome.seconds or outcome.ending != "finished":
            say(f"{len(outcomes)}/{len(runs)} {outcome.run.name}: {_ending_text(outcome)}")

    def signal_all() -> None:
        for one in started:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGUSR1)

    for run, state in zip(runs, states, strict=True):
        if state == "finished":
            settle(Outcome(run, "finished"))
    waiting = deque(run for run in runs if run.index not in outcomes)
    lacking, _ = _prepared(_shards(waiting), say, stop)
    for run in list(waiting):
        if run.data is not None and run.data.folder in lacking:
            waiting.remove(run)
            settle(Outcome(run, "failed", why=str(lacking[run.data.folder])))
    try:
        while waiting or started:
            if not stopping and stop():
                stopping = True
                signal_all()
                for run in waiting:
                    settle(Outcome(run, "stopped"))
                waiting.clear()
            while waiting and len(started) < jobs:
                run = waiting.popleft()
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


def prepare_shards(runs: Sequence[PlannedRun], say: Say, stop: Callable[[], bool]) -> int:
    """Prepare the shards of the runs and train nothing; return the exit code. A failure keeps no others back."""
    lacking, stopped = _prepared(_shards(runs), say, stop)
    failed = list(lacking.values())
    if failed:
        kind = RunFailure if any(isinstance(one, RunFailure) for one in failed) else UserError
        raise kind("; ".join(map(str, failed)))
    return STOPPED_AFTER_SAVING if stopped else 0


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if a run failed, 75 if one was stopped, else 0."""
    endings = {one.ending for one in outcomes}
    return 1 if "failed" in endings else STOPPED_AFTER_SAVING if "stopped" in endings else 0


def _prepared(shards: Sequence[Preparation], say: Say, stop: Callable[[], bool]) -> tuple[dict[Path, UserError], bool]:
    """Prepare the shards; return the reasons of failures by folder, and whether a signal came."""
    lacking: dict[Path, UserError] = {}
    for data in shards:
        try:
            ensure_shards(data, say, stop)
        except Stopped:
            return lacking, True
        except UserError as error:  # RunFailure is one
            lacking[data.folder] = error
    return lacking, False


def _shards(runs: Iterable[PlannedRun]) -> list[Preparation]:
    return list({run.data.folder: run.data for run in runs if run.data is not None}.values())


def command(run: PlannedRun, ranks: int) -> list[str]:
    """Return the command that starts a run."""
    words = ["train", str(run.folder / CONFIGURATION), "--out", str(run.folder), "--resume"]
    return [*launcher(ranks), *this_fedmpi(), *words]


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
    why = how_it_ended(code, last_words(one.run.folder / OUTPUT, one.begin, any_line=True))
    return Outcome(one.run, "failed", seconds, why)


# --- what a sweep shows ---


def show_plan(sweep: Sweep, runs: Sequence[PlannedRun], states: Sequence[str], missing: Sequence[MissingFiles]) -> None:
    """Print the table of --dry-run: folder, values that differ and state of each run; the shards; missing files."""
    ranks = f", {sweep.ranks} ranks each" if sweep.ranks > 1 else ""
    rows = []
    for run, state in zip(runs, states, strict=True):
        state = f"continues at round {recorded(run.folder)} of {run.config.rounds}" if state == "begun" else state
        rows.append([str(run.index), run.name, labels_text(run.labels), state])
    title = f"{sweep.origin}: {len(runs)} runs{ranks}, folders in {sweep.out}"
    show_table(console(), ["#", "folder", "what differs", "state"], rows, title, left=4)
    for data in _shards(runs):
        state = "prepared" if data.ready() else "to be prepared"
        print(paragraph(f"{state}: fedmpi prepare {' '.join(data.command)}", "shards  ", "    "))
    for sentence in dict.fromkeys(map(str, missing)):
        print(paragraph(sentence, "missing ", "    "))


def show_line(text: str) -> None:
    """Print a line about a run."""
    print(paragraph(text), flush=True)


def show_outcomes(sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
    """Print every run with its end, and the reasons of failures."""
    rows = []
    for one in outcomes:
        time = readable_duration(one.seconds) if one.seconds else "before" if one.ending == "finished" else "-"
        score = one.score.rpartition(" ")[2] or "-"
        rows.append([one.run.name, one.ending, f"{recorded(one.run.folder)}/{one.run.config.rounds}", score, time])
    endings = [one.ending for one in outcomes]
    counts = [f"{endings.count(ending)} {ending}" for ending in ("finished", "failed", "stopped") if ending in endings]
    show_table(console(), ["run", "state", "rounds", "score", "time"], rows, caption=", ".join(counts), left=2)
    for one in outcomes:
        if one.ending == "failed":
            print(paragraph(f"{one.run.name}: {one.why} (see {one.run.folder})", "failed  ", "    "))
    if endings.count("finished") > 1:
        print(paragraph(f"results in {sweep.out}: fedmpi compare {sweep.out}"))


def _ending_text(outcome: Outcome) -> str:
    if outcome.ending == "failed":
        return f"failed: {outcome.why}"
    if outcome.ending == "stopped":
        return f"stopped, {recorded(outcome.run.folder)} of {outcome.run.config.rounds} rounds done"
    return ", ".join(filter(None, (f"finished in {readable_duration(outcome.seconds)}", outcome.score)))
