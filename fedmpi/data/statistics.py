"""Statistics of the samples and labels of a data set: distances of label distributions from a target, mean and
standard deviation of the features, and classes that occur in one part only.

Kullback-Leibler divergence: Duan et al. 2019 (Astraea), section III-B and Fig 7, in nats. Sum of the distances of all
shares: Zhao et al. 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.types import AnyArray, Floats, Ints

Counts = NDArray[np.integer]


STATISTICS_ROWS = 20_000
"""Evenly spaced rows that are read."""
ROWS_AT_ONCE = 512
SMALLEST_COLUMN_STD = 1e-30
NAMED = 10
"""Largest number of classes that a note lists by name."""


def target_distribution(classes: int, counts: AnyArray | None = None) -> Floats:
    """The distribution that mediators should come close to, float64 (C,).

    It follows class counts (C,), for example those of the test set, or is uniform without counts (P_u of the paper).
    """
    if counts is None:
        return np.full(classes, 1 / classes)
    weights = np.asarray(counts, np.float64)
    if weights.shape != (classes,) or not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() == 0:
        raise ValueError(f"a target distribution needs {classes} counts >= 0, one of them positive, not {counts}")
    probabilities: Floats = weights / weights.sum()
    return probabilities


def kl_divergence(counts: AnyArray, target: Floats | None = None) -> Floats:
    """D_KL(P || Q) of every row's class distribution P from the target Q, in nats."""
    from scipy.special import xlogy  # slow to import, and most runs have no mediators

    counts = np.asarray(counts, np.float64)
    target = target_distribution(counts.shape[-1]) if target is None else target
    totals = counts.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = counts / totals[..., None]
        divergence: Floats = xlogy(shares, shares).sum(axis=-1) - xlogy(shares, target).sum(axis=-1)
    return np.maximum(divergence, 0.0)


def label_distances(counts: Counts, reference: Floats) -> Floats:
    """sum_c |p_k(c) - reference(c)| for clients with class counts (m, C), (m,) in [0, 2]; NaN without samples."""
    with np.errstate(invalid="ignore"):
        shares = counts / counts.sum(axis=1, keepdims=True, dtype=np.float64)
    distances: Floats = np.abs(shares - reference).sum(axis=1)
    return distances


def summarize(divergences: Floats, name: str) -> dict[str, float | list[float]]:
    """Mean, standard deviation, largest value and quartiles (a box of Fig 7), as entries of a record, in nats.

    Rows without a distribution (NaN) are left out; everything is NaN when there is nothing to summarize.
    """
    known = divergences[~np.isnan(divergences)]
    if len(known) == 0:
        known = np.array([np.nan])
    with np.errstate(invalid="ignore"):  # the standard deviation of an infinite divergence is NaN
        return {
            f"{name}_mean": float(known.mean()),
            f"{name}_std": float(known.std()),
            f"{name}_max": float(known.max()),
            f"{name}_quartiles": np.quantile(known, [0, 0.25, 0.5, 0.75, 1]).tolist(),
        }


def pooled_counts(class_counts: Ints, groups: Ints) -> Ints:
    """Class counts of every group's pooled data."""
    pooled = np.zeros((int(groups.max(initial=-1)) + 1, class_counts.shape[1]), np.int64)
    np.add.at(pooled, groups, class_counts)
    return pooled


def statistics(
    read: Callable[[Ints], AnyArray],
    rows: Ints,
    channels: int,
    scale: float,
    at_most: int = STATISTICS_ROWS,
    columns: bool = False,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of x / scale over at most `at_most` evenly spaced rows."""
    if not columns:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), at_most)).astype(np.int64))]
    offset = np.zeros(channels)
    total, squares, count = np.zeros(channels), np.zeros(channels), 0
    least, most = np.full(channels, np.inf), np.full(channels, -np.inf)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        block = np.asarray(read(rows[start : start + ROWS_AT_ONCE]), np.float64) / scale
        if columns:
            block = np.moveaxis(block, -1, 1)
            offset = block[0].reshape(channels, -1)[:, 0] if not start else offset
            block = block - offset.reshape(channels, *(1,) * (block.ndim - 2))
        block = block.reshape(len(block), channels, -1)
        total += block.sum((0, 2))
        squares += (block**2).sum((0, 2))
        count += block.shape[0] * block.shape[2]
        least, most = np.minimum(least, block.min((0, 2))), np.maximum(most, block.max((0, 2)))
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    smallest = SMALLEST_COLUMN_STD if columns else 1e-8
    std[(least == most) | (std < smallest)] = 1.0  # rounding may leave more in a constant channel
    return tuple(float(value) for value in mean + offset), tuple(float(value) for value in std)


def class_notes(labels: Mapping[str, Ints], names: Sequence[object]) -> tuple[str, ...]:
    """Return a sentence for each part that alone has samples of some class."""
    counts = {part: np.bincount(y, minlength=len(names)) for part, y in labels.items() if len(y)}
    parts = sum((count > 0).astype(np.int64) for count in counts.values())
    notes = []
    for part, count in counts.items() if len(counts) > 1 else ():
        if len(alone := np.flatnonzero((count > 0) & (parts == 1))):
            named = ", ".join(f"{names[label]} ({count[label]:,})" for label in alone[:NAMED])
            more = f" and {len(alone) - NAMED:,} more" if len(alone) > NAMED else ""
            notes.append(f"classes in the {part} part only, with their samples: {named}{more}")
    return tuple(notes)
