"""Weights make up for clients that are away, through the planner and with the presets' own weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fedmpi.cohorts import CohortDraw
from fedmpi.config import load_config
from fedmpi.participation.strata import Strata, make_strata
from fedmpi.plan import Plan
from fedmpi.planner import Planner
from fedmpi.streams import Streams

LABELS = np.repeat(np.arange(10), 10)
EQUAL = np.full(100, 600, np.int64)
BY_CLASS = "system.availability=label-group"


def by_label(probabilities: np.ndarray) -> str:
    return f"system.by_label={[round(float(p), 4) for p in probabilities]}"


def planner(*settings: str, sizes: np.ndarray = EQUAL, labels: np.ndarray = LABELS) -> Planner:
    """A planner of clients of one class each."""
    config, counts = load_config(None, settings), np.eye(10, dtype=np.int64)[labels]
    streams = Streams(config.seed)
    return Planner(config, sizes, streams, CohortDraw(config, sizes, counts, streams, values=1000))


def weights(plan: Plan, sizes: np.ndarray) -> np.ndarray:
    """What each participant's update counts in the server's step."""
    c = plan.coefficients * (sizes[plan.clients] if plan.per_sample else 1)
    return c / c.sum() if plan.normalise and c.size else c


def rounds(
    made: Planner, count: int, strata: Strata | None = None, first: int = 1
) -> Iterator[tuple[Plan, np.ndarray]]:
    for t in range(first, first + count):
        plan = made.plan(t, strata)
        yield plan, weights(plan, made.sizes)


def class_weights(made: Planner, count: int, strata: Strata) -> np.ndarray:
    """Weight of every class in every round, (rounds, 10)."""
    return np.array([np.bincount(LABELS[plan.clients], c, 10) for plan, c in rounds(made, count, strata)])


def test_fedsso_gives_every_stratum_its_share_whoever_of_it_is_there() -> None:
    """Classes are there with 0.1 … 1.0. Where somebody of each is, every class weighs 0.1, whoever that is; a class of
    which nobody is there (0.35 and 0.11 of the rounds for the rarest two) leaves its share to the others.

    The means, 0.066 to 0.106, are those of equal shares among the classes that are there, by the binomial law; within
    five standard errors of 1,000 rounds (false alarm 6e-6). Weights by presence would give 0.018 to 0.183.
    """
    made = planner("preset=fedsso", "seed=5", "rounds=2000", BY_CLASS, by_label(np.arange(1, 11) / 10))
    shares = class_weights(made, 1000, make_strata(LABELS))
    there = np.random.default_rng(0).binomial(10, np.arange(1, 11) / 10, (100_000, 10)) > 0
    expected = (there / there.sum(axis=1, keepdims=True)).mean(axis=0)
    assert expected[[0, 9]] == pytest.approx([0.066, 0.106], abs=0.001)
    error = shares.std(axis=0) / np.sqrt(len(shares))
    assert (np.abs(shares.mean(axis=0) - expected) < 5 * error + 5e-4).all()
    everybody = (shares > 0).all(axis=1)
    assert everybody.sum() > 300 and shares[everybody] == pytest.approx(0.1, abs=1e-9)


def test_fedsso_gives_every_stratum_its_share_of_the_samples() -> None:
    """Unequal n_k, up to half of a stratum away: a stratum weighs Σ n_k of all its clients, not of those there.

    Un-normalised Σ c_k of the stratum over 1,500 rounds within five standard errors (false alarm 6e-6 in all).
    """
    sizes = np.random.default_rng(1).integers(1, 1000, 100)
    made = planner("preset=fedsso", "seed=5", "rounds=5000", BY_CLASS, by_label(np.linspace(0.5, 1, 10)), sizes=sizes)
    strata = make_strata(LABELS)
    raw = [
        np.bincount(LABELS[plan.clients], plan.coefficients, 10)
        for plan in (made.plan(t, strata) for t in range(1, 1501))
    ]
    share = np.bincount(LABELS, sizes) / sizes.sum()
    error = np.std(raw, axis=0) / np.sqrt(len(raw))
    assert (np.abs(np.mean(raw, axis=0) - share) < 5 * error + 2e-3 * share).all()
