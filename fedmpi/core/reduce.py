"""Fused sum of a round (update, total weight and metric sums in one flat buffer) and the server step.

Metrics are fixed-point limbs beside the update, so that counts stay exact whatever the number of ranks. Every rank
receives the same sums and takes the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.aggregators import Aggregator, CombinedSum
from fedmpi.aggregation.exact import (
    Accumulator,
    FixedPointSum,
    FloatSum,
    JudgedSum,
    decode_metrics,
    encode_metrics,
    metric_slots,
)
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.aggregation.weights import Weighing
from fedmpi.common.errors import RanksDisagree
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats
from fedmpi.config import Config
from fedmpi.local.algorithms import Totals
from fedmpi.local.hooks import Hooks
from fedmpi.local.measures import ClientMeasures
from fedmpi.local.observer import UpdateMoments, UpdateObserver
from fedmpi.local.work import WorkReport
from fedmpi.mediators.relay import RelayReport
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster
from fedmpi.privacy.updates import Clipping, adds_noise

SUMS = ("weight", "clients", "samples", "steps", "loss_sum", "loss_count", "stop", "visits", "hops")
ATTENDED = ("places", "due")
OBSERVED = ("clipped", "moment_weight", "moment_weighted_squares", "moment_term_squares", "moment_weighted_gain")
SingleUpdates = Callable[[Accumulator], CombinedSum | JudgedSum]
PER_RANK = 4
"""Number of metrics per rank: busy, load and idle seconds, and cost."""


@dataclass(frozen=True)
class RankWork:
    """Work of a rank in a round."""

    report: WorkReport = field(default_factory=WorkReport)  # Report of the engine, or of this rank's part of the relays
    places: int = 0  # Number of planned clients trained by this rank
    due: int = 0  # Number of those with samples to train on
    cost: float = 0.0  # Gradients of one sample and steps, in gradients of one sample
    relayed: RelayReport | None = None  # Work for mediators; None in a star and if no client was selected
    # True if the duration of the round is typical: not the first one
    steady: bool = False


@dataclass(frozen=True)
class RoundTotals:
    """The sums of a round over all ranks."""

    update: Tensor  # (d,): Σ c_k Δ_k; valid until the next sum, and read-only: other ranks may read the same memory
    sums: dict[str, float]  # Metric sums by name: SUMS, ATTENDED, OBSERVED
    busy: Floats  # (ranks,): Seconds of local work
    load: Floats  # (ranks,): Seconds of data loading within it
    idle: Floats  # (ranks,): Seconds of waiting for mediators' models
    cost: Floats  # (ranks,): Work in gradients of one sample
    further: dict[str, Any] = field(default_factory=dict)  # Tensors (d,) and numbers that the local algorithm sums

    @property
    def moments(self) -> UpdateMoments:
        """Sums over the clients' single updates (zeros if they are not observed)."""
        return UpdateMoments(*(self.sums[name] for name in OBSERVED[1:]))

    @property
    def stop(self) -> bool:
        """True if any rank received a stop request."""
        return self.sums["stop"] > 0

    def phase_seconds(self) -> dict[str, float]:
        """Return the slowest rank's seconds of loading and training."""
        return {"load": float(self.load.max()), "train": float((self.busy - self.load).max())}


