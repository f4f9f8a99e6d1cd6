"""Starting the runs of a sweep, each as a process of its own: the command that a user would give.

Finished runs are passed over, stopped and failed ones continued; what another process works on is waited for. A run
that fails stops no other. A signal is handed on: the runs save, and the sweep started again goes on with them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedmpi.cluster.launcher import library_version
from fedmpi.cluster.resources import MOST_THREADS, cores_allowed
from fedmpi.common.errors import MissingFiles, RunFailure, UserError
from fedmpi.common.files import refuse_unwritable
from fedmpi.process.signals import STOPPED_AFTER_SAVING
from fedmpi.sweeps.children import ends_with_parent, how_it_ended, last_words
from fedmpi.sweeps.plan import PlannedRun, Sweep
from fedmpi.sweeps.prepared import Preparation, Stopped, prepare
from fedmpi.sweeps.standing import CONFIGURATION, OUTPUT, Standing, announce, look, note, recorded

POLLED, POLLED_OTHERS = 0.1, 1.0
"""Seconds between two looks at own processes, and at runs of others."""

RunEnding = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes
    ----------
    run : PlannedRun
    ending : {"finished", "failed", "stopped"}
    standing : Standing
    seconds : float
        What it took now; 0 where it was finished before.
    why : str
        Of a failed one, what it said last.
    """

    run: PlannedRun
    ending: RunEnding
    standing: Standing
    seconds: float = 0.0
    why: str = ""


@dataclass
class Started:
    """A run at work; its output begins behind that of earlier ones, at byte `begin`."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    since: float
    begin: int


def check(sweep: Sweep, runs: Sequence[PlannedRun]) -> list[Standing]:
    """How far each run is; whatever can be refused is refused here, before anything is started.

    Raises
    ------
    UserError
        Folders that cannot be written or hold another run, shards that cannot be prepared, no mpiexec.
    """
    standings, missing = look_over(sweep, runs)
    if missing:
        raise missing[0]
    return standings


def look_over(sweep: Sweep, runs: Sequence[PlannedRun]) -> tuple[list[Standing], list[MissingFiles]]:
    """How far each run is, and what says which files of data sets are missing; all else is refused as in `check`."""
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
    """How far each run is, where their folders are, or can be made.

    Raises
    ------
    UserError
        A file where a folder would lie, one that cannot be written, or one of another run.
    """
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
    """Bring the runs to their end.

    Parameters
    ----------
    sweep : Sweep
    runs : sequence of PlannedRun
        Those of its runs that are wanted.
    jobs : int
        Runs at work at the same time.
    stop : callable
        Asked all the time; true has the runs save and stop.
    tell, done, working : callables
        Hear of preparations, of runs that came to an end, and of those at work.

    Returns
    -------
    list of Outcome
        In the order of `runs`.

    Raises
    ------
    UserError
        As `check`.
    """
    standings = check(sweep, runs)
    announce(sweep, tuple(runs))
    outcomes: dict[int, Outcome] = {}
    waiting: deque[PlannedRun] = deque()

    def settle(outcome: Outcome) -> None:
        outcomes[outcome.run.index] = outcome
        done(outcome)

    for run, standing in zip(runs, standings, strict=True):
        if standing.state == "finished":
            settle(Outcome(run, "finished", standing))
        else:
            waiting.append(run)
    lacking, _ = _prepared(_shards(waiting), show_line, stop)
    for run in [run for run in waiting if run.data is not None and run.data.folder in lacking]:
        waiting.remove(run)
        settle(_failed(run, 0.0, str(lacking[run.data.folder]) if run.data else ""))
    started: list[Started] = []
    stopping, waited_for = False, ""
    try:
        while waiting or started:
            if stop() and not stopping:
                stopping = True
                for one in started:
                    _signal(one.process, signal.SIGUSR1)
            if stopping:
                while waiting:
                    run = waiting.popleft()
                    now = _glance(run)
                    settle(Outcome(run, "finished" if now.state == "finished" else "stopped", now))
            while len(started) < jobs and (free := _next(waiting, settle)) is not None:
                try:
                    started.append(_start(sweep, free, jobs))
                except (OSError, UserError) as error:
                    settle(_failed(free, 0.0, f"cannot be started ({error})"))
            blocked = bool(waiting) and not started  # others work on all that are left
            if blocked and waiting[0].name != waited_for:
                waited_for = waiting[0].name
                show_line(
                    f"{waited_for}: waiting for {_glance(waiting[0]).holder or 'another process'}, which works on it"
                )
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
        for one in started:
            _signal(one.process, signal.SIGUSR1)
        for one in started:
            one.process.wait()
    return [outcomes[run.index] for run in runs]


def prepare_shards(runs: Sequence[PlannedRun], show_line: Callable[[str], None], stop: Callable[[], bool]) -> int:
    """Prepare what the runs need and train nothing; the exit code. What cannot be prepared keeps nothing else back.

    Raises
    ------
    UserError
        Shards are refused.
    RunFailure
        Preparing some of them failed.
    """
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
    """Refuse a run whose shards are missing where they cannot be prepared: in a job of several ranks.

    Raises
    ------
    UserError
    """
    if run.data is not None and not run.data.ready():
        raise UserError(
            f"{run.data.folder} is not prepared, which one process has to do: fedmpi sweep {sweep.origin} --out "
            f"{sweep.out} --index {run.index} --prepare"
        )


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 where a run failed, 75 where one was stopped, else 0."""
    endings = {one.ending for one in outcomes}
    return 1 if "failed" in endings else STOPPED_AFTER_SAVING if "stopped" in endings else 0


