"""Runs of unlike age are compared round for round: what grows is seen, and what the machine does to both is not."""

import numpy as np
import pytest

from benchmarks.aged import measured, ratio


@pytest.mark.parametrize("growth", [1.0, 1.03])
def test_what_a_machine_does_to_both_cancels_and_what_grows_stays(growth: float):
    """The machine drifts by half, stops a round in twenty and is off by 3 % in each: 50 turns tell 3 % from nothing."""
    drawn = np.random.default_rng(5)
    machine = np.linspace(20, 30, 500).reshape(50, 10)
    times = np.stack([growth * machine, machine], 2) * drawn.normal(1, 0.03, (50, 10, 2))
    times[drawn.random(times.shape) < 0.05] *= 3
    mean, least, most = ratio(times)
    assert least < mean < most and most - least < 0.012
    assert least < growth < most
    assert (least <= 1 <= most) == (growth == 1)


def test_an_interval_holds_the_ratio_as_often_as_it_says():
    """1,000 intervals of 95 % over 10 turns: 20 to 80 miss, more than four standard deviations around 50."""
    drawn = np.random.default_rng(6)
    missed = 0
    for _ in range(1000):
        _, least, most = ratio(np.exp(drawn.normal(0, 0.05, (10, 10, 2))))
        missed += not least < 1 < most
    assert 20 <= missed <= 80


@pytest.mark.slow
def test_the_turns_of_two_runs_are_sent_and_their_calls_counted():
    times, calls = measured(rounds=20, turns=2)
    assert times.shape == (2, 10, 2) and (times > 0).all()
    assert calls[0] == pytest.approx(calls[1], rel=0.02)
