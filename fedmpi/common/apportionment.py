"""Whole numbers from sizes and shares: offsets, shares rounded to a given total, blocks, unions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedmpi.common.types import Floats, Ints

TOLERANCE = 1e-9
"""Largest distance below a whole number that is rounded up to it."""
BLOCK = 2**16


def blocks(count: int) -> Iterator[slice]:
    """Yield 0 … count − 1 in parts of at most BLOCK, which stay in the cache. NumPy's generators draw the same numbers
    in parts as at once."""
    return (slice(first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))


def offsets_of(sizes: Ints) -> Ints:
    """Return the offset of each of several concatenated parts, with the total as the last value."""
    offsets = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def places_within(counts: Ints) -> Ints:
    """Return the place of each item in its part, 0 ... n_i - 1, of parts of n_i items each."""
    return np.arange(int(counts.sum())) - np.repeat(offsets_of(counts)[:-1], counts)


def united(some: Ints, others: Ints) -> Ints:
    """Return the distinct values of both, sorted.

    `numpy.union1d` computes the same with a hash table, which is many times slower if one of both is sorted already.
    """
    both = np.sort(np.concatenate([some, others]), kind="stable")
    first = np.ones(len(both), bool)
    np.not_equal(both[1:], both[:-1], out=first[1:])
    return both[first]


def largest_remainders(quotas: Floats, total: int) -> Ints:
    """Round quotas down and give the rest of the total to the largest fractions (Hamilton's method)."""
    whole = np.floor(quotas + TOLERANCE).astype(np.int64)
    missing = total - int(whole.sum())
    if missing >= 0:
        whole[np.argsort(whole - quotas, kind="stable")[:missing]] += 1
    else:  # rounding errors of the quotas: huge ones have no fractions
        whole[np.argsort(quotas - whole - (whole > 0), kind="stable")[:-missing]] -= 1
    return whole
