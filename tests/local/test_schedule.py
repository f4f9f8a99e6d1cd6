"""The batches of one client."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.common.streams import Purpose
from fedmpi.local.schedule import needs_order, schedule, step_count
from fedmpi.local.work import LocalRule
from tests.local.synthetic import STREAMS

sizes = st.integers(0, 60)
batches = st.none() | st.integers(1, 70)
repeats = st.integers(1, 40)


def drawn(rule: LocalRule, n: int) -> list[np.ndarray]:
    batches = schedule(rule, n, STREAMS.generator(Purpose.BATCH_ORDER, 1, 2))
    return [np.arange(n) if rows is None else rows for rows in batches]


@given(n=sizes, batch=batches, epochs=st.integers(1, 4))
def test_every_row_is_seen_once_an_epoch_in_batches_of_b(n: int, batch: int | None, epochs: int):
    rule = LocalRule(epochs=epochs, batch_size=batch)
    found = drawn(rule, n)
    assert sorted(np.concatenate([[], *found])) == sorted(list(range(n)) * epochs)
    per_epoch = len(found) // epochs
    for epoch in range(epochs if n else 0):
        part = found[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(np.concatenate(part)) == list(range(n))
        assert all(len(rows) == (batch or n) for rows in part[:-1])


@given(n=sizes, batch=batches, steps=repeats)
def test_every_step_draws_distinct_rows_of_the_client(n: int, batch: int | None, steps: int):
    rule = LocalRule(epochs=None, steps=steps, batch_size=batch)
    found = drawn(rule, n)
    assert len(found) == (steps if n else 0)
    for rows in found:
        assert len(set(rows)) == len(rows) == min(batch or n, n)
        assert set(rows) <= set(range(n))


@given(n=sizes, batch=batches, repeat=repeats, by_steps=st.booleans())
def test_the_number_of_steps_is_known_without_drawing(n: int, batch: int | None, repeat: int, by_steps: bool):
    rule = LocalRule(epochs=None if by_steps else repeat, steps=repeat if by_steps else None, batch_size=batch)
    assert step_count(rule, n) == len(drawn(rule, n))
    if not needs_order(rule, n):
        assert schedule(rule, n, None) == [None] * step_count(rule, n)


def test_every_epoch_and_step_has_a_new_draw():
    first, second = (np.concatenate(half) for half in np.split(np.array(drawn(LocalRule(epochs=2), 50)), 2))
    assert not np.array_equal(first, second)
    steps = drawn(LocalRule(epochs=None, steps=2, batch_size=10), 1000)
    assert not np.array_equal(*steps)


def test_every_row_is_drawn_equally_often_by_steps():
    """χ² over 20 rows of 4000 draws at a fixed seed; false alarm rate 1e-4 (χ²_19 > 49.7, larger for sampling
    without replacement)."""
    rule = LocalRule(epochs=None, steps=1000, batch_size=4)
    counts = np.bincount(np.concatenate(drawn(rule, 20)), minlength=20)
    assert ((counts - 200) ** 2 / 200).sum() < 49.7


@pytest.mark.parametrize("epochs, steps", [(None, None), (1, 1)])
def test_a_rule_has_either_epochs_or_steps(epochs: int | None, steps: int | None):
    with pytest.raises(ValueError, match="either epochs or steps"):
        LocalRule(epochs=epochs, steps=steps)
