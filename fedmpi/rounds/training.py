"""A rank's training in a round: its tasks through the chosen engine, or along the mediators' relays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.cluster import Cluster
from fedmpi.common.calling import during
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.data.shards import ShardStore
from fedmpi.local.client_numbers import update_norms
from fedmpi.local.engines import CompositeEngine, LocalEngine
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule, WorkReport
from fedmpi.mediators.relay import run_relay
from fedmpi.mediators.relay_plan import place_mediators, plan_relay
from fedmpi.rounds.agreement import TakenClients, check_work
from fedmpi.rounds.local_state import LocalState
from fedmpi.rounds.round_sum import RankWork
from fedmpi.rounds.server import rate_of
from fedmpi.rounds.traffic_count import keeps_moments
from fedmpi.rounds.worker import Worker
from fedmpi.samples.row_rule import SampledRows

FORWARDS_PER_GRADIENT = 3
"""Forward, and backward with a product for the inputs and one for the weights: a gradient costs as much as three."""


class Trainer:
    """Trains the planned clients that this rank owns."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        engine: LocalEngine,
        worker: Worker,
        store: ShardStore,
        observer: UpdateObserver | None,
        state: LocalState,
    ):
        self.config = config
        self.cluster = cluster
        self.engine = engine
        self.worker = worker
        self.layout = worker.layout
        self.store = store
        self.observer = observer
        self.state = state
        flat = self.sequential.model
        self.loss = flat.loss
        self._began = False

    @property
    def sequential(self) -> SequentialEngine:
        """The engine that trains one client after the other, part of every engine."""
        return self.engine.sequential

    def train(
        self, plan: Plan, model: Tensor, total: Accumulator, further: Mapping[str, Accumulator] | None = None
    ) -> RankWork:
        """Add the weighted updates of this rank's participants to `total`, and what an algorithm sums to `further`."""
        self.state.begin(plan.round, model, further or {})
        self.state.bring(plan.clients, lambda: self.worker.trainers(plan))
        self._expect(plan)
        first, self._began = not self._began, True
        rule = self.worker.rule(plan)
        with self.loss.kept_generators(), during(plan.round):
            done = self._trained(plan, model, rule, total)
        rows, steps = self.worker.amount(plan, done.report)
        return replace(done, rows=rows, steps=steps, steady=not first)

    def trial_norms(self, round: int, model: Tensor, candidates: Ints, mine: Ints) -> Floats:
        """Norms of the updates that clients (k,) would make of the model (d,) in a round, float64 (k,); collective."""
        self.state.begin(round, model, {})
        self.state.bring(candidates, lambda: self.layout.owners(candidates))
        rule = self.worker.usual_rule(rate_of(self.config, round))
        with self.loss.kept_generators(), during(round):
            return update_norms(self.sequential, mine, model, rule, round)

    def check(self, plan: Plan, sums: dict[str, float]) -> None:
        """Compare the round's work, summed over all ranks, with the plan; see `agreement.check_work`."""
        trainable = self.worker.sizes_of(plan) >= self.sequential.model.least
        expected = int(np.count_nonzero(trainable)) if self.worker.uses_all(plan) else None
        check_work(plan, sums, expected, self.config.topology.mediator_epochs if len(plan.mediators) else None)

    def _expect(self, plan: Plan) -> None:
        """Have the system read samples of the round to come while this one's are trained on."""
        if self.worker.index is None or not len(plan.coming):
            return
        fresh = self.store.unannounced(plan.coming)
        if len(fresh):
            mine = self.worker.assigned(replace(plan, round=plan.round + 1, clients=plan.coming, one_step=False))
            self.store.expect(np.intersect1d(fresh, plan.coming[mine], assume_unique=True))

    def _trained(self, plan: Plan, model: Tensor, rule: LocalRule, total: Accumulator) -> RankWork:
        if not self.worker.uses_all(plan) and isinstance(self.engine, CompositeEngine):
            rows = self.worker.sampled(plan, self.worker.members(plan))
            if self.engine.merges_rows(rule, rows.largest, total):
                report = self._train_rows(self.engine, rows, plan, model, rule, total)
                return RankWork(report, self._taken(plan, self.worker.members(plan), len(rows.members)))
        if len(plan.mediators):
            return self._relay(plan, model, rule, total)
        tasks = self.worker.tasks(plan, self.worker.members(plan))
        taken = self._taken(plan, self.worker.members(plan), len(tasks))
        if self.observer is not None:
            self.observer.begin(tasks, plan.round, model)
        return RankWork(self.engine.train(tasks, model, rule, plan.round, total) if tasks else WorkReport(), taken)

    def _relay(self, plan: Plan, model: Tensor, rule: LocalRule, total: Accumulator) -> RankWork:
        """The mediators' models travel from client to client (Astraea, Algorithm 1)."""
        topology, workers = self.config.topology, self.layout.workers
        costs = self.worker.sizes[plan.clients].astype(np.float64)
        if topology.placement == "mediator":
            owners = place_mediators(costs, plan.mediators, workers)
        else:
            owners = self.layout.owners(plan.clients)
        relay = plan_relay(owners, plan.clients, plan.mediators, topology.mediator_epochs, costs, workers)
        mine = np.flatnonzero(owners == self.worker.index) if self.worker.index is not None else np.empty(0, np.int64)
        tasks = {task.client: task for task in self.worker.tasks(plan, mine)}
        keeps = keeps_moments(self.config, plan.one_step)
        relayed = run_relay(self.cluster, self.sequential, relay, tasks, model, rule, plan.round, total, keeps)
        return RankWork(relayed.work, self._taken(plan, mine, len(tasks)), relayed=relayed)

    def _taken(self, plan: Plan, members: Ints, due: int) -> TakenClients:
        return TakenClients.of(plan, members, due, self.cluster.is_server)

    def _train_rows(
        self,
        engine: CompositeEngine,
        sampled: SampledRows,
        plan: Plan,
        model: Tensor,
        rule: LocalRule,
        total: Accumulator,
    ) -> WorkReport:
        """One gradient of all sampled rows, clients not looped over: the cost is that of the rows (FedSampling)."""
        if not len(sampled.rows):
            return WorkReport()
        owners, weights = self.worker.row_weights(plan, sampled)
        return engine.train_rows(owners, sampled.rows, weights, model, rule, plan.round, total)


def evaluation_cost(config: Config, store: ShardStore) -> float:
    """What evaluating the model costs rank 0, in gradients of one sample."""
    parts = config.evaluation.parts(store.part_samples("val") > 0)
    return sum(map(store.part_samples, parts)) / FORWARDS_PER_GRADIENT
