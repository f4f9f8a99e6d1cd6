"""Accumulators: the float sum is the sum, the fixed-point sum does not depend on the order."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.aggregation.exact import (
    CHUNK,
    MOST_RANKS,
    SHORT,
    Accumulator,
    FixedPointSum,
    FloatSum,
    decode_metrics,
    encode_metrics,
    metric_slots,
)
from fedmpi.aggregation.weights import LARGEST


def terms(count: int, size: int, seed: int = 0) -> list[tuple[torch.Tensor, float]]:
    generator = np.random.default_rng(seed)
    return [
        (torch.from_numpy(generator.normal(0, 0.1, size).astype(np.float32)), float(generator.random()))
        for _ in range(count)
    ]


def total(accumulator: Accumulator, chosen: list[tuple[torch.Tensor, float]]) -> None:
    for vector, coefficient in chosen:
        accumulator.add(vector, coefficient)
    accumulator.flush()


@pytest.mark.parametrize("size", [1, CHUNK + 3])
def test_both_accumulators_sum_coefficient_times_vector(size: int):
    chosen = terms(5, size)
    expected = 2 * sum(vector.double() * coefficient for vector, coefficient in chosen).float()
    floats, fixed = np.empty(size, np.float32), np.empty(size, np.int64)
    for accumulator, buffer in ((FloatSum(floats), floats), (FixedPointSum(fixed), fixed)):
        total(accumulator, chosen)
        assert torch.allclose(accumulator.to_update(torch.from_numpy(2 * buffer)), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [SHORT - 1, SHORT, 5000])
def test_a_float_sum_of_any_number_of_terms_is_near_that_of_fsum(count: int):
    vectors = np.random.default_rng(count).normal(0, 1, (count, 7)).astype(np.float32)
    vectors[count // 2 :] += 40
    buffer = np.empty(7, np.float32)
    accumulator = FloatSum(buffer)
    for vector in vectors:
        accumulator.add(torch.from_numpy(vector), 0.5)
    accumulator.flush()
    accumulator.flush()  # a second time changes nothing
    expected = np.array([math.fsum(0.5 * column.astype(float)) for column in vectors.T])
    assert np.abs(buffer / expected - 1).max() < 3e-6


@pytest.mark.parametrize("count", [3, SHORT + 3])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_term_that_is_not_finite_is_seen_however_long_ago_it_was_added(count: int, bad: int):
    accumulator = FloatSum(np.empty(2, np.float32))
    for number in range(count):
        accumulator.add(torch.tensor([1.0, 2.0]), 1.0)
        assert accumulator.squared_norm() > 0
        if number == bad:
            accumulator.tensor[0] = np.inf
    assert not math.isfinite(accumulator.squared_norm())
    accumulator.reset()
    assert accumulator.squared_norm() == 0


@given(permutation=st.permutations(range(12)), cut=st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_the_fixed_point_sum_is_bit_identical_in_any_order_and_on_any_number_of_ranks(permutation: list[int], cut: int):
    chosen = terms(12, 500)
    whole, first, second = (np.empty(500, np.int64) for _ in range(3))
    total(FixedPointSum(whole), chosen)
    total(FixedPointSum(first), [chosen[i] for i in permutation[:cut]])
    total(FixedPointSum(second), [chosen[i] for i in permutation[cut:]])
    assert np.array_equal(first + second, whole)


@pytest.mark.parametrize("count", [1, SHORT + 1])
@pytest.mark.parametrize("kind", [FloatSum, FixedPointSum])
def test_an_accumulator_starts_again_after_a_reset(kind: type, count: int):
    buffer = np.full(10, 7, np.float32 if kind is FloatSum else np.int64)
    accumulator = kind(buffer)
    assert not buffer.any()
    for _ in range(SHORT + 2):
        accumulator.add(torch.ones(10), 2.0)
    accumulator.reset()
    for _ in range(count):
        accumulator.add(torch.ones(10), 0.5)
    accumulator.flush()
    assert accumulator.to_update(torch.from_numpy(buffer)).tolist() == [0.5 * count] * 10


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_an_update_that_is_not_finite_is_rejected_by_the_fixed_point_sum(bad: float):
    vector = torch.zeros(CHUNK + 5)
    vector[CHUNK + 1] = bad
    with pytest.raises(FloatingPointError, match=r"local\.lr"):
        FixedPointSum(np.empty(CHUNK + 5, np.int64)).add(vector, 1.0)


@pytest.mark.parametrize(("options", "limit"), [({}, 2.0**23), ({"ranks": 4}, 2.0**21)])
def test_a_sum_is_rejected_before_it_leaves_its_range_and_has_all_of_it_after_a_reset(
    options: dict[str, int], limit: float
):
    buffer = np.empty(3, np.int64)
    accumulator = FixedPointSum(buffer, **options)
    for _ in range(2):
        accumulator.add(torch.tensor([0.75 * limit, -0.75 * limit, 0]), 1.0)
        with pytest.raises(OverflowError, match=r"server\.exact"):
            accumulator.add(torch.tensor([0.5 * limit, 0, 0]), 1.0)
        assert buffer[0] == 0.75 * limit * 2**40
        accumulator.reset()


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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**50])
def test_values_that_cannot_be_kept_are_rejected(bad: float):
    with pytest.raises(OverflowError, match="metric"):
        encode_metrics(np.array([1.0, bad]), DTYPES[0])


def test_the_fixed_point_sum_rounds_to_the_nearest_unit():
    """Terms of one sign, so that a rounding in one direction would add up."""
    chosen = [(vector.abs(), coefficient) for vector, coefficient in terms(50, 300)]
    buffer = np.empty(300, np.int64)
    total(FixedPointSum(buffer), chosen)
    expected = sum(vector.double() * coefficient for vector, coefficient in chosen)
    assert np.abs(buffer / 2.0**40 - expected.numpy()).max() < 0.5 * 50 * 2.0**-40
    assert abs(np.mean(buffer / 2.0**40 - expected.numpy())) < 50 * 0.05 * 2.0**-40
