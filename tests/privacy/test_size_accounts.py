"""Who is charged for the size query in planned rounds: everybody who answered it, and without bound who tells its size
otherwise."""

import logging
import math

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.clients.strata import make_strata
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.core.plan import Planner
from fedmpi.privacy.sizes import estimate_total, exposure, saturations

SIZES = np.array([10, 1, 30, 5, 5, 20, 9, 20], np.int64)
PRIVATE = (
    *("preset=fedsampling", "samples.wanted=25", "samples.size_estimate=duchi", "samples.threshold=40"),
    "samples.epsilon=3",
)
ASKED = (*PRIVATE[:-1], "samples.asked=participants", "samples.epsilon=1")


def planner(*settings: str) -> Planner:
    config = load_config(None, settings)
    streams = Streams(config.seed)
    return Planner(config, SIZES, streams, CohortDraw(config, SIZES, None, streams, values=1000))


def test_clients_that_drop_out_have_answered_and_are_charged():
    lossy = planner(*ASKED, "system.drop_out=0.9")
    plans = [lossy.plan(t) for t in range(4)]
    assert max(len(plan.clients) for plan in plans) < 8
    assert [plan.facts["size_true"] for plan in plans] == [SIZES.sum()] * 4
    assert [plan.facts["size_epsilon_mean"] for plan in plans] == [1.0, 2.0, 3.0, 4.0]


def test_only_those_asked_are_charged():
    drawn = planner(*ASKED, "participation.clients=uniform", "participation.count=2", "system.drop_out=0.5")
    asked = [drawn.cohorts.draw(t, None).asked for t in range(6)]
    plans = [drawn.plan(t) for t in range(6)]
    answers = np.bincount(np.concatenate(asked), minlength=8)
    assert [plan.facts["size_true"] for plan in plans] == [SIZES[ids].sum() for ids in asked]
    assert np.array_equal(drawn.accounts.ledger.spent(), answers)  # type: ignore[union-attr]
    assert plans[-1].facts["size_epsilon_max"] == answers.max()
    assert plans[-1].facts["size_epsilon_mean"] == answers.mean() == 12 / 8


@pytest.mark.parametrize(
    "settings, named, known",
    [
        (["aggregation.weights=samples"], "aggregation.weights", 2),
        (["aggregation.weights=unbiased"], "population", 8),
        (["aggregation.weights=uniform", "participation.clients=weighted"], "participation.clients", 8),
        (["aggregation.weights=uniform", "rebalance.enabled=true"], "rebalance.enabled", 8),
    ],
)
def test_sizes_sent_openly_elsewhere_are_reported_as_unprotected_and_said_once(
    settings: list[str], named: str, known: int, caplog: pytest.LogCaptureFixture
):
    drawn = ("participation.clients=uniform", "participation.count=2")
    leaking = planner(*PRIVATE, *drawn, *settings)
    with caplog.at_level(logging.WARNING, "fedmpi"):
        plans = [leaking.plan(t) for t in range(2)]
    assert plans[0].facts["size_unprotected"] == known
    for plan in plans:
        assert plan.facts["size_epsilon_max"] == plan.facts["size_epsilon_mean"] == math.inf
    assert len(caplog.records) == 1
    assert named in caplog.text and "not protect" in caplog.text


STRATA = ("participation.clients=stratified", "participation.count=2")


@pytest.mark.parametrize(
    "settings, named",
    [
        ([*STRATA, "participation.features=label-histogram", "participation.draw=uniform"], "participation.features"),
        ([*STRATA, "participation.opening=true"], "participation.opening"),
        ([*STRATA, "aggregation.weights=samples"], "aggregation.weights"),
        (["aggregation.weights=uniform", "topology.kind=mediators"], "topology.scheduling"),
        (["aggregation.weights=uniform", "topology.kind=mediators", "topology.scheduling=random"], None),
        ([*STRATA, "aggregation.weights=stratified"], None),
        (["aggregation.weights=unbiased", "aggregation.population=clients"], None),
        (["participation.clients=oort", "participation.count=2"], "participation.clients"),
    ],
)
def test_strata_of_labels_openings_and_schedules_by_label_tell_sizes(settings: list[str], named: str | None):
    found = exposure(load_config(None, [*PRIVATE, *settings]))
    assert (found and found.setting.split(" = ")[0]) == named
    assert found is None or found.all_clients == named.startswith("participation")  # else of the participants only


