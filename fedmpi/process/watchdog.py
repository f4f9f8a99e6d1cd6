"""The watchdog: notices a rank that does nothing any more while the others wait for it, says so, and may end the job.

A thread of each rank wakes once a second, looks at what its rank is doing and exchanges that with rank 0, which judges
all ranks; rank 0 itself is judged by the others. A round is late after `LATE_TIMES` the longest round so far plus the
patience of the configuration, or a few seconds after a process was stopped alone, as its neighbours on the host see. A
rank that holds up the others tells itself in which line of code it is. Time counts
only while the judge itself runs: a job that is suspended as a whole, as batch systems do, is not late for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from fedmpi.cluster import Cluster
from fedmpi.cluster.heartbeat import Heartbeat
from fedmpi.common.activity import PHASES, Activity, activity
from fedmpi.common.frames import place_of
from fedmpi.common.processes import Process
from fedmpi.config import Config
from fedmpi.process.judge import LONGEST_LOOK, Finding, Judge, State
from fedmpi.process.signals import end_now

log = logging.getLogger("fedmpi")

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_GONE = 3.0
"""That the launcher has to end the job by itself when a process of it is gone."""
SECONDS_STOPPED = 5.0
"""That a process is stopped (SIGSTOP) while another of its host runs, after which that is said, or the job ended."""
SECONDS_TO_REPORT = 2.0
"""That a rank has to report where it is before the job is ended."""
OUR_FAULT = 1


class Own:
    """This rank's own state, look after look."""

    def __init__(self, source: Activity):
        self._source, self._turns, self._idle = source, -1, 0.0

    def look(self, seconds: float) -> State:
        """What the rank is doing, `seconds` after the last look."""
        source = self._source
        self._idle = self._idle + seconds if source.turns == self._turns else 0.0
        self._turns = source.turns
        waiting, idle = int(source.waiting), round(1000 * self._idle)
        return State(source.phase, source.round, source.first, source.client, source.beside, waiting, idle)


STANDING = ("", "T", "t")
"""Letters of processes that report nothing: gone, stopped by a signal, stopped by a debugger."""
LETTERS = {"T": "its process is stopped", "t": "a debugger has stopped it", "D": "it waits for a disk or the network"}


