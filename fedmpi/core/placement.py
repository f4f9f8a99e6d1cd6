"""Assignment of clients to workers: worker indices, the clients that each worker owns, and their trainers.

Assignments are pure functions of the plan, so every rank computes the same ones. If any rank may map any shard, clients
are assigned by planned work. Seconds measured in earlier rounds are used only if `cluster.balance` = "measured",
because then the sums of two equal runs differ in their last bits. Rank 0 estimates the cost of samples, steps and
workers and sends the result with the plan.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.arithmetic import repeat_results
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.data.assignment import ownership
from fedmpi.data.schema import DataDescription
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
"""Factor of a round's weight per later round in the learned costs: the last twenty rounds count most."""
MOST_STEP_ROWS = 1000.0
SLOWEST = 50.0
"""Largest assumed ratio of a worker's speed to the average, in either direction."""
TRUST = 1e-4
"""Weight of the assumed costs beside measured ones; they decide if measurements carry no information."""
NOISE, LIKELY = 0.1, 30.0
"""Assumed errors: relative error of measured seconds, and error of STEP_ROWS in samples. If all batches have one size,
samples and steps cannot be distinguished, and noise alone would move the cost of a step from one bound to the other."""
PASSES = 3
"""Number of alternations of the fit after a round; the fit continues from the last one."""
STATE = "balance.rounds"


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
    if config.server.exact:
        torch.set_num_threads(1)
        repeat_results()
    else:
        torch.set_num_threads(config.cluster.threads or cluster.threads_for_rank())
    device = cluster.device(config.cluster.device)
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
    cohort = part.count or round((part.fraction or 1.0) * len(sizes))
    return min(batch, float(sizes.mean())) * max(1.0, cohort / cluster.workers)


def places_on_node(cluster: Cluster, device: torch.device) -> int:
    """Return the smallest number of ranks that a node has cores or GPUs for, equal on all ranks; collective."""
    if device.type == "cpu":
        return cluster.fewest_cores
    return -cluster.maximum(-torch.cuda.device_count())


