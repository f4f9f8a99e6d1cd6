"""How often clients are really available, and how often they drop out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedmpi.clients.availability import TimeOfDay
from fedmpi.clients.cohort import full_participation
from fedmpi.clients.devices import survivors
from fedmpi.clients.view import View
from fedmpi.common.streams import Streams
from tests.statistical.weighed import there

CLIENTS, ROUNDS = 60, 2000
LABELS = np.arange(CLIENTS) % 4
STREAMS = Streams(5)


def by_time(round: int) -> np.ndarray:
    return TimeOfDay(probability=0.9, lowest=0.2)(View(round, CLIENTS, np.ones(CLIENTS, np.int64), CLIENTS, STREAMS))


@pytest.mark.parametrize(
    ("chance_of", "named"),
    [
        (lambda round: np.full(CLIENTS, 0.3), "bernoulli clients.availability.probability=0.3"),
        (
            by_time,
            "time-of-day clients.availability.probability=0.9 clients.availability.lowest=0.2 clients.availability.period=24",
        ),
        (
            lambda round: np.array([0.2, 0.4, 0.6, 0.8])[LABELS],
            "label-group clients.availability.by_label=[0.2,0.4,0.6,0.8]",
        ),
    ],
)
def test_clients_are_available_as_often_as_their_law_says(chance_of: Callable[[int], np.ndarray], named: str) -> None:
    """60 clients, 2,000 rounds: no frequency is 5 standard errors off (false alarm 4e-5 per law)."""
    hits, expected, variance = np.zeros(CLIENTS), np.zeros(CLIENTS), np.zeros(CLIENTS)
    for round in range(ROUNDS):
        hits[there(named, STREAMS, round, CLIENTS, LABELS)] += 1
        chance = chance_of(round)
        expected += chance
        variance += chance * (1 - chance)
    assert (np.abs(hits - expected) < 5 * np.sqrt(variance)).all()


def test_drop_outs_are_as_frequent_as_stated_and_independent_of_availability() -> None:
    """2,000 rounds × 60 clients: frequency and correlation with availability within 5 standard errors (1e-6)."""
    cohort = full_participation(CLIENTS)
    stayed, present = np.zeros((ROUNDS, CLIENTS)), np.zeros((ROUNDS, CLIENTS))
    for round in range(ROUNDS):
        stayed[round, survivors(STREAMS, round, cohort, CLIENTS, 0.25).clients] = 1
        present[round, there("bernoulli clients.availability.probability=0.5", STREAMS, round, CLIENTS)] = 1
    number = stayed.size
    assert abs(stayed.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / number)
    assert abs(np.corrcoef(stayed.ravel(), present.ravel())[0, 1]) < 5 / np.sqrt(number)
