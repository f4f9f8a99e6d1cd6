"""The strata in force: features measured by all ranks together, clustered by the server (FedSSO, FedSTS, FedSTaS)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.cluster import Cluster
from fedmpi.config import Config
from fedmpi.participation.allocation import spread
from fedmpi.participation.clustering import kmeans, optics
from fedmpi.participation.features import Features, gradient_features, label_histogram, merge, plan_features
from fedmpi.participation.strata import Strata, make_strata
from fedmpi.plan import Floats, Ints
from fedmpi.streams import Purpose, Streams

log = logging.getLogger("fedmpi")
Probe = Callable[[int, Tensor], Iterator[tuple[Ints, Tensor]]]


class Stratifier:
    """Measures features of all clients and groups them, when a stratification is due.

    Parameters
    ----------
    config : Config
        The parts.
    cluster : Cluster
        Gathers the features on rank 0.
    owned : (int, int)
        Range of clients that this rank measures.
    clients, values : int
        N and d.
    class_counts : callable
        (clients) -> int64 (k, C), for label histograms.
    probe : callable
        (round, model) -> blocks of (clients, gradients (k, d)) of the owned clients.
    streams : Streams
        Used for the projection and the starts of k-means.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        owned: tuple[int, int],
        clients: int,
        values: int,
        class_counts: Callable[[Ints], Ints],
        probe: Probe,
        streams: Streams,
    ):
        self.part = config.participation
        self.cluster = cluster
        self.owned = owned
        self.clients = clients
        self.class_counts = class_counts
        self.probe = probe
        self.streams = streams
        self.strata: Strata | None = None
        self.measured = False
        self._first = True
        if self.wanted and self.part.features != "label-histogram":
            self.plan = plan_features(
                self.part.features,
                clients,
                values,
                streams,
                levels=self.part.levels,
                restored=self.part.restore,
                lr=config.local.lr,
                project_above=self.part.projection_above,
            )
            log.info("strata: %s", self.plan.description)

    @property
    def wanted(self) -> bool:
        """Whether the draws need strata or gradient norms at all."""
        return self.part.clients in ("stratified", "importance")

    def observe(self, t: int, model: Tensor) -> None:
        """Measure and cluster anew if round t is due: a collective call, on every rank alike."""
        refresh = self.part.refresh
        self.measured = self.wanted and (self._first or (refresh > 0 and t % refresh == 0))
        if not self.measured:
            return
        self._first = False
        parts = self._gathered(self._features(t, model))
        if parts is not None:
            self.strata = self._grouped(t, merge(parts))

    def _features(self, t: int, model: Tensor) -> Features:
        if self.part.features == "label-histogram":
            mine = np.arange(*self.owned, dtype=np.int64)
            return label_histogram(mine, self.class_counts(mine))
        return gradient_features(self.plan, self.probe(t, model))

    def _gathered(self, mine: Features) -> list[Features] | None:
        clients = self.cluster.gather(mine.clients)
        matrix = self.cluster.gather(mine.matrix.ravel())
        norms = self.cluster.gather(mine.norms if mine.norms is not None else np.empty(0))
        if clients is None or matrix is None or norms is None:
            return None
        return [
            Features(ids, values.reshape(len(ids), -1), lengths if mine.norms is not None else None)
            for ids, values, lengths in zip(clients, matrix, norms, strict=True)
            if len(ids)
        ]

    def _grouped(self, t: int, features: Features) -> Strata:
        part, matrix = self.part, features.matrix
        if part.clients == "importance":
            return make_strata(np.zeros(self.clients, np.int64), None, features.norms)
        if part.clustering == "optics":
            labels = optics(matrix, part.min_samples, part.xi, part.noise)
        else:
            generator = self.streams.generator(Purpose.CLUSTERING, t)
            labels = kmeans(matrix, min(part.strata, self.clients), generator)
        spreads = spread(matrix, labels, part.spread) if part.allocation == "neyman" else None
        strata = make_strata(labels, spreads, features.norms)
        log.info("round %d: %d strata of sizes %s", t, len(strata.sizes), strata.sizes.tolist())
        return strata

    def state(self) -> dict[str, Tensor]:
        """The strata in force, for a checkpoint."""
        if self.strata is None:
            return {}
        norms = self.strata.norms if self.strata.norms is not None else np.empty(0)
        arrays: dict[str, Any] = {"labels": self.strata.labels, "spreads": self.strata.spreads, "norms": norms}
        return {f"strata.{name}": torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def load(self, state: dict[str, Tensor], resumed: bool) -> None:
        """Take the strata of a checkpoint over (rank 0 has them, every rank knows that they exist)."""
        self._first = self._first and not resumed
        if "strata.labels" in state:
            norms: Floats = state["strata.norms"].numpy()
            labels, spreads = state["strata.labels"].numpy(), state["strata.spreads"].numpy()
            self.strata = make_strata(labels, spreads, norms if norms.size else None)
