"""Assignment of clients to workers: worker indices, the clients that each worker owns, and their trainers.

Assignments are pure functions of the plan, so every rank computes the same ones. If any rank may map any shard, clients
are assigned by planned work. Seconds measured in earlier rounds are used only if `cluster.balance` = "measured",
because then the sums of two equal runs differ in their last bits. Rank 0 estimates the speed of each worker and sends
the result with the plan.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.arithmetic import set_arithmetic
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.data.assignment import ownership
from fedmpi.data.schema import DataDescription
from fedmpi.local.client_state import ClientState
from fedmpi.local.work import LocalRule
from fedmpi.mpi import Cluster
from fedmpi.mpi.device import explicit_threads
from fedmpi.updates.compression import keeps_residuals

log = logging.getLogger("fedmpi")

WORK_WORTH_THREADS = 8_000_000
"""Parameters × samples of a launch from which two threads are faster than one. Measured for a multilayer perceptron of
199,210 parameters, batches of 10: no gain with one client (2 million), 1.7 times as fast with ten (20 million).
"""

SHARED_BYTES = 2 << 30
"""Largest size of the data of a node's ranks for which "auto" lets every rank keep all data."""

STEP_ROWS = 8.0
"""Cost of a step in additional samples of its batch (measured: 6 to 12 for small dense and convolutional
networks)."""
LONGEST_FIRST_UP_TO = 4096
"""Largest number of selected clients for the exact rule; more are assigned in turns."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Its multiples modulo 1 fill the unit interval evenly: every worker's turns are spread over the sorted clients."""
MEMORY = 0.95
"""Factor of a round's weight per later round in the measured speeds: the last twenty rounds count most."""
SLOWEST = 50.0
"""Largest assumed ratio of a worker's speed to the average, in either direction."""
STATE = "balance.rounds"
MOVED_BYTES = 64 << 20
"""Largest number of bytes of clients' state transmitted at once, over all ranks."""


@dataclass(frozen=True)
class Layout:
    """Workers of a job and the clients that they own."""

    boundaries: Ints  # (workers + 1,): Worker w owns the clients boundaries[w] … boundaries[w + 1] − 1
    worker: int | None  # Worker index of this rank; None for a rank that only serves
    shared: bool = False  # True if any worker may train a client, not only its owner
    server_trains: bool = False  # True if rank 0, which plans and evaluates, is also worker 0

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.boundaries) - 1

    @property
    def description(self) -> str:
        """Description of the assignment, for the run log."""
        who = f"{self.workers} workers" + (", rank 0 among them" if self.server_trains else "")
        return f"{who}: " + (
            "each trains an equal part of the cohort" if self.shared else "each trains its own clients"
        )

    def ranks(self, workers: Ints) -> Ints:
        """Return the ranks of workers; negative for no worker."""
        first = 0 if self.server_trains else 1
        return np.where(workers < 0, workers, workers + first)

    def owners(self, clients: Ints) -> Ints:
        """Return the worker that owns each of the clients (m,), int64 (m,)."""
        return np.searchsorted(self.boundaries, clients, side="right") - 1

    @property
    def owned(self) -> tuple[int, int]:
        """First client of this rank and one past its last; empty for a rank that only serves."""
        if self.worker is None:
            return 0, 0
        return int(self.boundaries[self.worker]), int(self.boundaries[self.worker + 1])

    def own(self, clients: Ints) -> Ints:
        """Return those of the clients, sorted, that this rank owns."""
        first, last = np.searchsorted(clients, self.owned)
        return clients[first:last]


def shares_data(config: Config, cluster: Cluster, sizes: Ints, description: DataDescription) -> bool:
    """Return whether any worker may train any client (`cluster.placement`)."""
    placement = config.cluster.placement
    if cluster.size == 1 or config.topology.name == "mediators" or keeps_residuals(config):
        return False
    if placement != "auto":
        return placement == "shared"
    kept_bytes = int(sizes.sum()) * (4 * math.prod(description.feature_shape) + 8)
    return kept_bytes * cluster.largest_node <= SHARED_BYTES


def server_trains(config: Config, cluster: Cluster, shared: bool, places: int) -> bool:
    """Return whether rank 0 of several trains (`cluster.server_trains`): by default if its core or GPU would idle."""
    if config.cluster.server_trains != "auto":
        return config.cluster.server_trains == "always"
    return shared and cluster.largest_node <= places


