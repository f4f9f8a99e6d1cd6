"""Features for stratification: one vector per client, gathered block by block from gradients or class counts.

FedSSO clusters one-step model changes (Algorithm 1, lines 1-2), FedSTS and FedSTaS compressed gradients (FedSTaS,
Algorithm 1); above a stated size a Johnson-Lindenstrauss projection of them is clustered instead.

IS(), the information squeezing of FedSTS and FedSTaS (Algorithm 1), turns a client's d gradient values into d' centres
and one index per coordinate. The one-dimensional k-means is batched over clients and uses sorted values and
prefix sums: dynamic programming on a grid of cells finds the start, Lloyd's iteration on all values finishes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from fedmpi.common.calling import calling, refuse_result, result_array, takes
from fedmpi.common.decorators import features
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

if TYPE_CHECKING:
    from fedmpi.config.tables import Norms

CELLS = 128  # up to this many values the dynamic program uses every value: the result is the global optimum
MAX_ITERATIONS = 300
WORKING_VALUES = 1 << 20  # gradient values processed at once; working memory is about 32 bytes for each

NOT_FINITE = "a client's probe gradient is not finite. Lower the learning rate or check its data"
DISTORTION = 0.25  # ε of the Johnson-Lindenstrauss lemma: squared distances change by at most this share


class Compressed(NamedTuple):
    """Compressed gradients of k clients."""

    centres: NDArray[np.float32]  # (k, d'): X_k, sorted in increasing order within a client
    indices: NDArray[np.uint8]  # (k, d): λ_k: index of the centre that replaces each coordinate


def compress(block: NDArray[np.floating], levels: int) -> Compressed:
    """Compress the gradients of several clients: X_k, λ_k = IS(G_k) (FedSTaS, Algorithms 1 and 3).

    Deterministic: no random starts. With d <= 128 the sum of squared errors is the smallest possible; above, the start
    is optimal on a grid of 128 cells (half of equal count, half of equal width) and Lloyd's iteration refines it.
    """
    values = np.atleast_2d(np.asarray(block, np.float32))
    clients, size = values.shape
    if levels > size:
        raise UserError(
            f"clients.sampler.features.codebook_size = {levels} exceeds the {size} gradient values. Choose fewer levels"
        )
    centres = np.empty((clients, levels), np.float32)
    index = np.empty((clients, size), np.uint8)
    rows = max(1, WORKING_VALUES // size)
    for start in range(0, clients, rows):
        part = slice(start, start + rows)
        if not np.isfinite(values[part]).all():
            raise UserError(NOT_FINITE)
        centres[part] = _kmeans_1d(values[part], levels)
        index[part] = _nearest(values[part], centres[part])
    return Compressed(centres, index)


def restore(compressed: Compressed) -> NDArray[np.float32]:
    """Return Z_k = X_k[λ_k], float32 (k, d): every coordinate replaced by its centre (FedSTaS, Algorithm 1)."""
    restored = np.empty(compressed.indices.shape, np.float32)
    for row, centres, index in zip(restored, compressed.centres, compressed.indices, strict=True):
        np.take(centres, index, out=row)
    return restored


def norms(compressed: Compressed) -> Floats:
    """Return ‖IS(G_k)‖ = ‖Z_k‖, float64 (k,), without restoring the gradients."""
    levels = compressed.centres.shape[1]
    counts = np.stack([np.bincount(index, minlength=levels) for index in compressed.indices])
    return np.asarray(np.sqrt((counts * compressed.centres.astype(np.float64) ** 2).sum(axis=1)))


def _kmeans_1d(values: NDArray[np.float32], levels: int) -> Floats:
    """Return sorted centres (k, d') of each row."""
    ordered = np.sort(values, axis=1)
    shift = ordered.mean(axis=1, dtype=np.float64)[:, None]
    sums = _prefix(ordered - shift)
    cuts = _optimal_cuts(ordered, shift, sums, levels)
    # an empty cluster (fewer distinct values than levels) has the value that it starts at as its centre
    starts = np.minimum(cuts[:, :-1], ordered.shape[1] - 1)
    centres = _means(sums, cuts, np.take_along_axis(ordered, starts, axis=1) - shift)
    for _ in range(MAX_ITERATIONS):
        thresholds = 0.5 * (centres[:, :-1] + centres[:, 1:]) + shift
        moved = _with_ends(_count_up_to(ordered, thresholds), ordered.shape[1])
        if np.array_equal(moved, cuts):
            break
        cuts, centres = moved, _means(sums, moved, centres)
    return np.asarray(np.sort(centres, axis=1) + shift)


def _prefix(values: Floats) -> Floats:
    """Return prefix sums (k, d + 1) of rows, starting at 0."""
    return np.pad(np.cumsum(values, axis=1), ((0, 0), (1, 0)))


def _with_ends(cuts: Ints, size: int) -> Ints:
    return np.pad(cuts, ((0, 0), (1, 1)), constant_values=(0, size))


def _means(sums: Floats, cuts: Ints, if_empty: Floats) -> Floats:
    """Return means of the values between neighboring cuts; `if_empty` for no values."""
    count = np.diff(cuts, axis=1)
    total = np.diff(np.take_along_axis(sums, cuts, axis=1), axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), if_empty)


