"""Participants are assigned to workers: each one once, with its rows and its factor."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedmpi.common.errors import RanksDisagree
from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.placement import lay_out
from fedmpi.core.reduce import check_work
from fedmpi.core.worker import Worker
from fedmpi.local.work import ClientTask

RULES = {
    "all": [],
    "bernoulli": ["samples.sampler=bernoulli", "samples.budget=200"],
    "ratio": ["samples.sampler=ratio", "samples.sampler.ratio=0.3"],
    "exact": ["samples.sampler=exact", "samples.budget=60"],
}
COHORTS = {"some": ["clients.sampler=uniform", "clients.count=9"], "all": ["clients.sampler=all"]}


def experiment_of(*settings: str) -> Experiment:
    common = ["data.source=digits:clients=14,alpha=0.4", "model.hidden=[4]", "logging.tensorboard=false"]
    return Experiment.connect(load_config(None, [*common, *settings]))


def workers_of(experiment: Experiment, ranks: int, shared: bool, server_trains: bool) -> list[Worker]:
    """Return the work that every rank of a job derives from the same plan."""
    one, made = experiment.trainer.worker, []
    for rank in range(ranks):
        cluster = SimpleNamespace(rank=rank, size=ranks, is_server=rank == 0)
        layout = lay_out(cluster, one.sizes, np.array([0, len(one.sizes)]), server_trains, shared)
        cost = 50.0 if server_trains else 0.0
        made.append(Worker(one.config, layout, one.engine, one.sizes, one.row_rule, one.weight_sizes, cost, 0.0))
    return made


def by_client(tasks: list[ClientTask]) -> dict[int, tuple[list[int] | None, float]]:
    return {task.client: (None if task.rows is None else task.rows.tolist(), task.coefficient) for task in tasks}


def assert_shared_out(plan: Plan, workers: list[Worker], expected: dict[int, tuple[list[int] | None, float]]) -> None:
    places = [worker.members(plan) for worker in workers]
    assert sorted(np.concatenate(places).tolist()) == list(range(len(plan.clients)))
    parts = [by_client(worker.tasks(plan, own)) for worker, own in zip(workers, places, strict=True)]
    assert sum(map(len, parts)) == len(expected)
    assert {client: task for part in parts for client, task in part.items()} == expected
    if workers[0].layout.shared:
        trainers = workers[0].trainers(plan)
        for rank, (worker, own) in enumerate(zip(workers, places, strict=True)):
            assert np.array_equal(worker.trainers(plan), trainers)
            assert np.array_equal(np.flatnonzero(worker.layout.ranks(trainers) == rank), own)


@pytest.mark.parametrize("cohort", COHORTS)
@pytest.mark.parametrize("rule", ["all", "bernoulli", "ratio", "exact"])
def test_any_number_of_workers_does_the_tasks_of_one(rule: str, cohort: str) -> None:
    experiment = experiment_of(*RULES[rule], *COHORTS[cohort], "evaluation.every=2")
    alone = experiment.trainer.worker
    for t in range(3):
        plan = experiment.decisions.planner.plan(t)
        everybody = np.arange(len(plan.clients))
        expected = by_client(alone.tasks(plan, everybody))
        for ranks, server_trains, shared in ((2, True, True), (3, False, True), (4, True, True), (3, False, False)):
            assert_shared_out(plan, workers_of(experiment, ranks, shared, server_trains), expected)
        scattered = everybody[1::3]
        of_these = set(plan.clients[scattered].tolist())
        assert by_client(alone.tasks(plan, scattered)) == {k: task for k, task in expected.items() if k in of_these}
        assert not alone.tasks(plan, everybody[:0])
    experiment.close()


@pytest.mark.parametrize("rule", ["all", "bernoulli"])
def test_a_worker_that_is_three_times_as_fast_gets_about_three_times_the_work(rule: str) -> None:
    experiment = experiment_of(*RULES[rule], *COHORTS["all"], "data.source=digits:clients=60,partition=iid")
    plan = replace(experiment.decisions.planner.plan(1), speeds=np.array([0.5, 1.5]))
    workers = workers_of(experiment, 3, True, False)
    assert_shared_out(plan, workers, by_client(experiment.trainer.worker.tasks(plan, np.arange(60))))
    assert [len(worker.members(plan)) for worker in workers] == [0, 15, 45]
    experiment.close()


PLAN = Plan(3, 0.1, np.arange(4), np.ones(4), per_sample=True, normalize=True)


@pytest.mark.parametrize("trained", [2, 4])
def test_where_rows_are_drawn_those_who_got_some_are_all_trained(trained: int):
    sums = {"places": 4.0, "due": 3.0, "clients": 3.0}
    check_work(PLAN, sums, expected=None, visits_each=None)
    with pytest.raises(RanksDisagree, match="4 participants have samples to train on, but 3 were trained"):
        check_work(PLAN, sums, expected=4, visits_each=None)
    with pytest.raises(RanksDisagree, match=f"3 participants have samples to train on, but {trained} were trained"):
        check_work(PLAN, sums | {"clients": trained}, expected=None, visits_each=None)
