"""The communicators of a job: a private copy of the world, the ranks of this node, and one leader a node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from fedmpi.mpi.resources import core_mask, cores_allowed
from fedmpi.mpi.waiting import meet, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Communicators:
    """Built and freed by all ranks together."""

    world: MPI.Intracomm  # All ranks; the ranks that share memory with this one
    node: MPI.Intracomm
    leaders: MPI.Intracomm | None  # The first rank of every node, on those ranks
    nodes: int  # Number of nodes
    core_masks: NDArray[np.bool_]  # (ranks on the node, cores): The cores that each rank of this node may use
    largest_node: int  # The most ranks on a node, and the fewest cores that the ranks of a node have together
    fewest_cores: int

    @classmethod
    def split(cls, comm: MPI.Intracomm) -> Communicators:
        """Make them out of COMM_WORLD."""
        from mpi4py import MPI

        world = comm.Dup()
        node = cast("MPI.Intracomm", world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank))
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

    def free(self) -> None:
        """Give them back to MPI; collective."""
        for comm in (self.leaders, self.node, self.world):
            if comm is not None:
                comm.Free()


def count_nodes(comm: MPI.Intracomm) -> int:
    """How many nodes the ranks are on; collective."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    nodes = total(comm, int(node.rank == 0))
    node.Free()
    return nodes


def maximum(comm: MPI.Intracomm, value: int) -> int:
    """The largest of the ranks' integers, on all ranks; waits politely."""
    from mpi4py import MPI

    meet(comm)
    largest = np.empty(1, np.int64)
    comm.Allreduce(np.array([value], np.int64), largest, op=MPI.MAX)
    return int(largest[0])


def total(comm: MPI.Intracomm, value: int) -> int:
    """The sum of the ranks' integers, on all ranks; waits politely."""
    meet(comm)
    summed = np.empty(1, np.int64)
    comm.Allreduce(np.array([value], np.int64), summed)
    return int(summed[0])


def meet_members(world: MPI.Intracomm, ranks: tuple[int, ...], tag: int) -> None:
    """Wait politely until all these ranks of the world have come here; no other rank takes part."""
    nothing = np.empty(0, np.uint8)
    first, others = ranks[0], ranks[1:]
    if world.rank == first:
        for rank in others:
            wait_until(partial(world.Iprobe, source=rank, tag=tag))
            world.Recv(nothing, source=rank, tag=tag)
        for rank in others:
            world.Send(nothing, dest=rank, tag=tag)
    else:
        world.Send(nothing, dest=first, tag=tag)
        wait_until(partial(world.Iprobe, source=first, tag=tag))
        world.Recv(nothing, source=first, tag=tag)
