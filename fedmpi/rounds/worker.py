"""A worker's round: from the plan to the tasks of the clients it owns, trained by the chosen engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.cluster import Cluster
from fedmpi.common.calling import during
from fedmpi.common.plan import Plan
from fedmpi.config import Config
from fedmpi.data.shards import ShardStore
from fedmpi.local.engine_trial import EngineTrial
from fedmpi.local.engines import CompositeEngine, LocalEngine
from fedmpi.local.hooks import Hooks
from fedmpi.local.observer import UpdateObserver
from fedmpi.local.optimizers import own_optimizer
from fedmpi.local.work import LocalRule, Task, WorkReport
from fedmpi.mediators.relay import RelayReport, run_relay
from fedmpi.mediators.relay_plan import place_mediators, plan_relay
from fedmpi.rounds.agreement import Attendance, check_work
from fedmpi.rounds.balance import Balance
from fedmpi.rounds.homes import Homes
from fedmpi.rounds.placement import equal_parts, longest_first, planned_cost, planned_work
from fedmpi.rounds.traffic_count import keeps_moments
from fedmpi.rounds.workers import Layout
from fedmpi.samples.row_rule import RowRule
from fedmpi.samples.rules import holders, offsets_of
from fedmpi.samples.sampled_rows import SampledRows

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
    relayed : RelayReport or None
        What this rank did for mediators in the last round; None in a star and where nobody took part.
    work : (float, float)
        Gradients of one sample, and steps not merged, of this rank in the last round.
    attendance : Attendance
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
        self.hooks, self.own_optimizer = hooks, own_optimizer(config)
        keeps = hooks is not None and bool(hooks.client_state)
        self.homes = Homes(cluster, hooks.state, len(sizes)) if hooks is not None and keeps and layout.shared else None
        self.config = config
        self.engine = engine
        self.loss = engine.sequential.model.loss
        self.sizes = sizes
        self.weight_sizes = weight_sizes
        self.cluster = cluster
        self.layout = layout
        self.boundaries, self.worker = layout.boundaries, layout.worker
        self.store = store
        parts = config.evaluation.parts(store.part_samples("val") > 0)
        evaluated = sum(map(store.part_samples, parts)) if layout.server_trains else 0
        self.evaluation_cost = evaluated / FORWARDS_PER_GRADIENT
        self.row_rule = row_rule
        self.observer = observer
        self.trial = EngineTrial(cluster, engine, int(sizes.max(initial=0)))
        self._all_offsets: np.ndarray | None = None
        self.relayed: RelayReport | None = None
        self.work = (0.0, 0.0)
        self.attendance = Attendance()
        self.steady = False
        self._rounds = 0
        self._members: tuple[Plan, np.ndarray] | None = None
        self._answered: tuple[Plan, np.ndarray, SampledRows] | None = None

    def train(
        self, plan: Plan, model: Tensor, total: Accumulator, further: Mapping[str, Accumulator] | None = None
    ) -> WorkReport:
        """Add the weighted updates of this rank's participants to `total`, and what an algorithm sums to `further`."""
        if self.hooks is not None:
            self.hooks.begin(plan.round, model, further or {})
        if self.homes is not None:
            self.homes.bring(plan.clients, self.layout.ranks(self._trainers(plan)))
        self._expect(plan)
        self.steady, self._rounds = self._rounds > 0, self._rounds + 1
        self.relayed = None
        with self.loss.kept_generators(), during(plan.round):
            report = self._trained(plan, model, total)
        self.work = self._work(plan, report)
        return report

    def check(self, plan: Plan, sums: dict[str, float]) -> None:
        """Compare the round's work, summed over all ranks, with the plan; see `agreement.check_work`."""
        expected = int(np.count_nonzero(self._sizes(plan))) if self._uses_all(plan) else None
        check_work(plan, sums, expected, self.config.topology.mediator_epochs if len(plan.mediators) else None)

    def _expect(self, plan: Plan) -> None:
        """Have the system read samples of the round to come while this one's are trained on."""
        if self.worker is None or not len(plan.coming):
            return
        fresh = self.store.unannounced(plan.coming)
        if len(fresh):
            mine = self._assigned(replace(plan, round=plan.round + 1, clients=plan.coming, one_step=False))
            self.store.expect(np.intersect1d(fresh, plan.coming[mine], assume_unique=True))

    def _work(self, plan: Plan, report: WorkReport) -> tuple[float, float]:
        """What `work` holds: as done where rows are sampled, else as planned, where merged steps do not count."""
        if not self.layout.shared or not self._uses_all(plan):
            return report.loss_count, report.steps
        rows, steps = planned_work(self.rule(plan), self.sizes[plan.clients[self.members(plan)]], self._merging)
        return float(rows.sum()), float(steps.sum())

    def _trained(self, plan: Plan, model: Tensor, total: Accumulator) -> WorkReport:
        rule = self.rule(plan)
        if not plan.one_step and self.trial.due(rule, total):
            self.steady = False
            self.trial.decide(self.tasks(plan, self.members(plan)), model, rule, plan.round, total)
        if not self._uses_all(plan) and isinstance(self.engine, CompositeEngine):
            rows = self._sampled(plan, self.members(plan))
            if self.engine.merges_rows(rule, rows.largest, total):
                self._attend(plan, self.members(plan), len(rows.members))
                return self._train_rows(rows, plan, model, rule, total)
        if len(plan.mediators):
            return self._relay(plan, model, rule, total)
        tasks = self.tasks(plan, self.members(plan))
        self._attend(plan, self.members(plan), len(tasks))
        if self.observer is not None:
            self.observer.begin(tasks, plan.round, model)
        if not tasks:
            return WorkReport()
        return self.engine.train(tasks, model, rule, plan.round, total)

    def _relay(self, plan: Plan, model: Tensor, rule: LocalRule, total: Accumulator) -> WorkReport:
        """The mediators' models travel from client to client (Astraea, Algorithm 1)."""
        topology, workers = self.config.topology, len(self.boundaries) - 1
        costs = self.sizes[plan.clients].astype(np.float64)
        if topology.placement == "mediator":
            owners = place_mediators(costs, plan.mediators, workers)
        else:
            owners = np.searchsorted(self.boundaries, plan.clients, side="right") - 1
        relay = plan_relay(owners, plan.clients, plan.mediators, topology.mediator_epochs, costs, workers)
        mine = np.flatnonzero(owners == self.worker) if self.worker is not None else np.empty(0, np.int64)
        tasks = {task.client: task for task in self.tasks(plan, mine)}
        keeps = keeps_moments(self.config, plan.one_step)
        self._attend(plan, mine, len(tasks))
        self.relayed = run_relay(
            self.cluster, self.engine.sequential, relay, tasks, model, rule, plan.round, total, keeps
        )
        return self.relayed.work

    def _attend(self, plan: Plan, members: np.ndarray, due: int) -> None:
        self.attendance = Attendance.of(plan, members, due, self.cluster.is_server)

    def _train_rows(
        self, sampled: SampledRows, plan: Plan, model: Tensor, rule: LocalRule, total: Accumulator
    ) -> WorkReport:
        """One gradient of all sampled rows, clients not looped over: the cost is that of the rows (FedSampling)."""
        if not len(sampled.rows):
            return WorkReport()
        per_client = plan.coefficients[sampled.members]
        if plan.per_sample and self.weight_sizes is not None:
            per_client = per_client * sampled.below(self.weight_sizes[plan.clients[sampled.members]])
        counted_alone = plan.per_sample and self.weight_sizes is None
        weights = per_client if counted_alone else per_client / sampled.counts
        owners = np.repeat(plan.clients[sampled.members], sampled.counts)
        assert isinstance(self.engine, CompositeEngine)
        return self.engine.train_rows(
            owners, sampled.rows, np.repeat(weights, sampled.counts), model, rule, plan.round, total
        )

    def rule(self, plan: Plan) -> LocalRule:
        """What every participant does in this round."""
        part = self.config.local
        if plan.one_step:
            rows = {"full": None, "batch": part.batch_size, "sample": 1}[self.config.participation.probe]
            batch = None if rows == "all" else rows
            return LocalRule(lr=plan.lr, epochs=None, steps=1, batch_size=batch, dropout=False)
        epochs = part.epochs if part.epochs is not None or part.steps is not None else 1
        return LocalRule(
            optimizer="own" if self.own_optimizer else part.optimizer,
            own=self.own_optimizer,
            lr=plan.lr,
            epochs=epochs,
            steps=part.steps,
            batch_size=None if part.batch_size == "all" else part.batch_size,
            proximal_mu=part.proximal_mu + (0.0 if self.hooks is None else self.hooks.proximal_mu),
            beta1=part.beta1,
            beta2=part.beta2,
            epsilon=part.epsilon,
        )

    def _uses_all(self, plan: Plan) -> bool:
        """Whether all rows are used: the opening step, like the probe before it, chooses from all of them itself."""
        return plan.one_step or self.row_rule.uses_all

    def members(self, plan: Plan) -> np.ndarray:
        """Places in the cohort of the clients that this rank trains, int64 (q,)."""
        if self._members is None or self._members[0] is not plan:
            self._members = plan, self._assigned(plan)
        return self._members[1]

    def _assigned(self, plan: Plan) -> np.ndarray:
        if self.worker is None:
            return np.empty(0, np.int64)
        if not self.layout.shared:
            first, last = np.searchsorted(plan.clients, self.boundaries[self.worker : self.worker + 2])
            return np.arange(first, last)
        if self._in_parts(plan):
            return np.arange(*self._parts(plan)[self.worker : self.worker + 2])
        return np.flatnonzero(self._dealt(plan) == self.worker)

    def _trainers(self, plan: Plan) -> np.ndarray:
        """The worker that trains each participant, int64 (m,), where data is shared; −1 where nobody has rows."""
        if not self._in_parts(plan):
            return self._dealt(plan)
        parts = np.diff(self._parts(plan))
        everybody = parts.sum() == len(plan.clients)
        return np.repeat(np.arange(len(parts)), parts) if everybody else np.full(len(plan.clients), -1)

    def _in_parts(self, plan: Plan) -> bool:
        """Whether neighbouring participants are given to the same worker."""
        return not self._uses_all(plan) and self.row_rule.pooled

    def _dealt(self, plan: Plan) -> np.ndarray:
        """The worker of each participant by its planned cost, int64 (m,)."""
        balance = Balance.heard(plan.balance)
        costs = planned_cost(self.rule(plan), self._sizes(plan), self._merging, balance.step_rows)
        return longest_first(costs, self.layout.workers, self._evaluating(plan.round), balance.speeds)

    def _parts(self, plan: Plan) -> np.ndarray:
        """Boundaries of the workers' neighbouring participants, int64 (workers + 1,)."""
        offsets, expected = self._offsets(plan), self._expected_rows(plan)
        if not expected:  # nobody takes part, or nobody who does holds a sample
            return np.zeros(self.layout.workers + 1, np.int64)
        evaluating = self._evaluating(plan.round) * offsets[-1] / expected
        return equal_parts(offsets, self.layout.workers, evaluating, Balance.heard(plan.balance).speeds)

    @property
    def _merging(self) -> bool:
        """Whether participants with a single step are merged into one gradient."""
        return isinstance(self.engine, CompositeEngine) and self.engine.refusal is None

    def _expected_rows(self, plan: Plan) -> float:
        """Rows that the cohort is expected to be trained on."""
        wanted, whole = self.config.samples.wanted, float(self._offsets(plan)[-1])
        return min(float(wanted), whole) if self.config.samples.rule == "exact" and wanted else plan.probability * whole

    def _sizes(self, plan: Plan) -> np.ndarray:
        """Samples of each participant, int64 (m,)."""
        return self.sizes if len(plan.clients) == len(self.sizes) else self.sizes[plan.clients]

    def _offsets(self, plan: Plan) -> np.ndarray:
        """Where the samples of each participant begin on the cohort's axis, and their number, int64 (m + 1,)."""
        if len(plan.clients) < len(self.sizes):
            return offsets_of(self.sizes[plan.clients])
        if self._all_offsets is None:
            self._all_offsets = offsets_of(self.sizes)
        return self._all_offsets

    def _evaluating(self, round: int) -> float:
        """Planned cost of the evaluation of the round before, which rank 0 does first."""
        return self.evaluation_cost if round > 0 and round % self.config.evaluation.every == 0 else 0.0

    def tasks(self, plan: Plan, members: np.ndarray) -> list[Task]:
        """The tasks of the participants at these places of the cohort that have rows to train on, in client order."""
        weighing = self.sizes if self.weight_sizes is None else self.weight_sizes
        if self._uses_all(plan):
            used, counted = self.sizes[plan.clients[members]], weighing[plan.clients[members]]
            rows: list[np.ndarray | None] = [None] * len(members)
        else:
            sampled = self._sampled(plan, members)
            members, used, rows = sampled.members, sampled.counts, [*sampled.per_client()]
            counted = used if self.weight_sizes is None else sampled.below(weighing[plan.clients[members]])
        clients, coefficients = plan.clients[members], plan.coefficients[members]
        factors = coefficients * counted if plan.per_sample else coefficients
        return [
            Task(client, chosen, factor)
            for client, chosen, factor, count in zip(
                clients.tolist(), rows, factors.tolist(), used.tolist(), strict=True
            )
            if count
        ]

    def _sampled(self, plan: Plan, members: np.ndarray) -> SampledRows:
        """The sampled rows of the participants at the given places of the cohort.

        Neighbours are drawn alone; others by drawing for the cohort's part that spans them and leaving out the rest.
        """
        if not len(members):
            return SampledRows(members, members, members)
        sizes = self._sizes(plan)
        if not self.row_rule.pooled:
            return self._asked(plan, members, sizes)
        offsets, first, last = self._offsets(plan), int(members[0]), int(members[-1]) + 1
        part = int(offsets[first]), int(offsets[last])
        positions = self.row_rule.positions(plan.round, sizes, plan.probability, *part)
        having, counts = holders(positions, offsets)
        if len(members) < last - first:
            ours = np.isin(having, members)
            positions = positions[np.repeat(ours, counts)]
            having, counts = having[ours], counts[ours]
        return SampledRows(having, counts, positions - np.repeat(offsets[having], counts))

    def _asked(self, plan: Plan, members: np.ndarray, sizes: np.ndarray) -> SampledRows:
        """The rows that the rule gives for each of the participants; it is asked once a round."""
        known = self._answered
        if known is None or known[0] is not plan or not np.array_equal(known[1], members):
            drawn = self.row_rule.rows(plan.round, plan.clients[members], sizes[members], int(sizes.sum()))
            known = self._answered = plan, members, replace(drawn, members=members[drawn.members])
        return known[2]