def _count_up_to(ordered: NDArray[np.float32], thresholds: Floats) -> Ints:
    """Count the values of each sorted row <= each of its thresholds: np.searchsorted(side="right") row by row."""
    low = np.zeros(thresholds.shape, np.int64)
    high = np.full(thresholds.shape, ordered.shape[1], np.int64)
    for _ in range(ordered.shape[1].bit_length()):
        middle = (low + high) >> 1
        right = np.take_along_axis(ordered, np.minimum(middle, ordered.shape[1] - 1), axis=1) <= thresholds
        searching = low < high
        low = np.where(searching & right, middle + 1, low)
        high = np.where(searching & ~right, middle, high)
    return low


def _grid(ordered: NDArray[np.float32]) -> Ints:
    """Return cell boundaries (k, cells + 1) as positions in the sorted rows, from 0 to d."""
    rows, size = ordered.shape
    if size <= CELLS:
        return np.broadcast_to(np.arange(size + 1), (rows, size + 1))
    half = CELLS // 2
    equal_count = np.broadcast_to(np.arange(1, half) * size // half, (rows, half - 1))
    lowest, highest = (ordered[:, at, None].astype(np.float64) for at in (0, -1))
    equal_width = _count_up_to(ordered, lowest + (highest - lowest) * np.arange(1, half + 1) / (half + 1))
    return _with_ends(np.sort(np.concatenate([equal_count, equal_width], axis=1), axis=1), size)


def _optimal_cuts(ordered: NDArray[np.float32], shift: Floats, sums: Floats, levels: int) -> Ints:
    """Return boundaries (k, d' + 1) of the best partition of the cells, by Bellman's recursion over the clusters."""
    squares = _prefix((ordered - shift) ** 2)
    grid = _grid(ordered)
    cuts = np.empty((len(ordered), levels + 1), np.int64)
    rows = max(1, WORKING_VALUES // grid.shape[1] ** 2)
    for start in range(0, len(ordered), rows):
        part = slice(start, start + rows)
        edges = [np.take_along_axis(array[part], grid[part], axis=1) for array in (sums, squares)]
        chosen = _best_partition(grid[part], edges[0], edges[1], levels)
        cuts[part] = np.take_along_axis(grid[part], chosen, axis=1)
    return cuts


def _best_partition(grid: Ints, sums: Floats, squares: Floats, levels: int) -> Ints:
    """Return the cell boundaries (k, d' + 1) that cut the cells into d' clusters of least squared error."""
    count = grid[:, None, :] - grid[:, :, None]
    total = sums[:, None, :] - sums[:, :, None]
    cost = squares[:, None, :] - squares[:, :, None] - total**2 / np.maximum(count, 1)
    np.maximum(cost, 0.0, out=cost)  # cancellation
    ends = grid.shape[1]
    cost[:, np.tri(ends, dtype=bool)] = np.inf  # a cluster extends forward and contains at least one cell
    best = cost[:, 0, :]
    came_from = np.zeros((levels + 1, *best.shape), np.int64)
    for level in range(2, levels + 1):
        candidates = best[:, :, None] + cost
        came_from[level] = candidates.argmin(axis=1)
        best = np.take_along_axis(candidates, came_from[level][:, None, :], axis=1)[:, 0, :]
    chosen = np.zeros((len(grid), levels + 1), np.int64)
    chosen[:, levels] = ends - 1
    for level in range(levels, 1, -1):
        chosen[:, level - 1] = np.take_along_axis(came_from[level], chosen[:, level, None], axis=1)[:, 0]
    return chosen


def _nearest(values: NDArray[np.float32], centres: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the index of the nearest centre of each value; the lower one in a tie."""
    index = np.zeros(values.shape, np.uint8)
    thresholds = 0.5 * (centres[:, :-1].astype(np.float64) + centres[:, 1:])
    for threshold in thresholds.T:
        index += values > threshold[:, None].astype(np.float32)
    return index


@features(name="label-histogram", needs="labels")
def label_histogram(class_counts: Ints) -> NDArray[np.float32]:
    """Shares of the classes among a client's samples; all zeros for a client without samples."""
    total = np.maximum(class_counts.sum(axis=1, keepdims=True), 1)
    return np.asarray(class_counts / total, np.float32)


@features(name="one-step-change")
def one_step_change(gradients: NDArray[np.float32], *, lr: float) -> NDArray[np.float32]:
    """Change of the model after one local step (FedSSO, Algorithm 1, lines 1-2)."""
    return gradients * np.float32(-lr)


@features(name="full-gradient")
def full_gradient(gradients: NDArray[np.float32]) -> NDArray[np.float32]:
    """Local gradient."""
    return gradients


@features(name="compressed-gradient")
def compressed_gradient(
    gradients: NDArray[np.float32], *, codebook_size: Annotated[int, Field(ge=2, le=255)] = 9, decompress: bool = True
) -> tuple[NDArray[np.float32], Floats]:
    """Compressed gradient of FedSTS and FedSTaS: the nearest of d' centers replaces every value (IS()).

    Parameters
    ----------
    codebook_size : int
        d', the number of values that a compressed gradient keeps (FedSTaS, IS()).
    decompress : bool
        Cluster the decompressed gradients (the paper) or, if false, the d' sorted centers (the authors' code).
    """
    squeezed = compress(gradients, codebook_size)
    return restore(squeezed) if decompress else squeezed.centres, norms(squeezed)


@dataclass(frozen=True)
class Features:
    """Feature vectors of clients."""

    clients: Ints  # (k,): Sorted indices of the clients
    matrix: NDArray[np.float32]  # (k, width): One feature vector per client
    # (k,), or None: Euclidean norm of each client's gradient, or of ‖IS(G_k)‖; None for features of labels
    norms: Floats | None


class FeatureVectors:
    """Feature vectors of blocks of clients.

    A component gets the gradients (k, d) or class counts (k, C) of k clients. It returns vectors (k, f), or a pair of
    these and the norms (k,) that importance draws use instead of those of the gradients.
    """

    def __init__(self, part: Component, made: Any, lr: float):
        self.part, self._made = part, made
        self.of_labels = "labels" in part.marks.get("needs", ())
        given = "class_counts" if self.of_labels else "gradients"
        self._named = dict.fromkeys(takes(part, made, given, offered=("lr",)), lr)

    def __call__(self, block: NDArray[Any]) -> tuple[NDArray[np.float32], Floats | None]:
        """Return vectors (k, f) and norms (k,) of a block; no norms for labels."""
        if not np.isfinite(block).all():
            raise UserError(NOT_FINITE)
        with calling(self.part):
            found = self._made(block, **self._named)
            vectors, length = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
            vectors = np.ascontiguousarray(vectors, np.float32)
        if vectors.ndim != 2 or len(vectors) != len(block) or not vectors.size or not np.isfinite(vectors).all():
            problem = f"returned features of shape {vectors.shape}. Return finite numbers, shape ({len(block)}, f)"
            raise refuse_result(self.part, problem)
        if length is None and not self.of_labels:
            length = np.sqrt(np.einsum("kd,kd->k", block, block, dtype=np.float64))
        return vectors, length if length is None else result_array(self.part, length, (len(block),), "norms")


class FeatureTransform:
    """Transformation of all clients' gradients or class counts into features, identical on every rank.

    A projection is used if clients × width exceeds `projection_above` and the vectors would become shorter. It is a
    very sparse one (Li, Hastie and Church 2006) of the length that keeps all squared distances between `clients` points
    within 25 % (Johnson-Lindenstrauss lemma, Dasgupta and Gupta 2003). It is the same in all rounds, so that features
    of different rounds are comparable.
    """

    def __init__(self, table: Norms, clients: int, size: int, lr: float, streams: Streams):
        self.vectors = FeatureVectors(table.features, table.features.make(), lr)
        columns = np.ones((1, size), np.int64 if self.vectors.of_labels else np.float32)
        self.width = len(self.vectors(columns)[0][0])
        self.projection: Any = None  # SparseRandomProjection
        self.description = f"{table.features.name} features of {clients} clients × {self.width} values"
        if clients * self.width > table.projection_above and not self.vectors.of_labels:
            from sklearn import random_projection  # slow to import

            shorter = int(random_projection.johnson_lindenstrauss_min_dim(max(clients, 2), eps=DISTORTION))
            if shorter < self.width:
                seed = streams.seed64(Purpose.PROJECTION) % 2**32
                projection = random_projection.SparseRandomProjection(shorter, dense_output=True, random_state=seed)
                self.projection = projection.fit(np.zeros((1, self.width), np.float32))
                self.description += f", sparse random projection to {shorter} values"
                self.width = shorter

    def features(self, blocks: Iterable[tuple[Ints, ArrayLike]]) -> Features:
        """Compute features of the clients from gradients or class counts that arrive block by block.

        Only one block and the features themselves are in memory at any time.
        """
        clients, rows, lengths = [np.empty(0, np.int64)], [np.empty((0, self.width), np.float32)], [np.empty(0)]
        for members, given in blocks:
            clients.append(members)
            vectors, length = self.vectors(np.asarray(given))
            projected = vectors if self.projection is None else self.projection.transform(vectors)
            rows.append(np.ascontiguousarray(projected, np.float32))
            lengths.append(np.empty(0) if length is None else length)
        measured = np.concatenate(clients)
        order = np.argsort(measured)
        norms = None if self.vectors.of_labels else np.concatenate(lengths)[order]
        return Features(measured[order], np.concatenate(rows)[order], norms)
