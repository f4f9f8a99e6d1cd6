"""Whole numbers from sizes and shares: where each of a row of sizes begins, shares rounded to a given total, blocks,
unions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedmpi.common.types import Floats, Ints

TOLERANCE = 1e-9
"""What lies so little below a whole number is that number, rounded."""
BLOCK = 2**16


def blocks(count: int) -> Iterator[slice]:
    """0 … count − 1 in parts of at most BLOCK, which stay in the cache; NumPy's generators draw part by part what they
    draw at once."""
    return (slice(first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))


def offsets_of(sizes: Ints) -> Ints:
    """Where each of what lies one after another begins, and the total as the last value."""
    offsets = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def united(some: Ints, others: Ints) -> Ints:
    """The distinct values of both, sorted.

    `numpy.union1d` makes the same of a hash table, in many times the time where one of both is sorted already.
    """
    both = np.sort(np.concatenate([some, others]), kind="stable")
    first = np.ones(len(both), bool)
    np.not_equal(both[1:], both[:-1], out=first[1:])
    return both[first]


def largest_remainders(quotas: Floats, total: int) -> Ints:
    """Quotas rounded down, the rest of the total going to the largest fractions (Hamilton's method)."""
    whole = np.floor(quotas + TOLERANCE).astype(np.int64)
    missing = total - int(whole.sum())
    if missing >= 0:
        whole[np.argsort(whole - quotas, kind="stable")[:missing]] += 1
    else:  # the quotas' own rounding: huge ones have no fractions left
        whole[np.argsort(quotas - whole - (whole > 0), kind="stable")[:-missing]] -= 1
    return whole