def lay_out(
    cluster: Cluster, sizes: Ints, shard_starts: Ints, server_trains: bool = False, shared: bool = False
) -> Layout:
    """Divide the clients among the ranks that train."""
    all_train = server_trains or cluster.size == 1
    workers = cluster.size if all_train else cluster.size - 1
    idle = workers - len(sizes)
    if cluster.is_server and idle > 0:
        log.warning("%d workers for %d clients: %d stay idle", workers, len(sizes), idle)
    worker = cluster.rank if all_train else cluster.rank - 1
    boundaries = ownership(sizes, shard_starts, workers)
    return Layout(boundaries, worker if worker >= 0 else None, shared, all_train)


def prepare_device(config: Config, cluster: Cluster) -> torch.device:
    """Choose this rank's device, its thread limit (one with exact sums, for equal arithmetic) and its memory."""
    exact = config.server.exact
    torch.set_num_threads(1 if exact else config.cluster.threads or cluster.threads_for_rank())
    device = cluster.device(config.cluster.device)
    set_arithmetic(exact, device.type == "cuda" and config.local.precision == "tf32")
    return device


def settle_threads(config: Config, cluster: Cluster, values: int, sizes: Ints) -> None:
    """Take one thread if the work of a step is too small for more, unless the user has set their number.

    The others are a fair share of the node's cores. Exact sums need one.
    """
    fair, named = torch.get_num_threads(), config.cluster.threads or explicit_threads(os.environ)
    if fair > 1 and not named and values * rows_per_launch(config, cluster, sizes) < WORK_WORTH_THREADS:
        torch.set_num_threads(1)
    log.info("threads: %d, of %d that there is room for", torch.get_num_threads(), fair)


def rows_per_launch(config: Config, cluster: Cluster, sizes: Ints) -> float:
    """Estimate the samples of one launch: a batch, of several clients if they may be trained together."""
    batch = float(sizes.mean()) if config.local.batch_size == "all" else float(config.local.batch_size)
    if config.local.engine == "sequential" or config.topology.name == "mediators":
        return batch
    part = config.clients
    count = config.topology.in_flight if config.topology.name == "async" else part.count
    cohort = count or round((part.fraction or 1.0) * len(sizes))
    return min(batch, float(sizes.mean())) * max(1.0, cohort / cluster.workers)


def places_on_node(cluster: Cluster, device: torch.device) -> int:
    """Return the smallest number of ranks that a node has cores or GPUs for, equal on all ranks; collective."""
    if device.type == "cpu":
        return cluster.fewest_cores
    return -cluster.maximum(-torch.cuda.device_count())


