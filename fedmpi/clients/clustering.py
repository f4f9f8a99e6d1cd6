"""From feature vectors to strata: k-means as in FedSTS and FedSTaS (FedSTaS, Algorithm 1), OPTICS as in FedSSO
(Algorithm 1, line 2; Ankerst et al. 1999), and the strata of the clients that OPTICS calls noise.

scikit-learn is imported where it is used: it takes as long as torch, and most runs need no strata.
"""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints

Matrix = NDArray[np.floating]
Noise = Literal["nearest", "singletons", "stratum", "drop"]

DROPPED = -1
DISTANCES_UP_TO = 12_000  # clients whose distances to each other are computed at once (float32: 576 MB)


def kmeans(matrix: Matrix, strata: int, generator: np.random.Generator, starts: int = 1) -> Ints:
    """Strata by k-means whose first centres are randomly chosen clients (FedSTaS, Algorithm 1).

    A cluster that runs empty is given the client farthest from its centre (scikit-learn's rule). With fewer distinct
    vectors than `strata`, fewer strata result.

    Parameters
    ----------
    matrix : ndarray of float, shape (N, width)
        One feature vector per client.
    strata : int
        H; more than N means N.
    generator : numpy.random.Generator
        Purpose.CLUSTERING.
    starts : int
        Random starts, of which the one with the least squared error counts; the paper makes one.

    Returns
    -------
    ndarray of int64, shape (N,)
        Stratum of each client: 0 … H − 1 without gaps, numbered in order of their first clients.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if len(matrix) == 0:
        return np.empty(0, np.int64)
    model = KMeans(min(strata, len(matrix)), init="random", n_init=starts, random_state=int(generator.integers(2**32)))
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct vectors than strata: see the docstring
        return _numbered(model.fit_predict(matrix))


def optics(matrix: Matrix, min_samples: int = 2, xi: float = 0.25) -> Ints:
    """Clusters by OPTICS with the ξ method on Euclidean distances (FedSSO, Algorithm 1, line 2; §4.1: 2 and 0.25).

    Noise here means "alone of its kind", not "malicious": with two classes per client it is the clients whose pair of
    labels nobody else holds.

    Parameters
    ----------
    matrix : ndarray of float, shape (N, width)
        One feature vector per client.
    min_samples : int
        Neighbours, the client itself included, that make a core client.
    xi : float
        Steepness of the reachability plot that bounds a cluster.

    Returns
    -------
    ndarray of int64, shape (N,)
        Cluster of each client; −1 for noise.
    """
    from sklearn import config_context
    from sklearn.cluster import OPTICS

    if not np.isfinite(matrix).all():
        raise ValueError("feature vectors must be finite")
    if len(matrix) < min_samples:
        found = np.full(len(matrix), DROPPED)
    else:
        # assume_finite: else scikit-learn checks all N² distances again for every client
        with threadpool_limits(1), config_context(assume_finite=True), warnings.catch_warnings():
            # coinciding clients have reachability 0, whose ratios the ξ method divides by
            warnings.simplefilter("ignore", RuntimeWarning)
            if len(matrix) <= DISTANCES_UP_TO:
                model = OPTICS(min_samples=min_samples, xi=xi, cluster_method="xi", metric="precomputed")
                found = model.fit_predict(_distances(matrix))
            else:
                model = OPTICS(min_samples=min_samples, xi=xi, cluster_method="xi", metric="euclidean")
                found = model.fit_predict(matrix)
    return np.asarray(found, np.int64)


def strata_of_clusters(found: Ints, matrix: Matrix, noise: Noise) -> Ints:
    """Strata from the clusters of OPTICS."""
    alone, labels = found == DROPPED, found.copy()
    if noise == "drop":
        if alone.all() and len(alone):
            raise UserError(
                f'OPTICS finds no cluster among {len(alone)} clients and participation.noise = "drop" would drop them '
                'all: use noise = "nearest", a smaller xi, or probe = "full"'
            )
        labels[~alone] = _numbered(labels[~alone])
        return labels
    if noise == "nearest" and alone.any() and not alone.all():
        from sklearn.metrics import pairwise_distances_argmin  # slow to import

        labels[alone] = labels[~alone][pairwise_distances_argmin(matrix[alone], matrix[~alone])]
    else:
        labels[alone] = labels.max(initial=-1) + 1 + (np.arange(alone.sum()) if noise == "singletons" else 0)
    return _numbered(labels)


def _distances(matrix: Matrix) -> Matrix:
    """Euclidean distances (N, N) with an exactly zero diagonal."""
    from sklearn.metrics import pairwise_distances

    distances = pairwise_distances(matrix)
    return np.asarray(np.maximum(distances, distances.T))


def _numbered(labels: NDArray[np.integer]) -> Ints:
    """The same partition with its parts numbered 0, 1, … in order of their first members."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int64)
