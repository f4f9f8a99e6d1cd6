"""Current strata: features measured on all ranks, clustered by the server (FedSSO, FedSTS, FedSTaS).

k-means as in FedSTS and FedSTaS (FedSTaS, Algorithm 1), OPTICS as in FedSSO (Algorithm 1, line 2; Ankerst et al. 1999),
and the strata of the clients that OPTICS calls noise. scikit-learn is imported where it is used: its import takes as
long as torch's, and most runs need no strata.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedmpi.clients.features import Features, FeatureTransform
from fedmpi.clients.strata import Strata, make_strata, stratum_spreads
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.config.tables import OpticsClustering, of_labels, stratification
from fedmpi.mpi import Cluster

Matrix = NDArray[np.floating]
Noise = Literal["nearest", "singletons", "stratum", "drop"]

DROPPED = -1
DISTANCES_UP_TO = 12_000  # largest number of clients whose pairwise distances are computed at once (float32: 576 MB)

log = logging.getLogger("fedmpi")
ClientProbe = Callable[[int, Tensor, Ints], Iterator[tuple[Ints, Tensor]]]
MOST_NOISE = 0.25
"""Largest share of OPTICS noise (clients in no cluster) without a warning."""


def kmeans(matrix: Matrix, strata: int, generator: np.random.Generator) -> Ints:
    """Compute strata by k-means whose first centres are randomly chosen clients (FedSTaS, Algorithm 1).

    An empty cluster receives the client farthest from its centre (scikit-learn's rule). With fewer distinct vectors
    than `strata`, fewer strata result.

    Strata are numbered 0 … H − 1 without gaps, in order of their first clients.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if len(matrix) == 0:
        return np.empty(0, np.int64)
    model = KMeans(min(strata, len(matrix)), init="random", n_init=1, random_state=int(generator.integers(2**32)))
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct vectors than strata: see the docstring
        return _numbered(model.fit_predict(matrix))


def optics(matrix: Matrix, min_samples: int = 2, xi: float = 0.25) -> Ints:
    """Cluster by OPTICS with the ξ method on Euclidean distances (FedSSO, Algorithm 1, line 2; §4.1: 2 and 0.25).

    Noise here means "alone of its kind", not "malicious": with two classes per client it is the clients with a unique
    pair of labels.

    `min_samples` counts the client itself. `xi` is the steepness of the reachability plot that bounds a cluster. Noise
    is −1.
    """
    from sklearn import config_context
    from sklearn.cluster import OPTICS
    from sklearn.metrics import pairwise_distances

    if len(matrix) < min_samples:
        found = np.full(len(matrix), DROPPED)
    else:
        # assume_finite: else scikit-learn checks all N² distances again for every client
        with threadpool_limits(1), config_context(assume_finite=True), warnings.catch_warnings():
            # identical clients have reachability 0, and the ξ method divides by it
            warnings.simplefilter("ignore", RuntimeWarning)
            metric, data = "euclidean", matrix
            if len(matrix) <= DISTANCES_UP_TO:
                distances = pairwise_distances(matrix)
                metric, data = "precomputed", np.maximum(distances, distances.T)
            found = OPTICS(min_samples=min_samples, xi=xi, cluster_method="xi", metric=metric).fit_predict(data)
    return np.asarray(found, np.int64)


def strata_of_clusters(found: Ints, matrix: Matrix, noise: Noise) -> Ints:
    """Make strata from the clusters of OPTICS."""
    alone, labels = found == DROPPED, found.copy()
    if noise == "drop":
        if alone.all() and len(alone):
            raise UserError(
                f'OPTICS finds no cluster among {len(alone)} clients, and clients.sampler.clustering.outliers = "drop" '
                'would drop them all. Use outliers = "nearest", a smaller xi, or probe = "full"'
            )
        labels[~alone] = _numbered(labels[~alone])
        return labels
    if noise == "nearest" and alone.any() and not alone.all():
        from sklearn.metrics import pairwise_distances_argmin  # slow to import

        labels[alone] = labels[~alone][pairwise_distances_argmin(matrix[alone], matrix[~alone])]
    else:
        labels[alone] = labels.max(initial=-1) + 1 + (np.arange(alone.sum()) if noise == "singletons" else 0)
    return _numbered(labels)


def _numbered(labels: NDArray[np.integer]) -> Ints:
    """Renumber the parts of a partition 0, 1, … in order of their first members."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int64)


@dataclass(eq=False)
class Stratifier:
    """Measurement of all clients' features and their grouping, when a stratification is due."""

    config: Config
    cluster: Cluster
    owned: tuple[int, int]  # First client of this rank and one past its last
    clients: int  # N
    values: int  # Trainable parameters
    class_counts: Callable[[Ints], Ints]
    probe: ClientProbe
    streams: Streams
    strata: Strata | None = None  # The current ones, on rank 0
    latest: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # Clients selected in the previous round
    measured: int = 0  # Clients measured for this round
    noise: int | None = None  # Clients in no cluster, if OPTICS has clustered for this round
    _warned: bool = False
    _first: bool = True
    _kept: Features | None = None

    def __post_init__(self) -> None:
        self.table, sampler = stratification(self.config), self.config.clients.sampler
        self._needs = sampler.marks.get("needs", ())
        self._spreads = sampler.options.get("allocation", "neyman") == "neyman"
        self._everybody = self.table.refresh_clients == "all" or of_labels(self.config)
        if self.wanted:
            columns = self.class_counts(np.arange(0)).shape[1] if of_labels(self.config) else self.values
            lr = self.config.local.lr
            self.transform = FeatureTransform(self.table, self.clients, columns, lr, self.streams)

    @property
    def wanted(self) -> bool:
        """True if the draws need strata or gradient norms at all."""
        return "strata" in self._needs or "norms" in self._needs

    def observe(self, t: int, model: Tensor) -> None:
        """Measure and cluster again if round t is due. Collective, with the same arguments on every rank."""
        refresh = self.table.refresh
        self.measured, self.noise = 0, None
        if not self.wanted or not (self._first or (refresh > 0 and t % refresh == 0)):
            return
        found = self._gathered(self._features(t, model, self._due()))
        self._first = False
        if found is not None:
            self.measured = len(found.clients)
            self.strata = self._grouped(t, self._complete(found))

    def _due(self) -> Ints:
        """Return this rank's clients to measure: all, or those selected in the previous round."""
        first, last = self.owned
        if self._first or self._everybody:
            return np.arange(first, last, dtype=np.int64)
        latest = self.cluster.broadcast([self.latest] if self.cluster.is_server else None)[0]
        return latest[(latest >= first) & (latest < last)]

    def _features(self, t: int, model: Tensor, due: Ints) -> Features:
        if of_labels(self.config):
            return self.transform.features([(due, self.class_counts(due))] if len(due) else [])
        return self.transform.features(self.probe(t, model, due))

    def _gathered(self, mine: Features) -> Features | None:
        """Return the features of all ranks' clients, sorted since ranks own them in order; None except on rank 0."""
        norms = np.empty(0) if mine.norms is None else mine.norms
        gathered = [self.cluster.gather(part) for part in (mine.clients, mine.matrix.ravel(), norms)]
        if not self.cluster.is_server:
            return None
        clients, matrix, norms = (np.concatenate(parts) for parts in gathered if parts is not None)
        return Features(clients, matrix.reshape(-1, mine.matrix.shape[1]), None if mine.norms is None else norms)

    def _complete(self, new: Features) -> Features:
        """Complete the features with earlier ones of the clients not measured now, whose gradients are stale."""
        if self._everybody:
            return new
        if self._kept is not None:
            assert self._kept.norms is not None and new.norms is not None
            matrix, norms = self._kept.matrix, self._kept.norms.copy()
            matrix[new.clients], norms[new.clients] = new.matrix, new.norms
            new = Features(self._kept.clients, matrix, norms)
        self._kept = new
        return new

    def _grouped(self, t: int, features: Features) -> Strata:
        table, matrix = self.table, features.matrix
        if "strata" not in self._needs:
            return make_strata(np.zeros(self.clients, np.int64), None, features.norms)
        if isinstance(table.clustering, OpticsClustering):
            found = optics(matrix, table.clustering.min_samples, table.clustering.xi)
            self._report_noise(t, int((found < 0).sum()), table.clustering.outliers)
            labels = strata_of_clusters(found, matrix, table.clustering.outliers)
        else:
            generator = self.streams.generator(Purpose.CLUSTERING, t)
            labels = kmeans(matrix, min(table.strata, self.clients), generator)
        spreads = stratum_spreads(matrix, labels, table.spread) if self._spreads else None
        strata = make_strata(labels, spreads, features.norms)
        log.info("round %d: %d strata of sizes %s", t, len(strata.sizes), strata.sizes.tolist())
        return strata

    def _report_noise(self, t: int, noise: int, rule: Noise) -> None:
        """Record the number of clients in no cluster; warn once if there are many."""
        self.noise = noise
        log.info('round %d: OPTICS puts %d clients in no cluster; outliers = "%s"', t, noise, rule)
        if noise > MOST_NOISE * self.clients and not self._warned:
            self._warned = True
            log.warning(
                "OPTICS puts %d of %d clients in no cluster. If availability depends on the data, the mean update is "
                'biased, since no similar client replaces them. Set server.weights = "unbiased" (logged once)',
                *(noise, self.clients),
            )

    def state(self) -> dict[str, Tensor]:
        """Return the current strata, and the features for their renewal, for a checkpoint."""
        if self.strata is None:
            return {}
        norms = self.strata.norms if self.strata.norms is not None else np.empty(0)
        arrays: dict[str, Any] = {"labels": self.strata.labels, "spreads": self.strata.spreads, "norms": norms}
        if self._kept is not None:
            arrays |= {"features": self._kept.matrix, "feature_norms": self._kept.norms, "latest": self.latest}
        return {f"strata.{name}": torch.from_numpy(np.array(array)) for name, array in arrays.items()}

    def load(self, state: dict[str, Tensor], resumed: bool) -> None:
        """Restore the strata of a checkpoint (rank 0 stores them, every rank knows that they exist)."""
        self._first = self._first and not resumed
        if "strata.labels" in state:
            norms: Floats = state["strata.norms"].numpy()
            labels, spreads = state["strata.labels"].numpy(), state["strata.spreads"].numpy()
            self.strata = make_strata(labels, spreads, norms if norms.size else None)
        if "strata.features" in state:
            clients = np.arange(self.clients, dtype=np.int64)
            self._kept = Features(clients, state["strata.features"].numpy(), state["strata.feature_norms"].numpy())
            self.latest = state["strata.latest"].numpy()
