"""Whether rounding explains a difference: yes where a calculation jumps, no where it is smooth, never above a tenth."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedmpi.common.arithmetic import AT_MOST, TIMES, TRIES, explained_by_rounding

VALUES = torch.full((50,), 0.3)


class Tried:
    """What is tried, and by how much it is said to move."""

    def __init__(self, *moves: float):
        self.moves, self.values = list(moves), list[Tensor]()

    def __call__(self, values: Tensor) -> float:
        self.values.append(values)
        return self.moves[min(len(self.values), len(self.moves)) - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_values_tried_are_each_a_unit_in_the_last_place_beside_the_given_ones(dtype: torch.dtype):
    given, tried = VALUES.to(dtype), Tried(0.0)
    kept = given.clone()
    assert not explained_by_rounding(0.01, tried, given)
    assert torch.equal(given, kept)
    assert len(tried.values) == TRIES
    for values in tried.values:
        moved = (values - given) / given / torch.finfo(dtype).eps
        assert ((moved.abs() > 0.4) & (moved.abs() < 1.6)).all()
        assert 5 < int((moved > 0).sum()) < 45
    assert not any(torch.equal(one, tried.values[0]) for one in tried.values[1:])


def test_one_try_that_moves_as_far_is_enough_and_the_last():
    tried = Tried(1e-7, 1e-7, 0.01 / TIMES * 1.01, 0.0)
    assert explained_by_rounding(0.01, tried, VALUES)
    assert len(tried.values) == 3


def test_tries_that_all_fall_short_explain_nothing():
    assert not explained_by_rounding(0.01, Tried(0.01 / TIMES * 0.99), VALUES)


def test_what_moves_to_no_number_explains_nothing():
    assert not explained_by_rounding(0.01, Tried(math.nan), VALUES)


@pytest.mark.parametrize("apart", [AT_MOST * 1.01, math.inf, math.nan])
def test_large_differences_are_never_rounding(apart: float):
    tried = Tried(1.0)
    assert not explained_by_rounding(apart, tried, VALUES)
    assert not tried.values


def test_the_global_generator_stays_as_it_was():
    state = torch.get_rng_state()
    explained_by_rounding(0.01, Tried(0.0), VALUES)
    assert torch.equal(torch.get_rng_state(), state)
