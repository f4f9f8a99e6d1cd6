"""An experiment: the parts of a configuration, assembled on one rank of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fedmpi.aggregation.fused_metrics import check_ranks
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.cluster import Cluster
from fedmpi.cluster.on_server import on_server
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.base import written
from fedmpi.config.choices import chosen, data_options, options
from fedmpi.data.copies.client_samples import SampleSource, client_samples, rebalancing_facts
from fedmpi.data.opening import open_store
from fedmpi.data.schema import check_targets
from fedmpi.data.watch import DataWatch
from fedmpi.local.comparisons import LocalLosses, Reference
from fedmpi.local.engines import choose_engine
from fedmpi.local.hooks import make_hooks
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.models.flat import FlatModel
from fedmpi.privacy.updates import check_buffers
from fedmpi.rounds.agreement import agree_on_traits, agree_on_values
from fedmpi.rounds.clients_view import ClientsView, clients_view
from fedmpi.rounds.decisions import Decisions
from fedmpi.rounds.evaluated import EvaluatedParts
from fedmpi.rounds.local_state import LocalState
from fedmpi.rounds.memory import build_model, refuse_large_run
from fedmpi.rounds.run_facts import agree, data_digest
from fedmpi.rounds.server_step import ServerStep
from fedmpi.rounds.sum import SingleUpdates, one_by_one
from fedmpi.rounds.training import Trainer, evaluation_cost
from fedmpi.rounds.worker import Worker
from fedmpi.rounds.workers import Layout, agree_on_work, lay_out, prepare_device, settle_threads
from fedmpi.samples.row_rule import RowRule
from fedmpi.tasks.losses import task_loss
from fedmpi.updates.attacks import FlippedLabels, attacked_updates, attackers
from fedmpi.updates.compression import check_residuals


@dataclass(frozen=True)
class DataFacts:
    """What a run knows of its data beside the samples.

    Attributes
    ----------
    watch : DataWatch
        Sees when the files of the data are changed.
    digest : str
        What checkpoints know the data by.
    class_counts : callable
        (clients) -> int64 (m, C), what clients hold of each class, copies included.
    augmentation : dict
        What rebalancing did to the clients' data, for the record (rank 0 only); empty when it is off.
    attackers : int64 (a,)
        The clients that attack.
    """

    watch: DataWatch
    digest: str
    class_counts: Callable[[Ints], Ints]
    augmentation: dict[str, Any] = field(default_factory=dict)
    attackers: Ints = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class ModelEvaluation:
    """What the global model is evaluated on and compared with.

    Attributes
    ----------
    parts : EvaluatedParts
        The samples that it is evaluated on (by rank 0).
    clients : ClientsView or None
        Evaluates it on clients by themselves.
    reference : Reference or None
        What it is compared with, on every rank alike.
    """

    parts: EvaluatedParts
    clients: ClientsView | None = None
    reference: Reference | None = None


@dataclass
class Experiment:
    """All that a rank needs for its share of a run.

    Attributes
    ----------
    config : Config
    cluster : Cluster
    layout : Layout
        Which clients this rank owns.
    data : ClientData
        Every client's samples; a rank reads those it owns.
    data_facts : DataFacts
    model : FlatModel
        The network, its parameters views of one flat vector.
    decisions : Decisions
        What is found out and decided before the work of a round.
    trainer : Trainer
        The local work of this rank's clients.
    local_state : LocalState
        What is kept for the local work from round to round.
    server : ServerStep
        From the round's sums to the next model, the same on every rank.
    evaluation : ModelEvaluation
        What the global model is evaluated on and compared with.
    single_updates : callable or None
        Makes what takes every client's own update, where sums of them are not enough.
    """

    config: Config
    cluster: Cluster
    layout: Layout
    data: SampleSource
    data_facts: DataFacts
    model: FlatModel
    decisions: Decisions
    trainer: Trainer
    local_state: LocalState
    server: ServerStep
    evaluation: ModelEvaluation
    single_updates: SingleUpdates | None = None

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
        attacking = attackers(config, streams, len(data.sizes))
        trained_on = FlippedLabels(data, attacking) if config.attack.kind == "label-flip" else data
        observer = UpdateObserver.wanted_by(config, streams, attacked_updates(config, streams, attacking))
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
        row_rule = RowRule(
            chosen(config, "row rule"), options(config, "row rule"), streams, config.samples.wanted, data.labels
        )
        worker = Worker(
            config,
            layout,
            engine,
            data.sizes,
            row_rule,
            samples.weight_sizes,
            evaluation_cost(config, store) if layout.server_trains else 0.0,
            0.0 if hooks is None else hooks.proximal_mu,
        )
        local_state = LocalState(cluster, layout, len(data.sizes), hooks, observer)
        trainer = Trainer(config, cluster, engine, worker, store, observer, local_state)
        decisions = Decisions.of(
            config, cluster, streams, layout, store, samples, trained_on, model, observer, trainer.trial_norms
        )
        optimizer = ServerOptimizer(
            chosen(config, "server optimizer"), options(config, "server optimizer"), model.trainable
        )
        return cls(
            config=config,
            cluster=cluster,
            layout=layout,
            data=data,
            data_facts=DataFacts(
                watch,
                data_digest(store.manifest),
                samples.class_counts,
                rebalancing_facts(config, store, samples.rebalancing) if cluster.is_server else {},
                attacking,
            ),
            model=model,
            decisions=decisions,
            trainer=trainer,
            local_state=local_state,
            server=ServerStep(config, streams, len(data.sizes), decisions.weighing, optimizer, hooks),
            evaluation=ModelEvaluation(
                evaluated,
                clients_view(config, cluster, streams, data, samples.rebalancing, layout, trainer),
                reference,
            ),
            single_updates=one_by_one(config, cluster, model, partial(LocalLosses, config, trained_on, device, loss)),
        )

    def close(self) -> None:
        """Free what belongs to MPI, and the file of clients' state."""
        self.local_state.close()
        self.cluster.close()
