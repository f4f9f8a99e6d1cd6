"""The sum of the ranks of a node in memory that they share, then among one leader a node.

Every rank writes its slot. `reduce` then runs, on each node, its barriers at the node's board where there is one:

1. barrier A: all slots of the node are filled, and all ranks have finished reading the previous sum;
2. every rank sums its slice over all slots, in rank order, into the result, block by block within the cache;
3. barrier B: the result is whole, and nobody reads the slots any more: their owners may overwrite them;
4. with several nodes: the leaders sum their results in place by Allreduce; barrier C tells the others of their node.

Nobody writes the result before barrier A of the next call, so it may be read until the reader itself calls `reduce`
again. A server that only serves, on a node with fewer cores than ranks, does not sum: it tells the board at once that
it has come to both barriers, and sleeps until the result is whole, for it would take a core from those it waits for.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from fedmpi.common.types import AnyArray
from fedmpi.mpi.board import Board
from fedmpi.mpi.communicators import Communicators
from fedmpi.mpi.counters import BytesMoved
from fedmpi.mpi.sums import allreduce_in_place
from fedmpi.mpi.waiting import meet

BLOCK = 32 << 10
CACHE_LINE = 64


def padded(nbytes: int) -> int:
    """Bytes of a region, in whole cache lines and at least one."""
    return max(1, -(-nbytes // CACHE_LINE)) * CACHE_LINE


def bytes_on_node(nbytes: int, ranks_on_node: int) -> int:
    """Shared memory that a node needs: a slot a rank, and the result."""
    return padded(nbytes) * (ranks_on_node + 1)


def slice_of(rank: int, ranks: int, count: int) -> slice:
    """The part of `count` values that a rank sums: equal parts, cut so that no cache line has two writers."""
    width = -(-count // ranks)
    width = -(-width // CACHE_LINE) * CACHE_LINE
    return slice(min(rank * width, count), min((rank + 1) * width, count))


class WindowSum:
    """See the module's text for the protocol; all ranks of a node build it together and then call `clear`."""

    def __init__(
        self,
        comms: Communicators,
        count: int,
        dtype: np.dtype,
        moved: BytesMoved,
        board: Board | None = None,
        away: bool = False,
    ):
        from mpi4py import MPI

        self._node, self._leaders, self._nodes, self._moved = comms.node, comms.leaders, comms.nodes, moved
        self._board = board
        region = padded(count * dtype.itemsize)
        mine = region * (2 if self._node.rank == 0 else 1)
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # a rank's slot lies in memory near to it
        self._window = MPI.Win.Allocate_shared(mine, 1, info=info, comm=self._node)
        info.Free()
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._slots = [self._region(rank, 0, count, dtype) for rank in range(self._node.size)]
        self.slot = self._slots[self._node.rank]
        self.result = self._region(0, region, count, dtype)
        first = int(away and board is not None and self._node.size > 1)
        self._spared = self._node.rank < first
        self._slice = slice_of(self._node.rank - first, self._node.size - first, 0 if self._spared else count)

    def clear(self) -> None:
        """Zero everything, which also takes the memory now and not in the middle of a run; collective on the node."""
        self.slot[:] = 0
        self.result[self._slice] = 0
        self._synchronise()

    def reduce(self) -> None:
        if self._spared and self._board is not None:
            self._board.come(2)
            self._board.wait(long=True)
        else:
            self._synchronise()
            self._sum_slice()
            self._synchronise()
        if self._nodes > 1:
            self._sum_over_nodes()
            self._synchronise()

    def close(self) -> None:
        self._slots = []
        self._window.Unlock_all()
        self._window.Free()

    def _region(self, rank: int, start: int, count: int, dtype: np.dtype) -> AnyArray:
        memory, _ = self._window.Shared_query(rank)
        region: AnyArray = np.ndarray((count,), dtype, cast(bytes, memory), offset=start)
        return region

    def _synchronise(self) -> None:
        self._window.Sync()
        if self._board is None:
            meet(self._node)
        else:
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
        self._moved.window += read * (self._node.size - 1)

    def _sum_over_nodes(self) -> None:
        if self._leaders is None:
            return
        meet(self._leaders)
        allreduce_in_place(self._leaders, self.result)
        self._moved.allreduce += self.result.nbytes
