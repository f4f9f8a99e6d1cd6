"""Messages of this rank that are under way, pushed by a thread while the rank computes, so that they get on.

MPI moves messages within its own calls: between hosts, one that needs a handshake (a large one, or the first between
the two) would wait until its sender is done with the client it trains and calls MPI again. So a thread tests what is
under way. MPI calls a message sent as soon as its array may be overwritten, when the last bytes may still wait for room
in the connection: the thread goes on making MPI work, ever more seldom, until the round ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fedmpi.common.types import Bytes
from fedmpi.mpi.waiting import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

# A large message progresses only inside the test when it does not travel by one copy between processes: sleep little.
LONGEST_SLEEP_IN_MESSAGE = 200e-6
TESTS_PER_PUSH = 16  # over TCP each moves a part of the message
SLEEP_BESIDE_WORK = 1e-3
"""Between two pushes while the sender computes, or longer when it does not get a core or Python's lock at once.

Waiting took 1.5 to 2.3 % of a core, moving 40 MB over TCP 3.1 to 4.4 % (MPICH, 2 busy cores, the thread's CPU time by
wall time).
"""
LONGEST_SLEEP_AFTER = 32e-3
"""Between two pushes when MPI calls all messages sent; the sleeps before it double. Then they take 0.2 to 0.3 % of a
core (MPICH and Open MPI, 2 busy cores)."""


class PendingSends:
    """The sends of this rank that are under way."""

    def __init__(self, progress: Callable[[], object] | None):
        self._progress = progress
        self._sending: list[tuple[MPI.Request, Bytes]] = []
        self._pushing = False
        self._flushed = True
        self._sleep = SLEEP_BESIDE_WORK
        self._changed = threading.Condition()

    def take(self, sends: list[tuple[MPI.Request, Bytes]]) -> None:
        """See to these requests, and keep their arrays as long as they are read."""
        with self._changed:
            self._sending += sends
            self._flushed, self._sleep = False, SLEEP_BESIDE_WORK
            self._test()
            start = self._progress is not None and not self._pushing
            self._pushing |= start
            self._changed.notify()
        if start:
            threading.Thread(target=self._push_along, name="fedmpi-sends", daemon=True).start()

    def push(self) -> bool:
        """Test what is under way; whether MPI calls everything sent."""
        with self._changed:
            return self._test()

    def flush(self) -> None:
        """Wait politely until MPI calls everything sent; who calls this goes on to call MPI, which sees to the rest."""
        wait_until(self.push, longest_sleep=LONGEST_SLEEP_IN_MESSAGE)
        with self._changed:
            self._flushed = True
            self._changed.notify()

    def _push_along(self) -> None:
        assert self._progress is not None
        with self._changed:
            while not self._flushed:
                if any(self._test() for _ in range(TESTS_PER_PUSH)):
                    self._progress()
                    self._sleep = min(2 * self._sleep, LONGEST_SLEEP_AFTER)
                self._changed.wait(self._sleep)
            self._pushing = False

    def _test(self) -> bool:
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        return not self._sending


def progress_beside_work(comm: MPI.Intracomm | None) -> Callable[[], object] | None:
    """A call that makes MPI work, for a thread beside the sender's work; None where MPI
    allows none, or does not run.
    """
    if comm is None or not calls_from_threads():
        return None
    return partial(comm.Iprobe, source=comm.Get_rank())


def calls_from_threads() -> bool:
    """Whether MPI allows calls from several threads at the same time."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE
