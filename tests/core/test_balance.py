"""Costs of rows, steps and workers are recovered from seconds, and work is spread by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedmpi.config import load_config
from fedmpi.core.placement import (
    LIKELY,
    MEMORY,
    MOST_STEP_ROWS,
    NOISE,
    STATE,
    STEP_ROWS,
    Balance,
    BalanceLearner,
    longest_first,
)
from tests.reference.program import on_ranks, records_of

ROW_SECONDS = 2e-5


class Machine:
    """Workers of known speeds on which a row and a step cost known times, measured with 3 % of noise."""

    def __init__(self, step_rows: float, speeds: list[float], seed: int = 0):
        self.step_rows, self.speeds = step_rows, np.array(speeds)
        self.generator = np.random.default_rng(seed)

    def cohort(self, clients: int = 40) -> tuple[np.ndarray, np.ndarray]:
        """Rows and steps of a round's participants: sizes differ by a factor of ten, batches are of twenty."""
        rows = self.generator.lognormal(4, 0.7, clients).astype(int) + 1.0
        return rows, np.ceil(rows / 20)

    def seconds(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        noise = self.generator.normal(1, 0.03, len(rows))
        return ROW_SECONDS * (rows + self.step_rows * steps) / self.speeds * noise

    def run(self, learner: BalanceLearner, rounds: int) -> np.ndarray:
        """Rounds spread by what has been learned; the share of the planned work that each worker got in the last."""
        for _ in range(rounds):
            rows, steps = self.cohort()
            balance = Balance.from_array(learner.as_array())
            costs = rows + balance.step_rows * steps
            owners = longest_first(costs, len(self.speeds), speeds=balance.speeds)
            per_worker = [np.bincount(owners, what, len(self.speeds)) for what in (rows, steps)]
            learner.observe(*per_worker, self.seconds(*per_worker))
        work = np.bincount(owners, costs, len(self.speeds))
        return work / work.sum()


@pytest.mark.parametrize("step_rows", [0.0, 8.0, 25.0, 80.0])
@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0], [1.4, 1.1, 0.5]])
def test_step_cost_and_speeds_are_recovered_within_a_few_per_cent(step_rows: float, speeds: list[float]):
    machine, learner = Machine(step_rows, speeds), BalanceLearner(3)
    generator = np.random.default_rng(1)
    for _ in range(40):
        rows, steps = generator.uniform(500, 3000, 3), generator.uniform(10, 150, 3)
        learner.observe(rows, steps, machine.seconds(rows, steps))
    found = learner.balance()
    assert found is not None and found.speeds is not None
    assert found.step_rows == pytest.approx(step_rows, rel=0.06, abs=1.5)
    assert found.speeds == pytest.approx(np.array(speeds) / np.mean(speeds), rel=0.03)


def test_the_step_cost_is_the_least_squares_fit_drawn_towards_what_is_assumed():
    """Rows [rows, steps | seconds] of a plain fit a · rows + b · steps, one more row for b = STEP_ROWS · a."""
    rows, steps, seconds = np.array([[900.0, 700.0, 1100.0], [46.0, 35.0, 54.0], [0.5, 0.3, 0.9]])
    learner = BalanceLearner(1)
    for round in zip(rows, steps, seconds, strict=True):
        learner.observe(*(np.array([value]) for value in round))
    recent = np.sqrt(MEMORY ** np.array([2, 1, 0]))
    r, q, s = recent * rows / seconds, recent * steps / seconds, recent
    row_seconds = np.linalg.lstsq((r + STEP_ROWS * q)[:, None], s, rcond=None)[0][0]
    trust = NOISE / (LIKELY * row_seconds)
    matrix = np.vstack([np.column_stack([r, q]), [-trust * STEP_ROWS, trust]])
    row, step = np.linalg.lstsq(matrix, np.append(s, 0.0), rcond=None)[0]
    assert 1 < step / row < MOST_STEP_ROWS / 2
    assert learner.as_array() == pytest.approx([step / row, 1.0], rel=1e-6)


def test_a_worker_that_is_twice_as_slow_gets_half_the_work_of_the_others():
    shares = Machine(8.0, [1.0, 0.5, 1.0]).run(BalanceLearner(3), 12)
    assert shares == pytest.approx([0.4, 0.2, 0.4], rel=0.1)


