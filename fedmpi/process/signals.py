"""Signals that make a run save and stop: SIGTERM, SIGUSR1 (batch systems), SIGINT, and SIGHUP of a closed terminal; a
second SIGTERM or SIGINT ends it at once.

This module imports nothing slow: the commands install the handlers before anything else is loaded.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from fedmpi.common.errors import UNWRITABLE

STOPPED_AFTER_SAVING = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
FORCING = (signal.SIGTERM, signal.SIGINT)
"""Signals whose repetition ends the job without saving; all others are warnings, however often they arrive."""
SECONDS_OF_COPIES = 2.0
"""Seconds after the first signal within which others are copies: launchers and batch systems may send several."""
SECONDS_FOR_RANK_0 = 1.0


class Interrupt:
    """Record of arrived signals; only a command installs it, as its first action, in the main thread.

    A separate thread is notified of every signal at once, even while the main thread waits inside MPI or a file system,
    where handlers do not run.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first: float | None = None
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reading,), name="fedmpi-signals", daemon=True).start()
        without_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as nohup starts it
        heeded = SIGNALS[:-1] if without_terminal else SIGNALS
        self._previous = {number: signal.signal(number, self._remember) for number in heeded}

    def asked(self) -> bool:
        """Check whether a signal has arrived: the `stop` of a run."""
        return self.requested

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _listen(self, reading: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # only the main thread may receive them
        while received := os.read(reading, 64):
            self.requested |= any(number in SIGNALS for number in received)
            for number in received:
                if number in FORCING:
                    self._count(signal.Signals(number))

    def _count(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            if number == signal.SIGINT and not _rank():
                _print_line("stopping: the round at work is finished and saved first; Ctrl-C once more ends at once")
        elif now - self._first > SECONDS_OF_COPIES:
            end_now(128 + number, f"ended by a second {number.name}: nothing was saved after the last checkpoint")

    def ignore(self) -> None:
        """Ignore further signals while a stopped run that has saved ends: batch systems send several."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the earlier handlers."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def end_now(code: int, why: str) -> NoReturn:
    """End the whole job with this code, from any thread, even if the main thread hangs; rank 0 prints the reason."""
    rank = _rank()
    if rank:
        time.sleep(SECONDS_FOR_RANK_0)  # if rank 0 hangs too, the others end the job
    _print_line(f"error: {why}" if rank is None else f"rank {rank}: error: {why}")
    if (launch := _launch_module()) is not None:
        launch.abort_anyway(code)
    os._exit(code)


def _rank() -> int | None:
    """Return this process's rank in its job, if it is known already."""
    module = _launch_module()
    launch = module.read_launch() if module is not None else None
    return launch.rank if launch is not None and launch.size > 1 else None


def _launch_module() -> Any:
    """Return `fedmpi.mpi.launch` if it is loaded: an import could wait for the main thread, which may hang."""
    module = sys.modules.get("fedmpi.mpi.launch")
    return module if hasattr(module, "running_mpi") else None


def _print_line(text: str) -> None:
    with suppress(*UNWRITABLE):  # a closed terminal must not keep the job from ending
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
