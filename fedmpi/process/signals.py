"""Signals that ask a run to save and stop: SIGTERM, SIGUSR1 (batch systems) and SIGINT."""

from __future__ import annotations

import signal
from types import FrameType

STOPPED_AFTER_SAVING = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupt:
    """Remembers that a signal arrived; only a command installs it, before MPI starts, in the main thread."""

    def __init__(self) -> None:
        self.requested = False
        self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}

    def asked(self) -> bool:
        """Whether a signal has arrived: the `stop` of a run."""
        return self.requested

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def ignore(self) -> None:
        """Let no further signal disturb the end of a run that has saved and stops: batch systems send several."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Put the earlier handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
