"""Metrics in the fused reduction: exact sums in float32 and int64 buffers, whatever the order of the ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.aggregation.exact import LARGEST, MOST_RANKS, decode_metrics, encode_metrics, metric_slots

DTYPES = [np.dtype(np.float32), np.dtype(np.int64)]
ON_THE_GRID = st.integers(-(2**52), 2**52).map(lambda q: q * 2.0**-40)
COUNTS = st.integers(-(2**40), 2**40).map(float)


def reduce(ranks: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    total = np.zeros(metric_slots(ranks[0].size, dtype), dtype)
    for values in ranks:
        total += encode_metrics(values, dtype)
    return decode_metrics(total, ranks[0].size)


@pytest.mark.parametrize("dtype", DTYPES)
@given(table=st.lists(st.tuples(COUNTS, ON_THE_GRID), min_size=1, max_size=40))
@settings(max_examples=80, deadline=None)
def test_sums_over_ranks_are_exact(dtype: np.dtype, table: list[tuple[float, float]]):
    sums = reduce([np.array(row) for row in table], dtype)
    counts, fractions = zip(*table, strict=True)
    assert sums[0] == sum(int(c) for c in counts)
    assert sums[1] == sum(int(f * 2**40) for f in fractions) / 2**40


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_number_of_ranks_keeps_the_largest_limbs_exact(dtype: np.dtype):
    assert MOST_RANKS == 4096
    values = np.array([LARGEST - 1, -LARGEST + 1, 2.0**-40 * (2**40 - 1), -1.0])
    encoded = encode_metrics(values, dtype)
    total = np.zeros_like(encoded)
    for _ in range(MOST_RANKS):
        total += encoded
    assert np.array_equal(decode_metrics(total, 4), values * MOST_RANKS)


@pytest.mark.parametrize("dtype", DTYPES)
@given(value=st.floats(-1e12, 1e12))
def test_any_value_is_kept_to_the_stated_resolution(dtype: np.dtype, value: float):
    decoded = decode_metrics(encode_metrics(np.array([value]), dtype), 1)[0]
    assert abs(decoded - value) <= 2.0**-41 + 2**-53 * abs(value)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**50])
def test_values_that_cannot_be_kept_are_refused(bad: float):
    with pytest.raises(OverflowError, match="metric"):
        encode_metrics(np.array([1.0, bad]), DTYPES[0])
