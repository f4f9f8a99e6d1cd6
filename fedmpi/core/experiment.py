"""The experiment of a configuration, assembled on one rank: its data, model, placement, plan, training and evaluation.

First, all ranks compare what they run. Facts found by one rank about its node or the model apply to all ranks.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

import fedmpi
from fedmpi.aggregation.aggregators import Aggregator
from fedmpi.aggregation.exact import check_ranks
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.clients.events import PlaceDraw
from fedmpi.clients.stratifier import Stratifier
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.calling import Remembering
from fedmpi.common.decorators import HELD_OUT, MEASURABLE
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.checks import attacks_updates
from fedmpi.config.tables import probe_of
from fedmpi.config.writing import flat_table
from fedmpi.core.asynchronous import AsyncPlanner, AsyncTrainer
from fedmpi.core.decisions import Decisions
from fedmpi.core.evaluation import ClientsView, EvaluatedParts, OwnRows
from fedmpi.core.placement import (
    BalanceLearner,
    Layout,
    lay_out,
    places_on_node,
    prepare_device,
    server_trains,
    settle_threads,
    shares_data,
)
from fedmpi.core.plan import Planner
from fedmpi.core.reduce import ServerStep, SingleUpdates, one_by_one
from fedmpi.core.worker import Trainer, Worker, evaluation_cost
from fedmpi.data.augmentation import ClientSamples, client_samples, rebalancing_facts
from fedmpi.data.opening import open_store
from fedmpi.data.schema import Manifest, check_targets
from fedmpi.data.shards import ShardStore
from fedmpi.data.source import ClientData, DataSource, Tensors
from fedmpi.doctor import free_memory
from fedmpi.local.engines import choose_engine
from fedmpi.local.hooks import Hooks, make_hooks
from fedmpi.local.measures import ClientMeasures, SampleMeasures, make_probe
from fedmpi.local.observer import UpdateObserver
from fedmpi.local.sequential import LocalEngine, SequentialEngine
from fedmpi.local.traits import forward_traits
from fedmpi.mediators.groups import mediator_groups
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster
from fedmpi.mpi.ranks import on_server
from fedmpi.privacy.updates import Clipping, check_buffers
from fedmpi.records.checkpoint import model_file
from fedmpi.records.provenance import digests, part_sources, versions
from fedmpi.samples.rules import RowRule
from fedmpi.tasks.losses import task_loss
from fedmpi.updates.attacks import AttackedUpdates, PoisonedLabels, attackers

Facts = dict[str, str]


@dataclass(frozen=True)
class RunData:
    """Data of a run on one rank: as stored, as assigned to clients, and as trained on."""

    store: ShardStore  # Stored data
    samples: ClientSamples  # Samples of the clients, including copies of scarce classes
    evaluated: EvaluatedParts  # Samples that rank 0 evaluates the global model on
    attackers: Ints  # (a,): Byzantine clients
    trained_on: DataSource  # Samples as the clients train on them; attackers may have other labels
    augmentation: dict[str, Any]  # Effect of rebalancing on the clients' data, for the record (rank 0 only)

    @classmethod
    def of(cls, config: Config, cluster: Cluster, streams: Streams, store: ShardStore, device: torch.device) -> RunData:
        """Open the data of a configuration; tensors are placed on the device. Collective."""
        if config.data.verify:
            on_server(cluster, lambda: open_store(config.data.source.choice, config.data.source.options, verify=True))
        samples = client_samples(config, store, streams, device)
        evaluated = EvaluatedParts(config, store, samples.data)
        check_targets(config.task.kind, store.description, str(config.data.source.name))
        attacking = attackers(config.attack, config.clients.attack_fraction, streams, store.clients)
        poisons = config.attack.name != "none" and not attacks_updates(config)
        trained_on = PoisonedLabels(samples.data, config.attack, attacking) if poisons else samples.data
        augmentation = rebalancing_facts(config, store, samples.rebalancing) if cluster.is_server else {}
        return cls(store, samples, evaluated, attacking, trained_on, augmentation)

    @property
    def sizes(self) -> Ints:
        """Effective sizes of all clients, int64 (N,)."""
        return self.samples.sizes

    @property
    def digest(self) -> str:
        """Digest that identifies the data in checkpoints."""
        return self.store.manifest.digest


@runtime_checkable
class Shared(Protocol):
    """Part with a state that is equal on all ranks."""

    def state(self) -> dict[str, Tensor]:
        """Return the state, for a checkpoint."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint."""