def planned_work(rule: LocalRule, rows: Ints, merged: bool) -> tuple[Ints, Ints]:
    """Return the sample gradients and the steps of each selected client."""
    batch = np.maximum(rows if rule.batch_size is None else np.minimum(rows, rule.batch_size), 1)
    if rule.steps is not None:
        steps, seen = np.where(rows > 0, rule.steps, 0), rule.steps * np.minimum(rows, batch)
    else:
        assert rule.epochs is not None
        used = rows - rows % batch if rule.drop_last else rows
        steps, seen = rule.epochs * -(-used // batch), rule.epochs * used
    return seen, np.where(steps == 1, 0, steps) if merged else steps


def planned_cost(rule: LocalRule, rows: Ints, merged: bool, step_rows: float = STEP_ROWS) -> Floats:
    """Return the cost of each selected client in gradients of one sample, float64 (m,); see `planned_work`."""
    seen, steps = planned_work(rule, rows, merged)
    return seen + step_rows * steps


def longest_first(costs: Floats, workers: int, head_start: float = 0.0, speeds: Floats | None = None) -> Ints:
    """Assign the costliest client to the worker that would finish it first, then the next one, and so on.

    With equal speeds this is the worker with the least work (Graham 1969). The smallest of many clients are assigned in
    turns that are proportional to the speeds.
    """
    order = np.argsort(-costs, kind="stable")
    owners = np.empty(len(costs), np.int64)
    speeds = np.ones(workers) if speeds is None else speeds
    slowness = (1 / speeds).tolist()
    finished = [head_start * slowness[0]] + [0.0] * (workers - 1)
    first, rest = order[:LONGEST_FIRST_UP_TO], order[LONGEST_FIRST_UP_TO:]
    for place, cost in zip(first.tolist(), costs[first].tolist(), strict=True):
        would = [seconds + cost * slow for seconds, slow in zip(finished, slowness, strict=True)]
        owner = would.index(min(would))
        finished[owner] = would[owner]
        owners[place] = owner
    shares = np.cumsum(speeds)
    owners[rest] = np.searchsorted(shares / shares[-1], np.arange(len(rest)) * GOLDEN_RATIO % 1, side="right")
    return owners


def equal_parts(offsets: Ints, workers: int, head_start: float = 0.0, speeds: Floats | None = None) -> Ints:
    """Cut the selected clients, in their order, into neighboring parts of equal sample counts.

    Workers of unequal speeds get parts in proportion to their speeds. Used for sampled data: neighbors are drawn
    together, so that no rank draws the samples of the whole cohort.
    """
    shares = np.ones(workers) if speeds is None else speeds / speeds.mean()
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


@dataclass(frozen=True)
class Balance:
    """Costs and speeds from which clients are assigned to workers."""

    step_rows: float = STEP_ROWS  # Cost of a step in samples
    speeds: Floats | None = None  # (workers,): Relative speeds of the workers, 1 on average; None = all equal

    def as_array(self) -> Floats:
        """Return one array for the plan, float64 (1 + workers,)."""
        return np.concatenate([[self.step_rows], [] if self.speeds is None else self.speeds])

    @classmethod
    def from_array(cls, values: Floats) -> Balance:
        """Read the array of a plan; an empty one means planned costs and equal speeds."""
        return cls(float(values[0]), values[1:]) if len(values) else cls()

    def facts(self) -> dict[str, Any]:
        """Return the entries for the record of the round that was assigned by it; empty unless measured."""
        return {} if self.speeds is None else {"step_rows": self.step_rows, "worker_speeds": self.speeds.tolist()}


class BalanceLearner:
    """Estimator of the cost of a step and the workers' speeds: seconds = slowness_w · (rows + κ steps) · a.

    Least squares over all workers and past rounds; older rounds decay slowly, and each round is weighted by its length.
    Slownesses and costs are fitted alternately, starting from those of the round before.
    """

    def __init__(self, workers: int):
        # Sums over the rounds, one row per worker: rows², rows · steps, steps², rows · seconds, steps · seconds.
        self._sums = np.zeros((workers, 5))
        self._slowness = np.ones(workers)
        self._step_rows = STEP_ROWS

    def observe(self, rows: Floats, steps: Floats, seconds: Floats) -> None:
        """Add the measurements of a round."""
        working = (rows > 0) & (seconds > 0)
        if not len(self._sums) or not working.any():
            return
        length = float(seconds[working].mean())
        r, q, s = (np.where(working, values, 0.0) / length for values in (rows, steps, seconds))
        self._sums *= MEMORY
        self._sums += np.stack([r * r, r * q, q * q, r * s, q * s], axis=1)
        self._fit()

    def balance(self) -> Balance | None:
        """Return the current estimate; None before the first round."""
        if not self._sums.any():
            return None
        speeds = 1 / self._slowness
        return Balance(self._step_rows, speeds / speeds.mean())

    def as_array(self) -> Floats:
        """Return the current estimate as an array for the plan; empty before the first round."""
        learned = self.balance()
        return learned.as_array() if learned else np.empty(0)

    def _fit(self) -> None:
        rr, rq, qq, rs, qs = self._sums.T
        for _ in range(PASSES):
            slow = self._slowness
            pooled = (slow**2 @ rr, slow**2 @ rq, slow**2 @ qq, slow @ rs, slow @ qs)
            k = self._step_rows = _step_rows(*map(float, pooled))
            squares, products = rr + 2 * k * rq + k * k * qq, rs + k * qs
            row_seconds = float(slow @ products) / float(slow**2 @ squares)
            assumed = TRUST * float(squares.mean())
            slow = (products / row_seconds + assumed) / (squares + assumed)
            self._slowness = np.clip(slow / slow.mean(), 1 / SLOWEST, SLOWEST)

    def state(self) -> dict[str, Tensor]:
        """Return the checkpoint state: sums and slownesses, float64 (workers, 6); nothing before the first round."""
        if not self._sums.any():
            return {}
        return {STATE: torch.from_numpy(np.column_stack([self._sums, self._slowness]))}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a checkpoint of as many workers."""
        if STATE not in state or len(state[STATE]) != len(self._sums):
            return
        saved: Floats = state[STATE].numpy()
        self._sums, self._slowness = saved[:, :5].copy(), saved[:, 5].copy()
        self._fit()


def _step_rows(rr: float, rq: float, qq: float, rs: float, qs: float) -> float:
    """Return κ = b/a of the least-squares fit a · rows + b · steps = seconds, shrunk towards STEP_ROWS, bounded."""
    if qq == 0:  # only merged steps
        return STEP_ROWS
    row_seconds = (rs + STEP_ROWS * qs) / (rr + 2 * STEP_ROWS * rq + STEP_ROWS**2 * qq)
    assumed = (NOISE / (LIKELY * row_seconds)) ** 2
    rr, rq, qq = rr + assumed * STEP_ROWS**2, rq - assumed * STEP_ROWS, qq + assumed
    row, step = qq * rs - rq * qs, rr * qs - rq * rs
    if row <= 0:
        return MOST_STEP_ROWS
    return min(max(step / row, 0.0), MOST_STEP_ROWS)
