"""Which way of summing pays: memory shared by the ranks of a node, MPI's Allreduce, or the tensors where they lie."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.mpi.board import Board
from fedmpi.mpi.communicators import Communicators, maximum
from fedmpi.mpi.counters import BytesMoved
from fedmpi.mpi.device import DeviceSum, agree_on_device
from fedmpi.mpi.sums import AllreduceSum, LocalSum, Reduction, Sum
from fedmpi.mpi.window import WindowSum, bytes_on_node

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Measured with MPICH: shared memory wins from 70,000 float32 on where every rank has a core; with more ranks than cores
# and no board the barriers can cost more than Allreduce, which pays from about a million bytes on.
WINDOW_FROM_BYTES = 128 << 10
WINDOW_FROM_BYTES_CROWDED = 1 << 20
SHARED_MEMORY = "/dev/shm"
SPARE_SHARED_MEMORY = 8 << 20


def choose_reduction(
    wanted: Reduction, nbytes: int, ranks_on_node: int, cores: int, board: bool = False
) -> tuple[Reduction, str]:
    """Decide between the window and Allreduce."""
    if wanted != "auto":
        return wanted, "as asked for"
    if ranks_on_node == 1:
        return "allreduce", "no two ranks share a node"
    least = WINDOW_FROM_BYTES_CROWDED if ranks_on_node > cores else WINDOW_FROM_BYTES
    if board:
        return "window", "the ranks of a node share memory in which they meet"
    where = f"{ranks_on_node} ranks on the {cores} cores of a node"
    if nbytes < least:
        return "allreduce", f"with {where} shared memory pays from {least >> 10} KiB on"
    return "window", f"shared memory pays with {where}"


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
    """A buffer that is summed over the ranks; all ranks build it together and the choice is logged."""
    if comms is not None:
        _check_alike(comms, count, dtype)
    if agree_on_device(comms, wanted, device, library):
        return DeviceSum(None if comms is None else comms.world, count, dtype, device, moved)
    if comms is None:
        return LocalSum(count, dtype)
    crowded = server_away and comms.largest_node > comms.fewest_cores
    return _on_host(comms, wanted, count, dtype, moved, board, crowded)


def _check_alike(comms: Communicators, count: int, dtype: np.dtype) -> None:
    for value in (count, dtype.num):
        if maximum(comms.world, value) != -maximum(comms.world, -value):
            raise RuntimeError(f"the ranks ask for different sum buffers (here {count} values of {dtype})")


def _on_host(
    comms: Communicators,
    wanted: Reduction,
    count: int,
    dtype: np.dtype,
    moved: BytesMoved,
    board: Board | None,
    server_away: bool,
) -> Sum:
    nbytes = count * dtype.itemsize
    way, reason = choose_reduction(wanted, nbytes, comms.largest_node, comms.fewest_cores, board is not None)
    away = bool(maximum(comms.node, int(server_away and comms.world.rank == 0)))
    shared = _share_memory(comms, count, dtype, moved, board, away) if way == "window" else None
    if isinstance(shared, str):
        way, reason = "allreduce", f"instead of shared memory: {shared}"
    if comms.world.rank == 0:
        level = logging.WARNING if isinstance(shared, str) else logging.INFO
        log.log(level, "sums of %d %s (%.1f MB) go through the %s: %s", count, dtype, nbytes / 1e6, way, reason)
    return shared if isinstance(shared, WindowSum) else AllreduceSum(comms.world, count, dtype, moved)


def shared_memory_lacks(nbytes: int) -> bool:
    """Whether this node's shared memory lacks room for so many bytes; writing beyond it is deadly (SIGBUS)."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return False  # the library keeps its shared memory elsewhere, and says itself when that fails
    return room.f_bavail * room.f_frsize < nbytes + SPARE_SHARED_MEMORY


def _share_memory(
    comms: Communicators, count: int, dtype: np.dtype, moved: BytesMoved, board: Board | None, away: bool
) -> WindowSum | str:
    """The window, or why some node has none; the same kind of answer on every rank."""
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
