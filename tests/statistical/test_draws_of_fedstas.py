"""FedSTaS's Lemma 2.1: unbiased averages under importance draws."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from fedmpi import Cohort
from fedmpi.clients.cohort import StrataSummary
from fedmpi.clients.designs import proportional_inclusion
from tests.statistical.weighed import coefficients, every_draw

LABELS = np.array([0, 0, 0, 0, 1, 1, 1])
SIZES = np.array([4, 3])
NORMS = np.array([1.0, 2.0, 3.0, 4.0, 0.5, 1.5, 1.0])
MODELS = np.array([[-1.0, 0.2], [0.5, 1.0], [2.0, -1.0], [4.0, 3.0], [0.0, 5.0], [1.0, 1.0], [-3.0, 2.0]])
ONE_EACH = np.ones(7, np.int64)


def every_cohort(draws: tuple[int, int]) -> Iterator[tuple[float, Cohort]]:
    """All (probability, cohort) of two strata with a fixed allocation."""
    members = [np.flatnonzero(stratum == LABELS) for stratum in (0, 1)]
    parts = [(NORMS[part], m) for part, m in zip(members, draws, strict=True)]
    inclusion = np.concatenate([proportional_inclusion(part, m) for part, m in parts])
    outcomes = [list(every_draw(part, m)) for part, m in parts]
    for (first_chance, first), (second_chance, second) in product(*outcomes):
        clients = np.concatenate([members[0][first], members[1][second]])
        summary = StrataSummary(SIZES, np.array(draws), np.zeros(2))
        cohort = Cohort(clients, inclusion[clients], stratum=LABELS[clients], strata=summary)
        yield first_chance * second_chance, cohort


def expected_average(kind: str, draws: tuple[int, int]) -> np.ndarray:
    total, mean = 0.0, np.zeros(2)
    for probability, cohort in every_cohort(draws):
        total += probability
        mean += probability * coefficients(kind, cohort, ONE_EACH, population="clients") @ MODELS[cohort.clients]
    assert total == pytest.approx(1.0)
    return mean


@pytest.mark.parametrize("draws", [(2, 1), (1, 1), (3, 2), (1, 3)])
def test_horvitz_thompson_weights_are_unbiased(draws: tuple[int, int]) -> None:
    """Lemma 2.1: E[w_{t+1}] = W(K), by enumeration of every possible cohort."""
    assert expected_average("unbiased", draws) == pytest.approx(MODELS.mean(axis=0), abs=1e-9)


def test_the_papers_plain_means_are_biased_by_what_their_inclusion_probabilities_say() -> None:
    """Lemma 2.1 does not hold for Algorithm 2 as printed: its bias is Σ_h N_h/N Σ_k (π_k/m_h − 1/N_h) w_k.

    Here it is 33 % of the average's length: no small-sample curiosity.
    """
    draws = (2, 1)
    bias = expected_average("stratified", draws) - MODELS.mean(axis=0)
    by_hand = np.zeros(2)
    for stratum, m in enumerate(draws):
        members = np.flatnonzero(stratum == LABELS)
        inclusion = proportional_inclusion(NORMS[members], m)
        by_hand += len(members) / 7 * (inclusion / m - 1 / len(members)) @ MODELS[members]
    assert bias == pytest.approx(by_hand, abs=1e-9)
    assert np.linalg.norm(bias) / np.linalg.norm(MODELS.mean(axis=0)) == pytest.approx(0.330, abs=0.001)
