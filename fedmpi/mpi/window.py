"""Sums over all ranks: in a node's shared memory, by MPI's Allreduce, or for tensors on their device.

In the window every rank of a node writes its slot. On each node, `reduce` then runs the following steps, with its
barriers at the node's shared-memory barrier if there is one:

1. barrier A: all slots of the node are filled, and all ranks have finished reading the previous sum;
2. every rank sums its slice over all slots, in rank order, into the result, block by block within the cache;
3. barrier B: the result is complete, and the slots are no longer read: their owners may overwrite them;
4. with several nodes: one leader per node sums the results in place by Allreduce; barrier C releases the others.

No rank writes the result before barrier A of the next call, so it may be read until the reader itself calls `reduce`
again. On a node with fewer cores than ranks, a server that only serves does not sum, because it would take a core from
the ranks that it waits for. It marks both barriers at once and sleeps until the result is complete.

On GPUs Allreduce needs an MPI that reads device memory (CUDA-aware); without one, updates are staged through host
memory. MPI is the only transport; NCCL is not used.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray
from fedmpi.mpi.board import Board
from fedmpi.mpi.collectives import (
    BytesMoved,
    Communicators,
    Reduction,
    allreduce_in_place,
    maximum,
    meet,
    pieces,
    total,
)

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

CUDA = 0
"""MPIX_GPU_SUPPORT_CUDA of MPICH's mpi.h."""
BLOCK = 32 << 10
CACHE_LINE = 64
log = logging.getLogger(__name__)
# Measured with MPICH: shared memory wins from 70,000 float32 on if every rank has a core. With more ranks than cores
# and no board the barriers can cost more than Allreduce, which pays from about a million bytes on.
WINDOW_FROM_BYTES = 128 << 10
WINDOW_FROM_BYTES_CROWDED = 1 << 20
SHARED_MEMORY = "/dev/shm"
SPARE_SHARED_MEMORY = 8 << 20


class Sum(Protocol):
    """Buffer that is repeatedly summed over the ranks."""

    @property
    def slot(self) -> AnyArray | torch.Tensor:
        """This rank's summand, (count,)."""

    @property
    def result(self) -> AnyArray | torch.Tensor:
        """Sum over the ranks, (count,)."""

    def reduce(self) -> None:
        """Sum the slots of all ranks into the result; collective."""

    def close(self) -> None:
        """Free the memory; collective. Slot and result become invalid."""


class AllreduceSum:
    """Sum of tensors by MPI Allreduce, called once all ranks have arrived; for a single process (None) a copy.

    If the tensors are on a GPU, MPI receives their addresses.
    """

    def __init__(
        self, comm: MPI.Intracomm | None, count: int, dtype: np.dtype, device: torch.device | None, moved: BytesMoved
    ):
        import torch

        self.slot = torch.zeros(count, dtype=getattr(torch, dtype.name), device=device)
        self.result = torch.zeros_like(self.slot)
        self._comm, self._moved = comm, moved

    def reduce(self) -> None:
        if self._comm is None:
            self.result.copy_(self.slot)
            return
        if self.slot.is_cuda:  # MPI does not know the stream of the kernels that use slot and result
            import torch

            torch.cuda.synchronize(self.slot.device)
        meet(self._comm)
        for part in pieces(len(self.slot)):
            self._comm.Allreduce(self.slot[part], self.result[part])
        self._moved.allreduce += self.result.numel() * self.result.element_size()

    def close(self) -> None:
        pass