@dataclass
class Experiment:
    """Everything that a rank needs for its share of a run."""

    config: Config
    cluster: Cluster
    layout: Layout  # Clients that each rank owns
    data: ClientData  # Samples of every client; a rank reads those of its own clients
    data_facts: RunData  # Facts about the data besides the samples
    model: FlatModel  # Network whose parameters are views of one flat vector
    decisions: Decisions  # Measurements and decisions before the work of a round
    trainer: Trainer  # Local work of this rank's clients
    server: ServerStep  # Step from the round's sums to the next model, identical on every rank
    single_updates: SingleUpdates | None  # Applies functions to every client's own update; None if sums are enough
    view: ClientsView | None  # Evaluates the model on single clients
    remembering: tuple[Remembering, ...]  # Components whose state rank 0 keeps
    shared: tuple[Shared, ...]  # Parts whose state all ranks keep

    @classmethod
    def connect(cls, config: Config, cluster: Cluster | None = None) -> Experiment:
        """Assemble the experiment of this rank; without a cluster, join the job's other ranks first."""
        cluster = cluster or Cluster.connect(reduction=config.cluster.reduction)
        check_ranks(cluster.size)
        device, streams = prepare_device(config, cluster), Streams(config.seed)
        store = open_and_compare(cluster, config, device)
        data = RunData.of(config, cluster, streams, store, device)
        samples, description = data.samples, data.samples.description
        loss = task_loss(config.task.loss.choice, config.task.loss.options, config.task.kind, samples.class_counts)
        name, given = config.model.choice, config.model.options
        model = FlatModel.built(name, given, description, config.seed, device, loss, config.local.personal)
        check_buffers(config, model)
        frozen = str(model.frozen_checksum)
        compare_ranks(cluster, {"the parameters": str(model.size), "the frozen parameters (checksum)": frozen})
        settle_threads(config, cluster, model.size, data.sizes)
        shared = shares_data(config, cluster, data.sizes, description)
        with_server = server_trains(config, cluster, shared, places_on_node(cluster, device))
        cluster.server_trains = with_server
        layout = lay_out(cluster, data.sizes, store.shard_starts, with_server, shared)
        losses = partial(ClientMeasures, model, data.trained_on, streams, cluster.rank)
        clipping = None if config.privacy.clip_norm is None else Clipping(config, streams, store.clients)
        others = AttackedUpdates(config.attack, data.attackers, streams) if attacks_updates(config) else None
        observer = UpdateObserver.wanted_by(config, streams, model, others, clipping)
        if observer is not None and config.logging.diagnostics:
            observer.losses = losses()
        forward_traits(model, description)
        check_batches(config, data.sizes, model.least)
        hooks = make_hooks(config, model, streams, store.clients)
        sequential = SequentialEngine(model, data.trained_on, streams, cluster.rank, observer, hooks)
        engine = choose_engine(config, sequential)
        worker = _worker(config, streams, data, layout, engine, hooks)
        trainer = (AsyncTrainer if config.topology.name == "async" else Trainer)(
            config, cluster, engine, worker, observer, hooks
        )
        decisions = _decisions(config, streams, data, model, trainer)
        part, weighing = config.server, decisions.planner.weighing
        optimizer = ServerOptimizer(part.optimizer, part.optimizer.options, model.initial, model.trainable)
        aggregator = Aggregator(part.aggregator, part.aggregator.options, store.clients)
        view = None
        if config.evaluation.clients is not None:
            rows = OwnRows.of(samples.originals, samples.rebalancing)
            view = ClientsView(config, cluster, streams, rows, layout, trainer)
        return cls(
            config=config,
            cluster=cluster,
            layout=layout,
            data=samples.data,
            data_facts=data,
            model=model,
            decisions=decisions,
            trainer=trainer,
            server=ServerStep(config, store.clients, weighing, optimizer, hooks, clipping),
            single_updates=one_by_one(cluster, model, losses, weighing, aggregator),
            view=view,
            remembering=(decisions.sampler, weighing, aggregator),
            shared=tuple(part for part in (model, clipping, trainer) if isinstance(part, Shared)),
        )

    def close(self) -> None:
        """Free the MPI resources and the file of clients' state."""
        if self.trainer.hooks is not None:
            self.trainer.hooks.state.close()
        self.cluster.close()


