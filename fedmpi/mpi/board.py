"""Shared-memory barrier of a node: the progress of each rank, and semaphores that wake waiting ranks.

A waiting rank uses the board instead of MPI: it sleeps until the last rank that it waits for wakes it. Polling MPI
instead wakes every waiting rank 50 times in 80 ms, at some 0.1 ms of a core that another rank computes on. A barrier of
MPI ends only when all have run in turns: with more ranks than cores both cost milliseconds per round. The semaphores
are the C library's own (`sem_init` with `pshared`): no file remains. Rank 0 passes small messages to the others on
pages of the same memory: one meeting instead of a broadcast, whose turns would cost as much.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np

from fedmpi.common.types import Bytes
from fedmpi.mpi.collectives import maximum, wait_until

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


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _library() -> ctypes.CDLL | None:
    """Return the C library if it has all of `CALLS`: glibc from 2.30 on has."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None
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
        if library is None:
            raise RuntimeError("this system has no semaphores between processes")
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


def board_of(node: MPI.Intracomm, world: MPI.Intracomm, lacking: bool) -> Board | None:
    """Return the board of this node if every node can have one; all ranks of the world agree."""
    from mpi4py import MPI

    if maximum(world, int(lacking or not semaphores_work())):
        return None
    board: Board | None = None
    try:
        board = Board(node)
    except MPI.Exception as error:
        log.info("waiting ranks poll MPI, because it cannot share memory (%s)", error)
    if maximum(world, int(board is None)) and board is not None:
        board.close()
        return None
    return board
