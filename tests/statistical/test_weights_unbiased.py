"""Aggregation weights hit their targets: exactly, by enumerating every cohort that a design can draw."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from fedmpi import Cohort, UserError
from fedmpi.clients.cohort import StrataSummary, full_participation
from fedmpi.common.streams import Streams
from tests.statistical.weighed import KINDS, coefficients, weighing

SIZES = np.array([1, 4, 2, 9, 3, 5], np.int64)
UPDATES = np.array([0.3, -1.0, 2.0, 0.7, 5.0, -0.2])
HALF = np.full(2, 0.5)
WEIGHTED_MEAN = float(SIZES @ UPDATES / SIZES.sum())


def aggregate(kind: str, cohort: Cohort, sizes: np.ndarray = SIZES, **options) -> float:
    c = coefficients(kind, cohort, sizes, **options)
    total = float(c @ UPDATES[cohort.clients])
    return total / c.sum() if weighing(kind).normalizes else total


def uniform_cohorts(count: int) -> list[Cohort]:
    """All equally likely cohorts of simple random sampling."""
    n = SIZES.size
    return [Cohort(np.array(chosen), np.full(count, count / n)) for chosen in itertools.combinations(range(n), count)]


@pytest.mark.parametrize("population", ["samples", "clients"])
def test_horvitz_thompson_weights_are_unbiased_under_uniform_draws(population: str):
    target = WEIGHTED_MEAN if population == "samples" else UPDATES.mean()
    means = [aggregate("unbiased", cohort, population=population) for cohort in uniform_cohorts(3)]
    assert np.mean(means) == pytest.approx(target)


def test_size_proportional_draws_with_replacement_are_unbiased_with_uniform_weights():
    """Scheme I of Li et al. 2020: all multinomial outcomes of 3 draws, with their probabilities."""
    p = SIZES / SIZES.sum()
    expected = {"uniform": 0.0, "unbiased": 0.0}
    for draws in itertools.product(range(SIZES.size), repeat=3):
        clients, multiplicity = np.unique(draws, return_counts=True)
        cohort = Cohort(clients, 3 * p[clients], multiplicity)
        for kind in expected:
            expected[kind] += math.prod(p[list(draws)]) * aggregate(kind, cohort)
    assert expected["uniform"] == pytest.approx(WEIGHTED_MEAN)
    assert expected["unbiased"] == pytest.approx(WEIGHTED_MEAN)


@pytest.mark.parametrize("kind", ["samples", "uniform", "stratified", "normalized"])
def test_the_weight_total_is_bit_identical_in_any_order(kind: str):
    clients = 5000
    sizes = Streams(3).generator(0).integers(1, 1000, clients)  # type: ignore[arg-type]
    strata = np.arange(clients) % 7
    summary = StrataSummary(np.bincount(strata), np.bincount(strata), np.zeros(7))
    cohort = Cohort(np.arange(clients), 1 / (1 + sizes % 5), stratum=strata, strata=summary)
    c = coefficients(kind, cohort, sizes)
    assert 0.4 < c.sum() < 6
    assert sum(c.tolist()) == sum(c[::-1].tolist()) == float(np.sum(c))


@pytest.mark.parametrize("kind", KINDS)
def test_a_participant_without_used_rows_weighs_nothing(kind: str):
    strata = StrataSummary(np.array([6]), np.array([6]), np.zeros(1))
    cohort = Cohort(np.arange(6), np.ones(6), stratum=np.zeros(6, np.int64), strata=strata)
    used = np.array([0, 4, 2, 0, 3, 5])
    c = coefficients(kind, cohort, SIZES, used, wanted=14)
    assert np.array_equal(c == 0, used == 0) or (kind == "literal" and c == pytest.approx(SIZES / SIZES.sum()))


def test_weights_that_lack_what_they_divide_by_are_rejected():
    with pytest.raises(UserError, match="strata"):
        coefficients("stratified", full_participation(6), SIZES)
    with pytest.raises(UserError, match="inclusion probabilities"):
        coefficients("unbiased", replace(full_participation(6), inclusion=None), SIZES)


@pytest.mark.parametrize("draws", [(1, 2), (2, 1), (1, 0), (0, 1)])
def test_stratified_means_are_unbiased_where_participants_have_no_sampled_row(draws: tuple[int, int]):
    """E over cohorts and over which clients have a row is the update of all clients; as many of these have no row.

    m = 1 < H: either stratum is drawn, each with probability 1/2.
    """
    strata, chance = np.array([0, 0, 0, 1, 1, 1]), np.array([0.1, 0.9, 0.5, 1.0, 0.2, 0.7])
    summary = StrataSummary(
        np.full(2, 3), np.array(draws), np.zeros(2), np.minimum(draws, 1) if sum(draws) > 1 else HALF
    )
    expected = []
    for chosen in itertools.product(*(itertools.combinations(range(3 * h, 3 * h + 3), m) for h, m in enumerate(draws))):
        clients = np.array(sum(chosen, ()))
        cohort = Cohort(clients, np.full(len(clients), np.nan), stratum=strata[clients], strata=summary)
        for having in itertools.product([0, 1], repeat=len(clients)):
            used = np.array(having) * SIZES[clients]
            c = coefficients("stratified", cohort, SIZES, used)
            assert not all(having) or c.sum() == pytest.approx(1)
            p = np.prod(np.where(having, chance[clients], 1 - chance[clients]))
            expected.append(p * c @ UPDATES[clients])
    found = np.sum(expected) / math.prod(math.comb(3, m) for m in draws)
    whole = chance * UPDATES / 6
    wanted = whole.sum() if sum(draws) > 1 else 2 * whole[strata == draws.index(1)].sum()
    assert found == pytest.approx(wanted)
