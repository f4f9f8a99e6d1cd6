"""Ragged clients and equal ones of as many steps: both train, and the steps are as many."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.engines import CASES
from benchmarks.studies.ragged_places import equal_steps, measure, ragged_steps, round_of


@pytest.mark.parametrize("clients", [1, 12, 50])
def test_equal_clients_take_as_many_steps_as_ragged_ones(clients: int) -> None:
    ragged = ragged_steps(clients, 20)
    equal = equal_steps(ragged)
    assert len(equal) == clients and equal.sum() == ragged.sum() and equal.max() - equal.min() <= 1
    assert ragged.min() == 1 and (clients == 1 or ragged.max() == 45)


def test_a_round_takes_the_steps_that_it_is_asked_for() -> None:
    report = round_of(CASES["mlp"], np.array([1, 3]))()
    assert (report.steps, report.samples) == (4, 80)


def test_a_model_is_a_line_of_the_table() -> None:
    assert measure("mlp", 3, 1).startswith("| mlp | 47 | ")
