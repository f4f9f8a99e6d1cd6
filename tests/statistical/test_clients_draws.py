"""The draws of clients have the inclusion probabilities that they state.

Frequencies are compared by χ² at 1e-6 per test, so each statistical test here fails by chance once in a million seeds.
"""

import numpy as np
import pytest
from scipy import stats

from fedmpi import Cohort, UserError
from fedmpi.clients.cohort import cohort_size, full_participation, size_proportional_inclusion, uniform, weighted
from fedmpi.common.streams import Purpose, Streams

FALSE_ALARM = 1e-6
SIZES = np.array([1, 2, 3, 5, 8, 13, 21, 34, 0, 4], np.int64)


def generator(round: int) -> np.random.Generator:
    return Streams(11).generator(Purpose.COHORT, round)


def frequencies(draw, rounds: int, clients: int) -> np.ndarray:
    counts = np.zeros(clients)
    for t in range(rounds):
        cohort: Cohort = draw(generator(t))
        counts[cohort.clients] += cohort.multiplicity
    return counts


def test_uniform_draws_include_every_client_with_probability_m_over_n():
    clients, count, rounds = 50, 7, 4000
    counts = frequencies(lambda g: uniform(g, clients, count), rounds, clients)
    q = count / clients
    statistic = np.sum((counts - rounds * q) ** 2) / (rounds * q * (1 - q)) * (clients - 1) / clients
    assert stats.chi2.sf(statistic, clients - 1) > FALSE_ALARM
    assert uniform(generator(0), clients, count).inclusion == pytest.approx(q)


def test_weighted_draws_with_replacement_are_proportional_to_size():
    count, rounds = 5, 4000
    counts = frequencies(lambda g: weighted(g, SIZES, None, count), rounds, SIZES.size)
    held = SIZES > 0
    assert counts[~held].sum() == 0
    expected = SIZES[held] / SIZES.sum() * count * rounds
    assert stats.chisquare(counts[held], expected).pvalue > FALSE_ALARM
    cohort = weighted(generator(1), SIZES, None, count)
    assert cohort.draws == count
    assert cohort.inclusion == pytest.approx(count * SIZES[cohort.clients] / SIZES.sum())


def test_weighted_draws_without_replacement_have_exactly_the_stated_inclusion_probabilities():
    """z-scores of all frequencies, Bonferroni at 1e-6 in all."""
    count, rounds = 4, 6000
    inclusion = size_proportional_inclusion(SIZES, count)
    counts = frequencies(lambda g: weighted(g, SIZES, None, count, replace=False), rounds, SIZES.size)
    certain = (inclusion == 0) | (inclusion == 1)
    assert np.array_equal(counts[certain], rounds * inclusion[certain])
    q = inclusion[~certain]
    z = (counts[~certain] - rounds * q) / np.sqrt(rounds * q * (1 - q))
    assert np.abs(z).max() < stats.norm.isf(FALSE_ALARM / (2 * z.size))


@pytest.mark.parametrize("count", range(1, 10))
def test_every_draw_without_replacement_has_the_asked_size_and_its_probabilities_sum_to_it(count: int):
    inclusion = size_proportional_inclusion(SIZES, count)
    assert inclusion.max() <= 1
    assert inclusion.sum() == pytest.approx(count)
    for t in range(50):
        cohort = weighted(generator(t), SIZES, None, count, replace=False)
        assert cohort.clients.size == count == np.unique(cohort.clients).size
        assert cohort.inclusion == pytest.approx(inclusion[cohort.clients])


def test_proportionality_holds_among_the_clients_that_are_not_certain():
    inclusion = size_proportional_inclusion(SIZES, 4)
    open_ = inclusion < 1
    assert 0 < np.count_nonzero(~open_) < SIZES.size
    ratio = inclusion[open_ & (SIZES > 0)] / SIZES[open_ & (SIZES > 0)]
    assert np.ptp(ratio) == pytest.approx(0)


def test_only_available_clients_are_drawn():
    available = np.array([1, 4, 5, 7], np.int64)
    for t in range(20):
        for cohort in (
            uniform(generator(t), available, 3),
            weighted(generator(t), SIZES, available, 3),
            weighted(generator(t), SIZES, available, 3, replace=False),
        ):
            assert np.isin(cohort.clients, available).all()
            assert np.all(np.diff(cohort.clients) > 0)
    assert uniform(generator(0), available, 3).inclusion == pytest.approx(3 / 4)


def test_when_too_few_clients_are_available_all_of_them_take_part():
    available = np.array([2, 9], np.int64)
    cohort = uniform(generator(0), available, 5)
    assert cohort.clients.tolist() == [2, 9]
    assert cohort.inclusion.tolist() == [1, 1]
    assert uniform(generator(0), np.zeros(0, np.int64), 5).clients.size == 0
    assert weighted(generator(0), SIZES, np.zeros(0, np.int64), 5).clients.size == 0


def test_everyone_is_everyone_once():
    cohort = full_participation(4)
    assert cohort.clients.tolist() == [0, 1, 2, 3]
    assert cohort.multiplicity.tolist() == cohort.inclusion.tolist() == [1, 1, 1, 1]


def test_a_fraction_of_the_clients_is_rounded_half_up_and_never_nobody():
    assert cohort_size(10, fraction=0.25) == 3
    assert cohort_size(10, fraction=0.01) == 1
    assert cohort_size(10, count=10) == 10


@pytest.mark.parametrize("wanted", [{}, {"count": 3, "fraction": 0.1}, {"count": 0}, {"count": 11}, {"fraction": 1.5}])
def test_an_impossible_cohort_size_is_the_users_error(wanted: dict):
    with pytest.raises(UserError, match=r"participation\."):
        cohort_size(10, **wanted)


def test_weighted_draws_from_clients_without_samples_are_the_users_error():
    with pytest.raises(UserError, match="at least one sample"):
        weighted(generator(0), np.zeros(3, np.int64), None, 2)