class Watchdog:
    """Watches the ranks of a job from this one.

    Parameters
    ----------
    cluster : Cluster
    patience : float
        See `Judge`.
    ends : bool
        Whether a job that stands still is ended.
    goes_on : bool
        Whether the job is to go on where the process of a rank is gone; MPI reports it.
    """

    def __init__(self, cluster: Cluster, patience: float, ends: bool, goes_on: bool = False):
        self.ends = ends
        self.rank, self.size = cluster.rank, cluster.size
        self.processes = processes(cluster)
        own = self.processes[self.rank]
        neighbours = [
            rank
            for rank, process in enumerate(self.processes)
            if process.host == own.host and process.seen and rank != self.rank
        ]
        self.neighbour = min(neighbours, key=lambda rank: (rank - self.rank) % self.size) if neighbours else None
        self._stopped = dict.fromkeys(neighbours, 0.0)
        self.neighbour = None if goes_on else self.neighbour
        self._visible = {*neighbours, self.rank}
        self._judge, self._own = Judge(self.rank, self.size, patience), Own(activity)
        self._heartbeat: Heartbeat | None = cluster.heartbeat(len(State._fields))
        self._judges = self.size == 1 or self._heartbeat is not None
        self._gone = 0.0
        self._watched = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fedmpi-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch; collective."""
        self._closing.set()
        self._thread.join()
        if self._heartbeat is not None:
            self._heartbeat.close()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(SECONDS_BETWEEN_LOOKS):
            now = time.monotonic()
            self._look(min(now - before, LONGEST_LOOK))
            before = now

    def _look(self, seconds: float) -> None:
        own = self._own.look(seconds)
        received = {} if self._heartbeat is None else self._heartbeat.beat(np.array(own, np.int64))
        if PHASES[own.phase] != "end":
            self._mind_the_neighbour(seconds, own)
        self._mind_the_stopped(seconds, own)
        if not self._judges or (self._heartbeat is not None and self._heartbeat.ended):
            return
        states = {rank: State(*state.tolist()) for rank, state in received.items()}
        found = self._judge.look(seconds, own, states)
        if self._judge.points(own):  # in a thread of its own: looking for files may hang as the rank does
            threading.Thread(target=self._point, args=(own,), name="fedmpi-pointing", daemon=True).start()
        if found is None:
            return
        if found.over and self.ends:
            time.sleep(SECONDS_TO_REPORT)
        self._report(found, own)

    def _report(self, found: Finding, own: State) -> None:
        sentence = self.words(found, own)
        if found.over and self.ends:
            end_now(OUR_FAULT, f"{sentence}: the job is ended, --resume goes on from the last checkpoint")
        log.warning("%s", sentence)

    def _point(self, own: State) -> None:
        place = place_of(self._watched)
        log.warning("rank %d on %s is at %s (%s)", self.rank, self.processes[self.rank].host, place, doing_of(own))

    def _mind_the_neighbour(self, seconds: float, own: State) -> None:
        """End the job where the process of the next rank on this host has gone, and the launcher does not."""
        if self.neighbour is None:
            return
        process = self.processes[self.neighbour]
        self._gone = 0.0 if process.seen else self._gone + seconds
        if self._gone >= SECONDS_GONE:
            name, moment = f"rank {self.neighbour} on {process.host}", moment_of(own)
            end_now(
                OUR_FAULT,
                f"{name} has left the job {moment}: its process {process.pid} is gone; --resume goes on from the last "
                "checkpoint",
            )

    def _mind_the_stopped(self, seconds: float, own: State) -> None:
        """Tell of ranks that a signal has stopped, not as part of the whole job, and end the job where it is to be.

        Of the ranks of a host that run, the lowest reports all others.
        """
        letters = {rank: self.processes[rank].seen for rank in self._stopped if rank < self.rank}
        if any(letter not in STANDING for letter in letters.values()):
            self._stopped = dict.fromkeys(self._stopped, 0.0)
            return
        before = self._stopped
        letters |= {rank: self.processes[rank].seen for rank in before if rank > self.rank}
        self._stopped = {rank: before[rank] + seconds if letters[rank] == "T" else 0.0 for rank in before}
        late = {rank: still for rank, still in self._stopped.items() if still >= SECONDS_STOPPED}
        if any(before[rank] < SECONDS_STOPPED for rank in late):
            known = {rank: (self._judge.known(rank), still) for rank, still in late.items()}
            self._report(Finding(max(late.values()), known, over=True), own)

    def words(self, found: Finding, own: State) -> str:
        """One sentence about it."""
        moment = moment_of(own)
        if not found.late:
            return f"all {self.size} ranks have waited for one another {moment} for {found.seconds:.0f} s"
        details = "; ".join(self._about(rank, *known) for rank, known in found.late.items())
        if self.size == 1:
            return f"nothing has been finished for {found.late[0][0].idle_seconds:.0f} s {moment} ({details})"  # type: ignore[union-attr]
        names = ", ".join(f"rank {rank} on {self.processes[rank].host}" for rank in found.late)
        return f"waiting {found.seconds:.0f} s for {names} {moment} ({details})"

    def _about(self, rank: int, state: State | None, silence: float) -> str:
        doing = "" if state is None else doing_of(state)
        if silence:
            letter = self.processes[rank].seen if rank in self._visible else ""
            why = LETTERS.get(letter, "")
            if rank in self._visible and not letter:
                why = "its process is gone"
            last = f"it was {doing} then" if doing else ""
            return ", ".join(filter(None, [f"no sign of life for {silence:.0f} s", why, last]))
        return doing


def doing_of(state: State) -> str:
    """What a rank does, in words that follow "it was"."""
    since = f" for {state.idle_seconds:.0f} s" if state.idle >= 1000 else ""
    if state.client >= 0:
        others = f" and {state.beside} beside it" if state.beside else ""
        return f"training client {state.client}{others}{since}"
    return f"at the {PHASES[state.phase]}{since}"


def moment_of(state: State) -> str:
    """Where in the run a rank is, in words."""
    phase = PHASES[state.phase]
    return (
        f"in the {phase} of the run" if state.round < 0 or phase == "end" else f"in the {phase} of round {state.round}"
    )


def processes(cluster: Cluster) -> list[Process]:
    """Those of all ranks, on all ranks; collective."""
    own = Process.of(os.getpid())
    encoded = np.frombuffer(f"{own.host} {own.pid} {own.started}\n".encode(), np.uint8)
    gathered = cluster.gather(encoded)
    (everybody,) = cluster.broadcast(None if gathered is None else [np.concatenate(gathered)])
    lines = [line.split(" ") for line in everybody.tobytes().decode().splitlines()]
    return [Process(host, int(pid), int(started)) for host, pid, started in lines]


@contextmanager
def watched(cluster: Cluster, config: Config) -> Iterator[None]:
    """Within: the ranks are watched as the configuration says; collective."""
    activity.begin()
    if config.cluster.watchdog == "off":
        yield
        return
    part = config.cluster
    watchdog = Watchdog(cluster, part.patience, part.watchdog == "end", part.on_rank_failure == "shrink")
    try:
        yield
    finally:
        watchdog.close()