def _worker(
    config: Config, streams: Streams, data: RunData, layout: Layout, engine: LocalEngine, hooks: Hooks | None
) -> Worker:
    """Make the worker that turns a plan into this rank's tasks."""
    part, given, labels = config.samples.sampler, config.samples.sampler.options, data.samples.data.labels
    seen = SampleMeasures(engine.sequential) if part.marks.get("needs") else None
    row_rule = RowRule(part, given, streams, config.samples.budget, labels, seen)
    evaluation = evaluation_cost(config, data.store) if layout.server_trains else 0.0
    proximal_mu = 0.0 if hooks is None else hooks.proximal_mu
    return Worker(
        config, layout, engine, data.sizes, row_rule, data.samples.weight_sizes, evaluation, proximal_mu, seen
    )


def _decisions(config: Config, streams: Streams, data: RunData, model: FlatModel, trainer: Trainer) -> Decisions:
    """Make the object that measures and plans before each round."""
    cluster, layout, samples, trained_on = trainer.cluster, trainer.layout, data.samples, data.trained_on
    widths = {} if trainer.observer is None else trainer.observer.numbers.widths
    if trainer.observer is not None and widths:
        on_server(cluster, partial(_check_vectors, config, *trainer.observer.numbers.memory(len(data.sizes))))
    counts, is_server = cache(samples.class_counts), cluster.is_server
    flying = config.topology.name == "async"
    draw, planner = (PlaceDraw, AsyncPlanner) if flying else (CohortDraw, Planner)
    cohorts = draw(config, data.sizes, counts, streams, model.size, widths, is_server)
    measured = {*cohorts.sampler.measures, *cohorts.sampler.numbers} & set(MEASURABLE)
    measure = ClientMeasures(model, trained_on, streams, cluster.rank) if measured else None
    if measure is not None and measured & set(HELD_OUT):
        measure.held_out = _held_out(config, OwnRows.of(samples.originals, samples.rebalancing))
    probe = make_probe(config, model, trained_on, streams, cluster.rank)
    groups = mediator_groups(config, cluster, data.store, samples.rebalancing, streams)
    learning = layout.shared and config.cluster.balance == "measured"
    return Decisions(
        planner=planner(config, data.sizes, streams, cohorts, groups, samples.weight_sizes),
        stratifier=Stratifier(
            config, cluster, layout.owned, data.store.clients, model.trainable, samples.class_counts, probe, streams
        ),
        trainer=trainer,
        measure=measure,
        balance=BalanceLearner(layout.workers if learning else 0),
    )


def _held_out(config: Config, rows: OwnRows) -> Callable[[int], Tensors | None]:
    """Return a function that loads a client's held-out samples, or None if it has none."""
    if not rows.held_out:
        raise UserError(
            f'clients.sampler = "{config.clients.sampler.name}" needs scores on held-out samples of each client, but '
            f"{config.data.source.name} has no held-out samples of its clients. Prepare the data with --val FRACTION"
        )
    return lambda client: rows.load(np.array([client])) if rows.counts[client] else None


def _check_vectors(config: Config, needed: int, vectors: str) -> None:
    """Reject vectors that do not fit into the memory of rank 0."""
    free = free_memory()
    if free is not None and needed > free:
        raise UserError(
            f'clients.sampler = "{config.clients.sampler.name}" keeps {vectors}. They need '
            f"{needed / 1e9:.1f} GB of memory on rank 0, but {free / 1e9:.1f} GB are free. Lower its "
            "sketch_size, or choose fewer layers"
        )


