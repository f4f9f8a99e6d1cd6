"""What is found out and decided before the work of a round: strata, the sampler's questions, the plan, the balance.

All ranks measure; rank 0 decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from fedmpi.aggregation.weighing import Weighing
from fedmpi.clients.sampler import ClientSampler
from fedmpi.clients.stratifier import Stratifier
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.plan import Plan
from fedmpi.common.streams import Streams
from fedmpi.config import Config
from fedmpi.core.balance import BalanceLearner
from fedmpi.core.inquiry import Inquiry, TrialNorms
from fedmpi.core.layout import Layout
from fedmpi.core.round_sum import RoundTotals
from fedmpi.core.run_data import RunData
from fedmpi.core.server import Planner
from fedmpi.local.client_numbers import ClientMeasures
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.local.probes import make_probe
from fedmpi.mediators.groups import mediator_groups
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster


@dataclass
class Decisions:
    """What a round is planned by."""

    cluster: Cluster
    layout: Layout
    planner: Planner  # Used by rank 0
    stratifier: Stratifier  # Measures and groups the clients, all ranks together
    sampler: ClientSampler
    inquiry: Inquiry  # What all ranks find out about single clients for the sampler
    # Learns how work is best spread (rank 0 only), where `topology.balance` = "measured" and data is shared
    balance: BalanceLearner

    @classmethod
    def of(
        cls,
        config: Config,
        cluster: Cluster,
        streams: Streams,
        layout: Layout,
        data: RunData,
        model: FlatModel,
        observer: UpdateObserver | None,
        trial: TrialNorms,
    ) -> Decisions:
        """Those of a configuration."""
        samples, trained_on = data.samples, data.trained_on
        cohorts = CohortDraw(config, data.sizes, None, streams, values=model.size, counts=cache(samples.class_counts))
        sampler = cohorts.sampler
        wanted = Inquiry.measures(sampler)
        device = model.initial.device
        measure = ClientMeasures(config, trained_on, streams, device, cluster.rank, model.loss) if wanted else None
        probe = make_probe(config, model, trained_on, streams, cluster.rank)
        groups = mediator_groups(config, cluster, data.store, samples.rebalancing, streams)
        learning = layout.shared and config.topology.balance == "measured"
        return cls(
            cluster=cluster,
            layout=layout,
            planner=Planner(config, data.sizes, streams, cohorts, groups, samples.weight_sizes),
            stratifier=Stratifier(
                config, cluster, layout.owned, data.store.clients, model.trainable, samples.class_counts, probe, streams
            ),
            sampler=sampler,
            inquiry=Inquiry(cluster, sampler, cohorts.numbers, layout.owned, measure, observer, trial),
            balance=BalanceLearner(layout.workers if learning else 0),
        )

    @property
    def measured(self) -> int:
        """Clients that were measured for strata before this round (rank 0 only)."""
        return self.stratifier.measured

    @property
    def weighing(self) -> Weighing:
        """How much each participant's update counts."""
        return self.planner.weighing

    def observe(self, t: int, model: Tensor) -> None:
        """What all ranks measure before the server plans round t: strata that are due, a sampler's candidates."""
        self.stratifier.observe(t, model)
        if self.sampler.measures:
            cohorts = self.planner.cohorts
            wanted = cohorts.candidates(t, self.stratifier.strata) if self.cluster.is_server else None
            measured = self.inquiry.candidates(t, model, wanted)
            if wanted is not None:
                cohorts.add_measured(t, wanted, measured)

    @property
    def inquires(self) -> bool:
        """Whether the sampler wants to know anything of a round's participants."""
        return bool(self.sampler.numbers)

    def inquire(self, plan: Plan, model: Tensor) -> None:
        """Remember what the sampler wants to know of the round's participants; collective, before the server's step."""
        self.inquiry.participants(plan, model, self.planner.seconds)

    def plan(self, t: int) -> Plan:
        """The server's plan of round t (rank 0 only)."""
        plan = self.planner.plan(t, self.stratifier.strata)
        self.stratifier.latest = plan.clients
        noise = self.stratifier.noise
        facts = plan.facts if noise is None else plan.facts | {"noise_clients": noise}
        return replace(plan, facts=facts, balance=self.balance.as_array())

    def plan_ahead(self, t: int) -> None:
        """Work out the plan of round t while others train: on a rank 0 that does not, if nothing they do changes it.

        It is announced ahead as well, unless it is to hold what is learned from the seconds of this round.
        """
        idle = self.cluster.is_server and self.layout.worker is None
        if idle and not self.sampler.depends_on_rounds:
            self.planner.prepare(t)
            if self.planner.sends_coming:
                self.planner.prepare(t + 1)
            plan = None if self.balance.learns else self.planner.foreseen(t)
            if plan is not None:
                self.cluster.announce(t, plan.arrays())

    def learn(self, totals: RoundTotals) -> None:
        """Learn from the seconds of a round like others how the work is best spread (rank 0 only)."""
        workers = slice(-self.layout.workers, None)  # the last ranks, with or without rank 0
        self.balance.observe(totals.rows[workers], totals.steps[workers], totals.busy[workers])

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of all this; whole on rank 0."""
        parts = self.stratifier.state() | self.planner.state() | self.balance.state() | self.inquiry.state()
        return parts | (self.sampler.state() if self.cluster.is_server else {})

    def load(self, tensors: Mapping[str, Tensor] | None, resumed: bool) -> None:
        """Take over what a checkpoint keeps; collective."""
        saved = dict(tensors or {})
        if tensors is not None:
            self.planner.load(saved)
            self.balance.load(saved)
            self.inquiry.load(saved)
            self.sampler.load(saved)
        self.stratifier.load(saved, resumed=resumed)
