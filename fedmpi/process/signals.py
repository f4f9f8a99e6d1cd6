"""Signals that make a run save and stop: SIGTERM, SIGUSR1 (batch systems), SIGINT, and SIGHUP of a closed terminal; a
second SIGTERM or SIGINT ends it at once.

This module imports nothing slow: the commands install the handlers before anything else is loaded.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from fedmpi.common.errors import UNWRITABLE

log = logging.getLogger("fedmpi")
STOPPED_AFTER_SAVING = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
FORCING = (signal.SIGTERM, signal.SIGINT)
"""Signals whose repetition ends the job without saving; all others are warnings, however often they arrive."""
SECONDS_OF_COPIES = 2.0
"""Seconds after the first signal within which others are copies: launchers and batch systems may send several."""
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""Environment variables that hold a rank; rank 0 speaks for all."""


class Interrupt:
    """Record of arrived signals; only a command installs it, as its first action, in the main thread.

    A separate thread is notified of every signal at once, even while the main thread waits inside MPI or a file system,
    where handlers do not run.
    """

    def __init__(self) -> None:
        self.requested, self._installed = False, True
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
        forced = False
        while received := os.read(reading, 64):
            self.requested |= any(number in SIGNALS for number in received)
            if not forced and any(number in FORCING for number in received):
                forced = True
                self._let_the_next_end_the_process(signal.SIGINT in received)

    def _let_the_next_end_the_process(self, from_terminal: bool) -> None:
        """Give SIGTERM and SIGINT their usual effect, which needs no handler; the launcher ends the other ranks."""
        if from_terminal and not any(os.environ.get(name, "0") != "0" for name in RANKS):
            with suppress(*UNWRITABLE):  # a closed terminal must not keep the run from saving
                sys.stderr.write(
                    "stopping: the round at work is finished and saved first; Ctrl-C once more ends at once\n"
                )
                sys.stderr.flush()
        time.sleep(SECONDS_OF_COPIES)
        for number in FORCING if self._installed else ():
            ctypes.CDLL(None).signal(int(number), 0)  # SIG_DFL; Python changes handlers in the main thread only

    def ignore(self) -> None:
        """Ignore further signals while a stopped run that has saved ends: batch systems send several."""
        self._installed = False
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the earlier handlers."""
        self._installed = False
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextmanager
def delayed_interrupt(stop: Callable[[], bool] | None) -> Iterator[Callable[[], bool]]:
    """Delay the first KeyboardInterrupt to the end of the context; yield `stop`, true also if it has arrived.

    A second one takes effect at once. Nothing changes outside the main thread, or if the program handles SIGINT itself.
    """
    arrived = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.warning("interrupted: finishing and saving this round. Interrupt again to stop at once")

    in_main_thread = threading.current_thread() is threading.main_thread()
    delays = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if delays:
        signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: arrived or (stop is not None and stop())
    finally:
        if delays:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if arrived:
        raise KeyboardInterrupt
