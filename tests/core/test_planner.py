"""Plans follow the published rules and depend on seed and round alone."""

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from fedmpi.common.plan import Plan
from tests.core.test_worker import experiment_of
from tests.statistical import weighed

SIZES = np.array([10, 1, 30, 5, 5, 20, 9, 20], np.int64)


planner = partial(weighed.planner, sizes=SIZES)


def test_a_saturated_sampling_probability_is_said_once(caplog: pytest.LogCaptureFixture):
    saturated = planner("preset=fedsampling", "samples.budget=1000", "samples.size.estimate=exact")
    with caplog.at_level(logging.WARNING, "fedmpi"):
        plans = [saturated.plan(t) for t in range(3)]
    assert [plan.probability for plan in plans] == [1.0, 1.0, 1.0]
    assert len(caplog.records) == 1
    assert "samples.budget" in caplog.text


@pytest.mark.parametrize(
    "settings", [["preset=fedsampling", "samples.budget=25", "samples.size.max_size=40"], ["preset=fedavg-weighted"]]
)
def test_a_plan_made_ahead_is_the_same_and_entered_in_the_accounts_in_its_round(settings: list[str]):
    settings = [*settings, *([] if settings[0] == "preset=fedsampling" else ["clients.count=4"])]
    there, here = planner(*settings), planner(*settings)
    for t in range(3):
        before = {name: value.clone() for name, value in here.accounts.state().items()}
        here.prepare(t)
        assert all(value.equal(before[name]) for name, value in here.accounts.state().items())
        ahead, now = here.plan(t), there.plan(t)
        assert ahead.facts == now.facts
        assert all(np.array_equal(a, b) for a, b in zip(ahead.arrays(), now.arrays(), strict=True))


def test_a_sum_of_gradients_is_divided_by_the_samples_that_clients_with_budgets_use():
    dealt = ["clients.sampler=tests.core.own_work:dealt", "clients.sampler.names=budget", "clients.count=9"]
    experiment = experiment_of(*dealt, "server.weights=gradient-sum")
    plan = experiment.decisions.planner.plan(0)
    used = np.minimum(plan.budgets, experiment.data.sizes[plan.clients]).sum()
    np.testing.assert_allclose(np.sort(plan.coefficients), np.array([1.0] * 8 + [2.0]) / used)


@pytest.mark.parametrize(("weights", "drafts"), [("samples", [1]), ("docs.examples.easing:Easing", [])])
def test_no_round_is_planned_ahead_with_weights_that_remember(weights: str, drafts: list[int]):
    experiment = experiment_of("clients.count=4", f"server.weights={weights}")
    experiment.decisions.layout = replace(experiment.trainer.layout, worker=None)
    experiment.decisions.plan_ahead(1)
    assert [*experiment.decisions.planner._drafts] == drafts


@pytest.mark.parametrize(
    "settings, values",
    [
        (["preset=fedsampling", "samples.budget=25"], 1 + 1),
        (["preset=fedavg-weighted", "clients.count=4"], None),
        (["preset=fedavg", "clients.count=1"], 1 + 1),
    ],
)
def test_plans_travel_short_and_arrive_whole(settings: list[str], values: int | None):
    plan = planner(*settings).plan(0)
    arrays = plan.arrays()
    received = Plan.from_arrays([array.copy() for array in arrays])
    assert np.array_equal(received.clients, plan.clients) and received.clients.dtype == np.int64
    assert np.array_equal(received.coefficients, plan.coefficients)
    if values is not None:
        assert arrays[2].size + arrays[3].size == values


def test_a_client_that_enters_an_asynchronous_step_twice_does_so_on_all_ranks():
    plan = Plan(5, 0.1, np.array([0, 1, 1, 3]), np.ones(4), 0, normalize=True, flight=np.arange(16).reshape(4, 4))
    assert Plan.from_arrays(plan.arrays()).clients.tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize(
    ("weights", "coefficients"),
    [("stratified", np.full(8, 1 / 8)), ("literal", SIZES / 100), ("gradient-sum", np.full(8, 2.0**-7))],
)
def test_an_opening_round_weighs_all_clients_by_what_the_weights_represent(weights: str, coefficients: np.ndarray):
    """The weights of a cohort do not fit a round of all: one vote each, or ρ_k, or their samples (in steps of 2⁻⁷)."""
    opening = ["clients.sampler=stratified", "clients.sampler.initial_step=true", "clients.count=4"]
    plan = planner(*opening, f"server.weights={weights}").plan(0)
    assert plan.coefficients == pytest.approx(coefficients) and plan.normalize
    assert plan.per_sample == (weights == "gradient-sum")
