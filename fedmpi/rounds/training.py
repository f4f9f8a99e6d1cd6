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
from fedmpi.local.engine_trial import EngineTrial
from fedmpi.local.engines import CompositeEngine, LocalEngine
from fedmpi.local.hooks import Hooks
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.local.work import LocalRule, WorkReport
from fedmpi.mediators.relay import RelayReport, run_relay
from fedmpi.mediators.relay_plan import place_mediators, plan_relay
from fedmpi.rounds.agreement import TakenClients, check_work
from fedmpi.rounds.homes import Homes
from fedmpi.rounds.placement import planned_work
from fedmpi.rounds.server import rate_of
from fedmpi.rounds.traffic_count import keeps_moments
from fedmpi.rounds.worker import Worker
from fedmpi.rounds.workers import Layout
from fedmpi.samples.row_rule import RowRule, SampledRows

FORWARDS_PER_GRADIENT = 3
"""Forward, and backward with a product for the inputs and one for the weights: a gradient costs as much as three."""


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
    cluster : Cluster
        Carries mediators' models between ranks.
    layout : Layout
        Which clients this rank owns, and whether it trains those of others too.
    store : ShardStore
        Told which clients will be read in the round to come. Rank 0 evaluates its test samples beside training.
    row_rule : RowRule
        Which rows of its participants are used.
    observer : UpdateObserver or None
        The one that the engine shows each update, if any.
    weight_sizes : int64 (N,), optional
        Samples of each client that count in the aggregation weights, its first rows; all of them by default.
    hooks : Hooks or None
        Of a local algorithm that has some; the engine's.

    Attributes
    ----------
    worker : Worker
        From the plan to this rank's tasks.
    relayed : RelayReport or None
        What this rank did for mediators in the last round; None in a star and where nobody took part.
    work : (float, float)
        Gradients of one sample, and steps not merged, of this rank in the last round.
    taken : TakenClients
        Which participants this rank took for its own in the last round.
    steady : bool
        Whether the last round took as long as such rounds do: not the first one, and no trial of engines in it.
    """

    def __init__(
        self,
        config: Config,
        engine: LocalEngine,
        sizes: np.ndarray,
        cluster: Cluster,
        layout: Layout,
        store: ShardStore,
        row_rule: RowRule,
        observer: UpdateObserver | None,
        weight_sizes: np.ndarray | None = None,
        hooks: Hooks | None = None,
    ):
        keeps = hooks is not None and bool(hooks.client_state)
        self.homes = Homes(cluster, hooks.state, len(sizes)) if hooks is not None and keeps and layout.shared else None
        self.hooks = hooks
        self.config = config
        self.engine = engine
        self.loss = engine.sequential.model.loss
        self.cluster = cluster
        self.layout = layout
        self.store = store
        self.observer = observer
        self.trial = EngineTrial(cluster, engine, int(sizes.max(initial=0)))
        self.worker = Worker(
            config,
            layout,
            engine,
            sizes,
            row_rule,
            weight_sizes,
            _evaluation_cost(config, store) if layout.server_trains else 0.0,
            0.0 if hooks is None else hooks.proximal_mu,
        )
        self.relayed: RelayReport | None = None
        self.work = (0.0, 0.0)
        self.taken = TakenClients()
        self.steady = False
        self._rounds = 0

    def train(
        self, plan: Plan, model: Tensor, total: Accumulator, further: Mapping[str, Accumulator] | None = None
    ) -> WorkReport:
        """Add the weighted updates of this rank's participants to `total`, and what an algorithm sums to `further`."""
        if self.hooks is not None:
            self.hooks.begin(plan.round, model, further or {})
        if self.homes is not None:
            self.homes.bring(plan.clients, self.layout.ranks(self.worker.trainers(plan)))
        self._expect(plan)
        self.steady, self._rounds = self._rounds > 0, self._rounds + 1
        self.relayed = None
        with self.loss.kept_generators(), during(plan.round):
            report = self._trained(plan, model, total)
        self.work = self._work(plan, report)
        return report

    def trial_norms(self, round: int, model: Tensor, candidates: Ints, mine: Ints) -> Floats:
        """Norms of the updates that clients (k,) would make of the model (d,) in a round, float64 (k,); collective.

        Parameters
        ----------
        round : int
        model : Tensor (d,)
        candidates : int64 (c,)
            All that are tried, of all ranks: what is kept of them is brought to their owners.
        mine : int64 (k,)
            Those of this rank.
        """
        if self.hooks is not None:
            self.hooks.begin(round, model, {})
        if self.homes is not None:
            owners = np.searchsorted(self.layout.boundaries, candidates, side="right") - 1
            self.homes.bring(candidates, self.layout.ranks(owners))
        rule = self.worker.usual_rule(rate_of(self.config, round))
        with self.loss.kept_generators(), during(round):
            return update_norms(self.engine.sequential, mine, model, rule, round)

    def check(self, plan: Plan, sums: dict[str, float]) -> None:
        """Compare the round's work, summed over all ranks, with the plan; see `agreement.check_work`."""
        expected = int(np.count_nonzero(self.worker.sizes_of(plan))) if self.worker.uses_all(plan) else None
        check_work(plan, sums, expected, self.config.topology.mediator_epochs if len(plan.mediators) else None)

    def _expect(self, plan: Plan) -> None:
        """Have the system read samples of the round to come while this one's are trained on."""
        if self.worker.index is None or not len(plan.coming):
            return
        fresh = self.store.unannounced(plan.coming)
        if len(fresh):
            mine = self.worker.assigned(replace(plan, round=plan.round + 1, clients=plan.coming, one_step=False))
            self.store.expect(np.intersect1d(fresh, plan.coming[mine], assume_unique=True))

    def _work(self, plan: Plan, report: WorkReport) -> tuple[float, float]:
        """What `work` holds: as done where rows are sampled, else as planned, where merged steps do not count."""
        if not self.layout.shared or not self.worker.uses_all(plan):
            return report.loss_count, report.steps
        rows, steps = planned_work(
            self.worker.rule(plan), self.worker.sizes[plan.clients[self.worker.members(plan)]], self.worker.merging
        )
        return float(rows.sum()), float(steps.sum())

    def _trained(self, plan: Plan, model: Tensor, total: Accumulator) -> WorkReport:
        rule = self.worker.rule(plan)
        if not plan.one_step and self.trial.due(rule, total):
            self.steady = False
            self.trial.decide(self.worker.tasks(plan, self.worker.members(plan)), model, rule, plan.round, total)
        if not self.worker.uses_all(plan) and isinstance(self.engine, CompositeEngine):
            rows = self.worker.sampled(plan, self.worker.members(plan))
            if self.engine.merges_rows(rule, rows.largest, total):
                self._attend(plan, self.worker.members(plan), len(rows.members))
                return self._train_rows(rows, plan, model, rule, total)
        if len(plan.mediators):
            return self._relay(plan, model, rule, total)
        tasks = self.worker.tasks(plan, self.worker.members(plan))
        self._attend(plan, self.worker.members(plan), len(tasks))
        if self.observer is not None:
            self.observer.begin(tasks, plan.round, model)
        if not tasks:
            return WorkReport()
        return self.engine.train(tasks, model, rule, plan.round, total)

    def _relay(self, plan: Plan, model: Tensor, rule: LocalRule, total: Accumulator) -> WorkReport:
        """The mediators' models travel from client to client (Astraea, Algorithm 1)."""
        topology, workers = self.config.topology, len(self.layout.boundaries) - 1
        costs = self.worker.sizes[plan.clients].astype(np.float64)
        if topology.placement == "mediator":
            owners = place_mediators(costs, plan.mediators, workers)
        else:
            owners = np.searchsorted(self.layout.boundaries, plan.clients, side="right") - 1
        relay = plan_relay(owners, plan.clients, plan.mediators, topology.mediator_epochs, costs, workers)
        mine = np.flatnonzero(owners == self.worker.index) if self.worker.index is not None else np.empty(0, np.int64)
        tasks = {task.client: task for task in self.worker.tasks(plan, mine)}
        keeps = keeps_moments(self.config, plan.one_step)
        self._attend(plan, mine, len(tasks))
        self.relayed = run_relay(
            self.cluster, self.engine.sequential, relay, tasks, model, rule, plan.round, total, keeps
        )
        return self.relayed.work

    def _attend(self, plan: Plan, members: np.ndarray, due: int) -> None:
        self.taken = TakenClients.of(plan, members, due, self.cluster.is_server)

    def _train_rows(
        self, sampled: SampledRows, plan: Plan, model: Tensor, rule: LocalRule, total: Accumulator
    ) -> WorkReport:
        """One gradient of all sampled rows, clients not looped over: the cost is that of the rows (FedSampling)."""
        if not len(sampled.rows):
            return WorkReport()
        per_client, power = plan.coefficients[sampled.members], plan.per_sample
        if power and self.worker.weight_sizes is not None:
            per_client = per_client * sampled.below(self.worker.weight_sizes[plan.clients[sampled.members]])
        if power and self.worker.weight_sizes is None:
            weights = per_client * sampled.counts ** (power - 1)
        else:
            weights = per_client / sampled.counts
        owners = np.repeat(plan.clients[sampled.members], sampled.counts)
        assert isinstance(self.engine, CompositeEngine)
        return self.engine.train_rows(
            owners, sampled.rows, np.repeat(weights, sampled.counts), model, rule, plan.round, total
        )


def _evaluation_cost(config: Config, store: ShardStore) -> float:
    """What evaluating the model costs rank 0, in gradients of one sample."""
    parts = config.evaluation.parts(store.part_samples("val") > 0)
    return sum(map(store.part_samples, parts)) / FORWARDS_PER_GRADIENT
