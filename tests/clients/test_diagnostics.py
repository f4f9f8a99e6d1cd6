"""Evenness of use, drift and diversity against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi.common.fairness import Usage, evenness
from fedmpi.local.pipeline import (
    UpdateMoments,
    client_drift,
    gradient_diversity,
    local_gain,
    update_moments,
)

CHANGES = np.random.default_rng(0).normal(size=(6, 40)) + 0.3
COEFFICIENTS = np.array([0.1, 0.3, 0.05, 0.2, 0.2, 0.15])


def moments_and_norm(changes: np.ndarray, coefficients: np.ndarray) -> tuple[UpdateMoments, float]:
    norms = np.linalg.norm(changes, axis=1)
    return update_moments(norms, coefficients), float(np.linalg.norm(coefficients @ changes))


def test_gini_is_half_the_relative_mean_difference() -> None:
    usage = np.array([1, 4, 0, 2, 9])
    pairs = np.abs(usage[:, None] - usage).mean() / (2 * usage.mean())
    assert evenness(usage).gini == pytest.approx(pairs)


def test_groups_of_units_count_as_their_units() -> None:
    usage, sizes = np.array([2, 0, 5]), np.array([3, 4, 1])
    grouped, single = evenness(usage, sizes), evenness(np.repeat(usage, sizes))
    assert (grouped.used, grouped.largest) == (single.used, single.largest)
    assert grouped.effective == pytest.approx(single.effective)
    assert grouped.gini == pytest.approx(single.gini)


def test_usage_counts_clients_with_multiplicity_and_repeated_samples() -> None:
    usage = Usage(4, 6)
    usage.record(np.array([0, 2]))
    usage.record(np.array([2, 3]), np.array([2, 1]))
    usage.record_samples(np.array([1, 1, 5]))
    assert usage.clients.tolist() == [1, 0, 3, 1]
    assert usage.samples.tolist() == [0, 2, 0, 0, 0, 1]


def test_drift_is_the_weighted_mean_squared_distance_from_the_mean_model() -> None:
    weights = COEFFICIENTS / COEFFICIENTS.sum()
    distances = ((CHANGES - weights @ CHANGES) ** 2).sum(axis=1)
    for scale in (1.0, 3.0):  # weights need not sum to one
        assert client_drift(*moments_and_norm(CHANGES, scale * COEFFICIENTS)) == pytest.approx(weights @ distances)
    assert client_drift(*moments_and_norm(3 * CHANGES[[0, 0]], np.ones(2))) == pytest.approx(0.0, abs=1e-9)


def test_diversity_is_one_for_orthogonal_and_one_over_m_for_equal_changes() -> None:
    assert gradient_diversity(*moments_and_norm(np.eye(6), np.ones(6))) == pytest.approx(1.0)
    assert gradient_diversity(*moments_and_norm(np.ones((6, 4)), np.ones(6))) == pytest.approx(1 / 6)
    assert gradient_diversity(*moments_and_norm(np.array([[1.0], [-1.0]]), np.ones(2))) == float("inf")


def test_a_round_without_changes_has_neither_diversity_nor_drift_nor_gain() -> None:
    nobody = update_moments(np.empty(0), np.empty(0), np.empty(0))
    assert gradient_diversity(nobody, 0.0) == client_drift(nobody, 0.0) == local_gain(nobody) == 0.0
    still = update_moments(np.zeros(2), np.ones(2), np.array([1.0, 3.0]))
    assert gradient_diversity(still, 0.0) == client_drift(still, 0.0) == 0.0 and local_gain(still) == 2.0
