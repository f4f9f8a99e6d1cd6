"""Work of a rank in a round: from the plan to its tasks and their training."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.common.apportionment import offsets_of
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.config.tables import Mediators, probe_of
from fedmpi.core.placement import STEP_ROWS, Homes, Layout, equal_parts, longest_first, planned_cost
from fedmpi.core.reduce import RankWork, check_work
from fedmpi.data.shards import ShardStore
from fedmpi.local.hooks import Hooks
from fedmpi.local.measures import SampleMeasures
from fedmpi.local.observer import UpdateObserver
from fedmpi.local.optimizers import rate_at, rule_of
from fedmpi.local.sequential import LocalEngine, SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, RoundJob, Rows, WorkReport, step_count, task_size
from fedmpi.mediators.relay import place_mediators, plan_relay, run_relay
from fedmpi.mpi import Cluster
from fedmpi.privacy.updates import adds_noise
from fedmpi.samples.rules import RowRule, SampledRows, holders
from fedmpi.updates.traffic import keeps_moments

log = logging.getLogger("fedmpi")

FORWARDS_PER_GRADIENT = 3
"""Cost of a gradient in forward passes: one forward, and a backward with two products (inputs and weights)."""


@dataclass(eq=False)
class Worker:
    """Tasks of this rank: the clients that it trains, their samples and their local rule."""

    config: Config
    layout: Layout
    engine: LocalEngine
    sizes: Ints  # (N,)
    row_rule: RowRule
    weight_sizes: Ints | None  # (N,): Sizes that the aggregation weights count, if others than `sizes`
    evaluation_cost: float  # Cost of the evaluation that rank 0 does first, in gradients of one sample
    proximal_mu: float  # μ of the local algorithm
    seen: SampleMeasures | None = None  # Measures the samples, if the data sampler needs it
    _members: tuple[Plan, Ints] | None = None
    _answered: tuple[Plan, Ints, SampledRows] | None = None

    @property
    def index(self) -> int | None:
        """Worker index of this rank; None for a rank that only serves."""
        return self.layout.worker

    def rule(self, plan: Plan) -> LocalRule:
        """Return the local rule of this round."""
        part = self.config.local
        if plan.one_step:
            rows = {"full": None, "batch": part.batch_size, "sample": 1}[probe_of(self.config)]
            batch = None if rows == "all" else rows
            return LocalRule(lr=plan.lr, epochs=None, steps=1, batch_size=batch, dropout=False)
        return replace(rule_of(part, plan.lr), proximal_mu=part.proximal_mu + self.proximal_mu)

    def at_steps(self, plan: Plan, rule: LocalRule, steps: int) -> LocalRule:
        """Return the rule for clients of so many steps, or of the first of them, with the rate of each step if the
        schedule counts steps."""
        part, before, places = self.config.local, plan.round * steps, self.config.rounds * steps
        if part.schedule_unit == "round" or plan.one_step:
            return rule
        rates = tuple(rate_at(part, rule.lr, before + step, places) for step in range(min(steps, rule.steps or steps)))
        return replace(rule, lr=rates[0]) if len(rates) == 1 else replace(rule, rates=rates)

    def uses_all(self, plan: Plan) -> bool:
        """Return whether all samples are used; the probing step chooses among them itself."""
        return plan.one_step or (self.row_rule.uses_all and not len(plan.budgets))

    def groups(self, plan: Plan, tasks: list[ClientTask], rule: LocalRule) -> list[tuple[LocalRule, list[ClientTask]]]:
        """Return the tasks in groups of equal steps and learning rates, each with its rule."""
        by_step = self.config.local.schedule_unit == "step" and not plan.one_step
        if not len(plan.steps) and not len(plan.rates) and not by_step:
            return [(rule, tasks)]
        found = defaultdict[tuple[int, float, int], list[ClientTask]](list)
        places = np.searchsorted(plan.clients, [task.client for task in tasks])
        steps = plan.steps[places] if len(plan.steps) else np.zeros(len(places), np.int64)
        cut = self.config.devices is not None and self.config.devices.late == "partial"  # the first steps of all
        for task, count in zip(tasks, steps.tolist(), strict=True):
            whole = by_step and (cut or not count)
            taken = step_count(rule, task_size(task, self.sizes)) if whole else count
            found[count, plan.rate_of(task.client), taken].append(task)
        groups = []
        for (count, lr, taken), group in found.items():
            own = replace(rule, lr=lr, epochs=None if count and not cut else rule.epochs, steps=count or rule.steps)
            groups.append((self.at_steps(plan, own, taken), group))
        return groups

    def members(self, plan: Plan) -> Ints:
        """Return cohort positions of the clients that this rank trains, int64 (q,)."""
        if self._members is None or self._members[0] is not plan:
            self._members = plan, self._assigned(plan)
        return self._members[1]

    def _assigned(self, plan: Plan) -> Ints:
        if self.index is None:
            return np.empty(0, np.int64)
        if not self.layout.shared:
            first, last = np.searchsorted(plan.clients, self.layout.boundaries[self.index : self.index + 2])
            return np.arange(first, last)
        if self._in_parts(plan):
            return np.arange(*self._parts(plan)[self.index : self.index + 2])
        return np.flatnonzero(self._dealt(plan) == self.index)

    def trainers(self, plan: Plan) -> Ints:
        """Return the worker of each selected client, int64 (m,), if data is shared; −1 if none has samples."""
        if not self._in_parts(plan):
            return self._dealt(plan)
        parts = np.diff(self._parts(plan))
        everybody = parts.sum() == len(plan.clients)
        return np.repeat(np.arange(len(parts)), parts) if everybody else np.full(len(plan.clients), -1)

    def _in_parts(self, plan: Plan) -> bool:
        """Check whether neighboring clients are assigned to the same worker."""
        return not plan.one_step and self.row_rule.pooled and not self.row_rule.uses_all

    def _dealt(self, plan: Plan) -> Ints:
        """Assign each selected client to a worker by its planned cost, int64 (m,)."""
        return longest_first(self._costs(plan, self.sizes_of(plan)), self._speeds(plan), self._evaluating(plan.round))

    def _parts(self, plan: Plan) -> Ints:
        """Return boundaries of the workers' neighboring clients, int64 (workers + 1,)."""
        offsets, expected = self._offsets(plan), self._expected_rows(plan)
        if not expected:  # no client is selected, or no selected client has a sample
            return np.zeros(self.layout.workers + 1, np.int64)
        if len(plan.steps):
            used = np.ceil(np.diff(offsets) * (expected / offsets[-1])).astype(np.int64)
            offsets = offsets_of(self._costs(plan, used).astype(np.int64))
            expected = float(offsets[-1])
        return equal_parts(offsets, self._speeds(plan), self._evaluating(plan.round) * offsets[-1] / expected)

    def _costs(self, plan: Plan, rows: Ints) -> Floats:
        """Return the planned cost of each selected client, float64 (m,), from the samples (m,) that it uses."""
        rows = np.minimum(rows, plan.budgets) if len(plan.budgets) else rows
        merged = self.engine.merged is not None and not plan.own_work
        return planned_cost(self.rule(plan), rows, merged, plan.steps if len(plan.steps) else None)

    def _speeds(self, plan: Plan) -> Floats:
        return plan.speeds if len(plan.speeds) else np.ones(self.layout.workers)

    def _expected_rows(self, plan: Plan) -> float:
        """Return the expected number of samples that the cohort is trained on."""
        budget, whole = self.config.samples.budget, float(self._offsets(plan)[-1])
        return (
            min(float(budget), whole) if self.row_rule.probability == "cohort" and budget else plan.probability * whole
        )

    def sizes_of(self, plan: Plan) -> Ints:
        """Return the sample count of each selected client, int64 (m,)."""
        everybody = len(plan.clients) == len(self.sizes) and not plan.flight.size
        return self.sizes if everybody else self.sizes[plan.clients]

    def _offsets(self, plan: Plan) -> Ints:
        """Return the cohort position of each client's first sample, and the total count, int64 (m + 1,)."""
        return self._all_offsets if len(plan.clients) == len(self.sizes) else offsets_of(self.sizes[plan.clients])

    @cached_property
    def _all_offsets(self) -> Ints:
        return offsets_of(self.sizes)

    def _evaluating(self, round: int) -> float:
        """Return the planned cost of evaluating the previous round, which rank 0 does first."""
        return self.evaluation_cost if round > 0 and round % self.config.evaluation.every == 0 else 0.0

    def tasks(self, plan: Plan, members: Ints) -> list[ClientTask]:
        """Return tasks of the clients at these cohort positions that have samples to train on, in client order."""
        weighing = self.sizes if self.weight_sizes is None else self.weight_sizes
        if self.uses_all(plan):
            used, counted = self.sizes[plan.clients[members]], weighing[plan.clients[members]]
            rows: list[Ints | None] = [None] * len(members)
        else:
            sampled = self.sampled(plan, members)
            members, used, rows = sampled.members, sampled.counts, [*sampled.per_client()]
            counted = used if self.weight_sizes is None else sampled.below(weighing[plan.clients[members]])
        clients, coefficients = plan.clients[members], plan.coefficients[members]
        least = self.engine.sequential.model.least
        factors = coefficients * counted**plan.per_sample
        return [
            ClientTask(client, chosen, factor)
            for client, chosen, factor, count in zip(
                clients.tolist(), rows, factors.tolist(), used.tolist(), strict=True
            )
            if count >= least
        ]

    def sampled(self, plan: Plan, members: Ints) -> SampledRows:
        """Draw the samples of the clients at the given cohort positions.

        Neighbors are drawn alone; for others, the spanning part of the cohort is drawn and the rest left out.
        """
        if not len(members):
            return SampledRows(members, members, members)
        sizes = self.sizes_of(plan)
        if not self._in_parts(plan):
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

    def used(self, plan: Plan) -> Ints:
        """Return this rank's clients that have samples to train on and the number of samples of each, int64 (2, q)."""
        sampled = self.sampled(plan, self.members(plan))
        enough = sampled.counts >= self.engine.sequential.model.least
        return np.stack([plan.clients[sampled.members], sampled.counts])[:, enough]

    def row_weights(self, plan: Plan, sampled: SampledRows) -> tuple[Ints, Floats]:
        """Return the client of each drawn sample, int64 (r,), and the weight of its gradient, float64 (r,)."""
        clients = plan.clients[sampled.members]
        weights, power = plan.coefficients[sampled.members], plan.per_sample
        if power and self.weight_sizes is not None:
            weights = weights * sampled.below(self.weight_sizes[clients])
        if power and self.weight_sizes is None:
            weights = weights * sampled.counts ** (power - 1)
        else:
            weights = weights / sampled.counts
        return np.repeat(clients, sampled.counts), np.repeat(weights, sampled.counts)

    def cost(self, plan: Plan, report: WorkReport) -> float:
        """Return the cost of this rank's work in a round: as planned, or as reported if samples are drawn."""
        if not self.layout.shared or not self.uses_all(plan):
            return report.loss_count + STEP_ROWS * report.steps
        return float(self._costs(plan, self.sizes_of(plan))[self.members(plan)].sum())

    def _asked(self, plan: Plan, members: Ints, sizes: Ints) -> SampledRows:
        """Call the data sampler for each of the clients; once per round."""
        known = self._answered
        if known is None or known[0] is not plan or not np.array_equal(known[1], members):
            budgets = plan.budgets[members] if len(plan.budgets) else None
            drawn = self.row_rule.rows(plan.round, plan.clients[members], sizes[members], int(sizes.sum()), budgets)
            known = self._answered = plan, members, replace(drawn, members=members[drawn.members])
        return known[2]


