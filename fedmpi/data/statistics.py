"""Mean and standard deviation of each channel of samples, which a run standardises by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedmpi.common.types import AnyArray, Ints

STATISTICS_ROWS = 20_000
"""Evenly spaced rows that are read."""
ROWS_AT_ONCE = 512
SMALLEST_COLUMN_STD = 1e-30


def channel_statistics(
    features: AnyArray, scale: float, among: Ints | None = None, at_most: int = STATISTICS_ROWS
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`statistics` of an array (n, C, H, W), or (n, d), which counts as one channel; of some of its rows, or all."""
    rows = np.arange(len(features)) if among is None else among
    channels = features.shape[1] if features.ndim == 4 else 1
    return statistics(lambda wanted: features[wanted], rows, channels, scale, at_most)


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
    std[(least == most) | (std < smallest)] = 1.0  # of a constant channel rounding may leave more than that
    return tuple(float(value) for value in mean + offset), tuple(float(value) for value in std)
