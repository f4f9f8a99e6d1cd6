"""An experiment: the parts of a configuration, assembled on one rank of a cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from torch import Tensor

from fedmpi.aggregation.fused_metrics import check_ranks
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.clients.stratifier import Stratifier
from fedmpi.clients.turnout import CohortDraw
from fedmpi.cluster import Cluster
from fedmpi.cluster.on_server import on_server
from fedmpi.common.plan import Plan
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.base import written
from fedmpi.config.choices import chosen, data_options, options
from fedmpi.data.copies.client_samples import SampleSource, client_samples, rebalancing_facts
from fedmpi.data.opening import open_store
from fedmpi.data.schema import check_targets
from fedmpi.data.watch import DataWatch
from fedmpi.local.client_numbers import ClientMeasures
from fedmpi.local.comparisons import LocalLosses, Reference
from fedmpi.local.engines import choose_engine
from fedmpi.local.hooks import make_hooks
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.local.probes import make_probe
from fedmpi.mediators.groups import mediator_groups
from fedmpi.models.flat import FlatModel
from fedmpi.privacy.updates import check_buffers
from fedmpi.rounds.agreement import agree_on_traits, agree_on_values
from fedmpi.rounds.balance import BalanceLearner
from fedmpi.rounds.clients_view import ClientsView, clients_view
from fedmpi.rounds.evaluated import EvaluatedParts
from fedmpi.rounds.inquiry import Inquiry
from fedmpi.rounds.memory import build_model, refuse_large_run
from fedmpi.rounds.run_facts import agree, data_digest
from fedmpi.rounds.server import Planner
from fedmpi.rounds.server_step import ServerStep
from fedmpi.rounds.sum import Around, RoundTotals, own_updates
from fedmpi.rounds.training import Trainer
from fedmpi.rounds.workers import agree_on_work, lay_out, prepare_device, settle_threads
from fedmpi.samples.row_rule import RowRule
from fedmpi.tasks.losses import task_loss
from fedmpi.updates.attacks import FlippedLabels, attackers, sent_lies
from fedmpi.updates.compression import check_residuals

log = logging.getLogger("fedmpi")


@dataclass
class Experiment:
    """All that a rank needs for its share of a run.

    Attributes
    ----------
    config : Config
    cluster : Cluster
    data : ClientData
        Every client's samples; a rank reads those it owns.
    model : FlatModel
        The network, its parameters views of one flat vector.
    planner : Planner
        Used by rank 0.
    stratifier : Stratifier
        Measures and groups the clients, all ranks together.
    inquiry : Inquiry
        What all ranks find out about single clients for the client sampler.
    trainer : Trainer
        The local work of this rank's clients.
    server : ServerStep
        From the round's sums to the next model, the same on every rank.
    evaluated : EvaluatedParts
        The samples that the global model is evaluated on (by rank 0).
    watch : DataWatch
        Sees when the files of the data are changed.
    clients_view : ClientsView or None
        Evaluates the global model on clients by themselves.
    around : callable or None
        Makes what takes every client's own update, where sums of them are not enough.
    liars : int64 (a,)
        The clients that attack.
    reference : Reference or None
        What the global model is compared with, on every rank alike.
    data_digest : str
        What checkpoints know the data by.
    augmentation : dict
        What rebalancing did to the clients' data, for the record (rank 0 only); empty when it is off.
    balance : BalanceLearner
        Learns how work is best spread (rank 0 only), where `topology.balance` = "measured" and data is shared.
    class_counts : callable
        (clients) -> int64 (m, C), what clients hold of each class, copies included.
    """

    config: Config
    cluster: Cluster
    streams: Streams
    data: SampleSource
    model: FlatModel
    planner: Planner
    stratifier: Stratifier
    trainer: Trainer
    server: ServerStep
    augmentation: dict[str, Any]
    inquiry: Inquiry
    balance: BalanceLearner
    evaluated: EvaluatedParts
    watch: DataWatch
    class_counts: Callable[[Ints], Ints]
    clients_view: ClientsView | None = None
    around: Around | None = None
    liars: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    reference: Reference | None = None
    data_digest: str = ""

    @classmethod
    def connect(cls, config: Config, cluster: Cluster | None = None) -> Experiment:
        """Assemble the parts of this rank; without a cluster join the job's other ranks first.

        Raises
        ------
        UserError
            When the data, the model or the launcher do not fit.
        """
        cluster = cluster or Cluster.connect(reduction=config.cluster.reduction)
        check_ranks(cluster.size)
        store = agree(cluster, config)
        watch = DataWatch(store)
        device = prepare_device(config, cluster)
        streams = Streams(config.seed)
        if config.data.verify:
            on_server(cluster, lambda: open_store(config.data.shards, data_options(config), verify=True))
        samples = client_samples(config, store, streams, device)
        data = samples.data
        evaluated = EvaluatedParts(config, store, data)
        check_targets(config.task.kind, store.description, str(written(config.data.shards)))
        loss = task_loss(config.task.loss, options(config, "loss"), config.task.kind)
        model = FlatModel(build_model(config, data.description, device, cluster), device, loss)
        check_buffers(config, model)
        settle_threads(config, cluster, model.size, data.sizes)
        shared, with_server = agree_on_work(config, cluster, data.sizes, data.description, device)
        layout = lay_out(cluster, data.sizes, store.shard_starts, with_server, shared)
        liars = attackers(config, streams, len(data.sizes))
        trained_on = FlippedLabels(data, liars) if config.attack.kind == "label-flip" else data
        observer = UpdateObserver.wanted_by(config, streams, sent_lies(config, streams, liars))
        if observer is not None and config.logging.diagnostics:
            observer.losses = LocalLosses(config, trained_on, device, loss)
        reference = Reference(config.logging.reference, model) if config.logging.reference else None
        if config.transport.error_feedback:
            check_residuals(store.clients, model.size)
        agree_on_values(cluster, model)
        agree_on_traits(cluster, model, data.description)
        hooks = make_hooks(config, model, store.clients)
        refuse_large_run(
            config,
            cluster,
            model,
            data.description,
            data.sizes,
            evaluated.most_samples,
            layout.workers,
            hooks,
            cluster.memory_for_rank(),
        )
        engine = choose_engine(config, model, trained_on, streams, cluster.rank, observer, hooks)
        cohorts = CohortDraw(
            config,
            data.sizes,
            None,
            streams,
            values=model.size,
            counts=cache(samples.class_counts),
        )
        wanted = Inquiry.measures(cohorts.sampler)
        measure = ClientMeasures(config, trained_on, streams, device, cluster.rank, loss) if wanted else None
        probe = make_probe(config, model, trained_on, streams, cluster.rank)
        groups = mediator_groups(config, cluster, store, samples.rebalancing, streams)
        planner = Planner(config, data.sizes, streams, cohorts, groups, samples.weight_sizes)
        trainer = Trainer(
            config,
            engine,
            data.sizes,
            cluster,
            layout,
            store,
            RowRule(
                chosen(config, "row rule"),
                options(config, "row rule"),
                streams,
                config.samples.wanted,
                data.labels,
            ),
            observer,
            samples.weight_sizes,
            hooks,
        )
        inquiry = Inquiry(
            cluster, cohorts.sampler, cohorts.numbers, layout.owned, measure, observer, trainer.trial_norms
        )
        return cls(
            config=config,
            cluster=cluster,
            streams=streams,
            data=data,
            model=model,
            planner=planner,
            stratifier=Stratifier(
                config, cluster, layout.owned, store.clients, model.trainable, samples.class_counts, probe, streams
            ),
            trainer=trainer,
            server=ServerStep(
                config,
                streams,
                len(data.sizes),
                planner.weighing,
                ServerOptimizer(
                    chosen(config, "server optimizer"), options(config, "server optimizer"), model.trainable
                ),
                hooks,
            ),
            around=own_updates(config, cluster, model, partial(LocalLosses, config, trained_on, device, loss)),
            evaluated=evaluated,
            clients_view=clients_view(config, cluster, streams, data, samples.rebalancing, layout, trainer),
            watch=watch,
            class_counts=samples.class_counts,
            liars=liars,
            reference=reference,
            data_digest=data_digest(store.manifest),
            augmentation=rebalancing_facts(config, store, samples.rebalancing) if cluster.is_server else {},
            inquiry=inquiry,
            balance=BalanceLearner(layout.workers if shared and config.topology.balance == "measured" else 0),
        )

    def observe(self, t: int, model: Tensor) -> None:
        """What all ranks measure before the server plans round t: strata that are due, a sampler's candidates."""
        self.stratifier.observe(t, model)
        if self.inquiry.sampler.measures:
            cohorts = self.planner.cohorts
            wanted = cohorts.candidates(t, self.stratifier.strata) if self.cluster.is_server else None
            measured = self.inquiry.candidates(t, model, wanted)
            if wanted is not None:
                cohorts.tell(t, wanted, measured)

    def inquire(self, plan: Plan, model: Tensor) -> None:
        """Remember what the sampler wants to know of the round's participants; collective, before the server's step."""
        self.inquiry.participants(plan, model, self.planner.seconds)

    def plan(self, t: int) -> Plan:
        """The server's plan of round t (rank 0 only)."""
        plan = self.planner.plan(t, self.stratifier.strata)
        self.stratifier.latest = plan.clients
        return replace(plan, balance=self.balance.as_array())

    def plan_ahead(self, t: int) -> None:
        """Work out the plan of round t while others train: on a rank 0 that does not, if nothing they do changes it.

        It is told ahead as well, unless it is to hold what is learned from the seconds of this round.
        """
        idle = self.cluster.is_server and self.trainer.worker.index is None
        if idle and not self.inquiry.sampler.depends_on_rounds:
            self.planner.prepare(t)
            if self.planner.tells_coming:
                self.planner.prepare(t + 1)
            plan = None if self.balance.learns else self.planner.foreseen(t)
            if plan is not None:
                self.cluster.foretell(t, plan.arrays())

    def learn(self, totals: RoundTotals) -> None:
        """Learn from the round's seconds how the work is best spread (rank 0 only)."""
        if self.trainer.steady:
            workers = slice(-self.trainer.layout.workers, None)  # the last ranks, with or without rank 0
            self.balance.observe(totals.rows[workers], totals.steps[workers], totals.busy[workers])

    def close(self) -> None:
        """Free what belongs to MPI, and the file of clients' state."""
        if self.trainer.hooks is not None:
            self.trainer.hooks.state.close()
        self.cluster.close()
