"""A worker's round: from the plan to the tasks of the clients it owns, trained by the chosen engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.config import Config
from fedmpi.local.engines import CompositeEngine, LocalEngine
from fedmpi.local.work import LocalRule, Task, WorkReport
from fedmpi.observer import UpdateObserver
from fedmpi.plan import Plan
from fedmpi.sampling.samples import bernoulli_rows, exact_rows, offsets_of, ratio_rows, used_counts
from fedmpi.streams import Streams


@dataclass(frozen=True)
class SampledRows:
    """The sampled rows of a rank's participants, participants without any left out.

    Attributes
    ----------
    members : int64 (q,)
        Places in the cohort of those that have rows.
    counts : int64 (q,)
        How many rows each has, at least one.
    rows : int64 (r,)
        Local rows, participant after participant.
    """

    members: np.ndarray
    counts: np.ndarray
    rows: np.ndarray

    @property
    def largest(self) -> int:
        """Most rows of one participant."""
        return int(self.counts.max(initial=0))

    def per_client(self) -> list[np.ndarray]:
        """The rows of each participant, views of `rows`."""
        ends = np.cumsum(self.counts).tolist()
        return [self.rows[a:b] for a, b in zip([0, *ends], ends, strict=False)]


class Trainer:
    """Trains the planned clients that this rank owns.

    Parameters
    ----------
    config : Config
        Chooses the local rule and the sampling of rows.
    engine : Engine
        Does the local work.
    sizes : int64 (N,)
        Effective sizes of all clients.
    owned : (int, int)
        First owned client and one past the last; empty for a rank that only serves.
    streams : Streams
        Source of the sampled rows.
    observer : UpdateObserver or None
        The one that the engine shows each update, if any.
    """

    def __init__(
        self,
        config: Config,
        engine: LocalEngine,
        sizes: np.ndarray,
        owned: tuple[int, int],
        streams: Streams,
        observer: UpdateObserver | None,
    ):
        self.config = config
        self.engine = engine
        self.sizes = sizes
        self.owned = owned
        self.streams = streams
        self.observer = observer

    def train(self, plan: Plan, model: Tensor, total: Accumulator) -> WorkReport:
        """Add the weighted updates of this rank's participants to `total`."""
        rule = self.rule(plan)
        if self.config.samples.rule != "all" and isinstance(self.engine, CompositeEngine):
            rows = self._sampled(plan)
            if self.engine.merges_rows(rule, rows.largest, total):
                return self._train_rows(rows, plan, model, rule, total)
        tasks = self.tasks(plan)
        if self.observer is not None:
            self.observer.begin(tasks)
        if not tasks:
            return WorkReport()
        return self.engine.train(tasks, model, rule, plan.round, total)

    def _train_rows(
        self, sampled: SampledRows, plan: Plan, model: Tensor, rule: LocalRule, total: Accumulator
    ) -> WorkReport:
        """One gradient of all sampled rows, clients not looped over: the cost is that of the rows (FedSampling)."""
        if not len(sampled.rows):
            return WorkReport()
        per_client = plan.coefficients[sampled.members]
        weights = per_client if plan.per_sample else per_client / sampled.counts
        owners = np.repeat(plan.clients[sampled.members], sampled.counts)
        assert isinstance(self.engine, CompositeEngine)
        return self.engine.train_rows(
            owners, sampled.rows, np.repeat(weights, sampled.counts), model, rule, plan.round, total
        )

    def rule(self, plan: Plan) -> LocalRule:
        """What every participant does in this round."""
        part = self.config.local
        epochs = part.epochs if part.epochs is not None or part.steps is not None else 1
        return LocalRule(
            optimizer=part.optimizer,
            lr=plan.lr,
            epochs=epochs,
            steps=part.steps,
            batch_size=None if part.batch_size == "all" else part.batch_size,
            proximal_mu=part.proximal_mu,
            beta1=part.beta1,
            beta2=part.beta2,
            epsilon=part.epsilon,
        )

    def tasks(self, plan: Plan) -> list[Task]:
        """The tasks of this rank's participants that have rows to train on, in client order."""
        if self.config.samples.rule == "all":
            first, last = self._part(plan)
            members = np.arange(first, last)
            used = self.sizes[plan.clients[members]]
            rows: list[np.ndarray | None] = [None] * len(members)
        else:
            sampled = self._sampled(plan)
            members, used, rows = sampled.members, sampled.counts, [*sampled.per_client()]
        clients, coefficients = plan.clients[members], plan.coefficients[members]
        factors = coefficients * used if plan.per_sample else coefficients
        return [
            Task(client, chosen, factor)
            for client, chosen, factor, count in zip(
                clients.tolist(), rows, factors.tolist(), used.tolist(), strict=True
            )
            if count
        ]

    def _part(self, plan: Plan) -> tuple[int, int]:
        """Places in the cohort of this rank's clients: the first and one past the last."""
        first, last = np.searchsorted(plan.clients, self.owned)
        return int(first), int(last)

    def _sampled(self, plan: Plan) -> SampledRows:
        """The sampled rows of this rank's participants."""
        samples, sizes = self.config.samples, self.sizes[plan.clients]
        offsets, (first, last) = offsets_of(sizes), self._part(plan)
        part = int(offsets[first]), int(offsets[last])
        if samples.rule == "bernoulli":
            positions = bernoulli_rows(self.streams, plan.round, sizes, plan.probability, *part)
        elif samples.rule == "ratio":
            positions = ratio_rows(self.streams, plan.round, sizes, plan.probability, *part)
        else:
            assert samples.wanted is not None
            positions = exact_rows(self.streams, plan.round, sizes, samples.wanted, *part)
        counts = used_counts(positions, offsets[first : last + 1])
        members = first + np.flatnonzero(counts)
        counts = counts[members - first]
        return SampledRows(members, counts, positions - np.repeat(offsets[members], counts))
