"""Astraea's Algorithm 2: which samples get how many augmented copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi import UserError
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.data.augmentation import copies_of, copies_per_sample, rebalance, source_rows

READINGS = ("ratio", "ratio-minus-one")


def population(seed: int, clients: int, classes: int) -> list[np.ndarray]:
    """Labels of some clients with skewed class totals; the last class may be missing altogether."""
    generator = np.random.default_rng(seed)
    law = generator.dirichlet(np.full(classes, 0.5))
    return [generator.choice(classes, generator.integers(1, 30), p=law) for _ in range(clients)]


def counts_of(labels: list[np.ndarray], classes: int) -> np.ndarray:
    return np.array([np.bincount(y, minlength=classes) for y in labels])


def test_a_class_below_the_mean_gets_the_ratio_to_the_mean_and_the_others_get_nothing() -> None:
    totals = np.array([2, 8, 20])  # mean 10
    np.testing.assert_allclose(copies_per_sample(totals, 1.0, "ratio"), [5.0, 1.25, 0.0])
    np.testing.assert_allclose(copies_per_sample(totals, 1.0, "ratio-minus-one"), [4.0, 0.25, 0.0])
    np.testing.assert_allclose(copies_per_sample(totals, 0.5, "ratio"), [np.sqrt(5), np.sqrt(1.25), 0.0])
    np.testing.assert_array_equal(copies_per_sample(totals, 0.0, "ratio"), [1.0, 1.0, 0.0])
    np.testing.assert_array_equal(copies_per_sample(totals, 0.0, "ratio-minus-one"), [0.0, 0.0, 0.0])


def test_a_missing_class_counts_in_the_mean_but_gets_no_copies() -> None:
    # Mean of (0, 6, 6, 12) is 6, not the 8 of the three classes that exist: the classes with 6 samples are not scarce.
    np.testing.assert_array_equal(copies_per_sample(np.array([0, 6, 6, 12]), 1.0, "ratio"), [0, 0, 0, 0])
    np.testing.assert_allclose(copies_per_sample(np.array([0, 4, 8, 12]), 1.0, "ratio"), [0, 1.5, 0, 0])


def test_whole_numbers_of_copies_need_no_luck() -> None:
    # Totals (2, 8, 20): class 0 gets exactly 5 copies a sample. Class 1 is made whole too by totals (2, 5, 23).
    counts = np.array([[1, 0, 13], [1, 5, 10]])
    result = rebalance(counts, 1.0, "ratio", Streams(3))
    np.testing.assert_array_equal(result.copies, [5, 2, 0])
    np.testing.assert_array_equal(result.class_counts, [[6, 0, 13], [6, 15, 10]])
    np.testing.assert_array_equal(result.added, [5, 15])
    np.testing.assert_array_equal(result.sizes, [19, 31])
    np.testing.assert_array_equal(result.original_sizes, [14, 16])
    assert result.overhead == 20 / 30


def test_the_fractional_part_is_a_bernoulli_draw_of_every_sample() -> None:
    """Frequency of the extra copy over 20,000 samples. False-alarm rate 6e-7 (five standard deviations)."""
    copies = np.array([2.3, 0.0])
    numbers = copies_of(np.zeros(20_000, np.int64), copies, Streams(5), client=4)
    assert set(np.unique(numbers)) == {2, 3}
    assert abs((numbers == 3).mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 20_000)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.integers(1, 6),
    st.floats(0, 2),
    st.sampled_from(READINGS),
)
def test_the_counts_of_the_server_are_those_of_the_clients_copies(
    seed: int, clients: int, classes: int, alpha: float, reading: str
) -> None:
    labels, streams = population(seed, clients, classes), Streams(seed)
    result = rebalance(counts_of(labels, classes), alpha, reading, streams)
    for client, y in enumerate(labels):
        rows = source_rows(y, result.copies, streams, client)
        made = np.concatenate([y, y[rows]])
        np.testing.assert_array_equal(np.bincount(made, minlength=classes), result.class_counts[client])
        assert len(made) == result.sizes[client]
        assert len(rows) == result.added[client]


def test_a_client_copies_the_same_rows_whichever_others_are_selected() -> None:
    labels, copies = np.array([0, 1, 0, 2, 1, 0]), np.array([0.5, 1.5, 0.0])
    alone = source_rows(labels, copies, Streams(9), client=70_000)
    population(0, 5, 3)
    np.testing.assert_array_equal(alone, source_rows(labels, copies, Streams(9), client=70_000))
    assert not np.array_equal(
        copies_of(np.zeros(64, np.int64), copies, Streams(9), 1),
        copies_of(np.zeros(64, np.int64), copies, Streams(9), 2),
    )


def test_blocks_of_clients_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counts_of(population(4, 50, 5), 5)
    whole = rebalance(counts, 0.67, "ratio", Streams(1))
    monkeypatch.setattr("fedmpi.data.augmentation._CLIENTS_AT_ONCE", 7)
    np.testing.assert_array_equal(rebalance(counts, 0.67, "ratio", Streams(1)).class_counts, whole.class_counts)


@pytest.mark.parametrize("alpha", [-0.1, 2.001, 12.0, float("nan"), float("inf")])
def test_alpha_outside_its_range_is_rejected_everywhere(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be a number from 0 to 2"):
        copies_per_sample(np.array([1, 2]), alpha, "ratio")
    with pytest.raises(UserError, match=r"rebalance\.alpha"):
        load_config(None, ["preset=astraea", f"rebalance.alpha={alpha}"])


def test_more_copies_than_can_be_handled_are_rejected_by_the_class_that_asks_for_them() -> None:
    # C̄ = 10⁵ with class 1 held once: (10⁵)² = 10¹⁰ copies of it, α = 1.9 leaves 3 · 10⁹ (below 2³²).
    counts = np.array([[200_000 - 1, 1]])
    with pytest.raises(
        UserError, match=r"rebalance.alpha = 2 asks for 1e\+10 copies .* class 1\), more than .*4,294,967"
    ):
        rebalance(counts, 2.0, "ratio", Streams(0))
    assert rebalance(counts, 1.9, "ratio", Streams(0)).added.sum() == pytest.approx(1e5**1.9, rel=1e-6)
    with pytest.raises(UserError, match=r"5e\+09 copies \(2.5e\+09 of each"):  # few enough of one sample, not of two
        rebalance(np.array([[200_000 - 2, 2]]), 2.0, "ratio", Streams(0))
