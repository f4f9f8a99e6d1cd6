"""An experiment: the parts of a configuration, assembled on one rank of a cluster."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedmpi
from fedmpi.aggregation.fused_metrics import check_ranks
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.clients.stratifier import Stratifier
from fedmpi.clients.turnout import CohortDraw
from fedmpi.cluster import Cluster
from fedmpi.cluster.refusal import on_server
from fedmpi.common.plan import Ints, Plan
from fedmpi.common.streams import Streams
from fedmpi.config import Config
from fedmpi.config.choices import chosen, options
from fedmpi.data.rebalanced import Samples, client_samples, rebalancing_facts
from fedmpi.data.shards import open_store
from fedmpi.local.algorithm import Totals
from fedmpi.local.diagnostics import client_drift, gradient_diversity, local_gain
from fedmpi.local.engines import choose_engine
from fedmpi.local.hooks import make_hooks
from fedmpi.local.measures import LocalLosses, Reference
from fedmpi.local.measuring import ClientMeasures
from fedmpi.local.observer import UpdateObserver
from fedmpi.local.probing import make_probe
from fedmpi.mediators.groups import mediator_groups
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from fedmpi.privacy.gaussian import add_noise
from fedmpi.privacy.updates import adds_noise, check_buffers, planned_participants
from fedmpi.records.checkpoint import Checkpoint
from fedmpi.records.client_records import load_records, save_records
from fedmpi.records.provenance import git_commit, versions
from fedmpi.rounds.agreement import agree_on_traits
from fedmpi.rounds.balance import Balance, BalanceLearner
from fedmpi.rounds.evaluated import EvaluatedParts
from fedmpi.rounds.inquiry import Inquiry
from fedmpi.rounds.run_facts import agree, data_digest
from fedmpi.rounds.server import Planner
from fedmpi.rounds.sum import Around, RoundTotals, own_updates
from fedmpi.rounds.traffic_count import paper_formula, round_links
from fedmpi.rounds.worker import Trainer
from fedmpi.rounds.workers import agree_on_work, lay_out, prepare_device
from fedmpi.samples.row_rule import RowRule
from fedmpi.tasks.losses import task_loss
from fedmpi.updates.attacks import FlippedLabels, attackers, sent_lies
from fedmpi.updates.compression import RESIDUALS, check_residuals

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
    server_optimizer : ServerOptimizer
        Takes the same step on every rank.
    evaluated : EvaluatedParts
        The samples that the global model is evaluated on (by rank 0).
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
    """

    config: Config
    cluster: Cluster
    streams: Streams
    data: Samples
    model: FlatModel
    planner: Planner
    stratifier: Stratifier
    trainer: Trainer
    server_optimizer: ServerOptimizer
    augmentation: dict[str, Any]
    inquiry: Inquiry
    balance: BalanceLearner
    evaluated: EvaluatedParts
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
        device = prepare_device(config, cluster)
        streams = Streams(config.seed)
        if config.data.verify:
            on_server(cluster, lambda: open_store(config.data.shards, verify=True))
        samples = client_samples(config, store, streams, device)
        data = samples.data
        evaluated = EvaluatedParts(config, store, data)
        loss = task_loss(config.task.loss, config.task.options)
        module = build(config.model.name, config.model.options, data.description, config.seed)
        model = FlatModel(module, device, loss)
        check_buffers(config, model)
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
        agree_on_traits(cluster, model, data.description)
        hooks = make_hooks(config, model, store.clients)
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
        inquiry = Inquiry(cluster, cohorts.sampler, cohorts.numbers, layout.owned, measure, observer)
        probe = make_probe(config, model, trained_on, streams, cluster.rank)
        groups = mediator_groups(config, cluster, store, samples.rebalancing, streams)
        return cls(
            config=config,
            cluster=cluster,
            streams=streams,
            data=data,
            model=model,
            planner=Planner(config, data.sizes, streams, cohorts, groups, samples.weight_sizes),
            stratifier=Stratifier(
                config, cluster, layout.owned, store.clients, model.trainable, samples.class_counts, probe, streams
            ),
            trainer=Trainer(
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
            ),
            server_optimizer=ServerOptimizer(
                chosen(config, "server optimizer"), options(config, "server optimizer"), model.trainable
            ),
            around=own_updates(config, cluster, model, partial(LocalLosses, config, trained_on, device)),
            evaluated=evaluated,
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
            cohorts.tell(t, self.inquiry.candidates(t, model, wanted))

    def inquire(self, plan: Plan, model: Tensor) -> None:
        """Remember what the sampler wants to know of the round's participants; collective, before the server's step."""
        self.inquiry.participants(plan, model, self.planner.seconds)

    def plan(self, t: int) -> Plan:
        """The server's plan of round t (rank 0 only)."""
        plan = self.planner.plan(t, self.stratifier.strata)
        self.stratifier.latest = plan.clients
        return replace(plan, balance=self.balance.told())

    def plan_ahead(self, t: int) -> None:
        """Work out the plan of round t while others train: on a rank 0 that does not, if nothing they do changes it."""
        idle = self.cluster.is_server and self.trainer.worker is None
        if idle and not self.inquiry.sampler.depends_on_rounds:
            self.planner.prepare(t)
            if self.planner.tells_coming:
                self.planner.prepare(t + 1)

    def learn(self, totals: RoundTotals) -> None:
        """Learn from the round's seconds how the work is best spread (rank 0 only)."""
        if self.trainer.steady:
            workers = slice(-self.trainer.layout.workers, None)  # the last ranks, with or without rank 0
            self.balance.observe(totals.rows[workers], totals.steps[workers], totals.busy[workers])

    def aggregate(self, plan: Plan, totals: RoundTotals, model: Tensor) -> Tensor:
        """The round's mean update Δ of the model from the sums of all ranks, with the server's noise if there is to be
        any."""
        privacy, divisor = self.config.privacy, self._divisor(plan, totals)
        update = totals.update / divisor
        if not plan.one_step and (more := self.planner.weighing.surplus(plan.coefficients)):
            update.add_(model, alpha=more)
        if privacy.clip_norm is not None and adds_noise(self.config):
            share = 1 / planned_participants(self.config, len(self.data.sizes))
            add_noise(update, self.streams, plan.round, privacy.noise_multiplier, privacy.clip_norm, share)
        if (hooks := self.trainer.hooks) is None:
            return update
        sums = totals.sums
        population, participants = len(self.data.sizes), round(sums["clients"])
        facts = Totals(population, participants, sums["weight"], divisor, plan.round, plan.lr)
        return hooks.server_step(update, totals.further, facts)

    def record(self, plan: Plan, totals: RoundTotals) -> dict[str, Any]:
        """The round's record, without what evaluation adds."""
        sums = totals.sums
        record = {
            "round": plan.round,
            "lr": plan.lr,
            "train_loss": sums["loss_sum"] / sums["loss_count"] if sums["loss_count"] else None,
            "samples": round(sums["samples"]),
            "steps": round(sums["steps"]),
            **plan.facts,
            **self._links(plan, totals),
            **self._observed(plan, totals),
            **({"attackers": int(np.isin(plan.clients, self.liars).sum())} if self.liars.size else {}),
            **Balance.heard(plan.balance).facts(),
            "busy_seconds": totals.busy.tolist(),
        }
        if plan.round == 0 and self.augmentation:
            record["rebalancing"] = self.augmentation
        return {key: value for key, value in record.items() if value is not None}

    @property
    def _combines(self) -> bool:
        """Whether a combiner has made the update, and not a sum."""
        return bool(self.config.aggregation.rule != "mean")

    def _divisor(self, plan: Plan, totals: RoundTotals) -> float:
        """What the sum of updates is divided by: the total weight of those who returned one, or 1."""
        weight = totals.sums["weight"]
        return weight if plan.normalise and weight > 0 and not self._combines else 1.0

    def distance(self, model: Tensor) -> dict[str, float]:
        """How far the global model is from the reference, where there is one."""
        return {} if self.reference is None else {"weight_divergence": self.reference.distance(model)}

    def _links(self, plan: Plan, totals: RoundTotals) -> dict[str, int]:
        classes, clients = self.data.description.classes, len(self.data.sizes)
        visits = round(totals.sums["visits"])
        links = round_links(self.config, self.model, clients, classes, plan, self.stratifier.measured, visits)
        counted = {f"bytes_{link}": count for link, count in vars(links).items() if count}
        return counted | {"bytes_paper_formula": paper_formula(self.config, self.model.size, len(plan.clients))}

    def _observed(self, plan: Plan, totals: RoundTotals) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self.config.topology.kind == "mediators":
            facts["visits"] = round(totals.sums["visits"])
            facts["hops"] = round(totals.sums["hops"])
            facts["idle_seconds"] = totals.idle.tolist()
        if self.config.privacy.clip_norm is not None:
            facts["clipped_updates"] = round(totals.sums["clipped"])
        if self.config.logging.diagnostics:
            norm = float(torch.linalg.vector_norm(totals.update, dtype=torch.float64))
            facts["update_norm"] = norm / self._divisor(plan, totals)
            if not self._combines:  # both compare the updates with their weighted mean
                facts["gradient_diversity"] = gradient_diversity(totals.moments, norm)
                facts["client_drift"] = client_drift(totals.moments, norm)
            facts["gamma"] = local_gain(totals.moments)
        return facts

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint must hold besides the model: tensors by name and a header; collective, whole on rank 0."""
        moments = {f"server.{name}": value for name, value in self.server_optimizer.state().items()}
        parts = self.stratifier.state() | self.planner.accounts.state() | self.balance.state()
        hooks, known = self.trainer.hooks, self.inquiry.numbers.state()
        server = {} if hooks is None else hooks.server_tensors()
        return {**moments, **parts, **known, **server, **self._transport_state()}, {"data": self.data_digest}

    def _transport_state(self) -> dict[str, Tensor]:
        observer = self.trainer.observer
        return observer.transport.gather_state(self.cluster) if observer and observer.transport else {}

    def share_checkpoint(self, checkpoint: Checkpoint | None) -> tuple[int, Tensor | None]:
        """Give rank 0's checkpoint to every rank; returns the first round and the model, if there is one."""
        hooks = self.trainer.hooks
        own = [] if hooks is None else hooks.tensor_names
        names = ["model", *(f"server.{name}" for name in self.server_optimizer.names), *RESIDUALS, *own]
        arrays = None
        if self.cluster.is_server:
            saved = checkpoint.tensors if checkpoint else {}
            first = np.array([checkpoint.next_round if checkpoint else 0], np.int64)
            arrays = [first, *(saved[n].numpy() if n in saved else np.empty(0, np.float32) for n in names)]
        received = self.cluster.broadcast(arrays)
        device = self.model.initial.device
        named = zip(names, received[1:], strict=True)
        tensors = {name: torch.tensor(array, device=device) for name, array in named if array.size}
        moments = {name.removeprefix("server."): t for name, t in tensors.items() if name.startswith("server.")}
        self.server_optimizer.load(moments, int(received[0][0]))
        if hooks is not None:
            hooks.load_server(tensors)
        if (observer := self.trainer.observer) is not None and observer.transport is not None:
            observer.transport.load(tensors, range(*self.trainer.layout.owned))
        if checkpoint is not None:
            self.planner.accounts.load(checkpoint.tensors)
            self.balance.load(checkpoint.tensors)
            self.inquiry.numbers.load(checkpoint.tensors)
        self.stratifier.load(checkpoint.tensors if checkpoint else {}, resumed=int(received[0][0]) > 0)
        return int(received[0][0]), tensors.get("model")

    @property
    def server_vectors(self) -> list[Tensor]:
        """What the local algorithm keeps on every rank alike."""
        return [] if self.trainer.hooks is None else [*self.trainer.hooks.server.values()]

    def save_client_state(self, path: Path | None) -> dict[str, str]:
        """Write the vectors kept for clients to a file beside a checkpoint, whose header is to hold the result.

        Collective; rank 0 gives the path, or None where nothing is to be written.
        """
        hooks = self.trainer.hooks
        if hooks is None or not hooks.client_state:
            return {}
        digest = save_records(self.cluster, hooks.state, path)
        return {"clients": digest} if digest else {}

    def load_client_state(self, path: Path | None, folder: Path | None) -> None:
        """Take over the vectors kept for this rank's clients from rank 0's file, None where there is none.

        Collective; rank 0 also tells the run's `folder`, where vectors go for which there is no memory.
        """
        hooks = self.trainer.hooks
        if hooks is None or not hooks.client_state:
            return
        name = str(folder.resolve()) if folder is not None else ""
        told = self.cluster.broadcast([np.frombuffer(name.encode(), np.uint8)] if self.cluster.is_server else None)
        hooks.state.folder = Path(told[0].tobytes().decode()) if told[0].size else None
        layout = self.trainer.layout
        clients = load_records(self.cluster, hooks.state, path, range(*layout.owned))
        if self.trainer.homes is not None:
            owners = np.searchsorted(layout.boundaries, clients, side="right") - 1
            self.trainer.homes.settle(clients, layout.ranks(owners))

    def announce(self) -> None:
        """Say in the run log what runs where, and why this engine."""
        log.info("fedmpi %s, torch %s, MPI %s", fedmpi.__version__, torch.__version__, self.cluster.mpi)
        log.info("%d ranks on %d nodes, device %s", self.cluster.size, self.cluster.nodes, self.model.initial.device)
        log.info(
            "%d clients, %d samples, model of %d values", len(self.data.sizes), self.data.sizes.sum(), self.model.size
        )
        log.info("placement: %s", self.trainer.layout.description)
        log.info("engine: %s", self.trainer.engine.description)
        if self.trainer.hooks is not None:
            log.info("algorithm: %s", self.trainer.hooks.description)

    def facts(self) -> dict[str, Any]:
        """What the summary says about where and with what the run was made."""
        return {
            "ranks": self.cluster.size,
            "clients": len(self.data.sizes),
            "parameters": self.model.trainable,
            "data": asdict(self.data.description),
            "engine": self.trainer.engine.description,
            **({"attackers": self.liars.tolist()} if self.liars.size else {}),
            **({"rebalancing": self.augmentation} if self.augmentation else {}),
            "versions": versions(self.cluster.mpi),
            "git_commit": git_commit(),
        }

    def close(self) -> None:
        """Free what belongs to MPI, and the file of clients' state."""
        if self.trainer.hooks is not None:
            self.trainer.hooks.state.close()
        self.cluster.close()
