"""Work per client: steps, learning rates and sample budgets of a cohort; data samplers that see the model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi import Cohort, ComponentFailure, UserError, client_sampler, data_sampler
from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.placement import STEP_ROWS
from tests.core.own_work import work_of
from tests.core.test_worker import assert_shared_out, by_client, experiment_of, workers_of
from tests.end_to_end.in_process import QUIET, run
from tests.reference.plain_algorithms import PlainAlgorithm
from tests.reference.plain_data import COHORT, Network, Population, stream
from tests.reference.plain_loop import batches, train

OWN = "tests.core.own_work:"
ROWS = 21
FEW = ["data.source=digits:clients=9,alpha=0.4", "model.hidden=[8]", "model.activation=tanh", "rounds=3", "seed=4"]
FEW += ["clients.count=5", "local.batch_size=8", "local.lr=0.05", *QUIET]
DEALT = [*FEW, f"clients.sampler={OWN}dealt"]
CLOCK = ["devices.speed=lognormal", "devices.speed.median=50"]


def plain(names: str, *settings: str) -> np.ndarray:
    """Return the last model of a plain loop in float64."""
    given = [*FEW, *settings]
    config = load_config(None, given)
    population = Population(config)
    network = Network(config, population.description)
    w, algorithm = network.initial, PlainAlgorithm(config, population.clients, len(network.initial))
    for t in range(config.rounds):
        total, divisor = np.zeros_like(w), 0.0
        drawn = stream(config.seed, COHORT, t).choice(9, 5, replace=False).tolist()
        for k in sorted(drawn):
            own, n = work_of(k, t, names), int(population.sizes[k])
            rows = list(range(n))
            if "budget" in own:
                generator = stream(config.seed, ROWS, t, k)
                rows = sorted(generator.choice(n, min(n, int(own["budget"])), replace=False, shuffle=False).tolist())
            of_client = load_config(None, [*given, *(f"local.{name}={own[name]}" for name in own if name != "budget")])
            steps = batches(of_client, t, k, len(rows))
            x, y = population.rows(k, rows)
            done = train(of_client, t, k, w, x, y, steps, network, term=lambda moved, k=k: algorithm.term(k, moved))
            factor = len(rows) * (2.0 if k == drawn[0] else 1.0)
            algorithm.note(k, done.change, done.steps, of_client.local.lr, factor)
            total, divisor = total + factor * done.change, divisor + factor
        w = w + algorithm.update(total / divisor, divisor)
    return w


@pytest.mark.parametrize(
    ("names", "algorithm"),
    [("steps+lr+budget", "plain"), ("budget", "plain"), ("steps+lr", "scaffold"), ("steps+budget", "fednova")],
)
def test_a_cohort_with_work_per_client_is_a_plain_loop_in_every_engine(names: str, algorithm: str) -> None:
    expected = plain(names, f"local.algorithm={algorithm}")
    for engine in ("sequential", "auto"):
        keys = [f"clients.sampler.names={names}", f"local.algorithm={algorithm}", f"local.engine={engine}"]
        done = run(*DEALT, *keys)
        found, start = done.model.double().numpy(), done.start.double().numpy()
        assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected - start)
        if "steps" in names:
            drawn = [stream(4, COHORT, t).choice(9, 5, replace=False).tolist() for t in range(3)]
            counts = [sum(int(work_of(k, t, names)["steps"]) for k in own) for t, own in enumerate(drawn)]
            assert [record["steps"] for record in done.records] == counts


def test_clients_of_one_step_use_their_sample_budgets() -> None:
    done = run(*DEALT, "clients.sampler.names=budget", "local.batch_size=all")
    assert "merged" in done.summary["engine"]
    np.testing.assert_allclose(done.model.numpy(), plain("budget", "local.batch_size=all"), atol=1e-6)


def test_samples_of_clients_with_rates_of_their_own_are_not_merged() -> None:
    drawn = ["samples.sampler=bernoulli", "samples.budget=200", "local.batch_size=all", "clients.sampler.names=lr"]
    one, other = (run(*DEALT, *drawn, f"local.engine={engine}").model for engine in ("sequential", "auto"))
    np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6)


@pytest.mark.parametrize("rule", ["all", "bernoulli"])
def test_any_number_of_workers_shares_the_given_work(rule: str) -> None:
    sampled = ["samples.sampler=bernoulli", "samples.budget=200"] if rule == "bernoulli" else []
    names = "steps" if sampled else "steps+lr+budget"
    experiment = experiment_of(
        f"clients.sampler={OWN}dealt", f"clients.sampler.names={names}", "clients.count=9", *sampled
    )
    alone, plan = experiment.trainer.worker, experiment.decisions.planner.plan(2)
    expected = by_client(alone.tasks(plan, np.arange(len(plan.clients))))
    for ranks, server_trains, shared in ((2, True, True), (3, False, True), (3, False, False)):
        assert_shared_out(plan, workers_of(experiment, ranks, shared, server_trains), expected)
    heavy = replace(plan, steps=np.where(np.arange(len(plan.clients)) == 0, 5000, 1), budgets=plan.budgets[:0])
    assert 0 in [len(worker.members(heavy)) - 1 for worker in workers_of(experiment, 2, True, True)]
    if rule == "all":
        costs = alone._costs(plan, alone.sizes_of(plan))
        passed = plan.steps * np.minimum(np.minimum(plan.budgets, alone.sizes[plan.clients]), 10)
        np.testing.assert_array_equal(costs, passed + STEP_ROWS * plan.steps)
    experiment.close()


def test_work_stays_with_its_client_when_others_drop_out_or_come_late() -> None:
    over = ["clients.over_selection=1.6", "clients.failure_rate=0.3", *CLOCK, "rounds=8", "local.batch_size=70"]
    experiment = experiment_of(f"clients.sampler={OWN}dealt", "clients.count=5", *over)
    sizes, cohorts = experiment.data.sizes, experiment.decisions.cohorts
    counts, capped = [], 0
    for t in range(8):
        plan = experiment.decisions.planner.plan(t)
        counts.append(len(plan.clients))
        work = [work_of(k, t, "steps+lr+budget") for k in plan.clients.tolist()]
        assert plan.steps.tolist() == [own["steps"] for own in work]
        assert plan.rates.tolist() == [own["lr"] for own in work]
        assert plan.budgets.tolist() == [own["budget"] for own in work]
        wanted = np.minimum(plan.budgets, 70)
        passed = plan.steps * np.minimum(wanted, sizes[plan.clients])
        capped += np.count_nonzero(wanted > sizes[plan.clients])
        own = cohorts._devices
        seconds = passed / own.speed[plan.clients]
        seconds += cohorts.bytes_down / own.download[plan.clients] + cohorts.bytes_up / own.upload[plan.clients]
        np.testing.assert_allclose(experiment.decisions.planner.seconds, seconds)
        assert plan.facts["virtual_seconds"] == pytest.approx(seconds.max())
    assert min(counts) < 5 == max(counts) and capped
    experiment.close()


@pytest.mark.parametrize(
    ("share", "sampler"), [(0.4, "clients.sampler=uniform"), (0.001, "clients.sampler.names=steps")]
)
def test_the_clock_follows_the_samples_that_a_data_sampler_has_used(share: float, sampler: str) -> None:
    rule = [f"samples.sampler={OWN}hardest", f"samples.sampler.share={share}"]
    done = run(*(FEW if "uniform" in sampler else DEALT), sampler, *rule, *CLOCK)
    trainer, cohorts = done.experiment.trainer, done.experiment.decisions.cohorts
    sampled = trainer.worker._answered
    assert sampled is not None
    plan, _, rows = sampled
    own, clients = cohorts._devices, plan.clients
    expected = (
        rows.counts * (plan.steps if len(plan.steps) else 1) / own.speed[clients]
        + cohorts.bytes_down / own.download[clients]
        + cohorts.bytes_up / own.upload[clients]
    )
    np.testing.assert_allclose(done.experiment.decisions.planner.seconds, expected)
    assert done.records[-1]["virtual_seconds"] == pytest.approx(expected.max())
    assert (1 in rows.counts) == (share == 0.001)
    assert done.records[-1]["samples"] == rows.counts.sum() < trainer.worker.sizes[clients].sum()


def test_an_opening_step_takes_as_long_with_any_data_sampler_and_no_client_is_late(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("client,start,end\n" + "".join(f"{k},0,0.001\n" for k in range(9)))
    opening = ["preset=fedsso", "data.source=digits:clients=9", "rounds=1", "local.epochs=2", *CLOCK, *QUIET]
    late = ["devices.deadline=0.001", "devices.late=partial", "server.weights=samples", "clients.over_selection=1.5"]
    late += ["clients.availability=intervals", f"clients.availability.file={tmp_path}/a.csv"]
    found = [run(*opening, *rule).records[0] for rule in ([], [f"samples.sampler={OWN}hardest"], late)]
    assert len({record["virtual_seconds"] for record in found}) == 1
    assert [found[2][key] for key in ("participants", "late", "partial", "departed")] == [9, 0, 0, 0]


def test_sample_losses_and_gradient_norms_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[tuple[int, int], list[np.ndarray]] = {}

    @data_sampler(needs=("sample_loss", "sample_gradient_norm"))
    def noting(client: Any) -> np.ndarray:
        seen[client.round, client.index] = [client.fresh("sample_loss"), client.fresh("sample_gradient_norm")]
        with pytest.raises(UserError, match=r"needs=\('loss',\)"):
            client.fresh("loss")
        return np.arange(0, len(client.labels), 2)

    monkeypatch.setattr("fedmpi.local.measures.PASS_ROWS", 7)
    given = {"seed": 4, "rounds": 2, "clients.count": 4, "model.dropout": 0.5, "samples.sampler": noting}
    config = load_config(None, ["preset=fedavg", "seed=4", "clients.count=4", "model.dropout=0.5"])
    population = Population(config)
    network = Network(config, population.description)
    one = fedmpi.run("fedavg", given | {"rounds": 1}).model.state_dict()
    seen.clear()
    fedmpi.run("fedavg", given)
    models = [network.initial, np.concatenate([value.double().numpy().ravel() for value in one.values()])]
    assert len(seen) == 8
    for (t, k), (losses, norms) in seen.items():
        assert not losses.flags.writeable
        x, y = population.rows(k, None)
        np.testing.assert_allclose(losses, network.losses(models[t], x, y)[0], rtol=1e-4)
        with torch.no_grad():
            logits = network.module(x)
        for row, (output, target) in enumerate(zip(logits, y.tolist(), strict=True)):
            gradient = torch.softmax(output, 0)
            gradient[target] -= 1
            assert norms[row] == pytest.approx(float(gradient.norm()), rel=1e-4)


UNBIASED = ["clients.over_selection=2", "server.weights=unbiased", "local.batch_size=1", "local.steps=1"]
REFUSED = [
    (["privacy.clip_norm=1", "server.weights=uniform"], "steps and lr and budget .* privacy.clip_norm does not"),
    (["topology=mediators", "topology.clients_per_mediator=2"], "steps and lr and budget .*mediators"),
    (
        ["samples.sampler=bernoulli", "samples.budget=99", "samples.size.estimate=ldp", "samples.size.epsilon=1"],
        "estimate",
    ),
    (["samples.sampler=exact", "samples.budget=99"], 'sets budget in its Cohort, which samples.sampler = "exact"'),
    (["local.algorithm=fednova"], 'sets lr in its Cohort, which local.algorithm = "fednova"'),
    (["server.weights=q-ffl"], "sets lr in its Cohort, which .*q-ffl.* without server.weights.lipschitz"),
    ([f"clients.sampler={OWN}uneven", *UNBIASED, "devices.speed=lognormal"], "always arrive before others"),
    ([f"clients.sampler={OWN}uneven", *UNBIASED, "devices=true"], "always arrive before others"),
    (["clients.sampler=uniform", f"samples.sampler={OWN}hardest", "clients.over_selection=2", *CLOCK], "must be known"),
]


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_unequal_work_is_rejected_where_it_is_not_covered(keys: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run(*DEALT, *keys)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": [1, 0]}, "steps = 0 for client 3: give values that are whole numbers from 1"),
        ({"budget": [1.5, 2]}, "budget = 1.5 for client 1"),
        ({"lr": [0.1, 0]}, "lr = 0 for client 3: give values above 0"),
        ({"lr": [0.1, np.nan]}, "lr that are not all finite"),
        ({"steps": [1, 2, 3]}, "steps of type int64, shape"),
    ],
)
def test_given_work_is_checked(given: dict[str, Any], words: str) -> None:
    assert all(isinstance(values, np.ndarray) for values in Cohort([1, 3], **given).own_work.values())
    wrong = client_sampler(lambda view: Cohort([1, 3], **given))
    with pytest.raises(ComponentFailure, match=words):
        fedmpi.run("fedavg", {"clients.count": 2, "clients.sampler": wrong})


def test_a_data_sampler_that_needs_the_model_is_not_pooled() -> None:
    with pytest.raises(UserError, match="pooled data samplers cannot have needs"):
        data_sampler(pooled=True, needs="sample_loss")
    with pytest.raises(UserError, match="data_sampler: needs = 'loss' is unknown"):
        data_sampler(needs="loss")


def test_a_plan_sends_work_per_client_only_if_it_is_given() -> None:
    plan = Plan(3, 0.1, np.array([1, 4, 5]), np.array([1.0, 2, 3]), 1, True)
    assert [array.tolist() for array in plan.arrays()] == [[3, 1, 1, 3, 0], [0.1, 1.0], [1, 4, 5], [1, 2, 3], [], []]
    own = replace(plan, rates=np.array([0.1, 0.2, 0.3]), budgets=np.array([4, 5, 6]))
    for one in (plan, own, replace(plan, budgets=own.budgets)):
        back = Plan.from_arrays(one.arrays())
        assert all(np.array_equal(getattr(back, name), getattr(one, name)) for name in ("steps", "rates", "budgets"))
    assert [own.rate_of(k) for k in (1, 4, 5)] == [0.1, 0.2, 0.3]


def test_the_log_says_once_why_clients_train_one_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fedmpi"):
        run(*DEALT, "clients.sampler.alone=true", "clients.count=1")
        run(*DEALT, "clients.sampler.alone=true")
    assert [record.getMessage() for record in caplog.records if "one at a time" in record.getMessage()] == [
        "round 0: clients train one at a time: each has its own steps or lr (said once)"
    ]