@dataclass(eq=False)
class Trainer:
    """Training of the planned clients that this rank owns."""

    config: Config
    cluster: Cluster
    engine: LocalEngine
    worker: Worker
    observer: UpdateObserver | None
    hooks: Hooks | None

    def __post_init__(self) -> None:
        self.layout, self.loss = self.worker.layout, self.sequential.model.loss
        self._began = self._explained = False
        self.homes: Homes | None = None
        if self.hooks is not None and self.hooks.kept and self.layout.shared:
            self.homes = Homes(self.cluster, self.hooks.state, len(self.worker.sizes))

    @property
    def sequential(self) -> SequentialEngine:
        """Engine that trains clients sequentially, part of every engine."""
        return self.engine.sequential

    def train(
        self,
        plan: Plan,
        model: Tensor,
        total: Accumulator,
        further: Mapping[str, Accumulator] | None = None,
        trial: bool = False,
    ) -> RankWork:
        """Add the weighted updates of this rank's clients to `total`, and the algorithm's sums to `further`.

        In a `trial`, the clients are candidates whose updates the sampler needs.
        """
        if self.hooks is not None:
            self.hooks.begin(plan.round, model, further or {})
        if self.homes is not None:
            self.homes.bring(plan.clients, self.layout.ranks(self.worker.trainers(plan)))
        first, self._began = not self._began, True
        if self.worker.seen is not None:
            self.worker.seen.start = model
        rule = self.worker.rule(plan)
        self.sequential.model.reset_integers()
        with self.loss.kept_generators():
            done = self._trained(plan, model, rule, total, trial)
        if self.hooks is not None:
            self.hooks.settle()
        return replace(done, cost=self.worker.cost(plan, done.report), steady=not first)

    def check(self, plan: Plan, sums: dict[str, float]) -> None:
        """Compare the work of all ranks with the plan (`reduce.check_work`), and combine the integer buffers."""
        if not adds_noise(self.config):  # no noise protects them
            self.sequential.model.combine_integers(self.cluster.maxima)
        trainable = self.worker.sizes_of(plan) >= self.sequential.model.least
        expected = int(np.count_nonzero(trainable)) if self.worker.uses_all(plan) else None
        check_work(plan, sums, expected, visits(self.config) if len(plan.mediators) else None)

    def _trained(self, plan: Plan, model: Tensor, rule: LocalRule, total: Accumulator, trial: bool) -> RankWork:
        if not self.worker.uses_all(plan) and self.engine.merged is not None and not plan.own_work:
            rows = self.worker.sampled(plan, self.worker.members(plan))
            if self.engine.merges_rows(rule, rows.largest):  # at the cost of the samples (FedSampling)
                rule = self.worker.at_steps(plan, rule, 1)
                report = WorkReport()
                if len(rows.rows):
                    owners, weights = self.worker.row_weights(plan, rows)
                    report = self.engine.merged.train_rows(
                        Rows(owners, rows.rows, weights), RoundJob(model, rule, plan.round, total)
                    )
                return RankWork(report, len(self.worker.members(plan)), len(rows.members))
        if len(plan.mediators):
            return self._relay(plan, model, rule, total)
        members = self.worker.members(plan)
        tasks = self.worker.tasks(plan, members)
        if self.observer is not None:
            self.observer.begin(tasks, plan.round, model, trial)
        report, engine = WorkReport(), self.engine.rest if plan.own_work else self.engine
        self._explain(plan)
        for own_rule, group in self.worker.groups(plan, tasks, rule) if tasks else ():
            report += engine.train(group, RoundJob(model, own_rule, plan.round, total))
        return RankWork(report, len(members), len(tasks))

    def _explain(self, plan: Plan) -> None:
        """Log once that no two clients can train as a batch."""
        own = [values for values in (plan.steps, plan.rates) if len(values)]
        if self._explained or not own or not self.cluster.is_server or self.engine.rest.name != "batched":
            return
        self._explained = np.unique(np.stack(own), axis=1).shape[1] == len(plan.clients) > 1
        if self._explained:
            log.info("round %d: clients train one at a time: each has its own steps or lr (said once)", plan.round)

    def _relay(self, plan: Plan, model: Tensor, rule: LocalRule, total: Accumulator) -> RankWork:
        """Pass the mediators' models from client to client (Astraea, Algorithm 1)."""
        workers = self.layout.workers
        costs = self.worker.sizes[plan.clients].astype(np.float64)
        if self.config.cluster.placement == "mediator":
            owners = place_mediators(costs, plan.mediators, workers)
        else:
            owners = self.layout.owners(plan.clients)
        relay = plan_relay(owners, plan.clients, plan.mediators, visits(self.config), costs, workers)
        mine = np.flatnonzero(owners == self.worker.index) if self.worker.index is not None else np.empty(0, np.int64)
        tasks = {task.client: task for task in self.worker.tasks(plan, mine)}
        keeps = keeps_moments(self.config, plan.one_step)
        relayed = run_relay(self.cluster, self.sequential, relay, tasks, model, rule, plan.round, total, keeps)
        return RankWork(relayed.work, len(mine), len(tasks), relayed=relayed)


def visits(config: Config) -> int:
    """Return the number of visits of a mediator's model to each of its clients in a round."""
    assert isinstance(config.topology, Mediators)
    return config.topology.epochs


def evaluation_cost(config: Config, store: ShardStore) -> float:
    """Return the cost of evaluating the model on rank 0, in gradients of one sample."""
    parts = config.evaluation.parts(store.part_samples("val") > 0)
    return sum(map(store.part_samples, parts)) / FORWARDS_PER_GRADIENT
