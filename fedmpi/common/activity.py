"""What this process is doing: noted where the work is done, read by the watchdog, which asks whether it still moves."""

from __future__ import annotations

PHASES = (
    *("start", "plan", "work", "inquiry", "sum", "step", "client evaluation"),
    *("record", "evaluation", "checkpoint", "end"),
)


class Activity:
    """Where this rank is in a run; a few assignments a client, so that it costs nothing to keep.

    Attributes
    ----------
    phase : int
        Place in `PHASES`.
    round, first : int
        The round at work and the first one of this process, counted from 0; −1 before it.
    client : int
        The one at work, −1 for none; with those side by side with it, the first.
    beside : int
        How many others are trained side by side with it.
    waiting : bool
        Whether this rank waits for others.
    turns : int
        How often anything of this has changed, or a step was done.
    """

    __slots__ = ("beside", "client", "first", "phase", "round", "turns", "waiting")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A run starts."""
        self.round, self.first, self.turns, self.waiting = -1, -1, 0, False
        self.enter("start")

    def enter(self, phase: str, round: int | None = None) -> int:
        """Go on to a phase, and to a round if one is given; the place of the phase before."""
        before = getattr(self, "phase", 0)
        self.phase = PHASES.index(phase)
        if round is not None:
            self.first = round if self.round < 0 else self.first
            self.round = round
        self.client, self.beside = -1, 0
        self.turns += 1
        return before

    def work_on(self, client: int, beside: int = 0) -> None:
        """Begin with a client, or with several side by side."""
        self.client, self.beside = client, beside
        self.turns += 1

    def go_on(self) -> None:
        """A step of the work is done: a batch, or several side by side."""
        self.turns += 1

    def wait(self, waiting: bool) -> None:
        """Begin or end to wait for others."""
        self.waiting = waiting
        self.turns += 1


activity = Activity()
"""That of this process: runs of several threads wait for one another, so there is one at a time."""
