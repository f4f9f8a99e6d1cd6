"""Signals that ask a run to save and stop: SIGTERM, SIGUSR1 (batch systems), SIGINT, and SIGHUP of a terminal that is
gone; a second SIGTERM or SIGINT ends it at once.

Nothing slow is imported here: the commands install the handlers before anything else is loaded.
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
"""Of which a second one ends the job without saving; the others are warnings however often they come."""
SECONDS_OF_COPIES = 2.0
"""Launchers and batch systems send the same signal by several ways: those so close to the first are copies of it."""
SECONDS_FOR_RANK_0 = 1.0


class Interrupt:
    """Remembers that a signal arrived; only a command installs it, first thing, in the main thread.

    A thread of its own hears of every signal at once, also while the main thread waits inside MPI or a file system,
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
        """Whether a signal has arrived: the `stop` of a run."""
        return self.requested

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _listen(self, reading: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the main thread takes them, or nobody
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
        """Let no further signal disturb the end of a run that has saved and stops: batch systems send several."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Put the earlier handlers back."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def end_now(code: int, why: str) -> NoReturn:
    """End the whole job with this code, from any thread, whatever the main thread hangs in; rank 0 says why."""
    rank = _rank()
    if rank:
        time.sleep(SECONDS_FOR_RANK_0)  # where rank 0 hangs too, the others end the job
    _print_line(f"error: {why}" if rank is None else f"rank {rank}: error: {why}")
    abort = _loaded("fedmpi.mpi.launch", "abort_anyway")
    if abort is not None:
        abort(code)
    os._exit(code)


def _rank() -> int | None:
    """This rank of the job that the process was launched in, once that has been looked up."""
    read_launch = _loaded("fedmpi.mpi.launch", "read_launch")
    launch = read_launch() if read_launch is not None else None
    return launch.rank if launch is not None and launch.size > 1 else None


def _loaded(module: str, name: str) -> Any:
    """A function of a module if that has been imported: an import could wait for the main thread, which may hang."""
    return getattr(sys.modules.get(module), name, None)


def _print_line(text: str) -> None:
    with suppress(*UNWRITABLE):  # a closed terminal must not keep the job from ending
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def open_descriptors() -> None:
    """Open those of 0 to 2 that the parent has closed, on /dev/null: no pipe or file of the run may get the number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
