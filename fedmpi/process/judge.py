"""Who holds up a job, and when that is to be said: the watchdog's judgement, of states in made-up or real time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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


class State(NamedTuple):
    """What a rank reports of itself; `idle` are the milliseconds since anything else of it has changed."""

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
        self._round, self._elapsed, self._reported, self._over, self._pointed = -1, 0.0, 0.0, False, False

    @property
    def limit(self) -> float:
        """Seconds after which the round at work is late."""
        return self.patience if self.longest is None else LATE_TIMES * self.longest + self.patience

    def look(self, seconds: float, own: State, received: Mapping[int, State]) -> Finding | None:
        """Take note of the ranks' states.

        Parameters
        ----------
        seconds : float
            Since the last look.
        own : State
        received : mapping of int to State
            What has come in of others since then.

        Returns
        -------
        Finding or None
            Somebody holds up the job, and this is to be said now: when the round is late, each time it has taken twice
            as long as when that was said last, and when the job is to be ended.
        """
        for rank in self._silence:
            self._silence[rank] = 0.0 if rank in received else self._silence[rank] + seconds
        self._states.update(received)
        if own.round != self._round:
            if own.round > own.first:  # some have been finished, perhaps all of them since the last look
                self.longest = max(self.longest or 0.0, self._elapsed if self._round >= 0 else seconds)
            self._round, self._elapsed, self._reported, self._over, self._pointed = own.round, 0.0, 0.0, False, False
        self._elapsed += seconds
        deputy = SECONDS_PER_DEPUTY * max(0, self.rank - 1)
        if self._elapsed < self.limit + deputy:
            return None
        late, stuck = self._late(own)
        if not (late or stuck):
            return None
        over = self._elapsed >= self._end + deputy
        due = self._elapsed >= 2 * self._reported and self._matters(own)
        if not due and (self._over or not over):
            return None
        self._reported, self._over = self._elapsed, over
        return Finding(self._elapsed, late, over)

    def known(self, rank: int) -> State | None:
        """What another rank has last reported of itself, as far as this one receives it."""
        return self._states.get(rank)

    def points(self, own: State) -> bool:
        """Whether this rank itself holds up the job, as far as it knows, and is to report where it is: once a round."""
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
