"""The workers' speeds are recovered from seconds, and work is spread by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedmpi.config import load_config
from fedmpi.core.placement import SLOWEST, BalanceLearner
from tests.reference.program import on_ranks, records_of


def observe(learner: BalanceLearner, speeds: list[float], rounds: int) -> None:
    """Rounds of different lengths in which the workers have different costs; seconds have 3 % of noise."""
    generator = np.random.default_rng(rounds)
    for _ in range(rounds):
        costs = generator.uniform(500, 3000, len(speeds)) * generator.uniform(1, 9)
        learner.observe(costs, 2e-5 * costs / speeds * generator.normal(1, 0.03, len(speeds)))


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0], [1.4, 1.1, 0.5]])
def test_speeds_are_recovered_and_a_checkpoint_of_as_many_workers_continues(speeds: list[float]):
    learner, same, more = BalanceLearner(3), BalanceLearner(3), BalanceLearner(5)
    assert not learner.speeds().size and not learner.state()
    observe(learner, speeds, 40)
    assert learner.speeds() == pytest.approx(np.array(speeds) / np.mean(speeds), rel=0.03)
    for other in (same, more):
        other.load(learner.state())
        other.load({})
    assert np.array_equal(same.speeds(), learner.speeds()) and not more.speeds().size


def test_the_last_twenty_rounds_count_most_and_older_ones_are_forgotten():
    """After 60 rounds at new speeds the 200 before them weigh 0.95 ** 60 = 5 %; unforgotten they would decide."""
    learner = BalanceLearner(2)
    observe(learner, [1.0, 1.0], 200)
    observe(learner, [1.0, 3.0], 60)
    assert learner.speeds() == pytest.approx([0.5, 1.5], rel=0.12)


def test_an_idle_worker_is_taken_to_be_average_and_senseless_seconds_stay_bounded():
    learner = BalanceLearner(3)
    learner.observe(np.array([100.0, 0.0, 100.0]), np.array([1.0, 1e-6, 1.0]))
    assert learner.speeds() == pytest.approx([1, 1, 1])
    learner.observe(np.zeros(3), np.ones(3))
    for cost, seconds in ((1000.0, 9.0), (1.0, 1e-9), (5.0, 1e9)):
        learner.observe(np.array([cost, 2 * cost, cost]), np.array([seconds, 1e-9, seconds]))
        speeds = learner.speeds()
        assert (speeds > 0).all() and speeds.mean() == pytest.approx(1) and speeds.max() / speeds.min() <= SLOWEST**2


SLOWED = """
from dataclasses import replace
from fedmpi.core.decisions import Decisions
from tests.reference.program import *

learn = Decisions.learn

def learn_from_synthetic_seconds(self, totals):
    seconds = 1e-4 * totals.cost
    seconds[1] *= 3
    learn(self, replace(totals, busy=seconds))

Decisions.learn = learn_from_synthetic_seconds
run_guarded(main)
"""


@pytest.mark.slow
def test_a_rank_that_is_a_third_as_fast_gets_less_work_and_the_model_is_the_same(tmp_path: Path):
    """Rank 1 is the first worker; the run resumes after a round with what it has learned."""
    common = "preset=fedavg clients.count=12 rounds=6 logging.tensorboard=false local.epochs=1 server.exact=true"
    common += " local.batch_size=10 cluster.placement=shared cluster.server_trains=never cluster.threads=1"
    common += " samples.sampler=bernoulli samples.budget=300"
    configs = {
        balance: load_config(None, f"{common} cluster.balance={balance}".split()) for balance in ("planned", "measured")
    }
    traces = on_ranks(3, configs, tmp_path, "cut", ("-c", SLOWED))
    planned, measured = traces["planned"], traces["measured"]
    assert np.array_equal(planned["cohorts"], measured["cohorts"])
    assert np.array_equal(planned["models"], measured["models"])
    (_, slow, quick), (_, less, more) = (trace["shares"].sum(axis=0) for trace in (planned, measured))
    assert slow == pytest.approx(quick, rel=0.3) and less < 0.6 * more
    assert records_of(measured)[-1]["worker_speeds"] == pytest.approx([0.5, 1.5], rel=0.1)
    assert "worker_speeds" not in records_of(planned)[-1]
