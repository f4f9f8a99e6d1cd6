"""Who does what among the ranks: worker indices, and the range of clients that every worker owns."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fedmpi.cluster import Cluster
from fedmpi.data.ownership import ownership
from fedmpi.plan import Ints

log = logging.getLogger("fedmpi")


@dataclass(frozen=True)
class Layout:
    """The workers of a job.

    Attributes
    ----------
    boundaries : int64 (workers + 1,)
        Worker w owns the clients boundaries[w] … boundaries[w + 1] − 1.
    worker : int or None
        This rank among the workers; None for a rank that only serves.
    """

    boundaries: Ints
    worker: int | None

    @property
    def owned(self) -> tuple[int, int]:
        """First client of this rank and one past its last; empty for a rank that only serves."""
        if self.worker is None:
            return 0, 0
        return int(self.boundaries[self.worker]), int(self.boundaries[self.worker + 1])


def lay_out(cluster: Cluster, sizes: Ints, shard_starts: Ints, server_trains: bool) -> Layout:
    """Share the clients out among the ranks that train.

    Parameters
    ----------
    cluster : Cluster
        The ranks.
    sizes : int64 (N,)
        Effective sizes of all clients.
    shard_starts : int64 (shards + 1,)
        First client of every shard, then N.
    server_trains : bool
        Whether rank 0 of several ranks owns clients too; a single process always does.
    """
    all_train = server_trains or cluster.size == 1
    workers = cluster.size if all_train else cluster.size - 1
    idle = workers - len(sizes)
    if cluster.is_server and idle > 0:
        log.warning("%d workers for %d clients: %d stay idle", workers, len(sizes), idle)
    worker = cluster.rank if all_train else cluster.rank - 1
    return Layout(ownership(sizes, shard_starts, workers), worker if worker >= 0 else None)
