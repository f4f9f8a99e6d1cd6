"""Shared memory of a node (an accelerator): a barrier that wakes waiting ranks, small messages, and sums.

A waiting rank uses the board instead of MPI: it sleeps until the last rank that it waits for wakes it. Polling MPI
instead wakes every waiting rank 50 times in 80 ms, at some 0.1 ms of a core that another rank computes on. A barrier of
MPI ends only when all have run in turns: with more ranks than cores both cost milliseconds per round. The semaphores
are the C library's own (`sem_init` with `pshared`): no file remains. Rank 0 passes small messages to the others on
pages of the same memory: one meeting instead of a broadcast, whose turns would cost as much.

For a sum every rank of a node writes its slot. On each node, `reduce` then runs the following steps, with its barriers
at the board:

1. barrier A: all slots of the node are filled, and all ranks have finished reading the previous sum;
2. every rank sums its slice over all slots, in rank order, into the result, block by block within the cache;
3. barrier B: the result is complete, and the slots are no longer read: their owners may overwrite them;
4. with several nodes: one leader per node sums the results in place by Allreduce; barrier C releases the others.

No rank writes the result before barrier A of the next call, so it may be read until the reader itself calls `reduce`
again. On a node with fewer cores than ranks, a server that only serves does not sum, because it would take a core from
the ranks that it waits for. It marks both barriers at once and sleeps until the result is complete.

Only `ranks.py` imports this module, and only if it exists: without it, ranks wait and sum through MPI.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from contextlib import ExitStack, suppress
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np

from fedmpi.common.types import AnyArray, Bytes
from fedmpi.mpi.collectives import BytesMoved, Communicators, maximum, meet, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

BYTES = 64
"""Bytes of a semaphore: a cache line; a `sem_t` is 32 bytes in glibc and musl, and smaller elsewhere."""
CALLS = ("sem_init", "sem_post", "sem_trywait", "sem_clockwait")
log = logging.getLogger(__name__)
LINE = 64 + BYTES
"""Bytes of a rank: its numbers in a separate cache line, then its semaphore."""
COME, WANTED = 0, 1
"""Indices of a rank's numbers: its progress, and the progress of all others that wakes it (0: it is awake)."""
PAGE, PAGES = 1 << 20, 2
"""Bytes of a page for messages (a plan of 60,000 clients), and number of pages."""
LONGEST_REST = 0.05
"""Seconds after which a sleeping rank checks by itself, and lets MPI progress."""
BLOCK = 32 << 10
"""Values that are summed at once, within the cache."""
CACHE_LINE = 64
SHARED_MEMORY = "/dev/shm"
SPARE_SHARED_MEMORY = 8 << 20


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _library() -> ctypes.CDLL | None:
    """Return the C library if it has all of `CALLS`: glibc from 2.30 on has."""
    library = ctypes.CDLL(None, use_errno=True)
    sized = ctypes.sizeof(ctypes.c_long) == 8
    return library if sized and all(hasattr(library, name) for name in CALLS) else None


def semaphores_work() -> bool:
    """Check whether this operating system has such semaphores."""
    library = _library()
    if library is None:
        return False
    tried = ctypes.create_string_buffer(BYTES)
    return int(library.sem_init(tried, 1, 0)) == 0


class Semaphore:
    """Semaphore in memory that belongs to the caller and remains after it is closed."""

    def __init__(self, memory: Bytes, made: bool):
        library = _library()
        assert library is not None  # by `semaphores_work`
        self._library, self._memory = library, memory
        self._address = ctypes.c_void_p(memory.ctypes.data)
        if made and library.sem_init(self._address, 1, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self) -> None:
        """Wake the waiting rank, or the next one to wait."""
        self._library.sem_post(self._address)

    def reset(self) -> None:
        """Forget earlier posts."""
        while self._library.sem_trywait(self._address) == 0:
            pass

    def wait(self, seconds: float) -> None:
        """Sleep until it is posted, at most so many seconds; a signal also ends the sleep."""
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + round(1e9 * seconds)
        limit = _Time(until // 10**9, until % 10**9)
        self._library.sem_clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(limit))


