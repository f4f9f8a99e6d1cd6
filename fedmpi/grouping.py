"""The mediators of a round, and how close to the target their pooled classes come (Astraea, Algorithm 3)."""

from __future__ import annotations

from typing import Any

from fedmpi.config import Config
from fedmpi.mediators.divergence import kl_divergence, pooled_counts, summarise, target_distribution
from fedmpi.mediators.scheduling import schedule
from fedmpi.plan import Ints
from fedmpi.streams import Purpose, Streams


class MediatorGroups:
    """Groups the participants of every round.

    Parameters
    ----------
    config : Config
        The parts.
    class_counts : int64 (N, C)
        Every client's class counts, augmented copies included.
    test_counts : int64 (C,)
        Class counts of the test set, followed when topology.target = "test".
    streams : Streams
        Used by random groups.
    """

    def __init__(self, config: Config, class_counts: Ints, test_counts: Ints, streams: Streams):
        self.part = config.topology
        self.class_counts = class_counts
        self.streams = streams
        followed = test_counts if self.part.target == "test" else None
        self.target = target_distribution(class_counts.shape[1], followed)
        self._static: Ints | None = None

    def group(self, t: int, clients: Ints) -> tuple[Ints, dict[str, Any]]:
        """The mediator of every participant (m,), and the divergences for the record (Fig 7)."""
        counts = self.class_counts[clients]
        mediators = self._static
        if mediators is None or len(mediators) != len(clients):
            generator = self.streams.generator(Purpose.SCHEDULE, t)
            mediators = schedule(self.part.scheduling, counts, self.part.clients_per_mediator, generator, self.target)
            if self.part.reschedule == "static":
                self._static = mediators
        pooled = summarise(kl_divergence(pooled_counts(counts, mediators), self.target))
        alone = summarise(kl_divergence(counts[counts.sum(1) > 0], self.target))
        facts = {
            "mediators": int(mediators.max(initial=-1)) + 1,
            "kl_mean": pooled.mean,
            "kl_std": pooled.std,
            "kl_max": pooled.max,
            "kl_client_mean": alone.mean,
        }
        return mediators, facts
