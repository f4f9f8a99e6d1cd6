"""Mediators of a round, and the divergence of their pooled classes from the target (Astraea, Algorithm 3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmpi.common.calling import calling, refuse_result, result_array, takes
from fedmpi.common.registry import Component
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.tables import Mediators
from fedmpi.data.augmentation import Rebalancing
from fedmpi.data.shards import ShardStore
from fedmpi.data.statistics import kl_divergence, pooled_counts, summarize, target_distribution
from fedmpi.mpi import Cluster


class MediatorGroups:
    """Grouping of the selected clients of every round, or of all N clients once for the run.

    Groups made once are a function of the class counts and of the stream (SCHEDULE, 0): a resumed run makes the same.
    The selected clients of a round are those of their members that are available.
    """

    def __init__(
        self, config: Config, class_counts: Ints, original_counts: Ints | None, test_counts: Ints, streams: Streams
    ):
        assert isinstance(config.topology, Mediators)
        self.part = config.topology
        self.scheduling = config.topology.scheduling
        with calling(self.scheduling):
            self._schedule = config.topology.scheduling.make()
        takes(self.scheduling, self._schedule, "class_counts", "most", "generator", "target")
        self.class_counts = class_counts
        self.original_counts = original_counts
        self.streams = streams
        followed = test_counts if self.part.target == "test" else None
        self.target = target_distribution(class_counts.shape[1], followed)
        self._static: Ints | None = None

    def group(self, t: int, clients: Ints) -> tuple[Ints, dict[str, Any]]:
        """Return the mediator of every selected client (m,), and the divergences for the record (Fig 7).

        `kl_...` are those of the mediators' pooled data, `kl_client_...` those of the single clients, and
        `kl_client_before_...` those of the clients before their data were augmented.
        """
        counts = self.class_counts[clients]
        mediators = self._standing(clients) if self.part.regroup == "once" else self._made(t, counts)
        pooled = kl_divergence(pooled_counts(counts, mediators), self.target)
        facts: dict[str, Any] = {
            "mediators": int(mediators.max(initial=-1)) + 1,
            "kl_mediators": pooled.tolist(),
            **summarize(pooled, "kl"),
            **summarize(kl_divergence(counts, self.target), "kl_client"),
        }
        if self.original_counts is not None:
            before = kl_divergence(self.original_counts[clients], self.target)
            facts |= summarize(before, "kl_client_before")
        return mediators, facts

    def _standing(self, clients: Ints) -> Ints:
        """Return the groups of all N clients without empty ones; the others keep their order."""
        if self._static is None:
            self._static = self._made(0, self.class_counts)
        return np.unique(self._static[clients], return_inverse=True)[1].astype(np.int64)

    def _made(self, t: int, counts: Ints) -> Ints:
        generator = self.streams.generator(Purpose.SCHEDULE, t)
        most = self.part.clients_per_mediator
        with calling(self.scheduling, t):
            found = self._schedule(counts, most, generator, self.target)
        return checked_mediators(self.scheduling, found, len(counts), most, t) if self.scheduling.foreign else found


def checked_mediators(part: Component, found: Any, participants: int, most: int, t: int) -> Ints:
    """Check and renumber without gaps the mediators (m,) that a custom scheduling returned."""
    mediators: Ints = result_array(part, found, (participants,), "mediators", t, whole=True)
    if (mediators < 0).any():
        raise refuse_result(part, f"gave the mediator {mediators.min()}. Number mediators from 0 on", t)
    numbers, times = np.unique(mediators, return_counts=True)
    if participants and times.max() > most:
        raise refuse_result(part, f"gave {times.max()} clients to one mediator: {most} at most", t)
    return np.searchsorted(numbers, mediators).astype(np.int64)


def mediator_groups(
    config: Config, cluster: Cluster, store: ShardStore, rebalancing: Rebalancing | None, streams: Streams
) -> MediatorGroups | None:
    """Return the grouping of clients into mediators, on rank 0 of a topology that has them."""
    if config.topology.name != "mediators" or not cluster.is_server:
        return None
    test_counts = np.bincount(store.test()[1], minlength=store.description.classes)
    if rebalancing is None:
        return MediatorGroups(config, store.class_counts(), None, test_counts, streams)
    return MediatorGroups(config, rebalancing.class_counts, rebalancing.original_counts, test_counts, streams)