class Board:
    """Barrier that all ranks of a node build together and pass in the same order."""

    def __init__(self, node: MPI.Intracomm):
        from mpi4py import MPI

        self._node, self._rank = node, node.rank
        lines_bytes = LINE * node.size
        mine = lines_bytes + PAGES * PAGE if node.rank == 0 else 0
        self._window = MPI.Win.Allocate_shared(mine, 1, comm=node)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        memory, _ = self._window.Shared_query(0)
        lines: Bytes = np.ndarray((node.size, LINE), np.uint8, cast(bytes, memory))
        self._pages: Bytes = np.ndarray((PAGES, PAGE), np.uint8, cast(bytes, memory), lines_bytes)
        if node.rank == 0:
            self._pages[:] = 0  # allocates the memory now: a lack of memory during a run would end the process
        numbers = lines.view(np.int64)
        self._come, self._wanted = numbers[:, COME], numbers[:, WANTED]
        self._place = self._shared = 0
        lines[node.rank] = 0
        self._semaphores = [Semaphore(line[LINE - BYTES :], made=rank == node.rank) for rank, line in enumerate(lines)]
        self._window.Sync()
        node.Barrier()

    def come(self, places: int = 1) -> None:
        """Mark this rank as arrived at its next `places` meeting points; it has no work in all except the last."""
        self._place += places
        self._window.Sync()  # makes this rank's data visible to every rank that sees its arrival
        self._come[self._rank] = self._place
        self._window.Sync()
        everybody = int(self._come.min())
        for rank in np.flatnonzero((self._wanted > 0) & (self._wanted <= everybody)):
            self._semaphores[rank].post()

    def wait(self, long: bool = False) -> None:
        """Wait until all ranks have come to this rank's place; if it is known to take `long`, asleep at once."""
        self._node.Iprobe()
        wait_until(self._all_here, pause=self._rest, long=long)
        self._window.Sync()

    def meet(self) -> None:
        """Wait politely until all ranks of the node have come here."""
        self.come()
        self.wait()

    def share(self, message: Bytes | None) -> Bytes | None:
        """Return rank 0's message on all ranks of the node, or None on all if it is longer than a page; collective.

        Messages alternate between the pages: the writer of the next but one has met all readers of the previous one.
        """
        page = self._pages[self._shared % PAGES]
        length, content = page[:8].view(np.int64), page[8:]
        self._shared += 1
        if message is not None:
            length[0] = len(message)
            content[: len(message)] = message[: len(content)]
        self.meet()
        return content[: length[0]].copy() if length[0] <= len(content) else None

    def build_sum(
        self, comms: Communicators, count: int, dtype: np.dtype, moved: BytesMoved, server_away: bool
    ) -> tuple[WindowSum | None, str]:
        """Return a sum in shared memory, or None and the reason why some node has no memory for it; collective."""
        from mpi4py import MPI

        crowded = server_away and comms.largest_node > comms.fewest_cores
        away = bool(maximum(comms.node, int(crowded and comms.world.rank == 0)))
        need = padded(count * dtype.itemsize) * (comms.node.size + 1)
        if maximum(comms.world, int(shared_memory_lacks(need))):
            return None, f"a node has less than {(need + SPARE_SHARED_MEMORY) / 1e6:.0f} MB free in {SHARED_MEMORY}"
        made = None
        with suppress(MPI.Exception):
            made = WindowSum(comms, count, dtype, moved, self, away)
        if maximum(comms.world, int(made is None)):
            if made is not None:
                made.close()
            return None, "MPI cannot share memory"
        assert made is not None
        made.clear()
        return made, ""

    def close(self) -> None:
        """Free the memory; collective."""
        self._semaphores = []
        self._pages = np.empty((PAGES, 0), np.uint8)
        self._window.Unlock_all()
        self._window.Free()

    def _all_here(self) -> bool:
        return bool(self._come.min() >= self._place)

    def _rest(self, waited: float) -> None:
        own = self._semaphores[self._rank]
        own.reset()
        self._wanted[self._rank] = self._place
        self._window.Sync()
        if not self._all_here():
            own.wait(LONGEST_REST)
        self._wanted[self._rank] = 0
        self._node.Iprobe()


def board_of(comms: Communicators) -> Board | None:
    """Return the board of this node if every node can have one; all ranks of the world agree."""
    from mpi4py import MPI

    lacking = shared_memory_lacks(LINE * comms.node.size + PAGES * PAGE) or not semaphores_work()
    if maximum(comms.world, int(lacking)):
        return None
    board: Board | None = None
    try:
        board = Board(comms.node)
    except MPI.Exception as error:
        log.info("waiting ranks poll MPI, because it cannot share memory (%s)", error)
    if maximum(comms.world, int(board is None)) and board is not None:
        board.close()
        return None
    return board


