"""The ratio of fast rounds: what a machine does to some passes does not move it, and its interval holds the truth."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.beside import bootstrap, fast_ratio

Passes = list[tuple[list[float], list[float]]]


def passes(factor: float, seed: int) -> Passes:
    """Ten passes of twenty rounds, in three of which the machine is half as fast for one of the two."""
    generator = np.random.default_rng(seed)
    found: Passes = []
    for number in range(10):
        rounds = 0.1 * (1 + generator.exponential(0.05, (2, 20)))
        if number in (2, 5, 7):
            rounds[number % 2] *= 2
        found.append((rounds[0].tolist(), (factor * rounds[1]).tolist()))
    return found


def test_slow_passes_do_not_move_the_ratio_of_fast_rounds():
    for seed in range(5):
        assert fast_ratio(passes(1.2, seed)) == pytest.approx(1.2, rel=0.01)


def test_the_interval_holds_the_ratio_and_is_no_wider_than_the_fast_rounds_differ():
    for seed in range(5):
        low, high = bootstrap(passes(1.2, seed))
        assert 1.18 < low < 1.202 and 1.198 < high < 1.22
        assert low <= fast_ratio(passes(1.2, seed)) <= high