def padded(nbytes: int) -> int:
    """Return bytes of a region, in whole cache lines and at least one."""
    return max(1, -(-nbytes // CACHE_LINE)) * CACHE_LINE


def bytes_on_node(nbytes: int, ranks_on_node: int) -> int:
    """Return the shared memory that a node needs: one slot per rank, and the result."""
    return padded(nbytes) * (ranks_on_node + 1)


def slice_of(rank: int, ranks: int, count: int) -> slice:
    """Return a rank's slice of `count` values: equal parts, cut so that no cache line has two writers."""
    width = -(-count // ranks)
    width = -(-width // CACHE_LINE) * CACHE_LINE
    return slice(min(rank * width, count), min((rank + 1) * width, count))


class WindowSum:
    """Sum in a node's shared memory, by the module's protocol; all ranks of a node build it, then call `clear`."""

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
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # a rank's slot is in memory near to it
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
        """Zero everything, which allocates the memory now and not during a run; collective on the node."""
        self.slot[:] = 0
        self.result[self._slice] = 0
        self._synchronize()

    def reduce(self) -> None:
        if self._spared and self._board is not None:
            self._board.come(2)
            self._board.wait(long=True)
        else:
            self._synchronize()
            self._sum_slice()
            self._synchronize()
        if self._nodes > 1:
            self._sum_over_nodes()
            self._synchronize()

    def close(self) -> None:
        self._slots = []
        self._window.Unlock_all()
        self._window.Free()

    def _region(self, rank: int, start: int, count: int, dtype: np.dtype) -> AnyArray:
        memory, _ = self._window.Shared_query(rank)
        region: AnyArray = np.ndarray((count,), dtype, cast(bytes, memory), offset=start)
        return region

    def _synchronize(self) -> None:
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


def choose_reduction(
    wanted: Reduction, nbytes: int, ranks_on_node: int, cores: int, board: bool = False
) -> tuple[Reduction, str]:
    """Decide between the window and Allreduce."""
    if wanted != "auto":
        return wanted, "as configured"
    if ranks_on_node == 1:
        return "allreduce", "no two ranks share a node"
    if board:
        return "window", "the ranks of a node share memory in which they meet"
    least = WINDOW_FROM_BYTES_CROWDED if ranks_on_node > cores else WINDOW_FROM_BYTES
    way: Reduction = "window" if nbytes >= least else "allreduce"
    return way, f"shared memory is faster from {least >> 10} KiB on with {ranks_on_node} ranks on {cores} cores"


def build_sum(
    comms: Communicators | None,
    wanted: Reduction,
    count: int,
    dtype: np.dtype,
    moved: BytesMoved,
    device: torch.device | None = None,
    library: str = "MPI",
    board: Board | None = None,
    server_away: bool = False,
) -> Sum:
    """Build a buffer that is summed over the ranks; collective, and the choice is logged."""
    on_device = agree_on_device(comms, wanted, device, library)
    if comms is None or on_device:
        world = None if comms is None else comms.world
        return AllreduceSum(world, count, dtype, device if on_device else None, moved)
    nbytes = count * dtype.itemsize
    way, reason = choose_reduction(wanted, nbytes, comms.largest_node, comms.fewest_cores, board is not None)
    crowded = server_away and comms.largest_node > comms.fewest_cores
    away = bool(maximum(comms.node, int(crowded and comms.world.rank == 0)))
    shared = _share_memory(comms, count, dtype, moved, board, away) if way == "window" else None
    if isinstance(shared, str):
        way, reason = "allreduce", f"instead of shared memory: {shared}"
    if comms.world.rank == 0:
        level = logging.WARNING if isinstance(shared, str) else logging.INFO
        log.log(level, "sums of %d %s (%.1f MB) go through the %s: %s", count, dtype, nbytes / 1e6, way, reason)
    return shared if isinstance(shared, WindowSum) else AllreduceSum(comms.world, count, dtype, None, moved)


def shared_memory_lacks(nbytes: int) -> bool:
    """Check whether this node's shared memory lacks room for so many bytes; writing beyond it ends the process
    (SIGBUS)."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return False  # the library stores its shared memory elsewhere, and reports a failure itself
    return room.f_bavail * room.f_frsize < nbytes + SPARE_SHARED_MEMORY


def _share_memory(
    comms: Communicators, count: int, dtype: np.dtype, moved: BytesMoved, board: Board | None, away: bool
) -> WindowSum | str:
    """Return the window, or the reason why some node has none; all ranks agree."""
    from mpi4py import MPI

    need = bytes_on_node(count * dtype.itemsize, comms.node.size)
    if maximum(comms.world, int(shared_memory_lacks(need))):
        return f"a node has less than {(need + SPARE_SHARED_MEMORY) / 1e6:.0f} MB free in {SHARED_MEMORY}"
    try:
        shared = WindowSum(comms, count, dtype, moved, board, away)
    except MPI.Exception as error:
        maximum(comms.world, 1)
        return f"MPI cannot share memory ({error})"
    if maximum(comms.world, 0):
        shared.close()
        return "MPI cannot share memory on another node"
    shared.clear()
    return shared


def cuda_aware() -> bool:
    """Return whether the loaded MPI library reports that it reads and writes GPU memory.

    Open MPI and MPICH answer MPIX_Query_cuda_support; MPICH from 4 on and its derivatives MPIX_GPU_query_support.
    """
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # already loaded; symbols of the libraries it is linked to are found too
    ask = getattr(library, "MPIX_Query_cuda_support", None)
    if ask is not None and ask():
        return True
    ask, supported = getattr(library, "MPIX_GPU_query_support", None), ctypes.c_int(0)
    return ask is not None and ask(CUDA, ctypes.byref(supported)) == 0 and supported.value != 0


def sums_on_device(wanted: Reduction, ranks: int, accelerators: int, readable: bool, library: str) -> tuple[bool, str]:
    """Decide whether tensors are summed on their device."""
    if ranks == 1:
        return wanted == "device" or accelerators == 1, "there is one process"
    if wanted == "device":
        if not readable:
            raise UserError(
                f'cluster.reduction = "device" needs a CUDA-aware MPI where tensors are on GPUs, which {library} is '
                'not: choose "auto"'
            )
        return True, "as configured"
    if wanted != "auto":
        return False, f'cluster.reduction = "{wanted}"'
    if not readable:
        return False, f"{library} is not CUDA-aware"
    return accelerators == ranks, f"{library} is CUDA-aware, {accelerators} of {ranks} ranks have a GPU"


def agree_on_device(comms: Communicators | None, wanted: Reduction, device: torch.device | None, library: str) -> bool:
    """Apply `sums_on_device` for all ranks together, logged by rank 0 if there is a choice; collective."""
    kind = "cpu" if device is None else device.type
    if comms is None:
        return sums_on_device(wanted, 1, int(kind != "cpu"), True, library)[0]
    ranks, accelerators = comms.world.size, total(comms.world, int(kind != "cpu"))
    readable = kind == "cpu" or (kind == "cuda" and cuda_aware())
    everywhere = total(comms.world, int(readable)) == ranks
    decided, reason = sums_on_device(wanted, ranks, accelerators, everywhere, library)
    if accelerators and comms.world.rank == 0:
        way = "summed on their device" if decided else "staged through pinned host memory"
        log.info("sums: device tensors %s: %s", way, reason)
    return decided
