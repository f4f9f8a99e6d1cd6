"""A worker's share of a round: from the plan to the tasks of the clients that this rank trains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats, Ints
from fedmpi.common.whole_numbers import offsets_of
from fedmpi.config import Config
from fedmpi.core.balance import Balance
from fedmpi.core.layout import Layout
from fedmpi.core.placement import equal_parts, longest_first, planned_cost, planned_work
from fedmpi.local.engines import CompositeEngine, LocalEngine
from fedmpi.local.optimizers import own_optimizer
from fedmpi.local.work import ClientTask, LocalRule, WorkReport
from fedmpi.samples.built_in_rules import holders
from fedmpi.samples.row_rule import RowRule, SampledRows


class Worker:
    """Which of a plan's participants this rank trains, on which rows, by which rule."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        engine: LocalEngine,
        sizes: Ints,
        row_rule: RowRule,
        weight_sizes: Ints | None,
        evaluation_cost: float,
        proximal_mu: float,
    ):
        self.config = config
        self.layout = layout
        self.index = layout.worker
        self.engine = engine
        self.own_optimizer = own_optimizer(config)
        self.sizes = sizes
        self.row_rule = row_rule
        self.weight_sizes = weight_sizes
        self.evaluation_cost = evaluation_cost
        self.proximal_mu = proximal_mu
        self._all_offsets: Ints | None = None
        self._members: tuple[Plan, Ints] | None = None
        self._answered: tuple[Plan, Ints, SampledRows] | None = None

    def rule(self, plan: Plan) -> LocalRule:
        """What every participant does in this round."""
        part = self.config.local
        if plan.one_step:
            rows = {"full": None, "batch": part.batch_size, "sample": 1}[self.config.participation.probe]
            batch = None if rows == "all" else rows
            return LocalRule(lr=plan.lr, epochs=None, steps=1, batch_size=batch, dropout=False)
        return self.usual_rule(plan.lr)

    def usual_rule(self, lr: float) -> LocalRule:
        """What every participant does in a round of this rate, unless it is the opening step."""
        part = self.config.local
        return replace(
            LocalRule.scheduled(part),
            optimizer="own" if self.own_optimizer else part.optimizer,
            own=self.own_optimizer,
            lr=lr,
            proximal_mu=part.proximal_mu + self.proximal_mu,
            beta1=part.beta1,
            beta2=part.beta2,
            epsilon=part.epsilon,
        )

    def uses_all(self, plan: Plan) -> bool:
        """Whether all rows are used: the opening step, like the probe before it, chooses from all of them itself."""
        return plan.one_step or self.row_rule.uses_all

    def members(self, plan: Plan) -> Ints:
        """Places in the cohort of the clients that this rank trains, int64 (q,)."""
        if self._members is None or self._members[0] is not plan:
            self._members = plan, self.assigned(plan)
        return self._members[1]

    def assigned(self, plan: Plan) -> Ints:
        """As `members`, of any plan, also of a round to come."""
        if self.index is None:
            return np.empty(0, np.int64)
        if not self.layout.shared:
            first, last = np.searchsorted(plan.clients, self.layout.boundaries[self.index : self.index + 2])
            return np.arange(first, last)
        if self._in_parts(plan):
            return np.arange(*self._parts(plan)[self.index : self.index + 2])
        return np.flatnonzero(self._dealt(plan) == self.index)

    def trainers(self, plan: Plan) -> Ints:
        """The worker that trains each participant, int64 (m,), where data is shared; −1 where nobody has rows."""
        if not self._in_parts(plan):
            return self._dealt(plan)
        parts = np.diff(self._parts(plan))
        everybody = parts.sum() == len(plan.clients)
        return np.repeat(np.arange(len(parts)), parts) if everybody else np.full(len(plan.clients), -1)

    def _in_parts(self, plan: Plan) -> bool:
        """Whether neighbouring participants are given to the same worker."""
        return not self.uses_all(plan) and self.row_rule.pooled

    def _dealt(self, plan: Plan) -> Ints:
        """The worker of each participant by its planned cost, int64 (m,)."""
        balance = Balance.from_array(plan.balance)
        costs = planned_cost(self.rule(plan), self.sizes_of(plan), self.merging, balance.step_rows)
        return longest_first(costs, self.layout.workers, self._evaluating(plan.round), balance.speeds)

    def _parts(self, plan: Plan) -> Ints:
        """Boundaries of the workers' neighbouring participants, int64 (workers + 1,)."""
        offsets, expected = self._offsets(plan), self._expected_rows(plan)
        if not expected:  # nobody takes part, or nobody who does holds a sample
            return np.zeros(self.layout.workers + 1, np.int64)
        evaluating = self._evaluating(plan.round) * offsets[-1] / expected
        return equal_parts(offsets, self.layout.workers, evaluating, Balance.from_array(plan.balance).speeds)

    @property
    def merging(self) -> bool:
        """Whether participants with a single step are merged into one gradient."""
        return isinstance(self.engine, CompositeEngine) and self.engine.refusal is None

    def _expected_rows(self, plan: Plan) -> float:
        """Rows that the cohort is expected to be trained on."""
        wanted, whole = self.config.samples.wanted, float(self._offsets(plan)[-1])
        return min(float(wanted), whole) if self.config.samples.rule == "exact" and wanted else plan.probability * whole

    def sizes_of(self, plan: Plan) -> Ints:
        """Samples of each participant, int64 (m,)."""
        return self.sizes if len(plan.clients) == len(self.sizes) else self.sizes[plan.clients]

    def _offsets(self, plan: Plan) -> Ints:
        """Where the samples of each participant begin on the cohort's axis, and their number, int64 (m + 1,)."""
        if len(plan.clients) < len(self.sizes):
            return offsets_of(self.sizes[plan.clients])
        if self._all_offsets is None:
            self._all_offsets = offsets_of(self.sizes)
        return self._all_offsets

    def _evaluating(self, round: int) -> float:
        """Planned cost of the evaluation of the round before, which rank 0 does first."""
        return self.evaluation_cost if round > 0 and round % self.config.evaluation.every == 0 else 0.0

    def tasks(self, plan: Plan, members: Ints) -> list[ClientTask]:
        """The tasks of the participants at these places of the cohort that have rows to train on, in client order."""
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
        """The sampled rows of the participants at the given places of the cohort.

        Neighbours are drawn alone; others by drawing for the cohort's part that spans them and leaving out the rest.
        """
        if not len(members):
            return SampledRows(members, members, members)
        sizes = self.sizes_of(plan)
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

    def row_weights(self, plan: Plan, sampled: SampledRows) -> tuple[Ints, Floats]:
        """The client of each sampled row, int64 (r,), and the weight of its gradient, float64 (r,)."""
        clients = plan.clients[sampled.members]
        weights, power = plan.coefficients[sampled.members], plan.per_sample
        if power and self.weight_sizes is not None:
            weights = weights * sampled.below(self.weight_sizes[clients])
        if power and self.weight_sizes is None:
            weights = weights * sampled.counts ** (power - 1)
        else:
            weights = weights / sampled.counts
        return np.repeat(clients, sampled.counts), np.repeat(weights, sampled.counts)

    def amount(self, plan: Plan, report: WorkReport) -> tuple[float, float]:
        """Gradients of one sample, and steps not merged, of this rank in a round.

        As done where rows are sampled, else as planned, where merged steps do not count.
        """
        if not self.layout.shared or not self.uses_all(plan):
            return report.loss_count, report.steps
        rows, steps = planned_work(self.rule(plan), self.sizes[plan.clients[self.members(plan)]], self.merging)
        return float(rows.sum()), float(steps.sum())

    def _asked(self, plan: Plan, members: Ints, sizes: Ints) -> SampledRows:
        """The rows that the rule gives for each of the participants; it is asked once a round."""
        known = self._answered
        if known is None or known[0] is not plan or not np.array_equal(known[1], members):
            drawn = self.row_rule.rows(plan.round, plan.clients[members], sizes[members], int(sizes.sum()))
            known = self._answered = plan, members, replace(drawn, members=members[drawn.members])
        return known[2]
