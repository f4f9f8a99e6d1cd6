"""Signs of life between rank 0 and the others: small messages that a thread of every rank sends beside the work.

A rank sends its state, waits for rank 0's answer before it sends the next, and never blocks: with a rank that is
stopped, at most one message each way is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedmpi.cluster.living import is_loss, opened, stopped
from fedmpi.cluster.waiting import wait_until
from fedmpi.common.types import Ints

if TYPE_CHECKING:
    from mpi4py import MPI

STATE, FAREWELL = 1, 2
SECONDS_TO_CLOSE = 60.0


class Heartbeat:
    """Collective to build and to close; between that, `beat` is called from any one thread of each rank.

    Parameters
    ----------
    world : Intracomm
        Copied.
    values : int
        Length of a state, int64 (values,).

    Attributes
    ----------
    ended : bool
        Whether a rank has died.
    """

    def __init__(self, world: MPI.Intracomm, values: int):
        self._comm = opened(world.Dup())
        self._values = values
        self._asked = False
        self._sending: list[tuple[MPI.Request, Ints]] = []
        self._left = 0
        self.ended = False

    def beat(self, own: Ints) -> dict[int, Ints]:
        """Tell this rank's state; those of other ranks that have come in: on rank 0 all, elsewhere that of rank 0.

        Once a rank has died, and MPI tells so, `ended` is true and nothing comes in any more.
        """
        if self.ended:
            return {}
        try:
            return self._beat(own)
        except Exception as error:
            self.ended = is_loss(error)
            if not self.ended:
                raise
            return {}

    def _beat(self, own: Ints) -> dict[int, Ints]:
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        if self._comm.rank == 0:
            return self._answer(own)
        received = {}
        if self._asked and self._comm.Iprobe(source=0, tag=STATE):
            received[0] = self._receive(0, STATE)
            self._asked = False
        if not self._asked:
            self._send(own, 0, STATE)
            self._asked = True
        return received

    def close(self) -> None:
        """Take leave of one another and free the communicator, if all ranks come here in time and none has died."""
        if self.ended or stopped():
            return
        if self._comm.rank == 0:
            nothing = np.zeros(self._values, np.int64)
            together = wait_until(lambda: self._all_left(nothing), SECONDS_TO_CLOSE)
        else:
            together = not self._asked or wait_until(lambda: self._comm.Iprobe(source=0, tag=STATE), SECONDS_TO_CLOSE)
            if self._asked and together:
                self._receive(0, STATE)
            self._send(np.zeros(self._values, np.int64), 0, FAREWELL)
        if together and wait_until(self._all_sent, SECONDS_TO_CLOSE):
            self._comm.Free()

    def _all_left(self, own: Ints) -> bool:
        self._answer(own)
        return self._left == self._comm.size - 1

    def _all_sent(self) -> bool:
        return all(request.Test() for request, _ in self._sending)

    def _answer(self, own: Ints) -> dict[int, Ints]:
        from mpi4py import MPI

        received, status = {}, MPI.Status()
        while self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status):
            source, tag = status.Get_source(), status.Get_tag()
            received[source] = self._receive(source, tag)
            if tag == FAREWELL:
                self._left += 1
                del received[source]
            else:
                self._send(own, source, STATE)
        return received

    def _receive(self, source: int, tag: int) -> Ints:
        state = np.empty(self._values, np.int64)
        self._comm.Recv(state, source=source, tag=tag)
        return state

    def _send(self, state: Ints, to: int, tag: int) -> None:
        kept = state.copy()
        self._sending.append((self._comm.Isend(kept, dest=to, tag=tag), kept))
