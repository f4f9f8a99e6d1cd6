"""Astraea's Algorithm 3 on cases worked out by hand, and what the options beyond it promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from fedmpi import UserError
from fedmpi.common.registry import resolve
from fedmpi.data.statistics import kl_divergence, pooled_counts, summarize, target_distribution
from fedmpi.mediators.scheduling import _divergence, exchange, greedy

GENERATOR = np.random.default_rng


def random_counts(seed: int, clients: int, classes: int) -> np.ndarray:
    """Class counts of clients with few classes each; every client holds something."""
    generator = GENERATOR(seed)
    counts = generator.poisson(generator.dirichlet(np.full(classes, 0.3), clients) * 30)
    counts[np.arange(clients), generator.integers(0, classes, clients)] += 1
    return counts


def mean_divergence(counts: np.ndarray, mediators: np.ndarray) -> float:
    return float(kl_divergence(pooled_counts(counts, mediators)).mean())


def plain_greedy(counts: np.ndarray, most: int) -> list[list[int]]:
    """Algorithm 3 as the paper writes it, with scipy's relative entropy."""
    uniform, waiting, mediators = np.full(counts.shape[1], 1 / counts.shape[1]), list(range(len(counts))), []
    while waiting:
        members: list[int] = []
        while waiting and len(members) < most:
            pools = [counts[[*members, k]].sum(axis=0) for k in waiting]  # an empty one is as far away as one class
            scores = [round(float(entropy(pool, uniform) if pool.any() else -np.log(uniform[0])), 10) for pool in pools]
            members.append(waiting.pop(int(np.argmin(scores))))
        mediators.append(members)
    return mediators


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 14), st.integers(2, 6), st.integers(1, 6))
def test_it_is_the_papers_loop(seed: int, clients: int, classes: int, most: int) -> None:
    counts = random_counts(seed, clients, classes)
    counts[clients // 3] = 0  # an empty client
    mediators = greedy(counts, most)
    assert [sorted(members) for members in plain_greedy(counts, most)] == [
        np.flatnonzero(mediators == m).tolist() for m in range(mediators.max() + 1)
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 12), st.sampled_from(["greedy", "exchange", "random"]))
def test_every_client_has_one_mediator_and_all_but_the_last_are_full(
    seed: int, clients: int, most: int, kind: str
) -> None:
    mediators = resolve("scheduling", kind).object(random_counts(seed, clients, 5), most, GENERATOR(seed), None)
    sizes = np.bincount(mediators)
    drawn = [resolve("scheduling", "random").object(np.ones((20, 2)), 4, GENERATOR(seed), None) for seed in (seed, 7)]
    assert seed == 7 or drawn[0].tolist() != drawn[1].tolist()
    assert sizes.tolist() == [most] * (clients // most) + [clients % most] * (clients % most > 0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 30), st.integers(1, 8))
def test_exchanges_never_make_it_worse(seed: int, clients: int, most: int) -> None:
    counts = random_counts(seed, clients, 5)
    first = greedy(counts, most)
    improved = exchange(counts, first)
    assert mean_divergence(counts, improved) <= mean_divergence(counts, first) + 1e-12
    np.testing.assert_array_equal(np.bincount(improved), np.bincount(first))


def test_an_exchange_repairs_what_greed_left_over() -> None:
    # Greedy joins the two balanced clients and leaves the two of class 0 together, at log 2. One swap gives each of
    # these a balanced partner.
    counts = np.array([[5, 5], [6, 5], [9, 0], [9, 0]])
    first = greedy(counts, 2)
    assert first.tolist() == [0, 0, 1, 1]
    improved = exchange(counts, first)
    assert improved[0] != improved[1] and improved[2] != improved[3]
    assert mean_divergence(counts, improved) < mean_divergence(counts, first)


def test_a_given_target_is_approached_instead_of_the_uniform_one() -> None:
    # Target 3 : 1. Client 1 alone is at 3 : 1 and opens; under the uniform target client 0 would.
    counts = np.array([[2, 2], [3, 1], [1, 1]])
    assert greedy(counts, 1, target=target_distribution(2, np.array([30, 10]))).tolist() == [1, 0, 2]
    assert greedy(counts, 1).tolist() == [0, 2, 1]


def test_a_class_that_the_target_lacks_is_rejected() -> None:
    with pytest.raises(UserError, match="class 1"):
        greedy(np.array([[1, 1]]), 1, target=target_distribution(2, np.array([5, 0])))
    assert greedy(np.array([[1, 0]]), 1, target=target_distribution(2, np.array([5, 0]))).tolist() == [0]


def test_clients_without_samples_count_as_the_worst_when_they_are_grouped() -> None:
    """They are as far from the target as one whose samples are all of its rarest class."""
    target, counts = np.array([0.5, 0.4, 0.1]), np.array([[0, 0, 0], [0, 0, 7], [5, 4, 1], [9, 0, 0]])
    found = _divergence(counts.astype(np.float64), np.log(target))
    assert found == pytest.approx([-np.log(0.1), -np.log(0.1), 0.0, -np.log(0.5)], abs=1e-12)


def test_the_divergence_of_no_samples_is_unknown_and_left_out_of_the_summary() -> None:
    divergences = kl_divergence(np.array([[0, 0], [4, 0], [2, 2]]))
    np.testing.assert_allclose(divergences, [np.nan, np.log(2), 0], atol=1e-15)
    summary = [summarize(divergences, "kl")[f"kl_{name}"] for name in ("mean", "std", "max")]
    np.testing.assert_allclose(summary, [np.log(2) / 2, np.log(2) / 2, np.log(2)])
    assert np.isnan(summarize(divergences[:1], "kl")["kl_mean"])
