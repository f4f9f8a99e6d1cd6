"""Power of choice, Oort's utility and clustered sampling by size, each beside a plain loop written from the paper."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from fedmpi import Cohort, ComponentFailure, UserError, client_sampler
from fedmpi.clients.cohort import invited
from fedmpi.clients.sampler import ClientNumbers, ClientSampler, View
from fedmpi.clients.samplers import Oort, PowerOfChoice, clustered_by_size
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Streams

SIZES = np.array([40, 3, 0, 17, 8, 8, 60, 1, 25, 9], np.int64)
FALSE_ALARM = 1e-4
"""Chance that a statistical test of a right sampler fails; seeds are fixed, so that it does or does not for good."""


def view_of(round: int = 0, count: int = 4, sizes: np.ndarray = SIZES, seed: int = 0, **more: Any) -> View:
    return View(round, count, sizes, more.pop("present", len(sizes)), Streams(seed), **more)


# Power of choice (Cho et al. 2020)


def chance_of_set(weights: np.ndarray, drawn: tuple[int, ...]) -> float:
    """Chance that one draw after another, by weight among those left, gives this set."""
    total = 0.0
    for order in itertools.permutations(drawn):
        chance, left = 1.0, weights.sum()
        for k in order:
            chance *= weights[k] / left
            left -= weights[k]
        total += chance
    return total


def test_candidates_are_drawn_by_size_sequentially() -> None:
    """Chi-square over all sets of 3 of 6 clients; false-alarm rate 1e-4."""
    sizes = np.array([5, 1, 10, 2, 7, 3], np.int64)
    sets = list(itertools.combinations(range(6), 3))
    expected = np.array([chance_of_set(sizes.astype(float), drawn) for drawn in sets])
    assert math.isclose(expected.sum(), 1.0)
    seen = dict.fromkeys(sets, 0)
    for t in range(20_000):
        view = view_of(t, 2, sizes)
        seen[tuple(PowerOfChoice(candidates=3).candidates(view).tolist())] += 1
    assert chisquare(list(seen.values()), 20_000 * expected).pvalue > FALSE_ALARM


def test_the_candidates_with_the_highest_loss_are_selected() -> None:
    losses = np.full(10, np.nan)
    losses[[0, 1, 3, 6, 8, 9]] = [0.5, 2.0, 0.1, 2.0, 3.0, 0.2]
    cohort = PowerOfChoice().draw(view_of(count=3, measured={"loss": losses}))
    assert cohort.clients.tolist() == [1, 6, 8] and cohort.inclusion is None and cohort.multiplicity.tolist() == [1] * 3
    assert PowerOfChoice().draw(view_of(count=2, measured={"loss": losses})).clients.tolist() == [1, 8]  # ties: lower


# Oort (Lai et al. 2021)


def remembered(ages: dict[int, int], losses: dict[int, float], round: int, clients: int = 10) -> ClientNumbers:
    numbers = ClientNumbers(("loss",), clients)
    for k, age in ages.items():
        numbers.enter("loss", round - age, np.array([k]), np.array([losses[k]]))
    return numbers


AGES = {0: 3, 1: 1, 3: 9, 6: 2, 8: 1, 9: 12}
LOSSES = {0: 0.7, 1: 2.3, 3: 1.1, 6: 0.4, 8: 1.9, 9: 0.05}


def plain_utilities(round: int, clip: float, stale: float) -> dict[int, float]:
    """n_k · loss_k, capped at a quantile, plus √(stale · ln R / L), R and L counted from 1, in plain loops."""
    base = {k: float(SIZES[k]) * LOSSES[k] for k in AGES}
    ordered = sorted(base.values())
    place = clip * (len(ordered) - 1)
    below = int(place)
    cap = ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])
    now = round + 1
    return {k: min(base[k], cap) + math.sqrt(stale * math.log(now) / (now - age)) for k, age in AGES.items()}


@pytest.mark.parametrize("round", [13, 40])
def test_the_utility_is_that_of_plain_loops(round: int) -> None:
    numbers = remembered(AGES, LOSSES, round)
    known = np.array(sorted(AGES))
    found = Oort(clip=0.8, stale=0.3).utility(view_of(round, numbers=numbers), known)
    expected = plain_utilities(round, 0.8, 0.3)
    np.testing.assert_allclose(found, [expected[k] for k in known.tolist()], rtol=1e-12)


def test_exploited_are_those_near_the_best_and_explored_those_never_seen() -> None:
    round, count, cutoff = 20, 4, 0.5
    utilities = plain_utilities(round, 0.95, 0.1)
    share = max(0.2, 0.9 * 0.98**round)
    explored = math.floor(share * count + 0.5)
    ranked = sorted(utilities.values(), reverse=True)
    pool = {k for k, u in utilities.items() if u >= cutoff * ranked[count - explored - 1]}
    assert 0 < explored < count and len(pool) > count - explored  # there is something to choose
    seen = set()
    for seed in range(40):
        numbers = remembered(AGES, LOSSES, round)
        cohort = Oort(cutoff=cutoff).draw(view_of(round, count, seed=seed, numbers=numbers))
        old = [k for k in cohort.clients.tolist() if k in AGES]
        assert len(cohort.clients) == count and len(old) == count - explored and set(old) <= pool
        seen |= set(old)
    assert seen == pool and cohort.inclusion is None


def test_exploitation_is_in_proportion_to_utility() -> None:
    """One exploited client: chi-square against the utilities of the pool, false-alarm rate 1e-4."""
    round = 30
    utilities = plain_utilities(round, 0.95, 0.1)
    sampler = Oort(explore=0.0, explore_least=0.0, cutoff=0.0)
    numbers = remembered(AGES, LOSSES, round)
    times = dict.fromkeys(sorted(AGES), 0)
    for seed in range(10_000):
        (k,) = sampler.draw(view_of(round, 1, seed=seed, numbers=numbers)).clients.tolist()
        times[k] += 1
    expected = np.array([utilities[k] for k in times])
    assert chisquare(list(times.values()), 10_000 * expected / expected.sum()).pvalue > FALSE_ALARM


def test_exploration_decays_from_round_to_round_down_to_its_least() -> None:
    sampler = Oort(explore=1.0, explore_decay=0.5, explore_least=0.25)
    for round, count, explored in ((1, 4, 2), (2, 4, 1), (9, 4, 1), (1, 3, 2)):  # count · max(0.25, 0.5^round), rounded
        numbers = remembered(dict.fromkeys(range(7), 1), dict.fromkeys(range(7), 1.0), round)
        drawn = sampler.draw(view_of(round, count, numbers=numbers)).clients
        assert len(drawn) == count and (drawn > 6).sum() == explored


def test_clients_without_samples_are_not_explored_for_ever() -> None:
    """No client ever has a loss, so that all would stay unknown."""
    sizes = np.array([0, 0, 0, 0, 5, 6, 7, 8, 9], np.int64)
    known = remembered(dict.fromkeys(range(4, 9), 1), dict.fromkeys(range(4, 9), 0.7), 30)
    for seed in range(10):
        drawn = Oort().draw(view_of(30, 4, sizes, seed, numbers=known)).clients
        assert len(drawn) == 4 and drawn.min() >= 4
    nobody = ClientNumbers(("loss",), 9)
    assert Oort().draw(view_of(0, 7, sizes, numbers=nobody)).clients.tolist() == [4, 5, 6, 7, 8]


# Clustered sampling by size (Fraboni et al. 2021, Algorithm 1)


def plain_urns(sizes: np.ndarray, m: int) -> list[list[int]]:
    """m urns of n balls: clients from the largest to the smallest lay down m n_k balls each, sequentially."""
    order = sorted(range(len(sizes)), key=lambda k: (-sizes[k], k))
    balls = [k for k in order for _ in range(m * int(sizes[k]))]
    n = int(sizes.sum())
    return [balls[urn * n : (urn + 1) * n] for urn in range(m)]


@pytest.mark.parametrize("m", [1, 3, 7])
def test_one_client_is_drawn_from_every_urn(m: int) -> None:
    for t in range(50):
        cohort = clustered_by_size(view_of(t, m))
        balls = view_of(t, m).generator.integers(0, SIZES.sum(), m).tolist()
        drawn = [urn[ball] for urn, ball in zip(plain_urns(SIZES, m), balls, strict=True)]
        assert np.repeat(cohort.clients, cohort.multiplicity).tolist() == sorted(drawn)
        assert cohort.draws == m


def test_the_expected_number_of_draws_is_that_of_draws_by_size() -> None:
    """E[draws of k] = m n_k / n: exactly from the urns, and in 20,000 draws to 4.9 standard errors (1e-6 a client)."""
    m, n = 4, int(SIZES.sum())
    urns = plain_urns(SIZES, m)
    exact = np.array([sum(urn.count(k) for urn in urns) / n for k in range(len(SIZES))])
    np.testing.assert_allclose(exact, m * SIZES / n, rtol=1e-12)
    times = np.zeros(len(SIZES))
    rounds = 20_000
    for t in range(rounds):
        cohort = clustered_by_size(view_of(t, m))
        times[cohort.clients] += cohort.multiplicity
        np.testing.assert_allclose(cohort.inclusion, m * SIZES[cohort.clients] / n, rtol=1e-12)
    error = np.sqrt(m * SIZES / n / rounds) + 1e-12
    assert (np.abs(times / rounds - m * SIZES / n) < 4.9 * error).all()


# Checks of what a sampler returns


def sampler_of(draw: Any) -> ClientSampler:
    return ClientSampler(resolve("client sampler", draw), {})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "fedmpi.Cohort"),
        ([1, 2], "fedmpi.Cohort"),
        (Cohort(np.array([0.5, 1.0])), "clients of type float64"),
        (Cohort(np.array([3, 99])), "client 99"),
        (Cohort(np.array([3, 10])), "client 10"),
        (Cohort(np.array([-1])), "client -1"),
        (Cohort(np.array([1, 2]), np.array([0.5])), r"inclusion of type float64, shape \(1,\)"),
        (Cohort(np.array([1, 2]), np.array([0.5, 0.0])), "probability 0 for client 2"),
        (Cohort(np.array([1, 2]), np.array([0.5, 1.5])), "probability 1.5 for client 2"),
        (Cohort([2, 1, 2], [1.5, 0.5, 1.5]), "probability 1.5 for client 2.*multiplicity"),
        (Cohort(np.array([1]), None, np.array([0])), "multiplicity"),
        (Cohort(np.array([1]), None, np.array([1.5])), "multiplicity"),
        (Cohort(np.array([1]), np.array([np.nan])), "inclusion .*finite"),
        (Cohort(np.array([1]), numbers={"mine": np.inf}), "numbers .*finite"),
        (Cohort(np.array([1]), numbers={"mine": "many"}), "numbers .*real numbers"),  # type: ignore[dict-item]
    ],
)
def test_a_useless_cohort_is_rejected_by_name(returned: Any, message: str) -> None:
    def mine(view: View) -> Any:
        return returned

    with pytest.raises(ComponentFailure, match=f"client sampler .*mine.* failed in round 6: .*{message}"):
        sampler_of(mine).draw(view_of(6))


def test_a_cohort_is_sorted_and_a_client_listed_twice_was_drawn_twice() -> None:
    def mine(view: View) -> Cohort:
        return Cohort([7, 1, 7, 3], [0.7, 0.1, 0.7, 0.3])  # type: ignore[arg-type]

    cohort = sampler_of(mine).draw(view_of())
    assert cohort.clients.tolist() == [1, 3, 7] and cohort.multiplicity.tolist() == [1, 1, 2]
    assert cohort.inclusion is not None and cohort.inclusion.tolist() == [0.1, 0.3, 0.7]


@pytest.mark.parametrize("times", [[1], [1, 1], [2, 1], [1, 3]])
def test_expected_numbers_of_draws_above_1_are_taken_in_every_round_in_which_draws_are_counted(times: Any) -> None:
    def mine(view: View) -> Cohort:
        return Cohort(np.arange(len(times)), np.full(len(times), 1.5), np.array(times))

    cohort = sampler_of(mine).draw(view_of())
    assert cohort.inclusion is not None and set(cohort.inclusion) == {1.5} and cohort.multiplicity.tolist() == times


def test_as_many_are_asked_as_over_selection_says_and_no_more_than_there_are() -> None:
    assert invited(3, 1.5, 99) == 5 and invited(10, 1.0, 99) == 10 and invited(10, 2.0, 15) == 15
    assert invited(50, 1.1, 99) == 55 < 50 * 1.1  # in floats


def test_a_sampler_sees_only_what_it_has_asked_for_and_cannot_change_sizes() -> None:
    @client_sampler(needs=("loss",))
    def mine(view: View) -> Cohort:
        with pytest.raises(ValueError, match="read-only"):
            view.sizes[0] = 1
        view.last("seconds")
        return Cohort(view.available)

    with pytest.raises(UserError, match=r"view\.last\('seconds'\) .*\(needs=\('seconds',\)"):
        sampler_of(mine).draw(view_of(numbers=ClientNumbers(("loss",), 10)))
    with pytest.raises(UserError, match=r"view\.fresh\('loss'\) is not measured"):
        view_of().fresh("loss")


def test_measuring_requires_a_class_with_two_methods() -> None:
    @client_sampler(measures=("loss",))
    def mine(view: View) -> Cohort:
        return Cohort(view.available)

    @client_sampler(measures=("loss",))
    class OneStage:
        def draw(self, view: View) -> Cohort:
            return Cohort(view.available)

    @client_sampler
    class Drawless:
        pass

    for wrong in (mine, OneStage, Drawless):
        with pytest.raises(UserError, match=r"has no method (candidates|draw)\(view\)"):
            sampler_of(wrong)


def test_numbers_are_remembered_with_their_age_and_survive_a_checkpoint() -> None:
    numbers = ClientNumbers(("loss", "seconds"), 4)
    numbers.enter("loss", 3, np.array([0, 2]), np.array([1.5, 2.5]))
    again = ClientNumbers(("loss", "seconds"), 4)
    again.load(numbers.state())
    assert again.age("loss", 5).tolist() == [2, -1, 2, -1] and again.age("seconds", 5).tolist() == [-1] * 4
    np.testing.assert_array_equal(again.last("loss"), [1.5, np.nan, 2.5, np.nan])
    with pytest.raises(UserError, match=r"lacks numbers\.accuracy"):
        ClientNumbers(("accuracy",), 4).load(numbers.state())


def test_there_are_at_least_as_many_candidates_as_participants_and_none_without_samples() -> None:
    sampler = PowerOfChoice(candidates=2)
    assert len(sampler.candidates(view_of(count=5))) == 5
    everybody = PowerOfChoice(candidates=100).candidates(view_of())
    assert everybody.tolist() == np.flatnonzero(SIZES).tolist()
    there = np.array([2, 3, 7], np.int64)
    assert PowerOfChoice().candidates(view_of(present=there)).tolist() == [3, 7]
    assert not len(PowerOfChoice().candidates(view_of(present=np.array([2], np.int64))))


def test_where_no_client_is_known_all_are_explored_and_where_all_are_known_none_is() -> None:
    nobody = ClientNumbers(("loss",), 10)
    assert len(Oort().draw(view_of(0, 4, numbers=nobody)).clients) == 4
    assert len(Oort(explore=0.0, explore_least=0.0).draw(view_of(0, 4, numbers=nobody)).clients) == 4
    everybody = remembered(dict.fromkeys(range(10), 1), dict.fromkeys(range(10), 0.0), 5)
    drawn = Oort(explore=1.0, explore_least=1.0).draw(view_of(5, 7, numbers=everybody)).clients
    assert len(drawn) == 7 and (np.diff(drawn) > 0).all()
    few = np.array([1, 4], np.int64)
    assert Oort().draw(view_of(0, 4, present=few, numbers=nobody)).clients.tolist() == [1, 4]
