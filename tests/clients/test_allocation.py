"""Allocations in whole numbers: sums, bounds, expectations by enumeration; and the cohorts drawn by them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

from fedmpi.clients.sampler import View
from fedmpi.clients.samplers import stratified
from fedmpi.clients.strata import _exact_shares, allocate, make_strata, stratum_spreads, systematic_rounding
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


def test_largest_remainders_go_to_the_largest_fractions() -> None:
    assert largest_remainders(np.array([1.2, 2.7, 3.1]), 7).tolist() == [1, 3, 3]


def test_neyman_with_fewer_draws_than_strata_can_draw_every_stratum() -> None:
    expected = allocate("neyman", np.array([1, 5, 5, 5]), np.array([0.0, 1.0, 2.0, 1.0]), 2, stream()).expected
    assert expected == pytest.approx(2 * np.array([1, 5, 10, 5]) / 21)


# Stratified cohorts

LABELS = np.array([0] * 20 + [1] * 12 + [2] * 6 + [-1] * 2 + [3] * 2)
NORMS = np.random.default_rng(0).lognormal(size=len(LABELS))


def view_of(present: np.ndarray | int, count: int) -> View:
    strata = make_strata(LABELS, np.array([1.0, 2.0, 0.5, 0.0]), NORMS)
    return View(0, count, np.ones(42, np.int64), present, Streams(0), strata=strata, wanted=lambda clients: count)


@pytest.mark.parametrize("allocation", ["proportional", "neyman", "equal"])
@pytest.mark.parametrize("draw", ["uniform", "importance"])
@pytest.mark.parametrize("count", [1, 8, 40, 100])
def test_a_cohort_is_sorted_of_the_requested_size_and_keeps_to_its_allocation(
    allocation: str, draw: str, count: int
) -> None:
    cohort = stratified(view_of(42, count), allocation=allocation, within_stratum=draw)  # type: ignore[arg-type]
    assert len(cohort.clients) == min(count, 40)
    assert (np.diff(cohort.clients) > 0).all()
    assert cohort.stratum is not None and cohort.strata is not None
    assert np.array_equal(cohort.stratum, LABELS[cohort.clients])
    assert np.array_equal(np.bincount(cohort.stratum, minlength=4), cohort.strata.draws)
    assert ((cohort.inclusion > 0) & (cohort.inclusion <= 1 + 1e-12)).all()


def test_the_rest_of_a_cluster_represents_unavailable_clients() -> None:
    available = np.setdiff1d(np.arange(42), np.arange(12))
    cohort = stratified(view_of(available, 20), allocation="proportional", within_stratum="uniform")
    assert cohort.strata is not None
    assert cohort.strata.draws[0] == 8  # its share is 10: what it cannot supply goes to other strata
    assert cohort.strata.draws.sum() == 20
    assert not np.isin(cohort.clients, np.arange(12)).any()
    some = stratified(view_of(available, 10), allocation="proportional", within_stratum="uniform")
    assert some.strata is not None
    assert some.strata.draws.tolist() in ([5, 3, 2, 0], [5, 3, 1, 1], [5, 3, 2, 1])
    assert some.inclusion[some.stratum == 0] == pytest.approx(np.full(5, 5 / 8))


def test_pairwise_spread_is_the_mean_distance_of_two_clients() -> None:
    vectors = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    values = stratum_spreads(vectors, np.array([0, 0, 0, 0, 0, 1]), "pairwise")
    assert values == pytest.approx([pdist(vectors[:5]).mean(), 0.0], rel=1e-5)
