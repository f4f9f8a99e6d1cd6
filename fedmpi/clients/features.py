"""What strata are made from: one feature vector per client, gathered block by block from the clients' probe gradients.

FedSSO clusters one-step model changes (Algorithm 1, lines 1-2), FedSTS and FedSTaS compressed gradients (FedSTaS,
Algorithm 1); above a stated size a Johnson-Lindenstrauss projection of them is clustered instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedmpi.clients.gradient_codes import compress, norms, restore
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

FeatureKind = Literal["one-step-change", "full-gradient", "compressed-gradient", "label-histogram"]

PROJECT_ABOVE = 20_000_000  # feature values (clients × width) that are clustered as they are: 80 MB
DISTORTION = 0.25  # ε of the Johnson-Lindenstrauss lemma: squared distances change by at most this share


@dataclass(frozen=True)
class Features:
    """Feature vectors of clients."""

    clients: Ints  # (k,): Sorted indices of the clients
    matrix: NDArray[np.float32]  # (k, width): One feature vector per client
    # (k,), or None: Euclidean norm of the vector each client sent, ‖IS(G_k)‖ or ‖G_k‖, before any projection; None for
    # label histograms, which know no gradient
    norms: Floats | None


@dataclass(frozen=True)
class FeaturePlan:
    """How gradients become features: the same on every rank.

    Attributes
    ----------
    kind : str
        "one-step-change", "full-gradient" or "compressed-gradient".
    levels : int
        d' of the compression.
    restored : bool
        Cluster the restored vectors Z_k (paper) or the d' sorted centres (the authors' code).
    scale : float
        Factor on the gradients: −η for one-step changes, 1 otherwise.
    width : int
        Length of a feature vector.
    projection : SparseRandomProjection or None
        The random projection, when there is one.
    description : str
        What was chosen and why, for the run's log.
    """

    kind: FeatureKind
    levels: int
    restored: bool
    scale: float
    width: int
    projection: Any
    description: str


def plan_features(
    kind: FeatureKind,
    clients: int,
    size: int,
    streams: Streams,
    *,
    levels: int = 9,
    restored: bool = True,
    lr: float = 1.0,
    project_above: int = PROJECT_ABOVE,
) -> FeaturePlan:
    """Decide how the gradients of all clients become features.

    A projection is used when clients × width exceeds `project_above` and would really shorten the vectors. It is a very
    sparse one (Li, Hastie and Church 2006) of the length that keeps all squared distances between `clients` points
    within 25 % (Johnson-Lindenstrauss lemma, Dasgupta and Gupta 2003), and the same in all rounds, so that features of
    different rounds can stand side by side.
    """
    compressed = kind == "compressed-gradient"
    width = levels if compressed and not restored else size
    name = f"{kind} features of {clients} clients × {width} values"
    scale = -lr if kind == "one-step-change" else 1.0
    whole = FeaturePlan(kind, levels, restored, scale, width, None, f"{name}, not projected")
    if clients * width <= project_above:
        return whole
    from sklearn.random_projection import SparseRandomProjection, johnson_lindenstrauss_min_dim  # slow to import

    shorter = int(johnson_lindenstrauss_min_dim(max(clients, 2), eps=DISTORTION))
    if shorter >= width:
        return whole
    seed = streams.seed64(Purpose.PROJECTION) % 2**32
    projection = SparseRandomProjection(shorter, dense_output=True, random_state=seed)
    projection.fit(np.zeros((1, width), np.float32))
    note = f"{name}, more than {project_above}: sparse random projection to {shorter} values"
    return FeaturePlan(kind, levels, restored, scale, shorter, projection, note)


def gradient_features(plan: FeaturePlan, blocks: Iterable[tuple[Ints, ArrayLike]]) -> Features:
    """Features of the clients whose gradients stream by.

    Only one block of gradients and the features themselves are in memory at any time.
    """
    clients, rows, lengths = [], [], []
    for members, gradients in blocks:
        clients.append(np.asarray(members, np.int64))
        vectors, length = _vectors(plan, np.asarray(gradients, np.float32))
        rows.append(vectors)
        lengths.append(length)
    if not clients:
        return Features(np.empty(0, np.int64), np.empty((0, plan.width), np.float32), np.empty(0))
    return _sorted(np.concatenate(clients), np.concatenate(rows), np.concatenate(lengths))


def label_histogram(clients: Ints, class_counts: Ints) -> Features:
    """Share of each class in each client's data, (k, C); a client without samples has all zeros."""
    total = np.maximum(class_counts.sum(axis=1, keepdims=True), 1)
    return _sorted(np.asarray(clients, np.int64), (class_counts / total).astype(np.float32), None)


def merge(parts: Sequence[Features]) -> Features:
    """Features of several ranks as one, sorted by client. A client may occur once only."""
    with_norms = [part.norms for part in parts if part.norms is not None]
    if with_norms and len(with_norms) != len(parts):
        raise ValueError("either all parts carry norms or none")
    lengths = np.concatenate(with_norms) if with_norms else None
    clients = np.concatenate([part.clients for part in parts])
    if len(np.unique(clients)) != len(clients):
        raise ValueError("a client occurs in two parts")
    return _sorted(clients, np.concatenate([part.matrix for part in parts]), lengths)


def refreshed(old: Features, new: Features) -> Features:
    """`old` with the rows of the clients in `new` replaced: participants' gradients are fresh, the others' stale."""
    stale = ~np.isin(old.clients, new.clients)
    lengths = None if old.norms is None else old.norms[stale]
    return merge([Features(old.clients[stale], old.matrix[stale], lengths), new])


def _vectors(plan: FeaturePlan, gradients: NDArray[np.float32]) -> tuple[NDArray[np.float32], Floats]:
    """Feature vectors (k, width) and norms (k,) of one block of gradients."""
    if plan.kind == "compressed-gradient":
        squeezed = compress(gradients, plan.levels)
        length = norms(squeezed)
        vectors = restore(squeezed) if plan.restored else squeezed.centres
    else:
        vectors = gradients * np.float32(plan.scale)
        if not np.isfinite(vectors).all():
            raise UserError("a client's probe gradient is not finite: lower the learning rate or check its data")
        length = np.sqrt(np.einsum("kd,kd->k", gradients, gradients, dtype=np.float64))
    if plan.projection is not None:
        vectors = plan.projection.transform(vectors)
    return np.ascontiguousarray(vectors, np.float32), length


def _sorted(clients: Ints, matrix: NDArray[np.float32], lengths: Floats | None) -> Features:
    order = np.argsort(clients, kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return Features(clients, matrix, lengths)
    return Features(clients[order], matrix[order], None if lengths is None else lengths[order])
