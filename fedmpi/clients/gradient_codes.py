"""IS(), the information squeezing of FedSTS and FedSTaS (Algorithm 1): a client's d gradient values become d' centres
and one index per coordinate. The one-dimensional k-means behind it runs for many clients at once on sorted values and
prefix sums: dynamic programming on a grid of cells finds the start, Lloyd's iteration on all values finishes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

CELLS = 128  # up to this many values the dynamic programme sees every value: the result is the global optimum
MAX_ITERATIONS = 300
WORKING_VALUES = 1 << 20  # gradient values handled at once; working memory is about 32 bytes for each


class Compressed(NamedTuple):
    """Compressed gradients of k clients."""

    centres: NDArray[np.float32]  # (k, d'): X_k, sorted in increasing order within a client
    indices: NDArray[np.uint8]  # (k, d): λ_k: which centre stands for each coordinate


def compress(block: NDArray[np.floating], levels: int) -> Compressed:
    """Compress the gradients of several clients: X_k, λ_k = IS(G_k) (FedSTaS, Algorithms 1 and 3).

    Deterministic: no random starts. With d <= 128 the sum of squared errors is the smallest possible; above, the start
    is optimal on a grid of 128 cells (half of equal count, half of equal width) and Lloyd's iteration refines it.
    """
    values = np.atleast_2d(np.asarray(block, np.float32))
    clients, size = values.shape
    if not 2 <= levels <= 255:
        raise UserError(f"participation.levels must lie between 2 and 255, not {levels}")
    if levels > size:
        raise UserError(f"participation.levels = {levels} exceeds the {size} gradient values: choose fewer levels")
    centres = np.empty((clients, levels), np.float32)
    index = np.empty((clients, size), np.uint8)
    rows = max(1, WORKING_VALUES // size)
    for start in range(0, clients, rows):
        part = slice(start, start + rows)
        if not np.isfinite(values[part]).all():
            raise UserError("a client's probe gradient is not finite: lower the learning rate or check its data")
        centres[part] = _kmeans_1d(values[part], levels)
        index[part] = _nearest(values[part], centres[part])
    return Compressed(centres, index)


def restore(compressed: Compressed) -> NDArray[np.float32]:
    """Z_k = X_k[λ_k], float32 (k, d): every coordinate replaced by its centre (FedSTaS, Algorithm 1)."""
    restored = np.empty(compressed.indices.shape, np.float32)
    for row, centres, index in zip(restored, compressed.centres, compressed.indices, strict=True):
        np.take(centres, index, out=row)
    return restored


def norms(compressed: Compressed) -> Floats:
    """‖IS(G_k)‖ = ‖Z_k‖, float64 (k,), without restoring the gradients."""
    levels = compressed.centres.shape[1]
    counts = np.stack([np.bincount(index, minlength=levels) for index in compressed.indices])
    return np.asarray(np.sqrt((counts * compressed.centres.astype(np.float64) ** 2).sum(axis=1)))


def _kmeans_1d(values: NDArray[np.float32], levels: int) -> Floats:
    """Sorted centres (k, d') of each row."""
    ordered = np.sort(values, axis=1)
    shift = ordered.mean(axis=1, dtype=np.float64)[:, None]
    sums = _prefix(ordered - shift)
    cuts = _optimal_cuts(ordered, shift, sums, levels)
    # where a cluster is empty (fewer distinct values than levels) its centre is the value it starts at
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
    """Prefix sums (k, d + 1) of rows, starting at 0."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


def _with_ends(cuts: Ints, size: int) -> Ints:
    return np.pad(cuts, ((0, 0), (1, 1)), constant_values=(0, size))


def _means(sums: Floats, cuts: Ints, if_empty: Floats) -> Floats:
    """Mean of the values between neighbouring cuts; where there are none, `if_empty`."""
    count = np.diff(cuts, axis=1)
    total = np.diff(np.take_along_axis(sums, cuts, axis=1), axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), if_empty)


def _count_up_to(ordered: NDArray[np.float32], thresholds: Floats) -> Ints:
    """How many values of each sorted row are <= each of its thresholds: np.searchsorted(side="right") row by row."""
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
    """Cell boundaries (k, cells + 1) as positions in the sorted rows, from 0 to d."""
    rows, size = ordered.shape
    if size <= CELLS:
        return np.broadcast_to(np.arange(size + 1), (rows, size + 1))
    half = CELLS // 2
    equal_count = np.broadcast_to(np.arange(1, half) * size // half, (rows, half - 1))
    lowest, highest = (ordered[:, at, None].astype(np.float64) for at in (0, -1))
    equal_width = _count_up_to(ordered, lowest + (highest - lowest) * np.arange(1, half + 1) / (half + 1))
    return _with_ends(np.sort(np.concatenate([equal_count, equal_width], axis=1), axis=1), size)


def _optimal_cuts(ordered: NDArray[np.float32], shift: Floats, sums: Floats, levels: int) -> Ints:
    """Boundaries (k, d' + 1) of the best partition of the cells: Bellman's recursion over the number of clusters."""
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
    """Which cell boundaries (k, d' + 1) cut the cells into d' clusters of least squared error."""
    count = grid[:, None, :] - grid[:, :, None]
    total = sums[:, None, :] - sums[:, :, None]
    cost = squares[:, None, :] - squares[:, :, None] - total**2 / np.maximum(count, 1)
    np.maximum(cost, 0.0, out=cost)  # cancellation
    ends = grid.shape[1]
    cost[:, np.tri(ends, dtype=bool)] = np.inf  # a cluster runs forward and holds a cell at least
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
    """Index of the nearest centre of each value; of two equally near ones the lower."""
    index = np.zeros(values.shape, np.uint8)
    thresholds = 0.5 * (centres[:, :-1].astype(np.float64) + centres[:, 1:])
    for threshold in thresholds.T:
        index += values > threshold[:, None].astype(np.float32)
    return index
