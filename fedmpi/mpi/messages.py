"""Messages from rank to rank: the models that mediators relay (Astraea, Algorithm 1), and sums in rank order.

Every group of ranks that a mediator's model visits has a sub-communicator. Messages are identified by sender and tag,
such as the mediator's number. MPI supports a limited number of communicators (MPICH: about 2,000 in a process), so
groups beyond `MOST_GROUPS` use the communicator of all ranks, where the tag keeps their messages apart.

Sending never blocks, so no order of sends and receives can deadlock if each receive has its send. Receiving waits
politely.

MPI transmits messages only within its own calls. Between hosts, a message that needs a handshake would wait until its
sender has trained the client and calls MPI again. So a thread tests the pending sends. MPI reports a message as sent
once its array may be overwritten, even if the last bytes still wait for room in the connection. The thread therefore
continues until the round ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from fedmpi.common.types import AnyArray, Bytes
from fedmpi.mpi.collectives import BytesMoved, as_bytes, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

# A large message progresses only inside the test unless it is sent by one copy between processes: sleep little.
LONGEST_SLEEP_IN_MESSAGE = 200e-6
TESTS_PER_PUSH = 16  # over TCP each moves a part of the message
SLEEP_BESIDE_WORK = 1e-3
"""Seconds between two pushes while the sender computes: 1.5 to 4.4 % of a core (MPICH, 2 busy cores)."""


MOST_GROUPS = 500
"""Largest number of sub-communicators."""

Ranks = tuple[int, ...]
"""Members of a group, ascending."""


class Messages:
    """Messages that this rank sends and receives; all ranks of the world make and close the object together."""

    def __init__(self, world: MPI.Intracomm, moved: BytesMoved):
        from mpi4py import MPI

        self._comm, self._moved = world.Dup(), moved
        self._groups: dict[Ranks, MPI.Intracomm] = {}  # Sub-communicators, null for those without this rank
        self._sending: list[tuple[MPI.Request, Bytes]] = []
        self._open_round = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            threading.Thread(target=self._push_along, name="fedmpi-sends", daemon=True).start()

    def use_groups(self, groups: Iterable[Ranks]) -> None:
        """Make the missing sub-communicators of a round; collective, with the same groups on all ranks."""
        wanted = dict.fromkeys(groups)
        if len(self._groups.keys() | wanted.keys()) > MOST_GROUPS:
            self._free_groups()
        with self._lock:
            for ranks in wanted:
                if ranks not in self._groups and len(self._groups) < MOST_GROUPS:
                    self._groups[ranks] = self._made(ranks)

    def send(self, array: AnyArray, to: int, tag: int = 0, group: Ranks = ()) -> None:
        """Start to send a copy of the array and return at once; the caller may overwrite the array."""
        comm, to = self._line(group, to)
        payload = as_bytes(array).copy()
        with self._lock:
            self._sending.append((comm.Isend(payload, dest=to, tag=tag), payload))
        self._moved["relay"] += len(payload)
        self._open_round.set()

    def recv(self, array: AnyArray, source: int, tag: int = 0, group: Ranks = ()) -> AnyArray:
        """Wait politely for a rank's array and write it into the given contiguous one."""
        from mpi4py import MPI

        status, buffer = MPI.Status(), array.reshape(-1).view(np.uint8)
        comm, place = self._line(group, source)
        wait_until(partial(comm.Iprobe, source=place, tag=tag, status=status))
        length = status.Get_count(MPI.BYTE)
        if length != len(buffer):
            raise ValueError(f"rank {source} sent {length} bytes where {len(buffer)} were expected")
        wait_until(comm.Irecv(buffer, source=place, tag=tag).Test, longest_sleep=LONGEST_SLEEP_IN_MESSAGE)
        return array

    def end_round(self) -> None:
        """Wait politely until MPI reports everything as sent; the caller's next MPI calls do the rest."""
        wait_until(self._sent, longest_sleep=LONGEST_SLEEP_IN_MESSAGE)
        self._open_round.clear()

    def close(self) -> None:
        """Free the communicators; collective."""
        self.end_round()
        self._closed = True
        self._open_round.set()
        self._free_groups()
        with self._lock:
            self._comm.Free()

    def _made(self, ranks: Ranks) -> MPI.Intracomm:
        from mpi4py import MPI

        if self._comm.rank not in ranks:
            return cast("MPI.Intracomm", MPI.COMM_NULL)
        members = self._comm.Get_group().Incl(ranks)
        made = self._comm.Create_group(members)
        members.Free()
        return made

    def _free_groups(self) -> None:
        with self._lock:
            for comm in self._groups.values():
                if comm:
                    comm.Free()
            self._groups.clear()

    def _line(self, group: Ranks, rank: int) -> tuple[MPI.Intracomm, int]:
        """Return the communicator of a group and the place of a rank in it."""
        comm = self._groups.get(group)
        return (self._comm, rank) if comm is None else (comm, group.index(rank))

    def _sent(self) -> bool:
        with self._lock:
            self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
            return not self._sending

    def _push_along(self) -> None:
        rank = self._comm.Get_rank()
        while self._open_round.wait() and not self._closed:
            if any(self._sent() for _ in range(TESTS_PER_PUSH)):
                with self._lock:
                    if not self._closed:
                        self._comm.Iprobe(source=rank)
            time.sleep(SLEEP_BESIDE_WORK)
