"""An experiment: the parts of a configuration, assembled on one rank of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fedmpi.aggregation.fused_metrics import check_ranks
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.cluster import Cluster
from fedmpi.common.streams import Streams
from fedmpi.config import Config
from fedmpi.config.choices import chosen, options
from fedmpi.data.copies.client_samples import SampleSource
from fedmpi.local.comparisons import LocalLosses, Reference
from fedmpi.local.engines import LocalEngine, choose_engine
from fedmpi.local.hooks import Hooks, make_hooks
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.local.traits import check_precision
from fedmpi.models.flat import FlatModel
from fedmpi.privacy.updates import check_buffers
from fedmpi.rounds.agreement import agree_on_traits, agree_on_values
from fedmpi.rounds.clients_view import ClientsView, clients_view
from fedmpi.rounds.decisions import Decisions
from fedmpi.rounds.evaluated import EvaluatedParts
from fedmpi.rounds.layout import Layout, agree_on_work, lay_out, prepare_device, settle_threads
from fedmpi.rounds.local_state import LocalState
from fedmpi.rounds.round_sum import SingleUpdates, one_by_one
from fedmpi.rounds.run_data import DataFacts, RunData
from fedmpi.rounds.run_facts import open_and_compare
from fedmpi.rounds.server_step import ServerStep
from fedmpi.rounds.small_batches import check_batches
from fedmpi.rounds.training import Trainer, evaluation_cost
from fedmpi.rounds.worker import Worker
from fedmpi.samples.row_rule import RowRule
from fedmpi.tasks.losses import task_loss
from fedmpi.updates.attacks import attacked_updates
from fedmpi.updates.compression import check_residuals


@dataclass(frozen=True)
class ModelEvaluation:
    """What the global model is evaluated on and compared with."""

    parts: EvaluatedParts  # The samples that it is evaluated on (by rank 0)
    clients: ClientsView | None = None  # Evaluates it on clients by themselves
    reference: Reference | None = None  # What it is compared with, on every rank alike


@dataclass
class Experiment:
    """All that a rank needs for its share of a run."""

    config: Config
    cluster: Cluster
    layout: Layout  # Which clients this rank owns
    data: SampleSource  # Every client's samples; a rank reads those it owns
    data_facts: DataFacts
    model: FlatModel  # The network, its parameters views of one flat vector
    decisions: Decisions  # What is found out and decided before the work of a round
    trainer: Trainer  # The local work of this rank's clients
    local_state: LocalState  # What is kept for the local work from round to round
    server: ServerStep  # From the round's sums to the next model, the same on every rank
    evaluation: ModelEvaluation  # What the global model is evaluated on and compared with
    # Makes what takes every client's own update, where sums of them are not enough
    single_updates: SingleUpdates | None = None

    @classmethod
    def connect(cls, config: Config, cluster: Cluster | None = None) -> Experiment:
        """Assemble the parts of this rank; without a cluster join the job's other ranks first."""
        cluster = cluster or Cluster.connect(reduction=config.cluster.reduction)
        check_ranks(cluster.size)
        store = open_and_compare(cluster, config)
        device, streams = prepare_device(config, cluster), Streams(config.seed)
        data = RunData.of(config, cluster, streams, store, device)
        model = _built_model(config, cluster, data, device)
        settle_threads(config, cluster, model.size, data.sizes)
        layout = _layout(config, cluster, data, device)
        losses = partial(LocalLosses, config, data.trained_on, device, streams, model.loss)
        observer = _observer(config, streams, data, losses)
        reference = Reference(config.logging.reference, model) if config.logging.reference else None
        _check_model(config, cluster, data, model)
        hooks = make_hooks(config, model, store.clients)
        engine = choose_engine(config, model, data.trained_on, streams, cluster.rank, observer, hooks)
        worker = _worker(config, streams, data, layout, engine, hooks)
        local_state = LocalState(cluster, layout, store.clients, hooks, observer)
        trainer = Trainer(config, cluster, engine, worker, store, observer, local_state)
        decisions = Decisions.of(config, cluster, streams, layout, data, model, observer, trainer.trial_norms)
        server = _server_step(config, streams, data, model, decisions, hooks)
        samples = data.samples
        return cls(
            config=config,
            cluster=cluster,
            layout=layout,
            data=samples.data,
            data_facts=data.facts(config, cluster.is_server),
            model=model,
            decisions=decisions,
            trainer=trainer,
            local_state=local_state,
            server=server,
            evaluation=ModelEvaluation(
                data.evaluated,
                clients_view(config, cluster, streams, samples.data, samples.rebalancing, layout, trainer),
                reference,
            ),
            single_updates=one_by_one(config, cluster, model, losses),
        )

    def close(self) -> None:
        """Free what belongs to MPI, and the file of clients' state."""
        self.local_state.close()
        self.cluster.close()


def _built_model(config: Config, cluster: Cluster, data: RunData, device: torch.device) -> FlatModel:
    """The network as one vector, with the loss of the task; collective."""
    loss = task_loss(config.task.loss, options(config, "loss"), config.task.kind)
    name, given = config.model.name, config.model.options
    model = FlatModel.built(name, given, data.description, config.seed, device, loss)
    check_buffers(config, model)
    return model


def _layout(config: Config, cluster: Cluster, data: RunData, device: torch.device) -> Layout:
    """Who trains whom; collective."""
    shared, with_server = agree_on_work(config, cluster, data.sizes, data.description, device)
    return lay_out(cluster, data.sizes, data.store.shard_starts, with_server, shared)


def _observer(
    config: Config, streams: Streams, data: RunData, losses: Callable[[], LocalLosses]
) -> UpdateObserver | None:
    """What sees every client's update, where somebody needs it; where diagnostics do, with the clients' losses."""
    observer = UpdateObserver.wanted_by(config, streams, attacked_updates(config, streams, data.attackers))
    if observer is not None and config.logging.diagnostics:
        observer.losses = losses()
    return observer


def _check_model(config: Config, cluster: Cluster, data: RunData, model: FlatModel) -> None:
    """Refuse residuals that are too large, and a model that is not the same, or does not do the same, on all ranks."""
    if config.transport.error_feedback:
        check_residuals(data.store.clients, model.size)
    agree_on_values(cluster, model)
    agree_on_traits(cluster, model, data.description)
    check_precision(model, data.description, config.local.precision)
    check_batches(config, data.sizes, model.least)


def _worker(
    config: Config, streams: Streams, data: RunData, layout: Layout, engine: LocalEngine, hooks: Hooks | None
) -> Worker:
    """From the plan to this rank's tasks."""
    part, given, held = chosen(config, "row rule"), options(config, "row rule"), data.samples.data
    row_rule = RowRule(part, given, streams, config.samples.wanted, held.labels)
    evaluation = evaluation_cost(config, data.store) if layout.server_trains else 0.0
    proximal_mu = 0.0 if hooks is None else hooks.proximal_mu
    return Worker(config, layout, engine, data.sizes, row_rule, data.samples.weight_sizes, evaluation, proximal_mu)


def _server_step(
    config: Config, streams: Streams, data: RunData, model: FlatModel, decisions: Decisions, hooks: Hooks | None
) -> ServerStep:
    """From the round's sums to the next model."""
    part, given = chosen(config, "server optimizer"), options(config, "server optimizer")
    optimizer = ServerOptimizer(part, given, model.trainable)
    return ServerStep(config, streams, data.store.clients, decisions.weighing, optimizer, hooks)
