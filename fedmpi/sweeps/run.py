"""Bringing the runs of a sweep to their end, each in a separate process: the command that a user would give.

Finished runs are passed over, stopped and failed ones continued; what another process works on is waited for. A run
that fails stops no other. A signal is handed on: the runs save, and the sweep started again continues with them.
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

from fedmpi.common.errors import MissingFiles, RunFailure, UserError
from fedmpi.common.files import make_folder, read_plain, refuse_unwritable, write_whole
from fedmpi.config import config_toml
from fedmpi.config.base import written
from fedmpi.config.writing import flat_table
from fedmpi.mpi.device import MOST_THREADS, cores_allowed
from fedmpi.process.children import ends_with_parent, how_it_ended, last_words, launcher, this_fedmpi
from fedmpi.process.signals import STOPPED_AFTER_SAVING
from fedmpi.records.changes import changes_since
from fedmpi.records.history import read_summary
from fedmpi.records.hold import owner_of
from fedmpi.records.provenance import digests, foreign_choices, has_trained, kept_digests, part_sources
from fedmpi.results.loading import components_from, shortened
from fedmpi.sweeps.plan import PlannedRun, Sweep
from fedmpi.sweeps.shards import Preparation, Stopped, ensure_shards

CONFIGURATION, NOTE, OUTPUT = "sweep.toml", "sweep.json", "output.log"
"""Files in a run's folder: its configuration; its labels and last failure; its output."""
POLLED, POLLED_OTHERS = 0.1, 1.0
"""Seconds between two looks at own processes, and at runs of others."""


@dataclass(frozen=True)
class Standing:
    """State of a run."""

    state: Literal["new", "begun", "finished", "busy"]  # "busy" where another process works on it
    rounds: int = 0  # Recorded
    summary: Mapping[str, Any] | None = None  # Of a finished run
    owner: str = ""  # Who works on it


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run."""

    run: PlannedRun
    ending: Literal["finished", "failed", "stopped"]
    standing: Standing
    seconds: float = 0.0  # Time of this start; 0 if it was finished before
    why: str = ""  # Of a failed one, what it said last


@dataclass(frozen=True)
class Started:
    """A running run; its output begins after that of earlier ones, at byte `begin`."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    since: float
    begin: int


# --- what has become of runs, as their folders show ---


def look(run: PlannedRun) -> Standing:
    """Return the progress of a run; reject a folder that contains another run."""
    path, rounds = run.folder / "config.toml", recorded(run.folder)
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
    if (owner := owner_of(run.folder)) is not None:
        return Standing("busy", rounds, owner=owner)
    final = summary.get("final", {})
    if not isinstance(final, dict) or not isinstance(last := final.get("round", -1), int):
        raise UserError(
            f"run {run.name}: {run.folder / 'summary.json'} does not say how many rounds there were: remove it"
        )
    if summary and last + 1 >= run.config.rounds:
        return Standing("finished", rounds, summary)
    return Standing("begun" if path.exists() else "new", rounds)


def _glance(run: PlannedRun) -> Standing:
    """Return the same as `look`, for a run that was looked at before."""
    try:
        return look(run)
    except UserError:
        return Standing("begun", recorded(run.folder))


def recorded(folder: Path) -> int:
    """Rounds that a run has recorded."""
    try:
        return read_plain(folder / "metrics.jsonl").count(b"\n")
    except OSError:
        return 0


def write_notes(sweep: Sweep, runs: Iterable[PlannedRun]) -> None:
    """Leave in each run's folder what it is started with and what differs in it."""
    for run in runs:
        try:
            make_folder(run.folder)
            _put(run.folder / CONFIGURATION, config_toml(run.config))
            _note(run, None)
        except OSError as error:
            raise UserError(f"cannot write {run.folder} ({error.strerror or error}): choose another --out") from error


def _note(run: PlannedRun, failure: str | None) -> None:
    """Write the values that differ in a run, and the reason of its last failure, for `fedmpi compare`."""
    labels = {key: written(value) for key, value in run.labels.items()}
    content = {"labels": labels, **({} if failure is None else {"failure": failure})}
    _put(run.folder / NOTE, json.dumps(content, indent=1, default=str) + "\n")


def _put(path: Path, text: str) -> None:
    with suppress(OSError):
        if read_plain(path) == text.encode():
            return
    try:
        write_whole(path, text.encode())
    except FileNotFoundError:  # another sweep of the same file has just put it there
        if not path.exists():
            raise


# --- checks before anything is started ---


def check_runs(sweep: Sweep, runs: Sequence[PlannedRun]) -> list[Standing]:
    """Return the progress of each run; reject every error that can be found before a run starts."""
    standings, missing = look_over(sweep, runs)
    if missing:
        raise missing[0]
    return standings


def look_over(sweep: Sweep, runs: Sequence[PlannedRun]) -> tuple[list[Standing], list[MissingFiles]]:
    """Return the progress of each run and the missing files of data sets; reject other errors as `check_runs` does."""
    standings = check_folders(sweep, runs)
    missing = []
    for data in _shards(run for run, now in zip(runs, standings, strict=True) if now.state != "finished"):
        try:
            data.check()
        except MissingFiles as error:
            missing.append(error)
    launcher(sweep.ranks)
    return standings, missing