def shared_memory_lacks(nbytes: int) -> bool:
    """Check whether this node's shared memory lacks room for so many bytes; writing beyond it ends the process
    (SIGBUS)."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return False  # the library stores its shared memory elsewhere, and reports a failure itself
    return room.f_bavail * room.f_frsize < nbytes + SPARE_SHARED_MEMORY


def padded(nbytes: int) -> int:
    """Return bytes of a region, in whole cache lines and at least one."""
    return max(1, -(-nbytes // CACHE_LINE)) * CACHE_LINE


def slice_of(rank: int, ranks: int, count: int) -> slice:
    """Return a rank's slice of `count` values: equal parts, cut so that no cache line has two writers."""
    width = -(-count // ranks)
    width = -(-width // CACHE_LINE) * CACHE_LINE
    return slice(min(rank * width, count), min((rank + 1) * width, count))


class WindowSum:
    """Sum in a node's shared memory, by the steps above; all ranks of a node build it, then call `clear`."""

    def __init__(self, comms: Communicators, count: int, dtype: np.dtype, moved: BytesMoved, board: Board, away: bool):
        from mpi4py import MPI

        self._node, self._leaders, self._nodes, self._moved = comms.node, comms.leaders, comms.nodes, moved
        self._board = board
        region = padded(count * dtype.itemsize)
        mine = region * (2 if self._node.rank == 0 else 1)
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # a rank's slot is in memory near to it
        self._window = MPI.Win.Allocate_shared(mine, 1, info=info, comm=self._node)
        info.Free()
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._slots = [self._region(rank, 0, count, dtype) for rank in range(self._node.size)]
        self.slot = self._slots[self._node.rank]
        self.result = self._region(0, region, count, dtype)
        self._pinned = ExitStack()
        first = int(away and self._node.size > 1)
        self._spared = self._node.rank < first
        self._slice = slice_of(self._node.rank - first, self._node.size - first, 0 if self._spared else count)

    def clear(self) -> None:
        """Zero everything, which allocates the memory now and not during a run; collective on the node."""
        self.slot[:] = 0
        self.result[self._slice] = 0
        self._synchronize()

    def pin(self) -> None:
        """Register this rank's slot and the result with CUDA, which then copies them in one pass."""
        import torch

        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        size, parts = mmap.PAGESIZE, (self.slot.ctypes.data, self.result.ctypes.data)
        spans = sorted((start // size, -(-(start + self.slot.nbytes) // size)) for start in parts)
        for start, end in [(spans[0][0], spans[1][1])] if spans[1][0] < spans[0][1] else spans:  # no page twice
            if cuda.cudaHostRegister(start * size, (end - start) * size, 0) == 0:
                self._pinned.callback(cuda.cudaHostUnregister, start * size)
                continue
            log.info("CUDA cannot register shared memory: copies of sums take two passes")
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # else the next kernel would report this error

    def reduce(self) -> None:
        if self._spared:
            self._board.come(2)
            self._board.wait(long=True)
        else:
            self._synchronize()
            self._sum_slice()
            self._synchronize()
        if self._nodes > 1:
            if self._leaders is not None:
                from mpi4py import MPI

                meet(self._leaders)
                self._leaders.Allreduce(MPI.IN_PLACE, self.result)
                self._moved["allreduce"] += self.result.nbytes
            self._synchronize()

    def close(self) -> None:
        self._slots = []
        self._pinned.close()
        self._window.Unlock_all()
        self._window.Free()

    def _region(self, rank: int, start: int, count: int, dtype: np.dtype) -> AnyArray:
        memory, _ = self._window.Shared_query(rank)
        return np.ndarray((count,), dtype, cast(bytes, memory), offset=start)

    def _synchronize(self) -> None:
        self._window.Sync()
        self._board.meet()
        self._window.Sync()

    def _sum_slice(self) -> None:
        for start in range(self._slice.start, self._slice.stop, BLOCK):
            block = slice(start, min(start + BLOCK, self._slice.stop))
            total = self.result[block]
            np.copyto(total, self._slots[0][block])
            for slot in self._slots[1:]:
                np.add(total, slot[block], out=total)
        read = (self._slice.stop - self._slice.start) * self.result.itemsize
        self._moved["window"] += read * (self._node.size - 1)
