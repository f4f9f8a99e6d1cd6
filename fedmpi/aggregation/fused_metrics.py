"""Metric sums that ride behind the update in the round's one reduction, exact whatever the order of the ranks.

A metric is a fixed-point number with 40 fractional bits, kept as a whole part and a fraction: two int64 values in an
int64 buffer, nine limbs of 12 bits in a float32 one, where sums of limbs over up to 4096 ranks stay below 2**24.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

FRACTION_BITS = 40
LIMB_BITS = 12
WHOLE_LIMBS = 5
FRACTION_LIMBS = 4
MOST_RANKS = 2 ** (24 - LIMB_BITS)
LARGEST = 2.0**50

Reducible = NDArray[np.float32] | Ints


def check_ranks(ranks: int) -> None:
    """Refuse a job whose metrics could not be summed exactly."""
    if ranks > MOST_RANKS:
        raise UserError(
            f"this job has {ranks} ranks, and sums over more than {MOST_RANKS} of them would not be exact: "
            f"start at most {MOST_RANKS}"
        )


def metric_slots(count: int, dtype: np.dtype[np.float32] | np.dtype[np.int64]) -> int:
    """How many values of the buffer's type `count` metrics take: 2 each as int64, 9 each as float32."""
    return count * (2 if dtype == np.int64 else WHOLE_LIMBS + FRACTION_LIMBS)


def encode_metrics(values: Floats, dtype: np.dtype[np.float32] | np.dtype[np.int64]) -> Reducible:
    """Metrics in a form whose elementwise sum over up to 4096 ranks is exact."""
    values = np.asarray(values, np.float64)
    if not np.all(np.abs(values) < LARGEST):
        raise OverflowError(f"a metric is not finite or not below 2**50 in magnitude: {values}")
    whole = np.floor(values)
    fraction = np.rint((values - whole) * 2.0**FRACTION_BITS).astype(np.int64)
    parts = np.stack([whole.astype(np.int64), fraction], axis=1)
    if dtype == np.int64:
        return parts.ravel()
    limbs = np.concatenate([_limbs(parts[:, 0], WHOLE_LIMBS), _limbs(parts[:, 1], FRACTION_LIMBS)], axis=1)
    return limbs.astype(np.float32).ravel()


def decode_metrics(reduced: Reducible, count: int) -> Floats:
    """The summed metrics from the summed `encode_metrics`, float64 (count,)."""
    table = reduced.reshape(count, -1).astype(np.int64)
    if reduced.dtype == np.int64:
        whole, fraction = table.T
    else:
        whole, fraction = _joined(table[:, :WHOLE_LIMBS]), _joined(table[:, WHOLE_LIMBS:])
    carried = whole + (fraction >> FRACTION_BITS)
    rest = fraction & (2**FRACTION_BITS - 1)
    sums: Floats = carried + rest / 2.0**FRACTION_BITS
    return sums


def _limbs(values: Ints, count: int) -> Ints:
    """Base-4096 digits, lowest first; the last one keeps the sign."""
    limbs = values[:, None] >> (LIMB_BITS * np.arange(count))
    limbs[:, :-1] &= 2**LIMB_BITS - 1
    return limbs


def _joined(limbs: Ints) -> Ints:
    joined: Ints = (limbs << (LIMB_BITS * np.arange(limbs.shape[1]))).sum(axis=1)
    return joined
