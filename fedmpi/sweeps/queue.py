"""The runs of a sweep that wait, those at work, each in a process of its own, and what became of the others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedmpi.common.errors import UserError
from fedmpi.mpi.device import MOST_THREADS, cores_allowed
from fedmpi.mpi.launch import library_version
from fedmpi.process.signals import STOPPED_AFTER_SAVING
from fedmpi.sweeps.children import ends_with_parent, how_it_ended, last_words
from fedmpi.sweeps.planned_runs import PlannedRun, Sweep
from fedmpi.sweeps.standing import CONFIGURATION, OUTPUT, Standing, look, note, recorded, write_notes

RunEnding = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    run: PlannedRun
    ending: RunEnding
    standing: Standing
    seconds: float = 0.0  # What it took now; 0 where it was finished before
    why: str = ""  # Of a failed one, what it said last


@dataclass
class Started:
    """A run at work; its output begins behind that of earlier ones, at byte `begin`."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    since: float
    begin: int


class RunQueue:
    """Runs that wait, are at work, or have come to their end."""

    def __init__(self, sweep: Sweep, jobs: int, show_line: Callable[[str], None], done: Callable[[Outcome], None]):
        self.sweep, self.jobs, self.show_line, self.done = sweep, jobs, show_line, done
        self.waiting: deque[PlannedRun] = deque()
        self.started: list[Started] = []
        self.outcomes: dict[int, Outcome] = {}
        self._stopping, self._waited_for = False, ""

    @property
    def goes_on(self) -> bool:
        """Whether any run has not come to its end."""
        return bool(self.waiting or self.started)

    @property
    def blocked(self) -> bool:
        """Whether others work on all that are left."""
        return bool(self.waiting) and not self.started

    def add(self, run: PlannedRun, standing: Standing) -> None:
        """Have a run wait, unless it is finished."""
        if standing.state == "finished":
            self._settle(Outcome(run, "finished", standing))
        else:
            self.waiting.append(run)

    def drop(self, lacking: dict[Path, UserError]) -> None:
        """Settle the waiting runs whose shards could not be prepared, each with the reason."""
        for run in list(self.waiting):
            if run.data is not None and run.data.folder in lacking:
                self.waiting.remove(run)
                self._settle(_failed(run, 0.0, str(lacking[run.data.folder])))

    def stop(self) -> None:
        """Have the runs at work save and stop, and start no other; those that wait then are settled."""
        if not self._stopping:
            self._stopping = True
            self._signal()

    def settle_waiting(self) -> None:
        """Once stopped: the runs that wait end here."""
        while self._stopping and self.waiting:
            run = self.waiting.popleft()
            now = _glance(run)
            self._settle(Outcome(run, "finished" if now.state == "finished" else "stopped", now))

    def start_free(self) -> None:
        """Start as many runs that nobody works on as may be at work."""
        while len(self.started) < self.jobs and (free := _next(self.waiting, self._settle)) is not None:
            try:
                self.started.append(_start(self.sweep, free, self.jobs))
            except (OSError, UserError) as error:
                self._settle(_failed(free, 0.0, f"cannot be started ({error})"))

    def tell_who_blocks(self) -> None:
        """Say, once for each run, who works on the one that is waited for."""
        if self.blocked and self.waiting[0].name != self._waited_for:
            self._waited_for = self.waiting[0].name
            holder = _glance(self.waiting[0]).holder or "another process"
            self.show_line(f"{self._waited_for}: waiting for {holder}, which works on it")

    def collect(self) -> None:
        """Settle the runs whose processes have ended; what another process took meanwhile waits again."""
        for one in [one for one in self.started if one.process.poll() is not None]:
            self.started.remove(one)
            outcome = _ended(one)
            if outcome is None:
                self.waiting.append(one.run)
            else:
                self._settle(outcome)

    def close(self) -> None:
        """Have those still at work save and stop, and wait for it."""
        self._signal()
        for one in self.started:
            one.process.wait()

    def _settle(self, outcome: Outcome) -> None:
        self.outcomes[outcome.run.index] = outcome
        self.done(outcome)

    def _signal(self) -> None:
        for one in self.started:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGUSR1)


def command(run: PlannedRun, ranks: int) -> list[str]:
    """What a run is started with."""
    words = ["-m", "fedmpi", "train", str(run.folder / CONFIGURATION), "--out", str(run.folder), "--resume"]
    return [*launcher(ranks), sys.executable, *words]


def launcher(ranks: int) -> list[str]:
    """The command line before that of a rank; none for one."""
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
