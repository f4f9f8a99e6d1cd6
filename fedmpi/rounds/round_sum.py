"""The fused sum of a round: update ⊕ weight total ⊕ metric sums in one flat buffer, one reduction.

Metrics travel as fixed-point limbs beside the update, so that counts stay exact whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.combiners import Combiner
from fedmpi.aggregation.dealt import CombinedSum
from fedmpi.aggregation.exact import Accumulator, FixedPointSum, FloatSum
from fedmpi.aggregation.fused_metrics import decode_metrics, encode_metrics, metric_slots
from fedmpi.aggregation.weighing import JudgedSum, Weighing
from fedmpi.cluster import Cluster
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats
from fedmpi.config import Config
from fedmpi.config.choices import chosen, options
from fedmpi.local.comparisons import LocalLosses
from fedmpi.local.diagnostics import UpdateMoments
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.local.work import WorkReport
from fedmpi.mediators.relay import RelayReport
from fedmpi.models.flat import FlatModel
from fedmpi.rounds.agreement import TakenClients

SUMS = (
    "weight",
    "clients",
    "samples",
    "steps",
    "loss_sum",
    "loss_count",
    "stop",
    "visits",
    "hops",
    "diverged",
    "power",
)
ATTENDED = ("places", "fingerprint", "due")
OBSERVED = ("clipped", "moment_weight", "moment_weighted_squares", "moment_term_squares", "moment_weighted_gain")
SingleUpdates = Callable[[Accumulator], CombinedSum | JudgedSum]
PER_RANK = 5
"""Metrics that every rank has of its own: busy, load and idle seconds, rows and steps."""


@dataclass(frozen=True)
class RankWork:
    """What a rank did in a round."""

    report: WorkReport = field(default_factory=WorkReport)  # Of its engine, or of its part of the relays
    taken: TakenClients = field(default_factory=TakenClients)  # Which participants it took for its own
    rows: float = 0.0  # Gradients of one sample, and steps not merged
    steps: float = 0.0
    relayed: RelayReport | None = None  # What it did for mediators; None in a star and where nobody took part
    # Whether the round took as long as such rounds do: not the first one
    steady: bool = False


@dataclass(frozen=True)
class RoundTotals:
    """The sums of a round over all ranks.

    Attributes
    ----------
    update : Tensor float32 (d,)
        Σ c_k Δ_k. Valid until the next sum, and not to be written to: other ranks may read the same memory.
    sums : dict
        The metric sums by name (`SUMS`, `ATTENDED`, `OBSERVED`); the update and "weight" are the true ones times
        2**power.
    busy, load, idle : float64 (ranks,)
        Seconds every rank spent on local work, of these on loading data, and waiting for mediators' models.
    rows, steps : float64 (ranks,)
        Gradients of one sample, and steps not merged, of every rank.
    further : dict of str to Tensor (d,) or float
        What else the local algorithm sums over the participants.
    """

    update: Tensor
    sums: dict[str, float]
    busy: Floats
    load: Floats
    idle: Floats
    rows: Floats
    steps: Floats
    further: dict[str, Any] = field(default_factory=dict)

    @property
    def moments(self) -> UpdateMoments:
        """Sums over the participants' own updates (zeros when nobody observed them)."""
        return UpdateMoments(*(self.sums[name] for name in OBSERVED[1:]))

    @property
    def stop(self) -> bool:
        """Whether any rank was asked to stop."""
        return self.sums["stop"] > 0

    def phase_seconds(self) -> dict[str, float]:
        """The slowest rank's seconds of loading and training."""
        return {"load": float(self.load.max()), "train": float((self.busy - self.load).max())}


