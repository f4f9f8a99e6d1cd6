"""Rows of values distributed over the ranks by columns: each rank stores its columns of every rank's rows.

A row is sent by its maker as soon as it is computed, one part to every rank. The next one waits until all ranks have
begun to receive the previous ones, unless they are small. So no rank stores more than one large row, or a few megabytes
of small ones, beside its columns. If MPI allows calls from several threads, a thread receives parts while a rank
computes, otherwise they are received at every call of this module. Sends are synchronous: once a rank's own are sent
and all ranks confirm this in a barrier, everything has arrived (the consensus of Hoefler et al. 2010, "Scalable
communication protocols for dynamic sparse data exchange", NBX).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.types import Bytes, Floats, Ints
from fedmpi.mpi.collectives import CHUNK, BytesMoved, wait_until
from fedmpi.mpi.groups import LONGEST_SLEEP_IN_MESSAGE, SLEEP_BESIDE_WORK, calls_from_threads

if TYPE_CHECKING:
    from mpi4py import MPI

HEAD = np.dtype([("label", np.int64), ("factor", np.float64)])
SLAB_BYTES = 48 << 20
"""Smallest size of the contiguous pieces in which memory for rows is allocated; unwritten parts take no memory."""
UNDER_WAY_BYTES = 4 << 20
"""Largest total size of rows sent at once: for small rows, waiting for the receivers takes longer than sending."""
MESSAGE_BYTES = 512
"""Approximate bytes of a message beside its values."""


class DealtRows:
    """Rows of a round, as this rank's columns of them."""

    def __init__(self, world: MPI.Intracomm | None, moved: BytesMoved):
        self._comm = None if world is None else world.Dup()
        self._rank = 0 if world is None else world.rank
        self._moved = moved
        self._borders: Ints = np.zeros(2, np.int64)
        self._dtype: np.dtype[Any] = np.dtype(np.float32)
        self._slabs: list[Bytes] = []
        self._slab_rows, self._rows = 1, 0
        self._sending: list[tuple[MPI.Request, Bytes]] = []
        self._under_way = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._receiving = False

    def open(self, borders: Ints, dtype: np.dtype[Any]) -> None:
        """Start without rows; all ranks do so with the same arguments before any of them adds one."""
        self._end_thread()
        self._borders, self._dtype = borders, dtype
        length = self._length(self._rank)
        if self._slabs and self._slabs[0].shape[1] != length:
            self._slabs = []
        del self._slabs[-(-self._rows // self._slab_rows) :]  # memory that the last round did not need
        self._slab_rows, self._rows = max(1, -(-SLAB_BYTES // length)), 0
        if self._comm is not None and calls_from_threads():
            self._receiving = True
            self._thread = threading.Thread(target=self._receive_along, name="fedmpi-rows", daemon=True)
            self._thread.start()

    def add(self, label: int, factor: float, values: NDArray[np.floating]) -> None:
        """Distribute a row; return once it may be overwritten."""
        head = np.array([(label, factor)], HEAD).view(np.uint8)
        size = values.nbytes + MESSAGE_BYTES * len(self._borders)
        if self._under_way + size > UNDER_WAY_BYTES:
            self._let_leave()
        else:
            self._take_in()
        self._under_way += size
        for rank in range(len(self._borders) - 1):
            part = values[self._borders[rank] : self._borders[rank + 1]]
            if rank == self._rank:
                with self._lock:
                    self._fill(self._new_row(), head, part)
                continue
            assert self._comm is not None
            whole = np.empty(self._length(rank), np.uint8)
            self._fill(whole, head, part)
            pieces = [whole[start : start + CHUNK] for start in range(0, len(whole), CHUNK)]
            self._sending += [(self._comm.Issend(piece, dest=rank), piece) for piece in pieces]
            self._moved.exchange += len(whole)

    def finish(self) -> None:
        """Wait politely until every rank's rows have arrived; collective."""
        if self._comm is None:
            return
        self._let_leave()
        everybody = self._comm.Ibarrier()

        def arrived() -> bool:
            self._take_in()
            return bool(everybody.Test())

        wait_until(arrived)
        self._end_thread()

    def heads(self) -> tuple[Ints, Floats]:
        """Return labels and factors of the received rows, int64 (m,) and float64 (m,)."""
        found = [row[: HEAD.itemsize].view(HEAD)[0] for row in self._kept()]
        return np.array([head["label"] for head in found], np.int64), np.array([head["factor"] for head in found])

    def rows(self) -> list[NDArray[np.floating]]:
        """Return this rank's columns of all rows, in the order of `heads`: m read-only arrays (own columns,)."""
        return [row[HEAD.itemsize :].view(self._dtype) for row in self._kept()]

    def close(self) -> None:
        """Free the communicator; collective."""
        self._end_thread()
        if self._comm is not None:
            self._comm.Free()
            self._comm = None
        self._slabs = []

    def _kept(self) -> Iterator[Bytes]:
        for place in range(self._rows):
            yield self._slabs[place // self._slab_rows][place % self._slab_rows]

    def _length(self, rank: int) -> int:
        """Return the bytes of a row's part for a rank, including its header."""
        return HEAD.itemsize + int(self._borders[rank + 1] - self._borders[rank]) * self._dtype.itemsize

    def _new_row(self) -> Bytes:
        slab, row = divmod(self._rows, self._slab_rows)
        if slab == len(self._slabs):
            self._slabs.append(np.empty((self._slab_rows, self._length(self._rank)), np.uint8))
        self._rows += 1
        new: Bytes = self._slabs[slab][row]
        return new

    def _fill(self, row: Bytes, head: Bytes, part: NDArray[np.floating]) -> None:
        row[: HEAD.itemsize] = head
        row[HEAD.itemsize :].view(self._dtype)[:] = part

    def _let_leave(self) -> None:
        """Wait until all rows are sent, and receive meanwhile: two ranks may wait for one another."""

        def left() -> bool:
            self._take_in()
            self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
            return not self._sending

        wait_until(left, longest_sleep=LONGEST_SLEEP_IN_MESSAGE)
        self._under_way = 0

    def _take_in(self) -> None:
        """Receive the parts that have arrived."""
        if self._comm is None:
            return
        from mpi4py import MPI

        status = MPI.Status()
        with self._lock:
            while self._comm.Iprobe(source=MPI.ANY_SOURCE, status=status):
                row, sender = self._new_row(), status.Get_source()
                for start in range(0, len(row), CHUNK):
                    self._comm.Recv(row[start : start + CHUNK], source=sender)

    def _receive_along(self) -> None:
        while self._receiving:
            self._take_in()
            time.sleep(SLEEP_BESIDE_WORK)

    def _end_thread(self) -> None:
        self._receiving = False
        if self._thread is not None:
            self._thread.join()
            self._thread = None