def open_and_compare(cluster: Cluster, config: Config, device: torch.device) -> ShardStore:
    """Open the data, and reject ranks that do not run the same. Collective, before any other exchange."""
    store, refusal = None, ""
    try:
        store = open_store(config.data.source.choice, config.data.source.options)
    except UserError as error:
        refusal = str(error)
    facts = facts_of_run(config, store.manifest if store else None, refusal)
    compare_ranks(cluster, facts | {"the device": device.type})
    if store is None:
        raise UserError(refusal)
    return store


def facts_of_run(config: Config, manifest: Manifest | None, refusal: str = "") -> Facts:
    """Return the facts about the run that all ranks must share."""
    facts = {key: repr(value) for key, value in flat_table(config).items()}
    facts |= {f"{name} (version)": found for name, found in versions("").items() if name != "mpi"}
    facts["fedmpi's own sources (sha256)"] = _sources(Path(fedmpi.__file__).parent)
    facts |= {f"{name} (sha256)": digest for name, digest in digests(part_sources(config)).items()}
    if isinstance(config.model.choice, nn.Module):
        facts["the values of the model given (sha256)"] = hashlib.sha256(model_file(config.model.choice)).hexdigest()
    facts["the data"] = refusal or "readable"
    return facts | (manifest.identity() if manifest else {})


def compare_ranks(cluster: Cluster, facts: Facts) -> None:
    """Reject ranks whose facts differ from those of rank 0; collective."""
    host = socket.gethostname()
    sent = [np.frombuffer(json.dumps([host, facts]).encode(), np.uint8)] if cluster.is_server else None
    server, theirs = json.loads(cluster.broadcast(sent)[0].tobytes())
    first = next((key for key in {**theirs, **facts} if theirs.get(key) != facts.get(key)), None)
    words = ""
    if first is not None:
        own, other = facts.get(first, "unset"), theirs.get(first, "unset")
        words = f"{first} is {other} on rank 0 ({server}) and {own} on rank {cluster.rank} ({host})"
    gathered = cluster.gather(np.frombuffer(words.encode(), np.uint8))

    def refuse() -> None:
        if found := [text.tobytes().decode() for text in gathered or [] if text.size]:
            raise UserError(f"the ranks differ: {found[0]}. Give all ranks the same files and options")

    on_server(cluster, refuse)


@cache
def _sources(package: Path) -> str:
    """Return the SHA-256 of a package's sources and tables, names included, cached for the process."""
    summed = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.toml")]):
        summed.update(f"{path.relative_to(package)}\0".encode())
        summed.update(hashlib.sha256(path.read_bytes()).digest())
    return summed.hexdigest()


def check_batches(config: Config, sizes: Ints, least: int) -> None:
    """Reject training batches of one sample if the model needs more (`models.flat.FlatModel.least`)."""
    part, rule = config.local, config.samples.sampler.name
    if least == 1:
        return
    cause = ""
    if part.batch_size == 1:
        cause = "local.batch_size = 1"
    elif config.clients.sampler.services is not None and probe_of(config) == "sample":
        cause = 'clients.sampler.features.probe = "sample"'
    elif not part.drop_last:
        lone = sizes == 1
        if part.batch_size != "all" and (part.steps is None or config.evaluation.fine_tune > 0):
            lone = sizes % part.batch_size == 1
            if rule != "all" and sizes.max() > part.batch_size:
                cause = f'samples.sampler = "{rule}"'
        if rule == "all" and lone.any():
            client = int(np.flatnonzero(lone)[0])
            cause = f"local.batch_size = {part.batch_size!r} and client {client}, who has {sizes[client]} samples"
    if cause:  # a client does not train in a round in which the data sampler leaves it one sample
        raise UserError(
            f"the model cannot be trained on a batch of one sample (BatchNorm, squeeze()?), as results from {cause}. "
            'Set a larger local.batch_size, local.drop_last = true or a probe of "full", or replace BatchNorm by '
            "GroupNorm and squeeze() by flatten(1)"
        )
