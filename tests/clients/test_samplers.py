"""Power of choice and clustered sampling by size, each beside a plain loop written from the paper."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from fedmpi import Cohort, ComponentFailure, UserError, client_sampler
from fedmpi.clients.sampler import ClientNumbers, ClientSampler, PastRound, PastRounds, View
from fedmpi.clients.samplers import PowerOfChoice, clustered_by_size
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
    for t in range(2_000):
        view = view_of(t, 2, sizes)
        seen[tuple(PowerOfChoice(candidates=3).candidates(view).tolist())] += 1
    assert chisquare(list(seen.values()), 2_000 * expected).pvalue > FALSE_ALARM


def test_the_candidates_with_the_highest_loss_are_selected() -> None:
    losses = np.full(10, np.nan)
    losses[[0, 1, 3, 6, 8, 9]] = [0.5, 2.0, 0.1, 2.0, 3.0, 0.2]
    cohort = PowerOfChoice().draw(view_of(count=3, measured={"loss": losses}))
    assert cohort.clients.tolist() == [1, 6, 8] and cohort.inclusion is None and cohort.multiplicity.tolist() == [1] * 3
    assert PowerOfChoice().draw(view_of(count=2, measured={"loss": losses})).clients.tolist() == [1, 8]  # ties: lower


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
    """E[draws of k] = m n_k / n, exactly from the urns."""
    m, n = 4, int(SIZES.sum())
    urns = plain_urns(SIZES, m)
    np.testing.assert_allclose([sum(urn.count(k) for urn in urns) / n for k in range(len(SIZES))], m * SIZES / n)
    cohort = clustered_by_size(view_of(0, m))
    np.testing.assert_allclose(cohort.inclusion, m * SIZES[cohort.clients] / n, rtol=1e-12)


# Checks of what a sampler returns


def sampler_of(draw: Any) -> ClientSampler:
    return ClientSampler(resolve("client sampler", draw), {})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1, 2], "fedmpi.Cohort"),
        (Cohort(np.array([0.5, 1.0])), "clients of type float64"),
        (Cohort(np.array([3, 99])), "client 99"),
        (Cohort(np.array([1, 2]), np.array([0.5])), r"inclusion of type float64, shape \(1,\)"),
        (Cohort(np.array([1, 2]), np.array([0.5, 0.0])), "probability 0 for client 2"),
        (Cohort([2, 1, 2], [1.5, 0.5, 1.5]), "probability 1.5 for client 2.*multiplicity"),
        (Cohort(np.array([1]), None, np.array([1.5])), "multiplicity"),
        (Cohort([2, 1, 2], steps=[5, 3, 4]), "client 2 twice, with different steps"),
        (Cohort(np.array([1]), np.array([np.nan])), "inclusion .*finite"),
        (Cohort(np.array([1]), numbers={"mine": np.inf}), "numbers .*finite"),
    ],
)
def test_a_useless_cohort_is_rejected_by_name(returned: Any, message: str) -> None:
    def mine(view: View) -> Any:
        return returned

    with pytest.raises(ComponentFailure, match=f"client sampler .*mine.* failed in round 6: .*{message}"):
        sampler_of(mine).draw(view_of(6))


def test_a_custom_sampler_is_not_called_if_no_client_is_available() -> None:
    def mine(view: View) -> Cohort:
        raise NotImplementedError

    found = sampler_of(mine).draw(replace(view_of(), present=np.arange(0)))
    assert not found.clients.size and found.inclusion is not None and not found.inclusion.size


@pytest.mark.parametrize("cohort", [([7, 1, 7, 3], [0.7, 0.1, 0.7, 0.3]), ([1, 7, 3], [0.1, 1.7, 0.3], [1, 2, 1])])
def test_a_cohort_is_sorted_and_a_client_listed_twice_was_drawn_twice(cohort: Any) -> None:
    """Expected numbers of draws may exceed 1 in rounds in which draws are counted."""

    def mine(view: View) -> Cohort:
        return Cohort(*cohort)

    found = sampler_of(mine).draw(view_of())
    assert found.clients.tolist() == [1, 3, 7] and found.multiplicity.tolist() == [1, 1, 2]
    assert found.inclusion is not None and found.inclusion.tolist() == [0.1, 0.3, max(cohort[1])]


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
    with pytest.raises(UserError, match="measures = 'strata' is unknown"):
        client_sampler(measures="strata")


def test_numbers_are_remembered_with_their_age_and_survive_a_checkpoint() -> None:
    numbers = ClientNumbers(("loss", "seconds"), 4)
    numbers.enter("loss", 3, np.array([0, 2]), np.array([1.5, 2.5]))
    again = ClientNumbers(("loss", "seconds"), 4)
    again.load(numbers.state())
    view = view_of(5, numbers=again)
    assert view.age("loss").tolist() == [2, -1, 2, -1] and view.age("seconds").tolist() == [-1] * 4
    view.last("loss")[:] = 0.0  # a copy
    np.testing.assert_array_equal(view.last("loss"), [1.5, np.nan, 2.5, np.nan])
    with pytest.raises(KeyError, match=r"numbers\.accuracy"):
        ClientNumbers(("accuracy",), 4).load(numbers.state())


def test_there_are_at_least_as_many_candidates_as_participants_and_none_without_samples() -> None:
    sampler = PowerOfChoice(candidates=2)
    assert len(sampler.candidates(view_of(count=5))) == 5
    everybody = PowerOfChoice(candidates=100).candidates(view_of())
    assert everybody.tolist() == np.flatnonzero(SIZES).tolist()
    there = np.array([2, 3, 7], np.int64)
    assert PowerOfChoice().candidates(view_of(present=there)).tolist() == [3, 7]
    assert not len(PowerOfChoice().candidates(view_of(present=np.array([2], np.int64))))


def test_a_view_has_the_past_rounds_and_vectors_of_the_clients() -> None:
    numbers = ClientNumbers(("update_sketch", "head_update"), 4, {"update_sketch": 3, "head_update": 2})
    numbers.enter("update_sketch", 2, np.array([3]), np.array([[1.0, 2.0, 4.0]]))
    past = [PastRound(t, np.arange(4), np.array([t]), {"train_loss": 1.0}, 2.0 + t) for t in range(3)]
    view = view_of(3, sizes=np.ones(4, np.int64), numbers=numbers, past=past)
    assert view.history[-1].arrived.tolist() == [2] and np.isnan(view.clock)
    assert view.sketches.dtype == np.float32 and view.sketches[3].tolist() == [1.0, 2.0, 4.0]
    assert view.age("update_sketch").tolist() == [-1, -1, -1, 1] and view.last("head_update").shape == (4, 2)
    again = ClientNumbers(numbers.names, 4, numbers.widths)
    again.load(numbers.state())
    np.testing.assert_array_equal(again.values["update_sketch"], view.sketches)
    with pytest.raises(UserError, match=r'needs=\("history",\)'):
        view_of().history  # noqa: B018
    dependent = [sampler_of(name).depends_on_rounds for name in ("ucb", "fedcs", "active", "fedgs", "uniform")]
    assert dependent == [True, True, True, True, False]


def test_past_rounds_have_the_finite_numbers_of_their_records_and_survive_a_checkpoint() -> None:
    past, again = PastRounds(), PastRounds()
    for t in range(2):
        past.enter(t, np.arange(3 + t), np.arange(t))
    past.finish({"round": 0, "seconds": 9.0, "participants": 0, "train_loss": math.nan, "clients": "0", "last": True})
    again.load(past.state())
    for one in (past, again):
        found = [(len(done.selected), len(done.arrived), done.metrics) for done in one.rounds]
        assert found == [(3, 0, {"participants": 0}), (4, 1, {})]
