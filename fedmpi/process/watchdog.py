"""The watchdog: notices a rank that does nothing any more while the others wait for it, says so, and may end the job.

A thread of each rank wakes once a second, looks at what its rank is doing and exchanges that with rank 0, which judges
all ranks; rank 0 itself is judged by the others. A round is late after `LATE_TIMES` the longest round so far plus the
patience of the configuration. A rank that holds up the others tells itself in which line of code it is. Time counts
only while the judge itself runs: a job that is suspended as a whole, as batch systems do, is not late for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedmpi.cluster import Cluster
from fedmpi.cluster.heartbeat import Heartbeat
from fedmpi.common.activity import PHASES, Activity, activity
from fedmpi.common.frames import place_of
from fedmpi.common.processes import Process
from fedmpi.config import Config
from fedmpi.process.signals import end_now

log = logging.getLogger("fedmpi")

SECONDS_BETWEEN_LOOKS = 1.0
LONGEST_LOOK = 3.0
"""Seconds that one look counts at most: more have passed only while this process was suspended."""
LATE_TIMES = 10
UNLEARNED_TIMES = 30
"""Times the patience after which a job ends that has not finished a round."""
ALONE_TIMES = 5
"""Times the patience after which a job that has not finished a round says so also where nobody waits for anybody."""
SECONDS_OF_SILENCE = (LONGEST_LOOK, 10.0)
"""Without a sign of life, after which a rank may be the one that holds up the others: the patience, within these."""
SECONDS_PER_DEPUTY = 10.0
"""Rank 1 speaks where rank 0 is silent, and rank 2 so much later where rank 1 is, too."""
SECONDS_GONE = 3.0
"""That the launcher has to end the job by itself when a process of it is gone."""
SECONDS_TO_TELL = 2.0
"""That a rank has to tell where it is before the job is ended."""
OUR_FAULT = 1


class State(NamedTuple):
    """What a rank tells of itself; `idle` are the milliseconds since anything else of it has changed."""

    phase: int
    round: int
    first: int
    client: int
    beside: int
    waiting: int
    idle: int

    @property
    def idle_seconds(self) -> float:
        return self.idle / 1000


@dataclass(frozen=True)
class Finding:
    """A job that stands still.

    Attributes
    ----------
    seconds : float
        How long the round has taken so far.
    late : dict of int to (State or None, float)
        The ranks that hold up the others: what is known of each, and the seconds since its last sign of life. Empty
        where all ranks wait for one another.
    over : bool
        Whether it is to be ended.
    """

    seconds: float
    late: Mapping[int, tuple[State | None, float]]
    over: bool


class Judge:
    """Decides from the states of the ranks, look after look, whether somebody holds up the job.

    Parameters
    ----------
    rank, size : int
        The rank that judges: rank 0 all of them, each other one only rank 0.
    patience : float
        Seconds.
    """

    def __init__(self, rank: int, size: int, patience: float):
        self.rank, self.size, self.patience = rank, size, patience
        self.longest: float | None = None
        others = range(1, size) if rank == 0 else [0]
        self._silence = dict.fromkeys(others, 0.0)
        self._states: dict[int, State] = {}
        self._round, self._elapsed, self._told, self._over, self._pointed = -1, 0.0, 0.0, False, False

    @property
    def limit(self) -> float:
        """Seconds after which the round at work is late."""
        return self.patience if self.longest is None else LATE_TIMES * self.longest + self.patience

    def look(self, seconds: float, own: State, heard: Mapping[int, State]) -> Finding | None:
        """Take note of the ranks' states.

        Parameters
        ----------
        seconds : float
            Since the last look.
        own : State
        heard : mapping of int to State
            What has come in of others since then.

        Returns
        -------
        Finding or None
            Somebody holds up the job, and this is to be said now: when the round is late, each time it has taken twice
            as long as when that was said last, and when the job is to be ended.
        """
        for rank in self._silence:
            self._silence[rank] = 0.0 if rank in heard else self._silence[rank] + seconds
        self._states.update(heard)
        if own.round != self._round:
            if own.round > own.first:  # some have been finished, perhaps all of them since the last look
                self.longest = max(self.longest or 0.0, self._elapsed if self._round >= 0 else seconds)
            self._round, self._elapsed, self._told, self._over, self._pointed = own.round, 0.0, 0.0, False, False
        self._elapsed += seconds
        deputy = SECONDS_PER_DEPUTY * max(0, self.rank - 1)
        if self._elapsed < self.limit + deputy:
            return None
        late, stuck = self._late(own)
        if not (late or stuck):
            return None
        over = self._elapsed >= self._end + deputy
        due = self._elapsed >= 2 * self._told and self._matters(own)
        if not due and (self._over or not over):
            return None
        self._told, self._over = self._elapsed, over
        return Finding(self._elapsed, late, over)

    def points(self, own: State) -> bool:
        """Whether this rank itself holds up the job, as far as it knows, and is to tell where it is: once a round."""
        if self._pointed or own.waiting or min(self._elapsed - self.limit, own.idle_seconds - self.patience) < 0:
            return False
        self._pointed = self._matters(own)
        return self._pointed

    @property
    def _end(self) -> float:
        return UNLEARNED_TIMES * self.patience if self.longest is None else self.limit

    def _late(self, own: State) -> tuple[Mapping[int, tuple[State | None, float]], bool]:
        """The ranks that hold up the others, and whether all wait for one another."""
        least, most = SECONDS_OF_SILENCE
        quiet = max(least, min(most, self.patience))
        silent = {rank: seconds for rank, seconds in self._silence.items() if seconds >= quiet}
        if silent:  # whoever else does nothing may hang in a call of MPI that takes these
            return {rank: (self._states.get(rank), seconds) for rank, seconds in silent.items()}, False
        if self.rank:
            return {}, False
        everybody = {0: own, **self._states}
        idle = {rank: state for rank, state in everybody.items() if state.idle_seconds >= self.patience}
        late = {rank: (state, 0.0) for rank, state in idle.items() if not state.waiting}
        return late, not late and len(idle) == self.size > 1

    def _matters(self, own: State) -> bool:
        """Whether a late round is worth a word: one that loads and tries, where somebody waits or after long."""
        if self.longest is not None or self._elapsed >= ALONE_TIMES * self.patience:
            return True
        return self.size > 1 and (bool(own.waiting) or any(state.waiting for state in self._states.values()))


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
        Whether the job is to go on where the process of a rank is gone; MPI tells of it.
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
        heard = {} if self._heartbeat is None else self._heartbeat.beat(np.array(own, np.int64))
        if PHASES[own.phase] != "end":
            self._mind_the_neighbour(seconds, own)
        if not self._judges or (self._heartbeat is not None and self._heartbeat.ended):
            return
        states = {rank: State(*state.tolist()) for rank, state in heard.items()}
        found = self._judge.look(seconds, own, states)
        if self._judge.points(own):  # in a thread of its own: looking for files may hang as the rank does
            threading.Thread(target=self._point, args=(own,), name="fedmpi-pointing", daemon=True).start()
        if found is None:
            return
        said = self.words(found, own)
        if found.over and self.ends:
            time.sleep(SECONDS_TO_TELL)
            end_now(OUR_FAULT, f"{said}: the job is ended, --resume goes on from the last checkpoint")
        log.warning("%s", said)

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

    def words(self, found: Finding, own: State) -> str:
        """One sentence about it."""
        moment = moment_of(own)
        if not found.late:
            return f"all {self.size} ranks have waited for one another {moment} for {found.seconds:.0f} s"
        told = "; ".join(self._about(rank, *known) for rank, known in found.late.items())
        if self.size == 1:
            return f"nothing has been finished for {found.late[0][0].idle_seconds:.0f} s {moment} ({told})"  # type: ignore[union-attr]
        names = ", ".join(f"rank {rank} on {self.processes[rank].host}" for rank in found.late)
        return f"waiting {found.seconds:.0f} s for {names} {moment} ({told})"

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
    told = np.frombuffer(f"{own.host} {own.pid} {own.started}\n".encode(), np.uint8)
    gathered = cluster.gather(told)
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