def check_folders(sweep: Sweep, runs: Sequence[PlannedRun]) -> list[Standing]:
    """Return the state of each run; require that its folder exists or can be made."""
    refuse_unwritable(sweep.out)
    standings = [look(run) for run in runs]
    for run, now in zip(runs, standings, strict=True):
        if now.state != "finished":
            refuse_unwritable(run.folder, writing=True)
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


def refuse_unprepared(run: PlannedRun, sweep: Sweep) -> None:
    """Reject a run with missing shards in a job of several ranks, which cannot prepare them."""
    if run.data is not None and not run.data.ready():
        raise UserError(
            f"{run.data.folder} is not prepared, which one process has to do: fedmpi sweep {sweep.origin} --out "
            f"{sweep.out} --index {run.index} --prepare"
        )


# --- running ---


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
    write_notes(sweep, runs)
    outcomes: dict[int, Outcome] = {}
    started: list[Started] = []
    stopping, waited_for = False, ""

    def settle(outcome: Outcome) -> None:
        outcomes[outcome.run.index] = outcome
        done(outcome)

    def signal_all() -> None:
        for one in started:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGUSR1)

    for run, now in zip(runs, standings, strict=True):
        if now.state == "finished":
            settle(Outcome(run, "finished", now))
    waiting = deque(run for run in runs if run.index not in outcomes)
    lacking, _ = _prepared(_shards(waiting), show_line, stop)
    for run in list(waiting):
        if run.data is not None and run.data.folder in lacking:
            waiting.remove(run)
            settle(_failed(run, 0.0, str(lacking[run.data.folder])))
    try:
        while waiting or started:
            if not stopping and stop():
                stopping = True
                signal_all()
            while stopping and waiting:
                now = _glance(waiting[0])
                settle(Outcome(waiting.popleft(), "finished" if now.state == "finished" else "stopped", now))
            while len(started) < jobs and (free := _next(waiting, settle)) is not None:
                try:
                    started.append(_start(sweep, free, jobs))
                except (OSError, UserError) as error:
                    settle(_failed(free, 0.0, f"cannot be started ({error})"))
            blocked = bool(waiting) and not started
            if blocked and waiting[0].name != waited_for:
                waited_for = waiting[0].name
                owner = _glance(waiting[0]).owner or "another process"
                show_line(f"{waited_for}: waiting for {owner}, which works on it")
            working(started)
            for one in [one for one in started if one.process.poll() is not None]:
                started.remove(one)
                outcome = _ended(one)
                if outcome is None:
                    waiting.append(one.run)
                else:
                    settle(outcome)
            if waiting or started:
                time.sleep(POLLED_OTHERS if blocked else POLLED)
    finally:
        signal_all()
        for one in started:
            one.process.wait()
    return [outcomes[run.index] for run in runs]


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


def _next(waiting: deque[PlannedRun], settle: Callable[[Outcome], None]) -> PlannedRun | None:
    """Take the first run that no process works on; settle the runs that others have finished meanwhile."""
    for _ in range(len(waiting)):
        run = waiting.popleft()
        try:
            standing = look(run)
        except UserError as error:
            settle(_failed(run, 0.0, str(error)))
            continue
        if standing.state == "finished":
            settle(Outcome(run, "finished", standing))
        elif standing.state == "busy":
            waiting.append(run)
        else:
            return run
    return None


def command(run: PlannedRun, ranks: int) -> list[str]:
    """Return the command that starts a run."""
    words = ["train", str(run.folder / CONFIGURATION), "--out", str(run.folder), "--resume"]
    return [*launcher(ranks), *this_fedmpi(), *words]


def _start(sweep: Sweep, run: PlannedRun, jobs: int) -> Started:
    write_notes(sweep, (run,))  # once more: its folder may have been removed since
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
    return Started(run, process, time.monotonic(), begin)


def _ended(one: Started) -> Outcome | None:
    """Return the outcome of a run after its process ends; None to wait for another process that uses its folder.

    Two sweeps of one file may start the same run at almost the same time. Then the later one is rejected, or it starts
    after the earlier one and locks the finished run's folder for a moment, which this function may observe.
    """
    code, seconds = one.process.returncode, time.monotonic() - one.since
    standing, why = _glance(one.run), last_words(one.run.folder / OUTPUT, one.begin, any_line=True)
    if (code == 2 and "is in use by" in why) or (code == 0 and standing.state == "busy"):
        return None
    if code == 0 and standing.state == "finished":
        return Outcome(one.run, "finished", standing, seconds)
    if code in (STOPPED_AFTER_SAVING, -signal.SIGUSR1, -signal.SIGTERM):  # the signals: before it heeds them
        return Outcome(one.run, "stopped", standing, seconds)
    if code == 0:
        try:
            rounds = look(one.run).rounds
            why = f"its process ended well, but {one.run.folder} has {rounds} of {one.run.config.rounds} rounds"
        except UserError as error:
            why = str(error)
    return _failed(one.run, seconds, how_it_ended(code, why))


def _failed(run: PlannedRun, seconds: float, why: str) -> Outcome:
    with suppress(OSError):
        _note(run, why)
    return Outcome(run, "failed", Standing("begun", recorded(run.folder)), seconds, why)
