"""Allocations in whole numbers: sums, bounds, expectations by enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

from fedmpi.clients.strata import _exact_shares, allocate, stratum_spreads, systematic_rounding
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


NOBODY_THERE = np.array([3, 1]), np.array([0.3, 0.0]), np.array([0, 0]), 2


@settings(max_examples=60, deadline=None)
@example(NOBODY_THERE, "neyman", False, 0)
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


def test_neyman_with_fewer_draws_than_strata_can_draw_every_stratum() -> None:
    expected = allocate("neyman", np.array([1, 5, 5, 5]), np.array([0.0, 1.0, 2.0, 1.0]), 2, stream()).expected
    assert expected == pytest.approx(2 * np.array([1, 5, 10, 5]) / 21)


def test_pairwise_spread_is_the_mean_distance_of_two_clients() -> None:
    vectors = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    values = stratum_spreads(vectors, np.array([0, 0, 0, 0, 0, 1]), "pairwise")
    assert values == pytest.approx([pdist(vectors[:5]).mean(), 0.0], rel=1e-5)
