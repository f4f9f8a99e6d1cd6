"""Groups of ranks that hand arrays around: the sub-communicators of the mediators (Astraea, Algorithm 1).

Sending never blocks, so no order of sends and receives can deadlock as long as each receive has its send; receiving
waits politely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from fedmpi.cluster.buffers import CHUNK, as_bytes
from fedmpi.cluster.communicators import meet_members
from fedmpi.cluster.counters import BytesMoved
from fedmpi.cluster.waiting import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

# A large message progresses only inside the test when it does not travel by one copy between processes: sleep little.
LONGEST_SLEEP_IN_MESSAGE = 200e-6
TAGS = 32768  # the MPI standard promises tags up to 32,767
ROUNDS_UNUSED = 8


class Groups:
    """The groups that this rank is in, each kept while it is in use."""

    def __init__(self, world: MPI.Intracomm | None, moved: BytesMoved):
        self._world = world
        self._moved = moved
        self._round = 0
        self._groups: dict[tuple[int, ...], Group] = {}
        self._last_use: dict[tuple[int, ...], int] = {}

    def get(self, ranks: tuple[int, ...], rank: int) -> Group:
        """The group of these ranks, built with its other members if need be."""
        if rank not in ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"rank {rank} cannot join a group of the ranks {ranks}")
        if ranks not in self._groups:
            self._groups[ranks] = Group(self._create(ranks), ranks, self._moved)
        self._last_use[ranks] = self._round
        return self._groups[ranks]

    def end_round(self) -> None:
        """Let everything sent leave, and free what was not asked for lately.

        The members of a group ask for it in the same rounds and end rounds together, so they free it together; the
        number of communicators that MPI can hold (about 2,000 in MPICH) limits those of a few rounds and not of a run.
        """
        self._round += 1
        for ranks in sorted(self._groups):
            self._groups[ranks].flush()
            if self._last_use[ranks] + ROUNDS_UNUSED <= self._round:
                self._groups.pop(ranks).close()

    def close(self) -> None:
        """Free all groups."""
        for ranks in sorted(self._groups):
            self._groups.pop(ranks).close()

    def _create(self, ranks: tuple[int, ...]) -> MPI.Intracomm | None:
        if self._world is None or len(ranks) == 1:
            return None
        tag = crc32(np.array(ranks, np.int64).tobytes()) % TAGS
        meet_members(self._world, ranks, tag)
        everyone = self._world.Get_group()
        members = everyone.Incl(ranks)
        comm = self._world.Create_group(members, tag)
        members.Free()
        everyone.Free()
        return comm


class Group:
    """A communicator of exactly these ranks; built by `Cluster.group`.

    Attributes
    ----------
    ranks : tuple of int
        The members' ranks in the cluster, in the order of the group.
    rank, size : int
        This member's place in the group, and the number of members.
    """

    def __init__(self, comm: MPI.Intracomm | None, ranks: Sequence[int], moved: BytesMoved):
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = 0 if comm is None else comm.Get_rank()
        self._comm = comm
        self._moved = moved
        self._closed = False
        self._sending: list[tuple[MPI.Request, np.ndarray]] = []
        self._to_myself: dict[int, list[np.ndarray]] = {}

    def send(self, array: np.ndarray, to: int | None = None, tag: int = 0) -> None:
        """Start to send a copy of the array and return at once; the caller may overwrite the array.

        Parameters
        ----------
        array : ndarray
            The values; the receiver passes an array of the same dtype and number of values.
        to : int, optional
            Place of the receiver in the group; by default the next member, the first after the last.
        tag : int
            Tells apart messages between the same two members; those of one tag arrive in order.
        """
        self._check_open()
        to = (self.rank + 1) % self.size if to is None else to
        payload = as_bytes(array).copy()
        if self._comm is None or to == self.rank:
            self._to_myself.setdefault(tag, []).append(payload)
            return
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        for start in range(0, max(len(payload), 1), CHUNK):
            piece = payload[start : start + CHUNK]
            self._sending.append((self._comm.Isend(piece, dest=to, tag=tag), piece))
        self._moved.relay += len(payload)

    def recv(self, array: np.ndarray, source: int | None = None, tag: int = 0) -> np.ndarray:
        """Wait politely for a member's array and write it into the given one.

        Parameters
        ----------
        array : ndarray
            Contiguous and writable, of the sent dtype and number of values; overwritten.
        source : int, optional
            Place of the sender in the group; by default the member before this one, the last before the first.
        tag : int
            As sent.

        Returns
        -------
        ndarray
            The given array.

        Raises
        ------
        ValueError
            If the array is not contiguous or the message has another length.
        """
        self._check_open()
        if not array.flags.c_contiguous:
            raise ValueError("a receive needs a contiguous array")
        source = (self.rank - 1) % self.size if source is None else source
        buffer = array.reshape(-1).view(np.uint8)
        if self._comm is None or source == self.rank:
            buffer[:] = self._to_myself[tag].pop(0)
            return array
        for start in range(0, max(len(buffer), 1), CHUNK):
            self._receive(self._comm, buffer[start : start + CHUNK], source, tag)
        return array

    def flush(self) -> None:
        """Wait politely until everything sent has left."""
        for request, _ in self._sending:
            wait_until(request.Test, longest_sleep=LONGEST_SLEEP_IN_MESSAGE)
        self._sending = []

    def close(self) -> None:
        """Free the communicator; the group is of no more use. All members do it at the same point of the program."""
        if self._comm is not None and not self._closed:
            self.flush()
            self._comm.Free()
        self._closed = True

    @staticmethod
    def _receive(comm: MPI.Intracomm, buffer: np.ndarray, source: int, tag: int) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        wait_until(lambda: comm.Iprobe(source=source, tag=tag, status=status))
        length = status.Get_count(MPI.BYTE)
        if length != len(buffer):
            raise ValueError(f"member {source} sent {length} bytes where {len(buffer)} were expected")
        wait_until(comm.Irecv(buffer, source=source, tag=tag).Test, longest_sleep=LONGEST_SLEEP_IN_MESSAGE)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"the group of ranks {self.ranks} was freed; ask the cluster for it again in every round that uses it"
            )
