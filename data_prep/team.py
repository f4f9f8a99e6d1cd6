"""The processes that prepare one folder together: each reads alike and writes its share of the shards."""

from __future__ import annotations

from fedmpi.cluster import Cluster, read_launch


def join_team() -> Cluster:
    """The processes that were launched together; for one process alone MPI is not even loaded.

    Raises
    ------
    UserError
        Several processes were launched, but MPI is missing or does not join them.
    """
    launch = read_launch()
    return Cluster.connect() if launch is not None and launch.size > 1 else alone()


def alone() -> Cluster:
    """This process as a team of one."""
    return Cluster(None, "none")
