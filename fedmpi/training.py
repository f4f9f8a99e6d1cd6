"""A worker's round: from the plan to the tasks of the clients it owns, trained by the chosen engine."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.config import Config
from fedmpi.local.work import Engine, LocalRule, Task, WorkReport
from fedmpi.observer import UpdateObserver
from fedmpi.plan import Plan
from fedmpi.sampling.samples import bernoulli_rows, exact_rows, offsets_of, ratio_rows, split
from fedmpi.streams import Streams


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
        engine: Engine,
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
        tasks = self.tasks(plan)
        if self.observer is not None:
            self.observer.begin(tasks)
        if not tasks:
            return WorkReport()
        return self.engine.train(tasks, model, self.rule(plan), plan.round, total)

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
        first, last = (int(i) for i in np.searchsorted(plan.clients, self.owned))
        clients, coefficients = plan.clients[first:last], plan.coefficients[first:last]
        if self.config.samples.rule == "all":
            rows: list[np.ndarray | None] = [None] * (last - first)
            used = self.sizes[clients]
        else:
            members, sampled = self._sampled(plan, first, last)
            rows, used = [*sampled], np.array([len(chosen) for chosen in sampled], np.int64)
            clients, coefficients = clients[members], coefficients[members]
        factors = coefficients * used if plan.per_sample else coefficients
        return [
            Task(client, chosen, factor)
            for client, chosen, factor, count in zip(
                clients.tolist(), rows, factors.tolist(), used.tolist(), strict=True
            )
            if count
        ]

    def _sampled(self, plan: Plan, first: int, last: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Places of this rank's participants that have sampled rows, and those rows."""
        samples, sizes = self.config.samples, self.sizes[plan.clients]
        offsets = offsets_of(sizes)
        part = int(offsets[first]), int(offsets[last])
        if samples.rule == "bernoulli":
            positions = bernoulli_rows(self.streams, plan.round, sizes, plan.probability, *part)
        elif samples.rule == "ratio":
            positions = ratio_rows(self.streams, plan.round, sizes, plan.probability, *part)
        else:
            assert samples.wanted is not None
            positions = exact_rows(self.streams, plan.round, sizes, samples.wanted, *part)
        return split(positions - part[0], offsets[first : last + 1] - part[0])
