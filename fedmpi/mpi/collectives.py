"""Typed collectives: arrays over MPI as stored in memory, sums, the job's communicators, and polite waiting.

An array is sent as a small int64 header and its bytes, without pickling.

A waiting rank must leave its core to the computing ranks, and a blocking MPI call spins. Therefore a tiny non-blocking
operation is polled: first eagerly (a short wait costs microseconds), for a millisecond yielding to other processes,
then with sleeps of a tenth of the time waited so far, at most 2 ms. Ranks of one node sleep until they are woken
instead (`window.Board`). A poll tests several times: a barrier takes several steps, each within a test. The blocking
collective is called only once all ranks have arrived. Large non-blocking collectives are never polled with sleeps: they
only progress inside the test. Python's signal handlers run between polls.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.types import AnyArray, Bytes, Ints
from fedmpi.mpi.device import core_mask, cores_allowed

Reduction = Literal["auto", "window", "allreduce", "device"]

if TYPE_CHECKING:
    from mpi4py import MPI

DTYPES = tuple(np.dtype(name) for name in ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
DIMENSIONS = 8
HEADER = 2 + DIMENSIONS
EAGER_TESTS = 200
YIELDING_SECONDS = 1e-3
TESTS_PER_POLL = 4
SLEEP_SHARE = 0.1
SHORTEST_SLEEP = 50e-6
LONGEST_SLEEP = 2e-3


def as_bytes(array: AnyArray) -> Bytes:
    """Return the array's values as uint8, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def packed(arrays: Sequence[AnyArray]) -> Bytes:
    """Pack arrays into one message: their number, a header each (code of the dtype, dimensions, shape), their bytes."""
    headers = np.zeros((len(arrays), HEADER), np.int64)
    for header, array in zip(headers, arrays, strict=True):
        if array.dtype not in DTYPES or array.ndim > DIMENSIONS:
            raise TypeError(f"cannot send {array.dtype} with {array.ndim} dimensions: numbers with up to {DIMENSIONS}")
        header[: 2 + array.ndim] = DTYPES.index(array.dtype), array.ndim, *array.shape
    return np.concatenate([as_bytes(part) for part in (np.array([len(arrays)]), headers, *arrays)])


def unpacked(message: Bytes) -> list[AnyArray]:
    """Unpack copies of the arrays in a message."""
    number = int(message[:8].view(np.int64)[0])
    begin = 8 + 8 * HEADER * number
    arrays: list[AnyArray] = []
    for code, dimensions, *shape in message[8:begin].view(np.int64).reshape(number, HEADER).tolist():
        array = np.empty(shape[:dimensions], DTYPES[code])
        as_bytes(array)[:] = message[begin : begin + array.nbytes]
        begin += array.nbytes
        arrays.append(array)
    return arrays


def broadcast_message(comm: MPI.Intracomm, message: Bytes | None) -> Bytes:
    """Return rank 0's message on every rank; the others pass None. All ranks must have arrived."""
    length = np.array([0 if message is None else len(message)], np.int64)
    comm.Bcast(length, root=0)
    received = np.empty(length[0], np.uint8) if message is None else message
    comm.Bcast(received, root=0)
    return received


def gather_messages(comm: MPI.Intracomm, message: Bytes) -> list[Bytes] | None:
    """Return every rank's message on rank 0, in rank order; None elsewhere. All ranks must have arrived."""
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([len(message)], np.int64), sizes)
    if comm.rank:
        comm.Gatherv(message, None, root=0)
        return None
    ends = np.cumsum(sizes)
    received = np.empty(ends[-1], np.uint8)
    comm.Gatherv(message, [received, (sizes, ends - sizes)], root=0)
    return np.split(received, ends[:-1])


