"""The draws of clients have the inclusion probabilities that they state.

Frequencies are compared by χ² at 1e-6 per test, so each statistical test here fails by chance once in a million seeds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedmpi import UserError
from fedmpi.clients.cohort import cohort_size, full_participation
from fedmpi.clients.devices import survivors
from fedmpi.clients.sampler import ClientSampler, View
from fedmpi.clients.strata import make_strata
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Streams
from tests.statistical.weighed import there

FALSE_ALARM = 1e-6
SIZES = np.array([1, 2, 3, 5, 8, 13, 21, 34, 0, 4], np.int64)


STRATA = make_strata(np.arange(10) % 3, np.array([1.0, 3.0, 0.5]), np.random.default_rng(0).lognormal(0, 0.7, 10))
DRAWS: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("all", {}),
    "uniform": ("uniform", {}),
    "weighted": ("weighted", {}),
    "weighted without replacement": ("weighted", {"replace": False}),
    "clustered-md": ("clustered-md", {}),
    "shuffled": ("shuffled", {}),
    "importance": ("importance", {}),
    "proportional uniform": ("stratified", {"allocation": "proportional", "within_stratum": "uniform"}),
    "neyman importance": ("stratified", {"allocation": "neyman"}),
    "equal importance": ("stratified", {"allocation": "equal"}),
}


@pytest.mark.parametrize(("name", "count"), [(name, 2 + 3 * (place % 2)) for place, name in enumerate(DRAWS)])
def test_every_client_is_drawn_as_often_as_its_stated_probability_says(name: str, count: int) -> None:
    """1,000 rounds: every frequency is within the two-sided normal quantile of 1e-6 over the clients, and the stated
    probabilities add up to m.
    """
    (kind, options), clients, rounds = DRAWS[name], len(SIZES), 1000
    sampler = ClientSampler(resolve("client sampler", kind), options)
    expected = clients if kind == "all" else count
    hits, stated = np.zeros(clients), np.zeros(clients)
    for t in range(rounds):
        cohort = sampler.draw(View(t, count, SIZES, clients, Streams(6), strata=STRATA, wanted=lambda n: count))
        assert cohort.draws == expected
        hits[cohort.clients] += cohort.multiplicity
        stated[cohort.clients] = cohort.inclusion
    assert stated.sum() == pytest.approx(expected)
    limit = stats.norm.isf(FALSE_ALARM / (2 * clients))
    variance = stated * (1 - stated / (count if cohort.counts_draws else 1))  # of draws of one client in a round
    assert (np.abs(hits - rounds * stated) <= limit * np.sqrt(rounds * variance.clip(0)) + 1e-6).all()


@pytest.mark.parametrize("name", ["importance", "stratified"])
def test_sequential_draws_state_no_probability(name: str):
    sampler = ClientSampler(resolve("client sampler", name), {"design": "sequential"})
    cohort = sampler.draw(View(0, 4, SIZES, len(SIZES), Streams(6), strata=STRATA, wanted=lambda n: 4))
    assert len(cohort.clients) == 4 and cohort.inclusion is None


def test_a_fraction_of_the_clients_is_rounded_half_up_and_never_zero():
    assert cohort_size(10, fraction=0.25) == 3
    assert cohort_size(10, fraction=0.01) == 1
    assert cohort_size(10, count=10) == 10


@pytest.mark.parametrize("wanted", [{}, {"count": 0}, {"count": 11}])
def test_an_impossible_cohort_size_is_the_users_error(wanted: dict):
    with pytest.raises(UserError, match=r"clients\."):
        cohort_size(10, **wanted)


def test_weighted_draws_from_clients_without_samples_are_the_users_error():
    with pytest.raises(UserError, match="at least one sample"):
        ClientSampler(resolve("client sampler", "weighted"), {}).draw(View(0, 2, np.zeros(3, np.int64), 3, Streams(6)))


CLIENTS, ROUNDS = 60, 800
LABELS = np.arange(CLIENTS) % 4
STREAMS = Streams(5)


@pytest.mark.parametrize(
    ("law", "chance"),
    [
        ("bernoulli clients.availability.probability=0.3", np.full(CLIENTS, 0.3)),
        ("label-group clients.availability.by_label=[0.2,0.4,0.6,0.8]", 0.2 + 0.2 * LABELS),
    ],
)
def test_clients_are_available_as_often_as_the_availability_model_states(law: str, chance: np.ndarray) -> None:
    """60 clients, 800 rounds: no frequency is 5 standard errors off (false alarm 4e-5 per law)."""
    hits = np.zeros(CLIENTS)
    for round in range(ROUNDS):
        hits[there(law, STREAMS, round, CLIENTS, LABELS)] += 1
    assert (np.abs(hits / ROUNDS - chance) < 5 * np.sqrt(chance * (1 - chance) / ROUNDS)).all()


def test_drop_outs_are_as_frequent_as_stated_and_independent_of_availability() -> None:
    """800 rounds × 60 clients: frequency and correlation with availability within 5 standard errors (1e-6)."""
    cohort = full_participation(CLIENTS)
    stayed, present = np.zeros((ROUNDS, CLIENTS)), np.zeros((ROUNDS, CLIENTS))
    for round in range(ROUNDS):
        stayed[round, survivors(STREAMS, round, cohort, CLIENTS, 0.25).clients] = 1
        present[round, there("bernoulli clients.availability.probability=0.5", STREAMS, round, CLIENTS)] = 1
    number = stayed.size
    assert abs(stayed.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / number)
    assert abs(np.corrcoef(stayed.ravel(), present.ravel())[0, 1]) < 5 / np.sqrt(number)