class RoundSum:
    """This rank's share of the round's sum."""

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
        kept = torch.device("cpu") if exact else self.device  # where the accumulator keeps its sum
        self.head = (1 + len(vectors)) * self.values
        self.buffer = cluster.sum_tensor(self.head + metric_slots(self.metrics, dtype), dtype, kept)
        sums: list[Accumulator] = [
            FixedPointSum(part, self.device, ranks=cluster.size) if exact else FloatSum(part, self.device)
            for part in torch.split(self.buffer[: self.head], self.values)
        ]
        self.updates: Accumulator = sums[0]
        self.further = dict(zip(vectors, sums[1:], strict=True))
        self.own = single_updates(self.updates) if single_updates is not None else None
        self.updates = self.own or self.updates

    def open(self, plan: Plan, model: Tensor) -> None:
        """Start a round with empty sums; `model` (d,) is where it starts."""
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
        """Write this rank's metrics, and what it observed of single updates, into the buffer behind its update."""
        report, relayed, taken = work.report, work.relayed, work.taken
        self.updates.flush()
        for vectors in self.further.values():
            vectors.flush()
        judged = self.own if isinstance(self.own, JudgedSum) else None
        sums = [
            report.weight if judged is None else judged.weight,
            report.clients,
            report.samples,
            report.steps,
            report.loss_sum,
            report.loss_count,
            float(stop),
            relayed.visits if relayed else 0,
            relayed.hops if relayed else 0,
            report.diverged,
            0 if judged is None else judged.power,
            taken.places,
            taken.fingerprint,
            taken.due,
        ]
        moments = observer.moments() if observer else UpdateMoments()
        observed = [
            observer.clipped if observer else 0,
            moments.weight,
            moments.weighted_squares,
            moments.term_squares,
            moments.weighted_gain,
        ]
        ranks = np.zeros((PER_RANK, self.cluster.size))
        idle_seconds = relayed.idle_seconds if relayed else 0.0
        ranks[:, self.cluster.rank] = busy_seconds, report.load_seconds, idle_seconds, work.rows, work.steps
        further = [0.0 if numbers is None else numbers[name] for name in self.numbers]
        metrics = np.concatenate([sums, observed, ranks.ravel(), further])
        self.buffer[self.head :] = torch.from_numpy(encode_metrics(metrics, self.dtype))

    def reduce(self) -> RoundTotals:
        """The sums over all ranks; every rank receives the same bits."""
        total = self.cluster.reduce_tensor()
        metrics = decode_metrics(total[self.head :].numpy(force=True), self.metrics)
        names = SUMS + ATTENDED + OBSERVED
        after = len(names) + PER_RANK * self.cluster.size
        busy, load, idle, rows, steps = metrics[len(names) : after].reshape(PER_RANK, -1)
        update, *others = torch.split(total[: self.head], self.values)
        further: dict[str, Any] = dict(zip(self.numbers, metrics[after:].tolist(), strict=True))
        for (name, vectors), summed in zip(self.further.items(), others, strict=True):
            further[name] = vectors.to_update(summed).clone()  # an algorithm may keep it
        sums = dict(zip(names, metrics.tolist(), strict=False))
        return RoundTotals(self.updates.to_update(update), sums, busy, load, idle, rows, steps, further)

    def release(self) -> None:
        """Drop the references to the buffer's memory before the cluster closes."""
        self.updates, self.own = FloatSum(np.zeros(0, np.float32), torch.device("cpu")), None
        self.further = {}


def one_by_one(
    config: Config, cluster: Cluster, model: FlatModel, losses: Callable[[], LocalLosses]
) -> SingleUpdates | None:
    """What takes every client's own update, where the configuration needs them one by one; None for sums."""
    if config.aggregation.rule != "mean":
        combiner = Combiner(chosen(config, "combiner"), options(config, "combiner"))
        return partial(CombinedSum, combiner=combiner, cluster=cluster, model=model.initial)
    weighing = Weighing(chosen(config, "weights"), options(config, "weights"))
    return partial(JudgedSum, weighing=weighing, loss=losses().before, cluster=cluster) if weighing.judges else None


def _dtype(model: Tensor, exact: bool) -> np.dtype[Any]:
    """The type of the sums: that of the model, or fixed point."""
    if exact:
        return np.dtype(np.int64)
    return np.dtype(np.float64 if model.dtype == torch.float64 else np.float32)
