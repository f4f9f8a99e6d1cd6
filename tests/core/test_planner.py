"""Plans follow the published rules and depend on seed and round alone."""

import logging

import numpy as np
import pytest

from fedmpi.clients.devices import DROP_OUT
from fedmpi.clients.strata import make_strata
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.plan import Plan, learning_rate
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import load_config
from fedmpi.core.plan import Planner
from fedmpi.samples.built_in_rules import bernoulli_rows

SIZES = np.array([10, 1, 30, 5, 5, 20, 9, 20], np.int64)


def planner(*settings: str, sizes: np.ndarray = SIZES) -> Planner:
    config = load_config(None, settings)
    streams = Streams(config.seed)
    return Planner(config, sizes, streams, CohortDraw(config, sizes, None, streams, values=1000))


def test_fedavg_weights_participants_by_their_size():
    plan = planner("preset=fedavg", "clients.count=3").plan(2)
    weights = plan.coefficients * SIZES[plan.clients]
    assert plan.per_sample and plan.normalize
    assert np.allclose(weights / weights.sum(), SIZES[plan.clients] / SIZES[plan.clients].sum())


def test_fedsampling_uses_all_clients_and_divides_by_the_samples_wanted():
    plan = planner("preset=fedsampling", "samples.budget=25", "samples.size.estimate=exact").plan(0)
    assert np.array_equal(plan.clients, np.arange(8))
    assert np.allclose(plan.coefficients, 1 / 25)
    assert plan.per_sample and not plan.normalize
    assert plan.probability == 25 / SIZES.sum()
    assert plan.facts["size_true"] == SIZES.sum()


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


def test_the_accounts_count_the_rows_that_are_drawn_in_the_round():
    used = planner("preset=fedsampling", "samples.budget=25", "samples.size.estimate=exact", "logging.diagnostics=true")
    for t in range(3):
        before = used.accounts.usage.samples.copy()  # type: ignore[union-attr]
        plan = used.plan(t)
        drawn = bernoulli_rows(Streams(used.config.seed), t, SIZES, plan.probability)
        after = used.accounts.usage.samples  # type: ignore[union-attr]
        assert np.flatnonzero(after - before).tolist() == drawn.tolist()


def test_accounts_go_on_where_a_checkpoint_left_them():
    settings = ["preset=fedsampling", "samples.budget=25", "samples.size.max_size=40", "logging.diagnostics=true"]
    first, second = planner(*settings), planner(*settings)
    first.plan(0)
    second.accounts.load(first.accounts.state())
    assert second.plan(1).facts == first.plan(1).facts


def test_a_round_without_participants_may_weigh_samples_of_a_gradient_sum():
    nobody = planner(
        "preset=fedavg", "clients.count=4", "server.weights=gradient-sum", "clients.availability=bernoulli",
        "clients.availability.probability=1e-9",
    )  # fmt: skip
    assert not nobody.plan(0).clients.size and not nobody.plan(0).coefficients.size


def test_a_plan_tells_who_comes_next_where_that_is_known():
    ahead = planner("preset=fedavg", "clients.count=4", "rounds=3")
    assert not ahead.plan(0).coming.size
    for t in (1, 2, 3):
        ahead.prepare(t)
    plans = [ahead.plan(t) for t in (1, 2)]
    assert np.array_equal(plans[0].coming, plans[1].clients) and plans[0].coming.dtype == np.int64
    assert not plans[1].coming.size  # the last round
    received = Plan.from_arrays(plans[0].arrays())
    assert np.array_equal(received.coming, plans[0].coming) and not received.balance.size


@pytest.mark.parametrize(
    "settings",
    [
        ["preset=fedavg", "clients.sampler=all"],
        ["preset=fedsampling", "samples.budget=25", "samples.size.max_size=40"],
        ["preset=fedavg", "clients.count=4", "samples.sampler=ratio", "samples.sampler.ratio=0.5"],
    ],
)
def test_nobody_is_announced_who_takes_part_anyway_or_is_read_in_parts(settings: list[str]):
    silent = planner(*settings)
    silent.prepare(0)
    silent.prepare(1)
    assert not silent.sends_coming and not silent.plan(0).coming.size


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


@pytest.mark.parametrize(
    ("schedule", "round", "expected"),
    [
        ("constant", 7, 0.1),
        ("inverse", 4, 0.02),
        ("cosine", 0, 0.1),
        ("cosine", 10, 0.05),
        ("step", 7, 0.001),
        ("step", 8, 0.001),
    ],
)
def test_learning_rate_schedules(schedule: str, round: int, expected: float):
    assert learning_rate(schedule, 0.1, round, rounds=20, every=3, factor=0.1) == pytest.approx(expected)