def wait_until(
    arrived: Callable[[], bool],
    limit: float | None = None,
    longest_sleep: float = LONGEST_SLEEP,
    pause: Callable[[float], None] | None = None,
    long: bool = False,
) -> bool:
    """Poll `arrived` until it is true; return False after `limit` seconds. A `long` wait sleeps at once."""
    for _ in range(1 if long else EAGER_TESTS):
        if arrived():
            return True
    started = time.monotonic()
    while not any(arrived() for _ in range(TESTS_PER_POLL)):
        waited = time.monotonic() - started
        if limit is not None and waited > limit:
            return False
        if waited < YIELDING_SECONDS and not long:
            os.sched_yield()
        elif pause is not None:
            pause(waited)
        else:
            time.sleep(min(max(waited * SLEEP_SHARE, SHORTEST_SLEEP), longest_sleep))
    return True


def meet(comm: MPI.Intracomm) -> None:
    """Wait politely until every rank of `comm` has called this (a barrier)."""
    wait_until(comm.Ibarrier().Test)


class BytesMoved(Counter[str]):
    """Bytes sent or received by this rank through MPI since the start; headers of a few words are not counted.

    broadcast, gather: payload. allreduce: length of the buffers, between ranks or between the leaders of the nodes.
    window: bytes of the other ranks' slots that this rank read in the node's shared memory. relay: bytes sent to
    another member of a group. exchange: bytes sent by this rank in all-to-all exchanges.
    """

    KINDS = ("broadcast", "gather", "allreduce", "window", "relay", "exchange")

    def facts(self) -> dict[str, dict[str, int]]:
        """Return the summary's entry `mpi_bytes`: every kind, and the total."""
        return {"mpi_bytes": {**{kind: self[kind] for kind in self.KINDS}, "total": self.total()}}


@dataclass(frozen=True)
class Communicators:
    """Communicators of a job, built and freed by all ranks together."""

    world: MPI.Intracomm  # All ranks; the ranks that share memory with this one
    node: MPI.Intracomm
    leaders: MPI.Intracomm | None  # First rank of every node, on those ranks
    nodes: int  # Number of nodes
    core_masks: NDArray[np.bool_]  # (ranks on the node, cores): Cores that each rank of this node may use
    largest_node: int  # Largest number of ranks on a node, and smallest number of cores of a node's ranks together
    fewest_cores: int

    @classmethod
    def split(cls, comm: MPI.Intracomm) -> Communicators:
        """Make the communicators from COMM_WORLD."""
        from mpi4py import MPI

        world = comm.Dup()
        node = cls.ranks_of_node(world)
        leads = node.rank == 0
        leaders = cast("MPI.Intracomm", world.Split(0 if leads else MPI.UNDEFINED, key=world.rank))
        nodes = total(world, int(leads))
        masks = np.zeros((node.size, len(core_mask())), bool)
        node.Allgather(core_mask(), masks)
        cores = min(int(masks.any(axis=0).sum()), cores_allowed())
        return cls(
            world=world,
            node=node,
            leaders=leaders if leads else None,
            nodes=nodes,
            core_masks=masks,
            largest_node=maximum(world, node.size),
            fewest_cores=-maximum(world, -cores),
        )

    @staticmethod
    def ranks_of_node(comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return the communicator of the ranks that share memory with this one; collective."""
        from mpi4py import MPI

        return cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))

    def free(self) -> None:
        """Free the communicators; collective."""
        for comm in (self.leaders, self.node, self.world):
            if comm is not None:
                comm.Free()


def maximum(comm: MPI.Intracomm, value: int) -> int:
    """Return the largest of the ranks' integers, on all ranks, after a polite wait."""
    return int(maxima(comm, np.array([value]))[0])


def maxima(comm: MPI.Intracomm, values: Ints) -> Ints:
    """Return the largest of the ranks' integers at each place, on all ranks, after a polite wait."""
    return _agreed(comm, values, "MAX")


def total(comm: MPI.Intracomm, value: int) -> int:
    """Return the sum of the ranks' integers, on all ranks, after a polite wait."""
    return int(_agreed(comm, np.array([value]), "SUM")[0])


def _agreed(comm: MPI.Intracomm, values: Ints, operation: str) -> Ints:
    from mpi4py import MPI

    meet(comm)
    result = np.empty(len(values), np.int64)
    comm.Allreduce(values.astype(np.int64), result, op=getattr(MPI, operation))
    return result
