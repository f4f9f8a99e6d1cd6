"""A group of ranks that hand arrays around: the sub-communicator of a mediator (Astraea, Algorithm 1).

Sending never blocks, so no order of sends and receives can deadlock as long as each receive has its send; receiving
waits politely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.common.types import AnyArray, Bytes
from fedmpi.mpi.buffers import CHUNK, as_bytes
from fedmpi.mpi.counters import BytesMoved
from fedmpi.mpi.pending_sends import LONGEST_SLEEP_IN_MESSAGE, PendingSends
from fedmpi.mpi.waiting import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI


class RankGroup:
    """Exactly these ranks, over a communicator of their own or one that they share with
    others; see `Cluster.groups`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None,
        ranks: Sequence[int],
        moved: BytesMoved,
        pending: PendingSends,
        addresses: Sequence[int] | None = None,
    ):
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self._addresses = tuple(range(self.size) if addresses is None else addresses)  # the members' ranks in `comm`
        self._shared = addresses is not None
        self.rank = 0 if comm is None else self._addresses.index(comm.Get_rank())
        self._comm = comm
        self._moved = moved
        self._pending = pending
        self._closed = False
        self._to_myself: dict[int, list[Bytes]] = {}

    def send(self, array: AnyArray, to: int | None = None, tag: int = 0) -> None:
        """Start to send a copy of the array and return at once; the caller may overwrite the array."""
        self._check_open()
        to = (self.rank + 1) % self.size if to is None else to
        payload = as_bytes(array).copy()
        if self._comm is None or to == self.rank:
            self._to_myself.setdefault(tag, []).append(payload)
            return
        pieces = [payload[start : start + CHUNK] for start in range(0, max(len(payload), 1), CHUNK)]
        address = self._addresses[to]
        self._pending.take([(self._comm.Isend(piece, dest=address, tag=tag), piece) for piece in pieces])
        self._moved.relay += len(payload)

    def recv(self, array: AnyArray, source: int | None = None, tag: int = 0) -> AnyArray:
        """Wait politely for a member's array and write it into the given one."""
        self._check_open()
        if not array.flags.c_contiguous:
            raise ValueError("a receive needs a contiguous array")
        source = (self.rank - 1) % self.size if source is None else source
        buffer = array.reshape(-1).view(np.uint8)
        if self._comm is None or source == self.rank:
            buffer[:] = self._to_myself[tag].pop(0)
            return array
        for start in range(0, max(len(buffer), 1), CHUNK):
            self._receive(self._comm, buffer[start : start + CHUNK], self._addresses[source], tag)
        return array

    def close(self) -> None:
        """Free the communicator if it is their own; the group is of no more use. All members do it in one order."""
        if self._comm is not None and not self._closed:
            self._pending.flush()
            if not self._shared:
                self._comm.Free()
        self._closed = True

    @staticmethod
    def _receive(comm: MPI.Intracomm, buffer: Bytes, source: int, tag: int) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        wait_until(lambda: comm.Iprobe(source=source, tag=tag, status=status))
        length = status.Get_count(MPI.BYTE)
        if length != len(buffer):
            raise ValueError(f"rank {source} of the group sent {length} bytes where {len(buffer)} were expected")
        wait_until(comm.Irecv(buffer, source=source, tag=tag).Test, longest_sleep=LONGEST_SLEEP_IN_MESSAGE)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"the group of ranks {self.ranks} was freed; ask the cluster for the groups of every round"
            )
