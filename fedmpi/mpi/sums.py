"""Sums over all ranks: in a node's shared memory (`window.py`), or of tensors where they are by MPI's Allreduce.

On GPUs Allreduce needs an MPI that reads device memory (CUDA-aware); without one, a sum is copied to host memory and
back once per round. MPI is the only transport; NCCL is not used.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.mpi.collectives import BytesMoved, Communicators, Reduction, meet, total

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from fedmpi.mpi.window import Board, WindowSum

CUDA = 0
"""MPIX_GPU_SUPPORT_CUDA of MPICH's mpi.h."""
log = logging.getLogger(__name__)


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

    def pin(self) -> None:
        """Move the tensors to memory that is copied to and from a GPU in one pass."""
        self.slot, self.result = self.slot.pin_memory(), self.result.pin_memory()

    def reduce(self) -> None:
        if self._comm is None:
            self.result.copy_(self.slot)
            return
        if self.slot.is_cuda:  # MPI does not know the stream of the kernels that use slot and result
            import torch

            torch.cuda.synchronize(self.slot.device)
        meet(self._comm)
        self._comm.Allreduce(self.slot, self.result)
        self._moved["allreduce"] += self.result.numel() * self.result.element_size()

    def close(self) -> None:
        pass


def build_sum(
    comms: Communicators | None,
    wanted: Reduction,
    count: int,
    dtype: np.dtype,
    moved: BytesMoved,
    device: torch.device | None = None,
    board: Board | None = None,
    server_away: bool = False,
) -> AllreduceSum | WindowSum:
    """Build a buffer that is summed over the ranks; collective, and the choice is logged.

    "auto" is the device if MPI reads it on all ranks, else the shared memory of nodes with several ranks, else
    Allreduce in host memory.
    """
    if comms is None:
        return AllreduceSum(None, count, dtype, device, moved)
    if sums_on_device(comms, wanted, device):
        return AllreduceSum(comms.world, count, dtype, device, moved)
    found, reason = None, "the ranks of a node have no shared memory" if wanted == "window" else ""
    if board is not None and (wanted == "window" or (wanted == "auto" and comms.largest_node > 1)):
        found, reason = board.build_sum(comms, count, dtype, moved, server_away)
    if comms.world.rank == 0:
        way = "shared memory" if found is not None else "Allreduce" + (f" ({reason})" if reason else "")
        level = logging.WARNING if reason else logging.INFO
        log.log(level, "sums of %d %s (%.1f MB) go through %s", count, dtype, count * dtype.itemsize / 1e6, way)
    made = AllreduceSum(comms.world, count, dtype, None, moved) if found is None else found
    if device is not None and device.type == "cuda":
        made.pin()
    return made


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


def sums_on_device(comms: Communicators, wanted: Reduction, device: torch.device | None) -> bool:
    """Decide whether tensors are summed on their device, for all ranks together; collective."""
    kind = "cpu" if device is None else device.type
    ranks, accelerators = comms.world.size, total(comms.world, int(kind != "cpu"))
    readable = total(comms.world, int(kind == "cpu" or (kind == "cuda" and cuda_aware()))) == ranks
    if wanted == "device" and not readable:
        raise UserError(
            'cluster.reduction = "device" needs a CUDA-aware MPI where tensors are on GPUs, and this one is not. '
            'Choose "auto"'
        )
    decided = readable and (wanted == "device" or (wanted == "auto" and accelerators == ranks))
    if accelerators and comms.world.rank == 0:
        way = "summed on their device" if decided else "staged through host memory"
        log.info("sums: tensors of %d of %d ranks are on GPUs: %s", accelerators, ranks, way)
    return decided