def command(run: PlannedRun, ranks: int) -> list[str]:
    """What a run is started with."""
    words = ["-m", "fedmpi", "train", str(run.folder / CONFIGURATION), "--out", str(run.folder), "--resume"]
    return [*launcher(ranks), sys.executable, *words]


def launcher(ranks: int) -> list[str]:
    """The command line before that of a rank; none for one.

    Raises
    ------
    UserError
        There is no mpiexec.
    """
    if ranks == 1:
        return []
    own = Path(sys.prefix) / "bin" / "mpiexec"
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise UserError(f"ranks = {ranks}, but there is no mpiexec: pip install 'fedmpi[mpi]', or leave out ranks")
    unbound = ["--bind-to", "none"] if library_version().startswith("Open MPI") else []
    return [found, "-n", str(ranks), *unbound]


def _next(waiting: deque[PlannedRun], settle: Callable[[Outcome], None]) -> PlannedRun | None:
    """Take the first run that nobody works on; those that others have finished meanwhile are settled."""
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


def _start(sweep: Sweep, run: PlannedRun, jobs: int) -> Started:
    announce(sweep, (run,))  # once more: its folder may have been removed since
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
    """What became of a run whose process has ended; None where another process has its folder, to be waited for.

    Two sweeps of one file start the same run at almost the same time: the later one is refused, or comes when the
    earlier one is done, and holds the finished run's folder for a moment while that is looked at here.
    """
    code, seconds = one.process.returncode, time.monotonic() - one.since
    standing, why = _glance(one.run), last_words(one.run.folder / OUTPUT, one.begin)
    taken = "is in use by" in why or "is being taken by several" in why
    if code == 2 and taken or code == 0 and standing.state == "busy":
        return None
    if code == 0 and standing.state == "finished":
        return Outcome(one.run, "finished", standing, seconds)
    if code in (STOPPED_AFTER_SAVING, -signal.SIGUSR1, -signal.SIGTERM):  # the signals: before it heeds them
        return Outcome(one.run, "stopped", standing, seconds)
    return _failed(one.run, seconds, how_it_ended(code, why) if code else _not_finished(one.run))


def _not_finished(run: PlannedRun) -> str:
    """Why a run whose process ended well is not finished."""
    try:
        standing = look(run)
    except UserError as error:
        return str(error)
    return f"its process ended well, but {run.folder} has {standing.rounds} of {run.config.rounds} rounds"


def _glance(run: PlannedRun) -> Standing:
    """As `look`, of a run that was looked at before."""
    try:
        return look(run)
    except UserError:
        return Standing("begun", recorded(run.folder))


def _failed(run: PlannedRun, seconds: float, why: str) -> Outcome:
    with suppress(OSError):
        note(run, why)
    return Outcome(run, "failed", Standing("begun", recorded(run.folder)), seconds, why)


def _prepared(
    shards: Sequence[Preparation], show_line: Callable[[str], None], stop: Callable[[], bool]
) -> tuple[dict[Path, UserError], bool]:
    """Prepare the shards; folders of those that could not be, with the reason, and whether it was asked to stop."""
    lacking: dict[Path, UserError] = {}
    for data in shards:
        try:
            prepare(data, show_line, stop)
        except Stopped:
            return lacking, True
        except UserError as error:  # RunFailure is one
            lacking[data.folder] = error
    return lacking, False


def _shards(runs: Iterable[PlannedRun]) -> list[Preparation]:
    return list({run.data.folder: run.data for run in runs if run.data is not None}.values())


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)
