"""Messages of this rank that are under way, tested by a thread while the rank computes, so that they get on.

MPI moves messages within its own calls: between hosts, one that needs a handshake (a large one, or the first between
the two) would wait until its sender is done with the client it trains and calls MPI again. So a thread tests what is
under way; it lives as long as there is something, asleep most of the time.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from fedmpi.cluster.living import until_stopped
from fedmpi.cluster.waiting import wait_until
from fedmpi.common.types import Bytes

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


class PendingSends:
    """The sends of this rank that are under way.

    Parameters
    ----------
    beside_work : bool
        Whether a thread may push them: MPI has to allow calls from several threads at the same time.
    """

    def __init__(self, beside_work: bool):
        self._beside_work = beside_work
        self._sending: list[tuple[MPI.Request, Bytes]] = []
        self._pushing = False
        self._lock = threading.Lock()

    def take(self, sends: list[tuple[MPI.Request, Bytes]]) -> None:
        """See to these requests, and keep their arrays as long as they are read."""
        with self._lock:
            self._sending += sends
            self._test()
            start = self._beside_work and bool(self._sending) and not self._pushing
            self._pushing |= start
        if start:
            threading.Thread(target=self._push_along, name="fedmpi-sends", daemon=True).start()

    def push(self) -> bool:
        """Test what is under way; whether everything has left."""
        with self._lock:
            return self._test()

    def flush(self) -> None:
        """Wait politely until everything has left."""
        wait_until(self.push, longest_sleep=LONGEST_SLEEP_IN_MESSAGE)

    def _push_along(self) -> None:
        with until_stopped():
            while True:
                with self._lock:
                    if any(self._test() for _ in range(TESTS_PER_PUSH)):
                        self._pushing = False
                        return
                time.sleep(SLEEP_BESIDE_WORK)

    def _test(self) -> bool:
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        return not self._sending


def calls_from_threads() -> bool:
    """Whether MPI allows calls from several threads at the same time."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE
