"""The data of a run on one rank: as stored, as clients hold and train on them, and the parts that are evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.base import written
from fedmpi.config.choices import data_options
from fedmpi.core.evaluated import EvaluatedParts
from fedmpi.data.copies.client_samples import ClientSamples, client_samples, rebalancing_facts
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription, check_targets
from fedmpi.data.shards import ShardStore
from fedmpi.data.watch import DataWatch
from fedmpi.local.work import DataSource
from fedmpi.mpi import Cluster
from fedmpi.mpi.on_server import on_server
from fedmpi.updates.attacks import FlippedLabels, attackers


@dataclass(frozen=True)
class DataFacts:
    """What a run knows of its data beside the samples."""

    watch: DataWatch  # Sees when the files of the data are changed
    digest: str  # What checkpoints know the data by
    class_counts: Callable[[Ints], Ints]  # (clients) -> int64 (m, C), what clients hold of each class, copies included
    # What rebalancing did to the clients' data, for the record (rank 0 only); empty when it is off
    augmentation: dict[str, Any] = field(default_factory=dict)
    attackers: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # (a,): The clients that attack


@dataclass(frozen=True)
class RunData:
    """The data that the parts of a run are made for."""

    store: ShardStore  # As stored
    watch: DataWatch  # Sees when the files are changed
    samples: ClientSamples  # As the clients hold them, copies of scarce classes among them
    evaluated: EvaluatedParts  # What rank 0 evaluates the global model on
    attackers: Ints  # (a,): The clients that attack
    trained_on: DataSource  # The clients' samples as they train on them: those of attackers may have other labels

    @classmethod
    def of(cls, config: Config, cluster: Cluster, streams: Streams, store: ShardStore, device: torch.device) -> RunData:
        """Those of a configuration, whose tensors come to lie on the device; collective."""
        watch = DataWatch(store)
        if config.data.verify:
            on_server(cluster, lambda: open_store(config.data.shards, data_options(config), verify=True))
        samples = client_samples(config, store, streams, device)
        evaluated = EvaluatedParts(config, store, samples.data)
        check_targets(config.task.kind, store.description, str(written(config.data.shards)))
        attacking = attackers(config, streams, store.clients)
        flipped = config.attack.kind == "label-flip"
        trained_on = FlippedLabels(samples.data, attacking) if flipped else samples.data
        return cls(store, watch, samples, evaluated, attacking, trained_on)

    @property
    def sizes(self) -> Ints:
        """Effective sizes of all clients, int64 (N,)."""
        return self.samples.sizes

    @property
    def description(self) -> DataDescription:
        """What a sample looks like to a model."""
        return self.samples.description

    def facts(self, config: Config, is_server: bool) -> DataFacts:
        """What is recorded and saved of them."""
        augmentation = rebalancing_facts(config, self.store, self.samples.rebalancing) if is_server else {}
        return DataFacts(
            self.watch, self.store.manifest.digest, self.samples.class_counts, augmentation, self.attackers
        )
