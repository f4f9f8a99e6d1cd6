"""`Cluster`: the ranks of the job, with the few exchanges that a federated round needs.

Rank 0 is the server, the others are workers; a single process is both. All ranks call collectives in the same
order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.mpi.collectives import (
    BytesMoved,
    Communicators,
    Reduction,
    broadcast_message,
    gather_messages,
    maxima,
    maximum,
    meet,
    packed,
    unpacked,
)
from fedmpi.mpi.device import choose_device, core_mask, cores_allowed, fair_threads
from fedmpi.mpi.launch import short_version, start_mpi
from fedmpi.mpi.messages import Messages
from fedmpi.mpi.sums import AllreduceSum, build_sum

if TYPE_CHECKING:
    import torch

    from fedmpi.mpi.window import Board, WindowSum

log = logging.getLogger(__name__)
T = TypeVar("T")


class Cluster:
    """Ranks of the job from the view of one of them; built by `Cluster.connect`."""

    def __init__(self, comms: Communicators | None, mpi: str, reduction: Reduction = "auto"):
        self._comms = comms
        self._reduction: Reduction = reduction
        self.moved = BytesMoved()
        self._sums: dict[tuple[int, np.dtype, str], AllreduceSum | WindowSum] = {}
        self._current: AllreduceSum | WindowSum | None = None
        self._messages: Messages | None = None
        self._board = None if comms is None else _shared_memory(comms)
        self.server_trains = True
        self.mpi = mpi
        self.rank, self.size = (0, 1) if comms is None else (comms.world.rank, comms.world.size)
        self.node_rank = 0 if comms is None else comms.node.rank
        self.nodes = 1 if comms is None else comms.nodes
        self.largest_node = 1 if comms is None else comms.largest_node
        self.fewest_cores = cores_allowed() if comms is None else comms.fewest_cores
        self.is_server = self.rank == 0
        self.workers = max(1, self.size - 1)
        self.worker = None if self.is_server and self.size > 1 else max(0, self.rank - 1)

    @classmethod
    def connect(cls, reduction: Reduction = "auto") -> Cluster:
        """Join the job that this process was launched in; without MPI, make a job of one process."""
        mpi = start_mpi()
        if mpi is None:
            log.info("one process: no MPI is installed")
            return cls(None, "none", reduction)
        library, world = short_version(mpi.Get_library_version()), mpi.COMM_WORLD
        if world.Get_size() == 1:
            log.info("one process (%s)", library)
            return cls(None, library, reduction)
        cluster = cls(Communicators.split(world), library, reduction)
        if cluster.is_server:
            log.info("%d processes on %d node(s) (%s)", cluster.size, cluster.nodes, library)
        return cluster

    def worker_rank(self, worker: int) -> int:
        """Return the rank of the worker with this index."""
        return worker if self.size == 1 else worker + 1

    def barrier(self) -> None:
        """Wait politely until all ranks have called this."""
        if self._board is not None and self.nodes == 1:
            self._board.meet()
        elif self._comms is not None:
            meet(self._comms.world)

    def broadcast(self, arrays: Sequence[AnyArray] | None) -> list[AnyArray]:
        """Return rank 0's arrays on all ranks."""
        if self._comms is None:
            return list(arrays or ())
        message = packed(arrays) if self.is_server and arrays is not None else None
        found = None
        if self._board is not None and self.nodes == 1:
            found = self._board.share(message)
        else:
            self.barrier()
        received = unpacked(broadcast_message(self._comms.world, message) if found is None else found)
        self.moved["broadcast"] += sum(array.nbytes for array in received)
        return list(arrays) if self.is_server and arrays is not None else received

    def gather(self, array: AnyArray) -> list[AnyArray] | None:
        """Return every rank's array on rank 0, in rank order, else None; lengths, shapes and dtypes may differ."""
        if self._comms is None:
            return [array]
        self.barrier()
        messages = gather_messages(self._comms.world, packed([array]))
        if messages is None:
            self.moved["gather"] += array.nbytes
            return None
        received = [unpacked(message)[0] for message in messages]
        self.moved["gather"] += sum(part.nbytes for part in received[1:])
        return received

    def exchange(
        self, outgoing: NDArray[np.floating], sent: Ints, incoming: NDArray[np.floating], received: Ints
    ) -> None:
        """Send neighboring parts of `outgoing`, one per rank, into neighboring parts of `incoming`; collective."""
        if self._comms is None:
            incoming[: received[0]] = outgoing[: sent[0]]
            return
        self.barrier()
        self._comms.world.Alltoallv(
            [outgoing, (sent, np.cumsum(sent) - sent)], [incoming, (received, np.cumsum(received) - received)]
        )
        self.moved["exchange"] += outgoing.itemsize * int(sent.sum() - sent[self.rank])

    def messages(self) -> Messages:
        """Return the point-to-point messages of a job of several ranks, until `close`; the first call is collective."""
        assert self._comms is not None
        self._messages = self._messages or Messages(self._comms.world, self.moved)
        return self._messages

    def maximum(self, value: int) -> int:
        """Return the largest of the ranks' integers, on all ranks."""
        return value if self._comms is None else maximum(self._comms.world, value)

    def maxima(self, values: Ints) -> Ints:
        """Return the largest of the ranks' integers at each place, on all ranks."""
        return values if self._comms is None else maxima(self._comms.world, values)

    def sum_tensor(self, count: int, dtype: DTypeLike, device: torch.device | None = None) -> torch.Tensor:
        """Return this rank's slot of a buffer that the next `reduce_tensor` sums.

        The slot is on the device, or in host memory if sums are computed there. The first call for a length, type and
        device is collective and builds the buffer (zeros); later calls return the same slot with its last content.
        Slots are valid until `close`.
        """
        import torch

        dtype = np.dtype(dtype)
        key = (count, dtype, str(device or "cpu"))
        if key not in self._sums:
            self._sums[key] = build_sum(
                self._comms, self._reduction, count, dtype, self.moved, device, self._board, not self.server_trains
            )
        self._current = self._sums[key]
        return torch.as_tensor(self._current.slot)

    def reduce_tensor(self) -> torch.Tensor:
        """Return the read-only sum over all ranks of the slots last requested, bit-identical on every rank.

        On a node the order of the summands is that of the ranks; between nodes, and in Allreduce, it is the MPI
        library's.
        """
        import torch

        assert self._current is not None  # by `sum_tensor`
        if self._messages is not None:
            self._messages.end_round()
        self._current.reduce()
        return torch.as_tensor(self._current.result)

    def share_bytes(self) -> BytesMoved:
        """Return the bytes moved through MPI so far, summed over all ranks, on all ranks; collective."""
        counts = np.array([self.moved[kind] for kind in BytesMoved.KINDS], np.int64)
        if self._comms is not None:
            self.barrier()
            self._comms.world.Allreduce(counts.copy(), counts)
        return BytesMoved(dict(zip(BytesMoved.KINDS, counts.tolist(), strict=True)))

    def threads_for_rank(self) -> int:
        """Return the threads that this rank may keep busy: its fair share of the node's cores, at least one."""
        masks, node_rank = (core_mask()[None], 0) if self._comms is None else (self._comms.core_masks, self.node_rank)
        return fair_threads(masks, node_rank, cores_allowed(), os.environ)

    def device(self, request: str = "auto") -> torch.device:
        """Return the torch device of this rank, made the current one."""
        device = choose_device(request, self.node_rank)
        if device.type == "cuda":
            import torch

            torch.cuda.set_device(device)  # MPI, too, works in the context of the current device
        return device

    def close(self) -> None:
        """Free buffers, messages and communicators; collective.

        Results of `sum_tensor` and `reduce_tensor` become invalid. Unfinished messages are safe only if the sender
        closes (or reduces) before it ends.
        """
        if self._messages is not None:
            self._messages.close()
        for summed in self._sums.values():
            summed.close()
        if self._board is not None:
            self._board.close()
        if self._comms is not None:
            self._comms.free()
        self._sums, self._current, self._comms, self._board, self._messages = {}, None, None, None, None


def _shared_memory(comms: Communicators) -> Board | None:
    """Return the shared memory of this node, an accelerator; None if it is missing on some node."""
    try:
        from fedmpi.mpi.window import board_of
    except ImportError:
        return None
    return board_of(comms)


def on_server(cluster: Cluster, work: Callable[[], T]) -> T | None:
    """Run something on rank 0 alone that may raise a UserError; collective."""
    result, refusal, kind = None, "", UserError
    if cluster.is_server:
        try:
            result = work()
        except UserError as error:
            refusal, kind = str(error), RunFailure if isinstance(error, RunFailure) else UserError
    words = [np.frombuffer(refusal.encode(errors="backslashreplace"), np.uint8), np.array([kind is RunFailure])]
    received = cluster.broadcast(words if cluster.is_server else None)
    if received[0].size:
        raise (RunFailure if received[1][0] else UserError)(received[0].tobytes().decode())
    return result
