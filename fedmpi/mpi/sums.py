"""Sums over all ranks in plain memory: the slot that a rank fills, and the sum that all ranks read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from fedmpi.common.types import AnyArray
from fedmpi.mpi.counters import BytesMoved
from fedmpi.mpi.waiting import meet

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

Reduction = Literal["auto", "window", "allreduce", "device"]

MOST_VALUES = 1 << 30


class Sum(Protocol):
    """A buffer that is summed over the ranks again and again."""

    @property
    def slot(self) -> AnyArray | torch.Tensor:
        """What this rank adds, (count,)."""

    @property
    def result(self) -> AnyArray | torch.Tensor:
        """The sum over the ranks, (count,)."""

    def reduce(self) -> None:
        """Sum the slots of all ranks into the result; collective."""

    def close(self) -> None:
        """Give the memory back; collective. Slot and result are of no more use."""


class LocalSum:
    """The sum of a single process: a copy, so that slot and result are two arrays here as well."""

    def __init__(self, count: int, dtype: np.dtype):
        self.slot = np.zeros(count, dtype)
        self.result = np.zeros(count, dtype)

    def reduce(self) -> None:
        np.copyto(self.result, self.slot)

    def close(self) -> None:
        pass


class AllreduceSum:
    """The sum by MPI Allreduce, called when all ranks have arrived."""

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: np.dtype, moved: BytesMoved):
        self.slot = np.zeros(count, dtype)
        self.result = np.zeros(count, dtype)
        self._comm = comm
        self._moved = moved

    def reduce(self) -> None:
        np.copyto(self.result, self.slot)
        meet(self._comm)
        allreduce_in_place(self._comm, self.result)
        self._moved.allreduce += self.result.nbytes

    def close(self) -> None:
        pass


def allreduce_in_place(comm: MPI.Intracomm, values: AnyArray) -> None:
    """Replace the values by their sums over the ranks, in pieces that 32-bit counts can name."""
    from mpi4py import MPI

    for part in pieces(len(values)):
        comm.Allreduce(MPI.IN_PLACE, values[part])


def pieces(length: int) -> Iterator[slice]:
    """Cuts that 32-bit counts can name."""
    for start in range(0, length, MOST_VALUES):
        yield slice(start, start + MOST_VALUES)