def test_fedsampling_draws_the_samples_wanted_from_those_who_are_there():
    """p = K/Ñ with Ñ over the available clients: K samples are expected in every round, whoever is there.

    The drawn number is a sum of independent Bernoulli variables: z-test of its mean over 300 rounds at 1e-6.
    """
    sizes = np.tile(SIZES, 50)
    planned = planner(
        "preset=fedsampling",
        "samples.budget=100",
        "samples.size.estimate=exact",
        "clients.availability=bernoulli",
        "clients.availability.probability=0.25",
        sizes=sizes,
    )
    drawn, variance = [], 0.0
    for t in range(300):
        plan = planned.plan(t)
        there = sizes[plan.clients]
        assert plan.facts["size_asked"] == plan.facts["available"] == len(plan.clients) < len(sizes) / 2
        assert plan.facts["size_true"] == there.sum()
        assert plan.probability * there.sum() == pytest.approx(100)
        variance += 100 * (1 - plan.probability)
        drawn.append(len(bernoulli_rows(planned.streams, t, there, plan.probability)))
    assert abs(sum(drawn) - 30_000) < 4.9 * np.sqrt(variance)


def test_those_who_drop_out_have_answered_the_size_query_before():
    planned = planner(
        "preset=fedstas",
        "clients.sampler=uniform",
        "server.weights=uniform",
        "clients.count=6",
        "samples.size.estimate=duchi",
        "samples.size.max_size=40",
        "samples.size.epsilon=2",
        "clients.failure_rate=0.6",
    )
    plans = [planned.plan(t) for t in range(20)]
    assert min(len(plan.clients) for plan in plans) < 6
    for t, plan in enumerate(plans):
        assert plan.facts["size_asked"] == plan.facts["asked"] == 6
        assert plan.facts["size_epsilon_mean"] == pytest.approx(2 * 6 * (t + 1) / len(SIZES))


def test_the_virtual_clock_shares_the_rows_wanted_among_those_who_are_there():
    """Three of four are away: each one who is there is expected to train on four times the rows."""
    settings = ["preset=fedsampling", "samples.budget=40", "samples.size.estimate=exact", "devices=true"]
    settings += ["devices.upload.median=1e12", "devices.download.median=1e12", "devices.speed.median=1"]
    sizes = np.full(400, 10, np.int64)
    everybody = planner(*settings, sizes=sizes).plan(0)
    assert everybody.facts["virtual_seconds"] == pytest.approx(0.1, rel=1e-3)
    some = planner(
        *settings, "clients.availability=bernoulli", "clients.availability.probability=0.25", sizes=sizes
    ).plan(0)
    assert some.facts["virtual_seconds"] == pytest.approx(40 / len(some.clients), rel=1e-3)


def test_an_opening_step_uses_every_sample_whatever_the_sampling_rule():
    opened = planner(
        "clients.sampler=stratified", "clients.count=2", "clients.sampler.initial_step=true",
        "clients.sampler.within_stratum=uniform", "samples.sampler=exact", "samples.budget=20", "logging.diagnostics=true",
    )  # fmt: skip
    strata = make_strata(np.arange(8) % 2)
    first, second = (opened.plan(t, strata).facts for t in range(2))
    assert first["samples_used"] == first["sample_use_effective"] == 1.0 and first["opening"]
    assert second["sample_use_effective"] < 1.0


def test_who_drops_out_is_decided_anew_in_every_round_by_the_rounds_own_stream():
    made = planner("preset=fedavg", "clients.count=8", "clients.failure_rate=0.5")
    for t in (3, 4):
        chance = made.streams.generator(Purpose.AVAILABILITY, t, DROP_OUT).random(len(SIZES))
        assert made.plan(t).clients.tolist() == np.flatnonzero(chance >= 0.5).tolist()


def test_vectors_that_an_algorithm_sends_to_its_clients_take_their_time():
    links = ["devices=true", "devices.speed.median=1e9", "devices.upload.median=1e9", "devices.download.median=4000"]
    seconds = [
        planner("preset=fedavg", "clients.count=3", f"local.algorithm={name}", *links).plan(0).facts["virtual_seconds"]
        for name in ("plain", "scaffold")
    ]
    assert seconds == pytest.approx([1.0, 2.0], rel=1e-3)


def test_a_step_of_a_client_with_less_than_a_batch_passes_the_rows_it_has():
    fast = ["devices=true", "devices.speed.median=1.0", "devices.upload.median=1e9", "devices.download.median=1e9"]
    work = ["clients.sampler=all", "local.steps=3", "local.batch_size=10"]
    few, many = (
        planner("preset=fedavg", *work, *fast, sizes=np.full(4, size)).plan(0).facts["virtual_seconds"]
        for size in (4, 40)
    )
    assert (few, many) == pytest.approx((3 * 4, 3 * 10), rel=1e-3)
