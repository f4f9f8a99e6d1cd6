"""Weights make up for clients that are away, through the planner and with the presets' own weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.clients.strata import Strata, make_strata
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.plan import Plan
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.plan import Planner

LABELS = np.repeat(np.arange(10), 10)
EQUAL = np.full(100, 600, np.int64)
BY_CLASS = "clients.availability=label-group"


def by_label(probabilities: np.ndarray) -> str:
    return f"clients.availability.by_label={[round(float(p), 4) for p in probabilities]}"


def planner(*settings: str, sizes: np.ndarray = EQUAL, labels: np.ndarray = LABELS) -> Planner:
    """A planner of clients of one class each."""
    config, counts = load_config(None, settings), np.eye(10, dtype=np.int64)[labels]
    streams = Streams(config.seed)
    return Planner(config, sizes, streams, CohortDraw(config, sizes, counts, streams, values=1000))


def weights(plan: Plan, sizes: np.ndarray) -> np.ndarray:
    """What each participant's update counts in the server's step."""
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

    Un-normalized Σ c_k of the stratum over 1,500 rounds within five standard errors (false alarm 6e-6 in all).
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


THIRTY = np.random.default_rng(2).integers(1, 50, 30)
THREE = np.repeat(np.arange(3), [15, 9, 6])
STRATA = make_strata(THREE, np.array([1.0, 0.0, 2.0]), np.random.default_rng(3).lognormal(0, 0.7, 30))
UPDATES = np.random.default_rng(4).normal(1, 1, 30) + THREE
AWAY = {
    "bernoulli": ["clients.availability=bernoulli", "clients.availability.probability=0.5"],
    "time-of-day": [
        "clients.availability=time-of-day",
        "clients.availability.lowest=0.2",
        "clients.availability.probability=0.9",
    ],
    "label-group": [BY_CLASS, by_label(np.linspace(0.25, 1, 10))],
}
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
    """Within five standard errors (false alarm 6e-7)."""
    assert abs(np.mean(values) - expected) < 5 * np.std(values) / np.sqrt(len(values)) + 1e-12


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(
    "law", [pytest.param(law, marks=[] if law == "label-group" else pytest.mark.slow) for law in AWAY]
)
def test_unbiased_weights_are_unbiased_whoever_is_there(law: str, draw: str) -> None:
    """E[Σ c_k] = 1 and E[Σ c_k y_k] = Σ ρ_k y_k over presence, draws and drop-outs, for samples and for clients."""
    population = "clients" if draw.startswith("fedsts") else "samples"
    settings = ["server.weights=unbiased", f"server.weights.population={population}", "rounds=500", "seed=3"]
    made = planner(*DRAWS[draw], *AWAY[law], *settings, sizes=THIRTY, labels=np.arange(30) % 10)
    found = np.array([(c.sum(), c @ UPDATES[plan.clients]) for plan, c in rounds(made, 400, STRATA)])
    rho = np.full(30, 1 / 30) if population == "clients" else THIRTY / THIRTY.sum()
    assert_mean(found[:, 0], 1.0)
    assert_mean(found[:, 1], rho @ UPDATES)


def test_the_opening_step_is_the_same_mean_whoever_is_there() -> None:
    """w_1 = Σ ρ_k w_1^k (FedSSO, Algorithm 1, line 3): each stratum of which somebody is there has its share."""
    law = [BY_CLASS, by_label(np.linspace(0.3, 1, 10))]
    for seed in range(5):
        made = planner("preset=fedsso", f"seed={seed}", *law, sizes=np.arange(1, 101))
        plan = made.plan(0, make_strata(LABELS))
        share = np.bincount(LABELS, np.arange(1, 101))
        shares = np.bincount(LABELS[plan.clients], weights(plan, made.sizes), 10)
        assert plan.one_step and len(plan.clients) < 100 and (shares > 0).all()
        assert shares == pytest.approx(share / share.sum(), abs=1e-9)
        of_clients = planner("preset=fedsso", f"seed={seed}", *law, "server.weights=stratified", sizes=made.sizes)
        plan = of_clients.plan(0, make_strata(LABELS))
        assert np.bincount(LABELS[plan.clients], weights(plan, made.sizes), 10) == pytest.approx(0.1, abs=1e-9)


@pytest.mark.parametrize(
    "settings, key",
    [
        (["clients.availability=time-of-day", "clients.availability.period=10"], "clients.availability.lowest = 0"),
        ([BY_CLASS, "clients.availability.by_label=[0.5, 0.0]"], "clients.availability.by_label"),
    ],
)
def test_unbiased_weights_are_refused_where_some_are_never_there(settings: list[str], key: str) -> None:
    with pytest.raises(UserError, match=key):
        load_config(None, ["preset=fedavg", "server.weights=unbiased", *settings])
    load_config(None, ["preset=fedavg", "server.weights=normalized", *settings])


FIRST = ["devices=true", "clients.over_selection=1.3", "clients.count=10"]


@pytest.mark.parametrize("preset", ["fedavg", "fedsso"])
def test_of_equally_fast_clients_none_is_preferred(preset: str) -> None:
    """100 clients, 10 wanted, 13 asked, everybody equally fast: each counts in a tenth of 1,000 rounds.

    No frequency is five standard errors off (false alarm 6e-5).
    """
    count = FIRST[:2] + (["clients.fraction=0.1"] if preset == "fedsso" else FIRST[2:])
    made = planner(f"preset={preset}", *count, "seed=1", "devices.speed=constant", "rounds=1000")
    cohorts, used = made.cohorts, np.zeros(100)
    strata = make_strata(np.repeat(np.arange(3), [50, 30, 20]))
    for t in range(1, 1001):
        turnout = cohorts.draw(t, strata if preset == "fedsso" else None)
        assert len(turnout.asked) >= 13 and turnout.cohort.inclusion == pytest.approx(0.1)
        used[turnout.cohort.clients] += 1
    assert np.abs(used / 1000 - 0.1).max() < 5 * np.sqrt(0.09 / 1000)


@pytest.mark.parametrize(
    "unlike",
    [
        ["devices.speed=lognormal"],
        ["devices.speed=constant", "devices.bandwidth_sigma_XXX=1.0"],
        ["devices.speed=constant"],
    ],
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
    with pytest.raises(UserError, match="over_selection"):
        planner(*steps, sizes=np.where(np.arange(100) == 99, 9, 600))


def test_an_opening_step_waits_for_everybody() -> None:
    made = planner("preset=fedsso", *FIRST[:2], "clients.fraction=0.1", "devices.speed=lognormal")
    turnout = made.cohorts.draw(0, None)
    assert len(turnout.cohort.clients) == len(turnout.asked) == 100
    assert turnout.seconds is not None and len(turnout.seconds) == 100
    slow = [
        "preset=fedsso",
        "devices=true",
        "devices.speed.median=1",
        "devices.upload.median=1e12",
        "devices.download.median=1e12",
    ]
    for probe, rows in (("full", EQUAL), ("batch", np.full(100, 20)), ("sample", np.ones(100))):
        seen = (
            planner(*slow, f"clients.sampler.features.probe={probe}", "local.batch_size=20")
            .cohorts.draw(0, None)
            .seconds
        )
        assert seen == pytest.approx(rows)


SMALL = np.repeat(np.arange(3), [5, 3, 2])
SHARES = np.array([0.5, 0.3, 0.2])
SPREADS = np.array([1.0, 0.0, 3.0])
VALUES = np.repeat([0.0, 1.0, 4.0], [5, 3, 2]) + np.array([-1, 0, 1, 2, -2, 0.5, 0, -0.5, 1, -1])
EXPECTED = {"proportional": [1, 0.6, 0.4], "equal": [2 / 3] * 3, "neyman": [10 / 14, 6 / 14, 12 / 14]}


@pytest.mark.parametrize("allocation", EXPECTED)
def test_stratified_means_are_unbiased_with_fewer_participants_than_strata(allocation: str) -> None:
    """Strata of 5, 3, 2 and m = 2: every round weighs N_h/N (1/E m_h) where m_h is 0 or 1; the mean, 1.1, is hit."""
    made = planner(
        "preset=fedsts", "clients.count=2", "clients.sampler.within_stratum=uniform",
        f"clients.sampler.allocation={allocation}", "rounds=1000", sizes=np.ones(10, np.int64), labels=SMALL,
    )  # fmt: skip
    strata, found = make_strata(SMALL, SPREADS), []
    for plan, c in rounds(made, 600, strata):
        assert c == pytest.approx((SHARES / np.array(EXPECTED[allocation]))[SMALL[plan.clients]], abs=1e-9)
        found.append(c @ VALUES[plan.clients])
    assert VALUES.mean() == pytest.approx(1.1)
    assert_mean(np.array(found), VALUES.mean())


@pytest.mark.parametrize("count", [2, 5])
def test_stratified_means_are_unbiased_where_updates_get_lost(count: int) -> None:
    made = planner(
        "preset=fedsts", f"clients.count={count}", "clients.sampler.within_stratum=uniform", "clients.failure_rate=0.4",
        "rounds=1000", sizes=np.ones(10, np.int64), labels=SMALL,
    )  # fmt: skip
    strata = make_strata(SMALL, SPREADS)
    assert_mean(np.array([c @ VALUES[plan.clients] for plan, c in rounds(made, 600, strata)]), VALUES.mean())


def test_stratified_means_are_those_of_the_strata_that_are_there() -> None:
    """Σ N_h mean_h over those there, over Σ N_h of the strata of which somebody is: unbiased for it in every round."""
    made = planner(
        "preset=fedsts", "clients.count=1", "clients.sampler.within_stratum=uniform", "clients.availability=bernoulli",
        "clients.availability.probability=0.4", "rounds=1000", sizes=np.ones(10, np.int64), labels=SMALL,
    )  # fmt: skip
    strata, errors = make_strata(SMALL, SPREADS), []
    for plan, c in rounds(made, 600, strata):
        there = made.cohorts.draw(plan.round, strata).present
        assert not isinstance(there, int)
        means = [VALUES[there[SMALL[there] == h]].mean() for h in np.unique(SMALL[there])]
        target = np.average(means, weights=SHARES[np.unique(SMALL[there])]) if len(there) else 0.0
        errors.append(c @ VALUES[plan.clients] - target)
    assert_mean(np.array(errors), 0.0)


def test_one_participant_counts_whole_whichever_strata_are_there() -> None:
    """Proportional draws of one: E m_h is N_h over the clients of the strata that are there, which cancels N_h."""
    made = planner(
        "preset=fedsts", "clients.count=1", "clients.sampler.within_stratum=uniform", "clients.sampler.allocation=proportional",
        "clients.availability=bernoulli", "clients.availability.probability=0.3", "rounds=1000", sizes=np.ones(10, np.int64),
        labels=SMALL,
    )  # fmt: skip
    for plan, c in rounds(made, 50, make_strata(SMALL, SPREADS)):
        assert c == pytest.approx(np.ones(len(plan.clients)), abs=1e-9)


def test_proportional_draws_leave_small_strata_out_with_more_participants_than_strata_too() -> None:
    """Strata of 5, 3, 2 and m = 3: E m_h = 1.5, 0.9, 0.6, so that the means of the last two count more, undivided."""
    made = planner(
        "preset=fedsts", "clients.count=3", "clients.sampler.within_stratum=uniform", "clients.sampler.allocation=proportional",
        "rounds=1000", sizes=np.ones(10, np.int64), labels=SMALL,
    )  # fmt: skip
    for plan, c in rounds(made, 50, make_strata(SMALL, SPREADS)):
        found = np.bincount(SMALL[plan.clients], c, 3)
        assert not plan.normalize
        assert found == pytest.approx((found > 0) * SHARES / np.array([1, 0.9, 0.6]), abs=1e-9)


@pytest.mark.parametrize("replace", ["true", "false"])
def test_nobody_is_drawn_by_size_where_those_there_hold_no_sample(replace: str) -> None:
    made = planner(
        "preset=fedavg-weighted", "clients.count=2", f"clients.sampler.replace={replace}",
        "clients.availability=bernoulli", "clients.availability.probability=0.3", sizes=np.array([5, 0, 0, 0]),
    )  # fmt: skip
    found = [(made.cohorts.draw(t, None).present, made.plan(t).clients.tolist()) for t in range(20)]
    assert {tuple(clients) for _, clients in found} == {(), (0,)}
    assert all((clients == [0]) == (0 in np.atleast_1d(there)) for there, clients in found)


@pytest.mark.parametrize("size_estimate", ["exact", "randomized-response"])
def test_a_round_of_nobody_is_no_reason_to_want_fewer_samples(
    size_estimate: str, caplog: pytest.LogCaptureFixture
) -> None:
    away = ("clients.availability=bernoulli", "clients.availability.probability=1e-9")
    made = planner("preset=fedsampling", f"samples.size.estimate={size_estimate}", *away)
    assert not len(made.plan(0).clients) and "samples.budget" not in caplog.text


def test_the_weights_of_strata_that_surely_have_a_participant_add_up_to_one() -> None:
    whole = planner("preset=fedsts", "clients.count=10", "clients.sampler.strata=10").plan(1, TEN)
    assert not whole.normalize and weights(whole, EQUAL).sum() == pytest.approx(1)


def test_fedsts_weighs_the_strata_of_a_round_such_that_all_have_their_share_in_the_mean() -> None:
    """Strata of 15, 9 and 6 clients, m = H = 3, S_h = 1, 0 and 2: E[m_h] = 1.25, 0.75 and 1 instead of one each.

    The preset's own weights; within five standard errors over 2,000 rounds (false alarm 2e-6).
    """
    settings = ["clients.count=3", "clients.sampler.within_stratum=uniform", "clients.sampler.every_stratum=false"]
    made = planner("preset=fedsts", "rounds=3000", *settings, sizes=THIRTY, labels=np.arange(30) % 10)
    drawn, shares = [], []
    for t in range(1, 2001):
        plan = made.plan(t, STRATA)
        assert not plan.normalize
        drawn.append(np.bincount(THREE[plan.clients], minlength=3))
        shares.append(np.bincount(THREE[plan.clients], plan.coefficients, 3))
    wanted = 3 * np.array([15, 9, 12]) / 36  # a stratum without spread has the smallest of the others
    assert (np.abs(np.mean(drawn, axis=0) - wanted) < 5 * np.std(drawn, axis=0) / 2000**0.5 + 1e-9).all()
    share = np.array([15, 9, 6]) / 30
    assert (np.abs(np.mean(shares, axis=0) - share) < 5 * np.std(shares, axis=0) / 2000**0.5 + 1e-9).all()


TEN = make_strata(LABELS, np.ones(10), np.ones(100))


@pytest.mark.parametrize("weighting", ["normalized", "unbiased", "literal"])
def test_a_share_of_the_clients_in_a_cluster_takes_part_where_the_others_are_left_out(weighting: str) -> None:
    """60 clients in clusters of 40 and 20, 40 in none, β = 0.1: 4 and 2 are drawn, and stand for the 60 alone."""
    labels = np.where(np.arange(100) < 60, np.arange(100) // 40, -1)
    made = planner("preset=fedsso", "clients.sampler.clustering.outliers=drop", f"server.weights={weighting}")
    for t in range(1, 30):
        plan = made.plan(t, make_strata(labels))
        assert np.bincount(labels[plan.clients]).tolist() == [4, 2]
        assert plan.coefficients == pytest.approx(1 / 6, abs=1e-9)
    six = planner("preset=fedsso", "clients.fraction=0.5", "clients.sampler.clustering.outliers=drop")
    few = make_strata(np.where(np.arange(100) < 10, 0, -1))
    assert len(six.plan(1, few).clients) == 5
    more = planner("preset=fedsts", "clients.count=30", "clients.sampler.within_stratum=uniform")
    assert len(more.plan(1, few).clients) == 10


@pytest.mark.parametrize("counted", ["augmented", "original"])
@pytest.mark.parametrize("weighting", ["normalized", "unbiased", "literal"])
def test_weights_of_an_augmented_population_count_copies_or_do_not(weighting: str, counted: str) -> None:
    """ρ_k by the samples with their copies or without, from an experiment's own planner; uniform draws, π = 4/12."""
    experiment = Experiment.connect(
        load_config(
            None,
            ["data.source=digits:clients=12,alpha=0.3", "clients.count=4", "rebalance=true",
             "rebalance.alpha=1.0", f"rebalance.weights={counted}", f"server.weights={weighting}",
             "cluster.threads=1"],
        )
    )  # fmt: skip
    original = experiment.data.store.class_counts().sum(axis=1)
    n = original if counted == "original" else experiment.data.sizes
    assert (experiment.data.sizes >= original).all() and experiment.data.sizes.sum() > 1.05 * original.sum()
    for t in range(5):
        plan = experiment.decisions.plan(t)
        assert plan.coefficients == pytest.approx(n[plan.clients] / n.sum() * 3, abs=1e-9)
    experiment.close()