def test_the_last_twenty_rounds_count_most_and_older_ones_are_forgotten():
    """After 60 rounds at new speeds the 200 before them weigh 0.95 ** 60 = 5 %; unforgotten they would decide."""
    learner, generator = BalanceLearner(2), np.random.default_rng(2)
    for count, speeds in ((200, [1.0, 1.0]), (60, [1.0, 3.0])):
        machine = Machine(8.0, speeds, seed=count)
        for _ in range(count):
            rows, steps = generator.uniform(500, 3000, 2), generator.uniform(10, 150, 2)
            learner.observe(rows, steps, machine.seconds(rows, steps))
    found = learner.balance()
    assert found is not None and found.speeds == pytest.approx([0.5, 1.5], rel=0.12)


def test_an_idle_worker_is_taken_to_be_average_and_senseless_seconds_stay_bounded():
    learner = BalanceLearner(3)
    learner.observe(np.array([100.0, 0.0, 100.0]), np.array([9.0, 0.0, 5.0]), np.array([1.0, 1e-6, 1.0]))
    found = learner.balance()
    assert found is not None and found.speeds is not None and found.speeds[1] == pytest.approx(1, rel=0.2)
    wild = BalanceLearner(2)
    for rows, steps, seconds in ((1.0, 1000.0, 9.0), (1000.0, 1.0, 1e-9), (5.0, 5.0, 1e9)):
        wild.observe(np.array([rows, rows]), np.array([steps, 2 * steps]), np.array([seconds, 1e-9]))
        found = wild.balance()
        assert found is not None and found.speeds is not None
        assert 0 <= found.step_rows <= MOST_STEP_ROWS and (found.speeds > 0).all()
        assert np.isfinite(found.speeds).all() and found.speeds.mean() == pytest.approx(1)


def test_a_checkpoint_of_as_many_workers_continues_where_it_was():
    learner, same, more = BalanceLearner(3), BalanceLearner(3), BalanceLearner(5)
    Machine(40.0, [1.5, 1.0, 0.5]).run(learner, 40)
    for other in (same, more):
        other.load(learner.state())
        other.load({})
    assert same.as_array() == pytest.approx(learner.as_array(), rel=1e-3)
    assert learner.state()[STATE].shape == (3, 6) and not more.as_array().size


SLOWED = """
from dataclasses import replace
from fedmpi.core.plan import Decisions
from tests.reference.program import *

learn = Decisions.learn

def learn_from_synthetic_seconds(self, totals):
    seconds = 1e-4 * (totals.rows + 20 * totals.steps)
    seconds[1] *= 3
    learn(self, replace(totals, busy=seconds))

Decisions.learn = learn_from_synthetic_seconds
run_guarded(main)
"""


@pytest.mark.slow
def test_a_rank_that_is_a_third_as_fast_gets_less_work_and_the_model_is_the_same(tmp_path: Path):
    """Rank 1 is the first worker; the run resumes after a round with what it has learned."""
    common = "preset=fedavg clients.count=12 rounds=10 logging.tensorboard=false local.epochs=1 server.exact=true"
    common += " local.batch_size=10 cluster.placement=shared cluster.server_trains=never cluster.threads=1"
    configs = {
        f"{balance}{sampled}": load_config(None, [*common.split(), f"cluster.balance={balance}", *sampled.split()])
        for sampled in ("", " samples.sampler=bernoulli samples.budget=300")
        for balance in ("planned", "measured")
    }
    traces = on_ranks(3, configs, tmp_path, "cut", ("-c", SLOWED))
    for sampled in ("", " samples.sampler=bernoulli samples.budget=300"):
        planned, measured = traces[f"planned{sampled}"], traces[f"measured{sampled}"]
        assert np.array_equal(planned["cohorts"], measured["cohorts"])
        assert np.array_equal(planned["models"], measured["models"])
        (_, slow, quick), (_, less, more) = (trace["shares"].sum(axis=0) for trace in (planned, measured))
        assert slow == pytest.approx(quick, rel=0.3) and less < 0.6 * more
        assert records_of(measured)[-1]["worker_speeds"] == pytest.approx([0.5, 1.5], rel=0.1)
        assert "worker_speeds" not in records_of(planned)[-1]
