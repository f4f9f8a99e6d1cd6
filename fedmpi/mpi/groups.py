"""Groups of ranks that pass arrays: the sub-communicators of mediators (Astraea, Algorithm 1).

Sending never blocks, so no order of sends and receives can deadlock if each receive has its send. Receiving waits
politely.

MPI moves messages only within its own calls. Between hosts, a message that needs a handshake would wait until its
sender has trained the client and calls MPI again. So a thread tests the pending sends. MPI reports a message as sent
once its array may be overwritten, even if the last bytes still wait for room in the connection. The thread therefore
continues to make MPI work, less and less often, until the round ends.

MPI supports only a limited number of communicators (MPICH: 2,048 per process), and making or freeing one takes all of
its members. So all ranks get all groups of a round and compute equally which of them have a communicator: the most
recently used, at most `MOST_COMMUNICATORS` in the whole job. All ranks free and then make them in one common order, so
that the first unfinished one has all its members waiting for it: it cannot deadlock. Groups beyond that number exchange
their messages over one communicator of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from fedmpi.common.types import AnyArray, Bytes
from fedmpi.mpi.collectives import CHUNK, BytesMoved, as_bytes, meet, meet_members, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

# A large message progresses only inside the test unless it is sent by one copy between processes: sleep little.
LONGEST_SLEEP_IN_MESSAGE = 200e-6
TESTS_PER_PUSH = 16  # over TCP each moves a part of the message
SLEEP_BESIDE_WORK = 1e-3
"""Seconds between two pushes while the sender computes; longer if it does not get a core or Python's lock at once.

Waiting took 1.5 to 2.3 % of a core, moving 40 MB over TCP 3.1 to 4.4 % (MPICH, 2 busy cores, the thread's CPU time by
wall time).
"""
LONGEST_SLEEP_AFTER = 32e-3
"""Longest sleep between two pushes once MPI reports all messages as sent; earlier sleeps double. Then they take 0.2 to
0.3 % of a core (MPICH and Open MPI, 2 busy cores)."""


Ranks = tuple[int, ...]
MOST_COMMUNICATORS = 1024
"""Largest number of communicators over all ranks: one context is left for any two members."""
TAGS = 32768  # the MPI standard promises tags up to 32,767


class PendingSends:
    """Unfinished sends of this rank."""

    def __init__(self, progress: Callable[[], object] | None):
        self._progress = progress
        self._sending: list[tuple[MPI.Request, Bytes]] = []
        self._pushing = False
        self._flushed = True
        self._sleep = SLEEP_BESIDE_WORK
        self._changed = threading.Condition()

    def take(self, sends: list[tuple[MPI.Request, Bytes]]) -> None:
        """Track these requests, and keep their arrays as long as they are read."""
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
        """Test the pending sends; return whether MPI reports everything as sent."""
        with self._changed:
            return self._test()

    def flush(self) -> None:
        """Wait politely until MPI reports everything as sent; the caller's next MPI calls do the rest."""
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
    """Return a call that makes MPI progress, for a thread beside the sender's work; None if MPI does not allow one or
    is not running.
    """
    if comm is None or not calls_from_threads():
        return None
    return partial(comm.Iprobe, source=comm.Get_rank())


def calls_from_threads() -> bool:
    """Check whether MPI allows calls from several threads at the same time."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


class RankGroup:
    """Group of exactly these ranks, over a separate or a shared communicator; see `Cluster.groups`."""

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
        self._addresses = tuple(range(self.size) if addresses is None else addresses)  # members' ranks in `comm`
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
        """Free the group's own communicator, if any; all members do so in the same order."""
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


class Recent:
    """Groups that have a communicator: the most recently used. Ranks that admit the same groups agree on them."""

    def __init__(self, most: int):
        self._most = most
        self._held: dict[Ranks, None] = {}  # least recently used first

    def __contains__(self, ranks: Ranks) -> bool:
        return ranks in self._held

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, wanted: Iterable[Ranks]) -> tuple[list[Ranks], list[Ranks]]:
        """Use these groups next."""
        distinct = dict.fromkeys(wanted)
        kept = [ranks for ranks in distinct if ranks in self._held]
        made = [ranks for ranks in distinct if ranks not in self._held][: self._most - len(kept)]
        idle = [ranks for ranks in self._held if ranks not in distinct]
        freed = idle[: max(0, len(self._held) + len(made) - self._most)]
        for ranks in (*freed, *kept):
            del self._held[ranks]
        self._held.update(dict.fromkeys((*kept, *made)))
        return freed, made


class Groups:
    """Groups that this rank is in."""

    def __init__(self, world: MPI.Intracomm | None, moved: BytesMoved):
        self._world = world
        self._moved = moved
        self._pending = PendingSends(progress_beside_work(world))
        self._recent = Recent(MOST_COMMUNICATORS)
        self._own: dict[Ranks, RankGroup] = {}
        self._guests: dict[Ranks, RankGroup] = {}
        self._common: MPI.Intracomm | None = None

    def get(self, wanted: Sequence[Ranks], rank: int) -> list[RankGroup | None]:
        """Return the groups of these ranks, None for those without this rank; see `Cluster.groups`."""
        for ranks in wanted:
            if not ranks or len(set(ranks)) < len(ranks):
                raise ValueError(f"the ranks {ranks} are no group: each rank once, and at least one")
        self._close(self._guests, [*self._guests])
        several = [ranks for ranks in wanted if len(ranks) > 1]
        freed, made = self._recent.admit(several)
        self._close(self._own, freed)
        for ranks in made:
            if rank in ranks:
                self._own[ranks] = RankGroup(self._create(ranks), ranks, self._moved, self._pending)
        if any(ranks not in self._recent for ranks in several):
            self._share()
        return [self._find(ranks) if rank in ranks else None for ranks in wanted]

    def end_round(self) -> None:
        """Finish all sends."""
        self._pending.flush()

    def close(self) -> None:
        """Free all groups."""
        self._close(self._guests, [*self._guests])
        self._close(self._own, [*self._own])
        self._pending.flush()
        if self._common is not None:
            self._common.Free()
            self._common = None

    def _find(self, ranks: Ranks) -> RankGroup:
        if ranks in self._own:
            return self._own[ranks]
        if ranks not in self._guests:
            common = self._common if len(ranks) > 1 else None
            self._guests[ranks] = RankGroup(common, ranks, self._moved, self._pending, addresses=ranks)
        return self._guests[ranks]

    @staticmethod
    def _close(groups: dict[Ranks, RankGroup], which: Iterable[Ranks]) -> None:
        for ranks in which:
            if ranks in groups:
                groups.pop(ranks).close()

    def _create(self, ranks: Ranks) -> MPI.Intracomm | None:
        if self._world is None:
            return None
        tag = crc32(np.array(ranks, np.int64).tobytes()) % TAGS
        meet_members(self._world, ranks, tag)
        world = self._world.Get_group()
        members = world.Incl(ranks)
        comm = self._world.Create_group(members, tag)
        members.Free()
        world.Free()
        return comm

    def _share(self) -> None:
        """Make the shared communicator of further groups, when they first occur; collective."""
        if self._common is None and self._world is not None:
            meet(self._world)
            self._common = self._world.Dup()
