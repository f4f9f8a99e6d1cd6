"""Weights make up for clients that are away, through the planner and with the presets' own weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.clients.strata import Strata, make_strata
from fedmpi.common.plan import Plan
from fedmpi.core.plan import Planner
from tests.statistical import weighed

LABELS = np.repeat(np.arange(10), 10)
EQUAL = np.full(100, 600, np.int64)
BY_CLASS = "clients.availability=label-group"


def by_label(probabilities: np.ndarray) -> str:
    return f"clients.availability.by_label={[round(float(p), 4) for p in probabilities]}"


def planner(*settings: str, sizes: np.ndarray = EQUAL, labels: np.ndarray = LABELS) -> Planner:
    return weighed.planner(*settings, sizes=sizes, labels=labels)


def weights(plan: Plan, sizes: np.ndarray) -> np.ndarray:
    """Return the factor of each participant's update in the server's step."""
    c = plan.coefficients * (sizes[plan.clients] if plan.per_sample else 1)
    return c / c.sum() if plan.normalize and c.size else c


def rounds(
    made: Planner, count: int, strata: Strata | None = None, first: int = 1
) -> Iterator[tuple[Plan, np.ndarray]]:
    for t in range(first, first + count):
        plan = made.plan(t, strata)
        yield plan, weights(plan, made.sizes)


def class_weights(made: Planner, count: int, strata: Strata) -> np.ndarray:
    """Weight of every class in every round, (rounds, 10)."""
    return np.array([np.bincount(LABELS[plan.clients], c, 10) for plan, c in rounds(made, count, strata)])


def test_fedsso_gives_every_stratum_its_share_with_any_available_clients() -> None:
    """Clients of a class are available with 0.1 … 1.0. If each class has one, every class weighs 0.1. A class
    without one (0.35 and 0.11 of the rounds for the rarest two) leaves its share to the others.

    The means, 0.066 to 0.106, are those of equal shares among the available classes, by the binomial law; within
    five standard errors of 600 rounds (false alarm 6e-6). Weights by presence would give 0.018 to 0.183.
    """
    made = planner("preset=fedsso", "seed=5", "rounds=2000", BY_CLASS, by_label(np.arange(1, 11) / 10))
    shares = class_weights(made, 600, make_strata(LABELS))
    there = np.random.default_rng(0).binomial(10, np.arange(1, 11) / 10, (100_000, 10)) > 0
    expected = (there / there.sum(axis=1, keepdims=True)).mean(axis=0)
    assert expected[[0, 9]] == pytest.approx([0.066, 0.106], abs=0.001)
    error = shares.std(axis=0) / np.sqrt(len(shares))
    assert (np.abs(shares.mean(axis=0) - expected) < 5 * error + 5e-4).all()
    everybody = (shares > 0).all(axis=1)
    assert everybody.sum() > 150 and shares[everybody] == pytest.approx(0.1, abs=1e-9)


THIRTY = np.random.default_rng(2).integers(1, 50, 30)
THREE = np.repeat(np.arange(3), [15, 9, 6])
STRATA = make_strata(THREE, np.array([1.0, 0.0, 2.0]), np.random.default_rng(3).lognormal(0, 0.7, 30))
UPDATES = np.random.default_rng(4).normal(1, 1, 30) + THREE
DRAWS = {
    "all": ["clients.sampler=all"],
    "uniform": ["preset=fedavg", "clients.count=8"],
    "with replacement": ["preset=fedavg-weighted", "clients.count=8"],
    "without replacement": ["preset=fedavg-weighted", "clients.count=8", "clients.sampler.replace=false"],
    "importance": ["clients.sampler=importance", "clients.count=8"],
    "fedsso": ["preset=fedsso", "clients.fraction=0.25"],
    "fedsts, m < H": ["preset=fedsts", "clients.count=2"],
    "fedsts, strata may be left out": ["preset=fedsts", "clients.count=3", "clients.sampler.every_stratum=false"],
    "fedsts, drop-outs": ["preset=fedsts", "clients.count=8", "clients.failure_rate=0.3"],
}


def assert_mean(values: np.ndarray, expected: float) -> None:
    """The frequencies are within five standard errors (false alarm 6e-7)."""
    assert abs(np.mean(values) - expected) < 5 * np.std(values) / np.sqrt(len(values)) + 1e-12


@pytest.mark.parametrize("draw", DRAWS)
def test_unbiased_weights_are_unbiased_with_any_available_clients(draw: str) -> None:
    """E[Σ c_k] = 1 and E[Σ c_k y_k] = Σ ρ_k y_k over presence, draws and drop-outs, for samples and for clients."""
    population = "clients" if draw.startswith("fedsts") else "samples"
    settings = ["server.weights=unbiased", f"server.weights.population={population}", "rounds=500", "seed=3"]
    law = [BY_CLASS, by_label(np.linspace(0.25, 1, 10))]
    made = planner(*DRAWS[draw], *law, *settings, sizes=THIRTY, labels=np.arange(30) % 10)
    found = np.array([(c.sum(), c @ UPDATES[plan.clients]) for plan, c in rounds(made, 400, STRATA)])
    rho = np.full(30, 1 / 30) if population == "clients" else THIRTY / THIRTY.sum()
    assert_mean(found[:, 0], 1.0)
    assert_mean(found[:, 1], rho @ UPDATES)


FIRST = ["devices=true", "clients.over_selection=1.3", "clients.count=10"]


@pytest.mark.parametrize("preset", ["fedavg", "fedsso"])
def test_of_equally_fast_clients_none_is_preferred(preset: str) -> None:
    """10 of 100 clients are requested, 13 invited, all equally fast: each counts in a tenth of 1,000 rounds.

    No frequency is five standard errors off (false alarm 6e-5).
    """
    count = FIRST[:2] + (["clients.fraction=0.1"] if preset == "fedsso" else FIRST[2:])
    made = planner(f"preset={preset}", *count, "seed=1", "devices.speed=constant", "rounds=1000")
    cohorts, used = made.cohorts, np.zeros(100)
    strata = make_strata(np.repeat(np.arange(3), [50, 30, 20]))
    for t in range(1, 1001):
        turnout = cohorts.draw(t, strata if preset == "fedsso" else None)
        assert len(turnout.asked) == (14 if preset == "fedsso" else 13)
        assert turnout.cohort.inclusion == pytest.approx(0.1)
        used[turnout.cohort.clients] += 1
    assert np.abs(used / 1000 - 0.1).max() < 5 * np.sqrt(0.09 / 1000)


@pytest.mark.parametrize(
    "unlike",
    [["devices.speed=lognormal"], ["devices.speed=constant", "devices.upload=lognormal"], ["devices.speed=constant"]],
    ids=["speeds", "bandwidths", "sizes"],
)
def test_where_some_always_arrive_first_nothing_is_promised_about_who_counts(unlike: list[str]) -> None:
    sizes = EQUAL + (np.arange(100) if unlike == ["devices.speed=constant"] else 0)
    settings = ["preset=fedavg", *FIRST, *unlike]
    with pytest.raises(UserError, match='"unbiased".*over_selection'):
        planner(*settings, "server.weights=unbiased", sizes=sizes)
    planner(*settings, "server.weights=normalized", sizes=sizes)
    equal = ["preset=fedavg", *FIRST, "devices.speed=constant"]
    planner(*equal, "server.weights=unbiased")
    asked = ["preset=fedavg", *unlike, "devices=true", "clients.count=10"]
    planner(*asked, "server.weights=unbiased", sizes=sizes)
    steps = [*equal, "local.steps=3", "local.batch_size=10", "server.weights=unbiased"]
    planner(*steps, sizes=EQUAL + np.arange(100))  # as many samples pass, whatever the sizes


SMALL = np.repeat(np.arange(3), [5, 3, 2])
SHARES = np.array([0.5, 0.3, 0.2])
SPREADS = np.array([1.0, 0.0, 3.0])
VALUES = np.repeat([0.0, 1.0, 4.0], [5, 3, 2]) + np.array([-1, 0, 1, 2, -2, 0.5, 0, -0.5, 1, -1])
EXPECTED = {"proportional": [1, 0.6, 0.4], "equal": [2 / 3] * 3, "neyman": [10 / 14, 6 / 14, 12 / 14]}


@pytest.mark.parametrize("allocation", EXPECTED)
@pytest.mark.parametrize("lost", [0.0, 0.4])
def test_stratified_means_are_unbiased_with_fewer_participants_than_strata(allocation: str, lost: float) -> None:
    """Strata of 5, 3, 2 and m = 2: every round weighs N_h/N (1/E m_h) where m_h is 0 or 1; the mean, 1.1, is hit."""
    made = planner(
        "preset=fedsts", "clients.count=2", "clients.sampler.within_stratum=uniform", f"clients.failure_rate={lost}",
        f"clients.sampler.allocation={allocation}", "rounds=1000", sizes=np.ones(10, np.int64), labels=SMALL,
    )  # fmt: skip
    strata, found = make_strata(SMALL, SPREADS), []
    for plan, c in rounds(made, 600, strata):
        expected = (SHARES / np.array(EXPECTED[allocation]))[SMALL[plan.clients]]
        assert lost or c == pytest.approx(expected, abs=1e-9)
        found.append(c @ VALUES[plan.clients])
    assert VALUES.mean() == pytest.approx(1.1)
    assert_mean(np.array(found), VALUES.mean())


@pytest.mark.parametrize("weighting", ["normalized", "unbiased", "literal"])
def test_a_share_of_the_clients_in_a_cluster_is_selected_where_the_others_are_left_out(weighting: str) -> None:
    """60 clients in clusters of 40 and 20, 40 in none, β = 0.1: 4 and 2 are drawn, and represent the 60 alone."""
    labels = np.where(np.arange(100) < 60, np.arange(100) // 40, -1)
    made = planner("preset=fedsso", "clients.sampler.clustering.outliers=drop", f"server.weights={weighting}")
    for t in range(1, 30):
        plan = made.plan(t, make_strata(labels))
        assert np.bincount(labels[plan.clients]).tolist() == [4, 2]
        assert plan.coefficients == pytest.approx(1 / 6, abs=1e-9)