class RoundSum:
    """Share of this rank in the round's sum."""

    def __init__(
        self,
        cluster: Cluster,
        model: Tensor,
        exact: bool,
        single_updates: SingleUpdates | None = None,
        vectors: Sequence[str] = (),
        numbers: Sequence[str] = (),
    ):
        self.cluster = cluster
        self.device = model.device
        self.values = model.numel()
        self.numbers = tuple(numbers)
        self.metrics = len(SUMS + ATTENDED + OBSERVED) + PER_RANK * cluster.size + len(self.numbers)
        self.dtype = dtype = _dtype(model, exact)
        self.head = (1 + len(vectors)) * self.values
        self.buffer = cluster.sum_tensor(self.head + metric_slots(self.metrics, dtype), dtype, self.device)
        self.partial = self.buffer[: self.head]  # of this rank, on the model's device
        if self.buffer.device != self.device:
            self.partial = torch.empty_like(self.partial, device=self.device)
        sums: list[Accumulator] = [
            FixedPointSum(part, ranks=cluster.size) if exact else FloatSum(part)
            for part in torch.split(self.partial, self.values)
        ]
        self.updates: Accumulator = sums[0]
        self.further = dict(zip(vectors, sums[1:], strict=True))
        self.own = single_updates(self.updates) if single_updates is not None else None
        self.updates = self.own or self.updates

    def open(self, plan: Plan, model: Tensor) -> None:
        """Start a round with empty sums; `model` (d,) is its initial model."""
        self.updates.reset()
        if self.own is not None:
            self.own.begin(plan, model)
        for vectors in self.further.values():
            vectors.reset()

    def close(
        self,
        work: RankWork,
        busy_seconds: float,
        stop: bool,
        observer: UpdateObserver | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        """Write this rank's metrics, and its observations of single updates, into the buffer after its update."""
        report, relayed = work.report, work.relayed
        self.updates.flush()
        for vectors in self.further.values():
            vectors.flush()
        if self.buffer.device != self.device:
            self.buffer[: self.head].copy_(self.partial)
        judged, moments = self.own, observer.moments() if observer else UpdateMoments()
        weight = judged.weight if isinstance(judged, JudgedSum) else report.weight
        visits, hops, idle_seconds = (relayed.visits, relayed.hops, relayed.idle_seconds) if relayed else (0, 0, 0.0)
        done = [weight, report.clients, report.samples, report.steps, report.loss_sum, report.loss_count]
        sums = [*done, float(stop), visits, hops, work.places, work.due]
        observed = [observer.clipped if observer else 0, *astuple(moments)]
        ranks = np.zeros((PER_RANK, self.cluster.size))
        ranks[:, self.cluster.rank] = busy_seconds, report.load_seconds, idle_seconds, work.cost
        further = [0.0 if numbers is None else numbers[name] for name in self.numbers]
        metrics = np.concatenate([sums, observed, ranks.ravel(), further])
        self.buffer[self.head :] = torch.from_numpy(encode_metrics(metrics, self.dtype))

    def reduce(self) -> RoundTotals:
        """Sum over all ranks; every rank receives bit-identical sums."""
        total = self.cluster.reduce_tensor()
        metrics = decode_metrics(total[self.head :].numpy(force=True), self.metrics)
        names = SUMS + ATTENDED + OBSERVED
        after = len(names) + PER_RANK * self.cluster.size
        busy, load, idle, cost = metrics[len(names) : after].reshape(PER_RANK, -1)
        update, *others = torch.split(total[: self.head].to(self.device, non_blocking=True), self.values)
        further: dict[str, Any] = dict(zip(self.numbers, metrics[after:].tolist(), strict=True))
        for (name, vectors), summed in zip(self.further.items(), others, strict=True):
            further[name] = vectors.to_update(summed).clone()  # copied because an algorithm may keep it
        sums = dict(zip(names, metrics.tolist(), strict=False))
        return RoundTotals(self.updates.to_update(update), sums, busy, load, idle, cost, further)

    def release(self) -> None:
        """Drop the references to the buffer's memory before the cluster closes."""
        self.updates, self.own = FloatSum(np.zeros(0, np.float32)), None
        self.further = {}


def one_by_one(
    cluster: Cluster, model: FlatModel, losses: Callable[[], ClientMeasures], weighing: Weighing, aggregator: Aggregator
) -> SingleUpdates | None:
    """Return the object that applies functions to single updates if the configuration needs them; None for sums."""
    if aggregator.part.name != "mean":
        return partial(CombinedSum, aggregator=aggregator, cluster=cluster, model=model.initial)
    if not weighing.judges:
        return None
    return partial(JudgedSum, weighing=weighing, loss=losses().loss, cluster=cluster, trainable=model.trainable)


def _dtype(model: Tensor, exact: bool) -> np.dtype[Any]:
    """Return the type of the sums: that of the model, or fixed point."""
    if exact:
        return np.dtype(np.int64)
    return np.dtype(np.float64 if model.dtype == torch.float64 else np.float32)


def check_work(plan: Plan, sums: dict[str, float], expected: int | None, visits_each: int | None) -> None:
    """Compare the work of all ranks in a round with the plan; every rank raises the same error."""
    places, due, trained = (round(sums[name]) for name in ("places", "due", "clients"))
    participants = len(plan.clients)
    if places != participants:
        _disagree(plan, f"{participants} participants are planned, but the ranks took {places} for theirs")
    if trained != due or (expected is not None and trained != expected):
        due = due if expected is None else expected
        _disagree(plan, f"{due} participants have samples to train on, but {trained} were trained")
    if visits_each is not None and (visits := round(sums["visits"])) != visits_each * due:
        _disagree(plan, f"{visits_each * due} visits of mediators are planned, but there were {visits}")


def _disagree(plan: Plan, what: str) -> None:
    raise RanksDisagree(f"round {plan.round}: {what}. Start all ranks with the same configuration, data and code")


@dataclass(frozen=True, eq=False)
class ServerStep:
    """Server step: mean update of a round, noise, the local algorithm's correction, and the server optimizer."""

    config: Config
    clients: int  # N
    weighing: Weighing
    optimizer: ServerOptimizer
    hooks: Hooks | None
    clipping: Clipping | None

    def take(self, plan: Plan, totals: RoundTotals, model: Tensor) -> None:
        """Update the model (d,) in place (Reddi et al. 2020, Algorithm 2)."""
        surplus = 0.0 if plan.one_step else self.weighing.surplus(plan.coefficients)
        noise, divisor = adds_noise(self.config), self.divisor(plan, totals)
        if surplus or noise or self.hooks is not None:
            self.optimizer.step(model, self._update(plan, totals, model, surplus, divisor))
        else:
            self.optimizer.step(model, totals.update, divisor)
        if self.clipping is not None and not plan.one_step:
            self.clipping.follow(plan.round, totals.sums["clients"], totals.sums["clipped"])

    def _update(self, plan: Plan, totals: RoundTotals, model: Tensor, surplus: float, divisor: float) -> Tensor:
        """Compute the round's mean update Δ of the model from the sums of all ranks, with noise and corrections."""
        update = totals.update / divisor
        if surplus:
            update.add_(model, alpha=surplus)
        if self.clipping is not None and adds_noise(self.config):
            self.clipping.add_noise(update, plan.round)
        if self.hooks is None:
            return update
        weight = totals.sums["weight"]
        true_divisor, participants = weight if self._divides(plan, totals) else 1.0, round(totals.sums["clients"])
        facts = Totals(self.clients, participants, weight, true_divisor, plan.round, plan.lr)
        return self.hooks.server_step(update, totals.further, facts)

    @property
    def combines(self) -> bool:
        """True if a robust aggregation rule, not a sum, makes the update."""
        return bool(self.config.server.aggregator.name != "mean")

    def divisor(self, plan: Plan, totals: RoundTotals) -> float:
        """Return the divisor of the sum of updates: the total weight of the returned updates, or 1."""
        return totals.sums["weight"] if self._divides(plan, totals) else 1.0

    def _divides(self, plan: Plan, totals: RoundTotals) -> bool:
        return plan.normalize and totals.sums["weight"] > 0 and not self.combines