@pytest.mark.parametrize("weights", ["gradient-sum", "uniform"])
def test_weights_without_sizes_leave_the_answers_private(weights: str):
    facts = planner(*PRIVATE, f"aggregation.weights={weights}").plan(0).facts
    assert facts["size_unprotected"] == 0 and facts["size_epsilon_max"] == 3.0


def test_unclipped_answers_of_large_clients_are_counted_as_unprotected():
    """Of the sizes 10, 1, 30, 5, 5, 20, 9, 20 three lie above M − 1 = 19."""
    rule = ("samples.size_estimate=randomised-response", "samples.threshold=20")
    plans = [planner(*PRIVATE, *rule, f"samples.clip={clip}").plan(0) for clip in ("true", "false")]
    assert [plan.facts["size_unprotected"] for plan in plans] == [0, 3]
    assert [plan.facts["size_epsilon_max"] for plan in plans] == [3.0, math.inf]


def test_a_single_unclipped_client_is_said_once_with_the_key(caplog: pytest.LogCaptureFixture):
    """One of eight is above M − 1 = 29, and one of a thousand is said as well."""
    rule = ("samples.size_estimate=randomised-response", "samples.threshold=30", "samples.clip=false")
    giving = planner(*PRIVATE, *rule)
    with caplog.at_level(logging.WARNING, "fedmpi"):
        assert [giving.plan(t).facts["size_unprotected"] for t in range(2)] == [1, 1]
    said = [record.message for record in caplog.records if "samples.clip = false" in record.message]
    assert len(said) == 1 and "1 of the 8 clients" in said[0]
    sizes = np.array([500, *[5] * 999])
    found = estimate_total("randomised-response", sizes, 1.0, 300, np.random.default_rng(3), clip=False)
    assert [one.kind for one in saturations(found, 10, 300)] == ["unclipped"]


@pytest.mark.parametrize("lost", ["ledger.answers", "usage.clients"])
def test_a_checkpoint_without_an_account_is_refused_by_name(lost: str):
    counting = planner(*ASKED, "logging.diagnostics=true").accounts
    state = counting.state()
    counting.load(state)
    del state[lost]
    with pytest.raises(UserError, match=rf"lacks {lost}"):
        counting.load(state)


def test_nobody_answers_the_size_query_in_an_opening_round():
    opening = ("participation.opening=true", "participation.draw=uniform", "aggregation.weights=stratified")
    opened = planner(*PRIVATE, *STRATA, *opening)
    strata = make_strata(np.arange(8) % 2)
    facts = [opened.plan(t, strata).facts for t in range(2)]
    assert facts[0]["opening"] and facts[1]["size_asked"] == 8
    assert "size_asked" not in facts[0] and "sampling_probability" not in facts[0]
    assert [round["size_epsilon_round"] for round in facts] == [0.0, 3.0]
    assert [round["size_epsilon_mean"] for round in facts] == [0.0, 3.0]


def test_unclipped_answers_and_participants_weighed_openly_add_up():
    rule = ("samples.size_estimate=randomised-response", "samples.threshold=20", "samples.clip=false")
    drawn = ("participation.clients=uniform", "participation.count=2", "aggregation.weights=samples", "seed=1")
    plan = planner(*PRIVATE, *rule, *drawn).plan(0)
    large = np.flatnonzero(SIZES >= 20)
    assert len(np.setdiff1d(plan.clients, large)) and len(np.setdiff1d(large, plan.clients))
    assert plan.facts["size_unprotected"] == len(np.union1d(large, plan.clients))
