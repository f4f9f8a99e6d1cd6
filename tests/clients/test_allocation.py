"""Allocations in whole numbers: sums, bounds, expectations by enumeration, and the spreads behind Neyman's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

from fedmpi.clients.strata import _exact_shares, allocate, bounded_shares, stratum_spreads, systematic_rounding
from fedmpi.common.apportionment import largest_remainders
from fedmpi.common.streams import Purpose, Streams


def stream(round: int = 0) -> np.random.Generator:
    return Streams(0).generator(Purpose.ALLOCATION, round)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Sizes, spreads, available clients and a number of participants."""
    sizes = np.array(draw(st.lists(st.integers(1, 40), min_size=1, max_size=8)))
    spreads = np.array([draw(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 50.0])) for _ in sizes])
    capacity = np.array([draw(st.integers(0, int(size))) for size in sizes])
    return sizes, spreads, capacity, draw(st.integers(1, int(sizes.sum())))


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from(["proportional", "neyman", "equal"]), st.booleans(), st.integers(0, 5))
def test_every_allocation_sums_up_and_stays_within_its_bounds(problem, rule, every, round) -> None:  # type: ignore[no-untyped-def]
    sizes, spreads, capacity, count = problem
    result = allocate(rule, sizes, spreads, count, stream(round), capacity, every)
    wanted = min(count, capacity.sum())
    assert result.draws.sum() == wanted
    assert result.expected.sum() == pytest.approx(wanted)
    assert (result.draws <= capacity).all()
    assert (np.abs(result.draws - result.expected) < 1).all()
    if rule == "neyman" and every and wanted >= (capacity > 0).sum():
        assert (result.draws[capacity > 0] >= 1).all()


def test_a_large_stratum_can_have_all_draws_where_not_every_stratum_must_have_one() -> None:
    """N_h S_h = 85 · 2, 5 · 0.2 three times: m_h is 10 · 170/173 and 10/173 in expectation; one each otherwise."""
    sizes, spreads = np.array([85, 5, 5, 5]), np.array([2.0, 0.2, 0.2, 0.2])
    assert allocate("neyman", sizes, spreads, 10, stream()).draws.tolist() == [7, 1, 1, 1]
    free = [allocate("neyman", sizes, spreads, 10, stream(round), every_stratum=False) for round in range(2000)]
    assert free[0].expected == pytest.approx(10 * np.array([170, 1, 1, 1]) / 173)
    drawn = np.array([allocation.draws for allocation in free])
    assert set(drawn[:, 0].tolist()) == {9, 10}
    assert np.abs(drawn.mean(axis=0) - free[0].expected).max() < 5 * drawn.std(axis=0).max() / 2000**0.5


@pytest.mark.parametrize("sizes", [[7, 5, 3], [1, 1, 1, 97], [13], [2, 2, 2, 2, 2]])
@pytest.mark.parametrize("count", [1, 4, 11])
def test_proportional_rounding_has_exactly_the_expected_value_m_times_share(sizes: list[int], count: int) -> None:
    """Enumeration: the mean over all N equally likely starts is m N_h / N, so every client has probability m / N."""
    sizes_array = np.array(sizes)
    total = int(sizes_array.sum())
    count = min(count, total)
    numerators, denominator = _exact_shares(sizes_array, count, sizes_array)
    outcomes = np.array([systematic_rounding(numerators, denominator, start) for start in range(denominator)])
    assert (outcomes.sum(axis=1) == count).all()
    assert (outcomes <= sizes_array).all()
    assert np.array_equal(outcomes.sum(axis=0) * total, count * sizes_array * denominator)


def test_neyman_minimizes_the_variance_of_the_stratified_mean_among_all_allocations() -> None:
    """Σ N_h² S_h² / m_h over all whole allocations of 9 draws: ours is within 2 % of the best."""
    sizes, spreads = np.array([12, 7, 20]), np.array([1.0, 4.0, 0.7])
    grid = [(a, b, 9 - a - b) for a in range(1, 8) for b in range(1, 8) if 9 - a - b >= 1]
    variances = [sum((sizes * spreads) ** 2 / np.array(split)) for split in grid]
    ours = sum((sizes * spreads) ** 2 / allocate("neyman", sizes, spreads, 9, stream()).draws)
    assert ours <= 1.02 * min(variances)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_bounded_shares_are_a_common_multiple_of_the_weights_cut_at_the_bounds(data: st.DataObject) -> None:
    """Solved independently by bisection on λ."""
    size = data.draw(st.integers(1, 7))
    weights = np.array([data.draw(st.floats(0.01, 100)) for _ in range(size)])
    lower = np.array([data.draw(st.integers(0, 2)) for _ in range(size)], float)
    upper = lower + np.array([data.draw(st.integers(0, 10)) for _ in range(size)], float)
    total = data.draw(st.floats(lower.sum(), upper.sum()))
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * weights, lower, upper).sum() < total else (low, middle)
    assert bounded_shares(weights, weights, lower, upper, total) == pytest.approx(
        np.clip(high * weights, lower, upper), abs=1e-6
    )


def test_largest_remainders_go_to_the_largest_fractions() -> None:
    assert largest_remainders(np.array([1.2, 2.7, 3.1]), 7).tolist() == [1, 3, 3]


def test_spread_is_the_root_mean_squared_distance_to_the_centroid() -> None:
    vectors = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    labels = np.array([0, 0, 0, 0, 1, 2, 2, -1, -1])
    first, second, third = stratum_spreads(vectors, labels)
    assert first == pytest.approx(np.sqrt(vectors[:4].var(axis=0).sum()), rel=1e-5)
    assert second == 0.0
    assert third == pytest.approx(np.linalg.norm(vectors[5] - vectors[6]) / 2, rel=1e-5)


def test_neyman_with_fewer_draws_than_strata_can_draw_every_stratum() -> None:
    expected = allocate("neyman", np.array([1, 5, 5, 5]), np.array([0.0, 1.0, 2.0, 1.0]), 2, stream()).expected
    assert expected == pytest.approx(2 * np.array([1, 5, 10, 5]) / 21)


def test_pairwise_spread_is_the_mean_distance_of_two_clients() -> None:
    vectors = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    values = stratum_spreads(vectors, np.array([0, 0, 0, 0, 0, 1]), "pairwise")
    assert values == pytest.approx([pdist(vectors[:5]).mean(), 0.0], rel=1e-5)
