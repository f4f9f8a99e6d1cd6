"""MPI layer: ranks, typed collectives, sums, relays, polite waiting, and the end of a job."""

from fedmpi.mpi.collectives import BytesMoved
from fedmpi.mpi.device import choose_device
from fedmpi.mpi.launch import Launch, abort_job, agree_on_end, read_launch, start_mpi, world_rank
from fedmpi.mpi.ranks import Cluster

__all__ = [
    "BytesMoved",
    "Cluster",
    "Launch",
    "abort_job",
    "agree_on_end",
    "choose_device",
    "read_launch",
    "start_mpi",
    "world_rank",
]
