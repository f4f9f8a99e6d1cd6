"""All that touches MPI: the ranks, typed collectives, sums, relays, polite waiting, and the end of a job."""

from fedmpi.mpi.counters import BytesMoved
from fedmpi.mpi.ending import abort_job, agree_on_end, world_rank
from fedmpi.mpi.launcher import Launch, LauncherMismatch, read_launch, start_mpi
from fedmpi.mpi.rank_group import RankGroup
from fedmpi.mpi.resources import choose_device
from fedmpi.mpi.world import Cluster, who_runs

__all__ = [
    "BytesMoved",
    "Cluster",
    "RankGroup",
    "Launch",
    "LauncherMismatch",
    "abort_job",
    "agree_on_end",
    "choose_device",
    "read_launch",
    "start_mpi",
    "who_runs",
    "world_rank",
]
