"""Who does what among the ranks: worker indices, the range of clients that every worker owns, whether rank 0 trains."""

from __future__ import annotations

import logging
import math
import os
import socket
from dataclasses import dataclass

import numpy as np
import torch

from fedmpi.common.arithmetic import repeat_results
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.core.agreement import places_on_node, refuse_mixed_devices
from fedmpi.data.ownership import ownership
from fedmpi.data.schema import DataDescription
from fedmpi.mpi import Cluster
from fedmpi.mpi.resources import explicit_threads, threads_beside_others

log = logging.getLogger("fedmpi")

WORK_WORTH_THREADS = 8_000_000
"""Values × samples of a launch from which two threads are quicker than one. Measured for a multilayer perceptron of
199,210 values and batches of 10: no gain with one client (2 million), 1.7 times as fast with ten together (20 million).
"""

THREADS_A_CORE = 8
"""Threads for each core of a node beyond which a system may refuse to start them, which ends the process."""
SHARED_BYTES = 2 << 30
"""Data of a node's ranks up to which "auto" lets every one of them keep all of it."""


@dataclass(frozen=True)
class Layout:
    """The workers of a job."""

    boundaries: Ints  # (workers + 1,): Worker w owns the clients boundaries[w] … boundaries[w + 1] − 1
    worker: int | None  # This rank among the workers; None for a rank that only serves
    shared: bool = False  # Whether participants are trained by any worker, not only by their owner
    server_trains: bool = False  # Whether rank 0, which plans and evaluates, is worker 0 as well

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.boundaries) - 1

    @property
    def description(self) -> str:
        """Who trains what, for the run log."""
        who = f"{self.workers} workers" + (", rank 0 among them" if self.server_trains else "")
        return f"{who}: " + (
            "each trains an equal part of the cohort" if self.shared else "each trains its own clients"
        )

    def ranks(self, workers: Ints) -> Ints:
        """The ranks of workers; below zero where there is none."""
        first = 0 if self.server_trains else 1
        return np.where(workers < 0, workers, workers + first)

    def owners(self, clients: Ints) -> Ints:
        """The worker that owns each of the clients (m,), int64 (m,)."""
        return np.searchsorted(self.boundaries, clients, side="right") - 1

    @property
    def owned(self) -> tuple[int, int]:
        """First client of this rank and one past its last; empty for a rank that only serves."""
        if self.worker is None:
            return 0, 0
        return int(self.boundaries[self.worker]), int(self.boundaries[self.worker + 1])


def shares_data(config: Config, cluster: Cluster, sizes: Ints, description: DataDescription) -> bool:
    """Whether any worker may train any client (`topology.placement`)."""
    placement = config.topology.placement
    if cluster.size == 1 or config.topology.kind == "mediators" or config.transport.error_feedback:
        return False
    if placement != "auto":
        return placement == "shared"
    kept_bytes = int(sizes.sum()) * (4 * math.prod(description.feature_shape) + 8)
    return kept_bytes * cluster.largest_node <= SHARED_BYTES


def server_trains(config: Config, cluster: Cluster, shared: bool, places: int) -> bool:
    """Whether rank 0 of several trains (`server.trains`): by default if its core or GPU would idle otherwise."""
    if config.server.trains != "auto":
        return config.server.trains == "always"
    return shared and cluster.largest_node <= places


def agree_on_work(
    config: Config, cluster: Cluster, sizes: Ints, description: DataDescription, device: torch.device
) -> tuple[bool, bool]:
    """Whether data is shared, and whether the server trains, as rank 0 decides for all; collective."""
    places, decided = places_on_node(cluster, device), None
    if cluster.is_server:
        shared = shares_data(config, cluster, sizes, description)
        decided = [np.array([shared, server_trains(config, cluster, shared, places)])]
    shared, with_server = cluster.broadcast(decided)[0].tolist()
    cluster.server_trains = with_server
    return shared, with_server


def lay_out(
    cluster: Cluster, sizes: Ints, shard_starts: Ints, server_trains: bool = False, shared: bool = False
) -> Layout:
    """Share the clients out among the ranks that train."""
    all_train = server_trains or cluster.size == 1
    workers = cluster.size if all_train else cluster.size - 1
    idle = workers - len(sizes)
    if cluster.is_server and idle > 0:
        log.warning("%d workers for %d clients: %d stay idle", workers, len(sizes), idle)
    worker = cluster.rank if all_train else cluster.rank - 1
    boundaries = ownership(sizes, shard_starts, workers)
    return Layout(boundaries, worker if worker >= 0 else None, shared, all_train)


def check_threads(threads: int) -> None:
    """Refuse so many threads that starting them ends the process."""
    cores = os.cpu_count() or 1
    if threads > THREADS_A_CORE * cores:
        raise UserError(
            f"cluster.threads = {threads}, but this node ({socket.gethostname()}) has {cores} cores: choose at most "
            f"{THREADS_A_CORE * cores}, better as many as a rank has cores, or 0 for that"
        )


def prepare_device(config: Config, cluster: Cluster) -> torch.device:
    """This rank's device, the most threads it may have (one with exact sums, for the same arithmetic), its memory."""
    check_threads(config.cluster.threads)
    if config.aggregation.exact:
        torch.set_num_threads(1)
        repeat_results()
    else:
        torch.set_num_threads(config.cluster.threads or cluster.threads_for_rank())
    device = cluster.device(config.cluster.device)
    refuse_mixed_devices(cluster, device)
    return device


def settle_threads(config: Config, cluster: Cluster, values: int, sizes: Ints) -> int:
    """The threads of this rank, now that model and clients are known; collective.

    Its fair share, as far as nothing else uses the cores, and only one where the work of a step is too small for more.
    What the user names, by `cluster.threads` or OMP_NUM_THREADS, stays.
    """
    fair, cores = torch.get_num_threads(), cluster.fewest_cores
    named = config.cluster.threads or explicit_threads(os.environ)
    if not cluster.maximum(int(fair > 1 and not config.aggregation.exact)):
        return fair
    others = cluster.cores_of_others()
    free = threads_beside_others(fair, cores, others, cluster.node_size)
    busy = f"other processes keep {others:.1f} of the {cores} cores busy"
    level = logging.WARNING if cluster.is_server else logging.INFO
    if named:
        if free < named > 1:
            log.log(level, "%s: the %d threads asked for will wait for one another: ask for fewer", busy, named)
        return fair
    if values * rows_per_launch(config, cluster, sizes) < WORK_WORTH_THREADS:
        free = 1
        log.info("threads: 1, of %d that there is room for: a step is too small for more", fair)
    elif free < fair:
        log.log(level, "%s: threads = %d, not %d (cluster.threads sets another number)", busy, free, fair)
    else:
        log.info("threads: %d", fair)
    torch.set_num_threads(free)
    return free


def rows_per_launch(config: Config, cluster: Cluster, sizes: Ints) -> float:
    """About how many samples one launch works on: a batch, of several clients where they may be trained together."""
    batch = float(sizes.mean()) if config.local.batch_size == "all" else float(config.local.batch_size)
    if config.local.engine == "sequential" or config.topology.kind == "mediators":
        return batch
    part = config.participation
    cohort = part.count or round((part.fraction or 1.0) * len(sizes))
    return min(batch, float(sizes.mean())) * max(1.0, cohort / cluster.workers)