def planned_cost(rule: LocalRule, rows: Ints, merged: bool, own_steps: Ints | None = None) -> Floats:
    """Return the cost of each selected client in gradients of one sample, float64 (m,): its samples and steps."""
    batch = np.maximum(rows if rule.batch_size is None else np.minimum(rows, rule.batch_size), 1)
    if rule.epochs is not None:
        used = rows - rows % batch if rule.drop_last else rows
        steps, seen = rule.epochs * -(-used // batch), rule.epochs * used
    else:
        assert rule.steps is not None
        steps, seen = np.where(rows > 0, rule.steps, 0), rule.steps * np.minimum(rows, batch)
    if own_steps is not None:
        own = own_steps > 0
        steps = np.where(own & (rows > 0), own_steps, steps)
        seen = np.where(own, own_steps * np.minimum(rows, batch), seen)
    return np.asarray(seen + STEP_ROWS * (np.where(steps == 1, 0, steps) if merged else steps))


def longest_first(costs: Floats, speeds: Floats, head_start: float = 0.0) -> Ints:
    """Assign the costliest client to the worker that would finish it first, then the next one, and so on.

    With equal speeds this is the worker with the least work (Graham 1969). The smallest of many clients are assigned in
    turns that are proportional to the speeds.
    """
    order = np.argsort(-costs, kind="stable")
    owners = np.empty(len(costs), np.int64)
    slowness = (1 / speeds).tolist()
    finished = [head_start * slowness[0]] + [0.0] * (len(speeds) - 1)
    first, rest = order[:LONGEST_FIRST_UP_TO], order[LONGEST_FIRST_UP_TO:]
    for place, cost in zip(first.tolist(), costs[first].tolist(), strict=True):
        would = [seconds + cost * slow for seconds, slow in zip(finished, slowness, strict=True)]
        owner = would.index(min(would))
        finished[owner] = would[owner]
        owners[place] = owner
    shares = np.cumsum(speeds)
    owners[rest] = np.searchsorted(shares / shares[-1], np.arange(len(rest)) * GOLDEN_RATIO % 1, side="right")
    return owners


def equal_parts(offsets: Ints, speeds: Floats, head_start: float = 0.0) -> Ints:
    """Cut the selected clients, in their order, into neighboring parts of equal sample counts.

    Workers of unequal speeds get parts in proportion to their speeds. Used for sampled data: neighbors are drawn
    together, so that no rank draws the samples of the whole cohort.
    """
    shares, workers = speeds / speeds.mean(), len(speeds)
    whole, ends = float(offsets[-1]), np.concatenate([[0.0], np.cumsum(shares)])
    share = (whole + head_start) / workers
    if shares[0] * share <= head_start and workers > 1:
        targets = np.minimum(np.maximum(ends - ends[1], 0) * (whole / (ends[-1] - ends[1])), whole)
    else:
        targets = np.clip(ends * share - head_start, 0, whole)
    after = np.searchsorted(offsets, np.ceil(targets).astype(np.int64))  # same type as the offsets: no copy
    before = np.maximum(after - 1, 0)
    boundaries: Ints = np.where(targets - offsets[before] < offsets[after] - targets, before, after)
    boundaries[0], boundaries[-1] = 0, len(offsets) - 1
    return boundaries


class BalanceLearner:
    """Estimator of the workers' speeds: planned cost per measured second of all past rounds; older ones count less."""

    def __init__(self, workers: int):
        self._sums = np.zeros((workers, 2))  # Cost and seconds of each worker, with rounds of equal length

    def observe(self, costs: Floats, seconds: Floats) -> None:
        """Add the measurements of a round, (workers,) each."""
        working = (costs > 0) & (seconds > 0)
        if len(self._sums) and working.any():
            measured = np.where(working, [costs, seconds], 0.0).T
            self._sums = MEMORY * self._sums + measured / float(seconds[working].mean())

    def speeds(self) -> Floats:
        """Return the relative speeds of the workers, 1 on average; average for one without work; () before round 1."""
        if not self._sums.any():
            return np.empty(0)
        costs, seconds = self._sums.T
        average = float(costs.sum() / seconds.sum())
        speeds = np.divide(costs, seconds * average, out=np.ones(len(costs)), where=seconds > 0)
        speeds = np.clip(speeds, 1 / SLOWEST, SLOWEST)
        relative: Floats = speeds / speeds.mean()
        return relative

    def state(self) -> dict[str, Tensor]:
        """Return the checkpoint state, float64 (workers, 2); nothing before the first round."""
        return {STATE: torch.from_numpy(self._sums)} if self._sums.any() else {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a checkpoint of as many workers."""
        if STATE in state and state[STATE].shape == self._sums.shape:
            self._sums = state[STATE].numpy().copy()


class Homes:
    """Ranks that store the clients' state: it stays where a client was trained last, and moves to its next trainer.

    Every rank computes all moves without communication, because the assignment is a function of the plan.
    """

    def __init__(self, cluster: Cluster, state: ClientState, clients: int):
        self.cluster, self.state = cluster, state
        self._rank = np.full(clients, -1, np.int32)

    def settle(self, clients: Ints, ranks: Ints) -> None:
        """Set the ranks that store the state of these clients."""
        self._rank[clients] = ranks

    def bring(self, clients: Ints, ranks: Ints) -> None:
        """Move the state of these clients to the ranks that train them now; collective, with the same arguments.

        A negative rank means that no rank trains the client. Its state is not moved.
        """
        clients, ranks = clients[ranks >= 0], ranks[ranks >= 0]
        homes = self._rank[clients]
        moving = np.flatnonzero((homes >= 0) & (homes != ranks))
        at_once = max(1, MOVED_BYTES // self.state.record_bytes)
        for first in range(0, len(moving), at_once):
            some = moving[first : first + at_once]
            self._move(clients[some], homes[some].astype(np.int64), ranks[some])
        self._rank[clients] = ranks

    def _move(self, clients: Ints, homes: Ints, ranks: Ints) -> None:
        """Send records to other ranks: rank by rank, in client order."""
        order = np.lexsort((clients, ranks))
        clients, homes, ranks = clients[order], homes[order], ranks[order]
        going, coming = np.flatnonzero(homes == self.cluster.rank), np.flatnonzero(ranks == self.cluster.rank)
        coming = coming[np.argsort(homes[coming], kind="stable")]
        values = self.state.record_bytes // np.dtype(np.float32).itemsize
        outgoing, incoming = np.empty((len(going), values), np.float32), np.empty((len(coming), values), np.float32)
        for row, client in zip(outgoing, clients[going].tolist(), strict=True):
            row[:] = self.state.record(client).reshape(-1).view(np.float32)
            self.state.drop(client)
        counts = [np.bincount(who, minlength=self.cluster.size) * values for who in (ranks[going], homes[coming])]
        self.cluster.exchange(outgoing.reshape(-1), counts[0], incoming.reshape(-1), counts[1])
        for row, client in zip(incoming, clients[coming].tolist(), strict=True):
            self.state.put(client, row.view(self.state.dtype).reshape(-1, self.state.values).copy())
