"""Sums of tensors where they lie, by MPI's Allreduce on the device's memory, and when that is possible.

On GPUs it takes an MPI that reads device memory (CUDA-aware); without one, updates are staged through host memory. NCCL
has no part: MPI is the one transport, for one rank or many, with and without GPUs.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.mpi.communicators import Communicators, total
from fedmpi.mpi.counters import BytesMoved
from fedmpi.mpi.sums import Reduction, pieces
from fedmpi.mpi.waiting import meet

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

log = logging.getLogger(__name__)

CUDA = 0
"""MPIX_GPU_SUPPORT_CUDA of MPICH's mpi.h."""


class DeviceSum:
    """The sum of tensors on their device; MPI is given their addresses."""

    def __init__(
        self, comm: MPI.Intracomm | None, count: int, dtype: np.dtype, device: torch.device | None, moved: BytesMoved
    ):
        import torch

        self.slot = torch.zeros(count, dtype=getattr(torch, dtype.name), device=device)
        self.result = torch.zeros_like(self.slot)
        self._comm = comm
        self._moved = moved

    def reduce(self) -> None:
        if self._comm is None:
            self.result.copy_(self.slot)
            return
        self._finish_kernels()
        meet(self._comm)
        for part in pieces(len(self.slot)):
            self._comm.Allreduce(self.slot[part], self.result[part])
        self._moved.allreduce += self.result.numel() * self.result.element_size()

    def close(self) -> None:
        pass

    def _finish_kernels(self) -> None:
        """MPI knows no stream: what writes the slot or reads the last result has to be done before it starts."""
        if self.slot.is_cuda:
            import torch

            torch.cuda.synchronize(self.slot.device)


def cuda_aware() -> bool:
    """Whether the MPI library that mpi4py has loaded reads and writes GPU memory, by its own account.

    Open MPI and MPICH answer MPIX_Query_cuda_support; MPICH from 4 on, and what is made of it, MPIX_GPU_query_support.
    """
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # loaded long since; symbols of the libraries it is linked to are found, too
    ask = getattr(library, "MPIX_Query_cuda_support", None)
    if ask is not None and ask():
        return True
    ask, supported = getattr(library, "MPIX_GPU_query_support", None), ctypes.c_int(0)
    return ask is not None and ask(CUDA, ctypes.byref(supported)) == 0 and supported.value != 0


def sums_on_device(wanted: Reduction, ranks: int, accelerators: int, readable: bool, library: str) -> tuple[bool, str]:
    """Decide whether tensors are summed where they lie."""
    if ranks == 1:
        return wanted == "device" or accelerators == 1, "there is one process"
    if wanted == "device":
        if not readable:
            raise UserError(
                f'cluster.reduction = "device" needs a CUDA-aware MPI where tensors are on GPUs, which {library} is '
                'not: choose "auto"'
            )
        return True, "as asked for"
    if wanted != "auto":
        return False, f'cluster.reduction = "{wanted}"'
    if not readable:
        return False, f"{library} is not CUDA-aware"
    return accelerators == ranks, f"{library} is CUDA-aware, {accelerators} of {ranks} ranks have a GPU"


def agree_on_device(comms: Communicators | None, wanted: Reduction, device: torch.device | None, library: str) -> bool:
    """`sums_on_device` for all ranks together, logged by rank 0 where there is anything to decide; collective."""
    kind = "cpu" if device is None else device.type
    if comms is None:
        return sums_on_device(wanted, 1, int(kind != "cpu"), True, library)[0]
    ranks, accelerators = comms.world.size, total(comms.world, int(kind != "cpu"))
    readable = kind == "cpu" or (kind == "cuda" and cuda_aware())
    everywhere = total(comms.world, int(readable)) == ranks
    decided, reason = sums_on_device(wanted, ranks, accelerators, everywhere, library)
    if accelerators and comms.world.rank == 0:
        way = "summed where they lie" if decided else "staged through pinned host memory"
        log.info("sums: device tensors %s: %s", way, reason)
    return decided
