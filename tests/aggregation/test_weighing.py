"""Custom weights are checked and made to add up in any order, also those that follow from clients' work."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedmpi import Cohort, ComponentFailure, weights
from fedmpi.aggregation.exact import FixedPointSum, FloatSum, JudgedSum
from fedmpi.aggregation.weights import ClientWork, Weighing
from fedmpi.clients.cohort import StrataSummary, full_participation
from fedmpi.common.plan import Plan
from fedmpi.common.registry import resolve
from fedmpi.mpi import Cluster

SIZES = np.array([3, 10, 7, 1, 29], np.int64)


@weights(per_sample=False, normalized=True)
def root(cohort: Cohort, sizes: np.ndarray) -> np.ndarray:
    return np.sqrt(sizes[cohort.clients])


def weighing(chosen: Any, **options: Any) -> Weighing:
    return Weighing(resolve("weights", chosen), options)


def test_normalized_weights_add_up_bit_for_bit_in_any_order() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 3001)
    found = weighing(root).of(full_participation(3001), sizes, 0)
    assert sum(found.tolist()) == sum(found[::-1].tolist()) == sum(np.sort(found).tolist())
    assert sum(np.sqrt(sizes).tolist()) != sum(np.sort(np.sqrt(sizes)).tolist())


@pytest.mark.parametrize("per_sample", [False, True])
def test_the_total_weight_is_of_a_known_size(per_sample: bool) -> None:
    chosen = weighing(weights(per_sample=per_sample)(lambda cohort, sizes: np.sqrt(sizes[cohort.clients]) / 7e5))
    found = chosen.of(full_participation(5), SIZES, 0)
    assert 2**9 <= (found * (SIZES if per_sample else 1)).sum() < 2**10


def answering(answer: Any, normalized: bool = True) -> Weighing:
    @weights(normalized=normalized)
    def some(cohort: Cohort, sizes: np.ndarray) -> Any:
        return answer(sizes)

    return weighing(some)


@pytest.mark.parametrize(
    "answer, reason",
    [
        (lambda sizes: sizes, r"shape \(5,\): return real numbers, shape \(2,\)"),
        (lambda sizes: sizes * np.ones(2), "ValueError"),
        (lambda sizes: "much", "return real numbers"),
        (lambda sizes: [1.0, 1j], "return real numbers"),
        (lambda sizes: [1.0, np.nan], "finite"),
        (lambda sizes: [-1.0, 1.0], "client 1 the coefficient -1"),
        (lambda sizes: [0.0, 0.0], "the coefficient 0"),
        (lambda sizes: [2.0**50, 2.0**50], "more than a sum can hold"),
        (lambda sizes: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_are_no_coefficients_is_rejected_with_the_weights_named(answer: Any, reason: str) -> None:
    with pytest.raises(ComponentFailure, match=f"test_weighing.*round 6.*{reason}"):
        answering(answer).of(Cohort(np.array([1, 4]), np.ones(2, np.int64), np.ones(2)), SIZES, 6)


def summed(chosen: Weighing, losses: Sequence[float], updates: np.ndarray, exact: bool = False) -> np.ndarray:
    """Return the step of clients 0, 1, … with these losses and updates (m, d), whose last value is a buffer."""
    d = updates.shape[1]
    buffer = np.zeros(d, np.int64 if exact else np.float32)
    inner = FixedPointSum(buffer) if exact else FloatSum(buffer)
    judged = JudgedSum(inner, chosen, lambda client, w, t: losses[client], Cluster.connect(), d - 1)
    for _ in range(2):  # the first sum is forgotten
        judged.reset()
        judged.begin(
            Plan(4, LR, np.arange(len(updates)), np.ones(len(updates)), False, chosen.normalizes), torch.zeros(d)
        )
        for client, update in enumerate(updates):
            judged.add(torch.from_numpy(update).float(), 1.0, client)
    judged.flush()
    return judged.to_update(torch.from_numpy(buffer)).double().numpy() / (judged.weight or 1.0)


LR = 0.05


@pytest.mark.parametrize("exact", [False, True])
def test_shares_by_which_nothing_can_be_divided_are_rejected_with_component_and_round(exact: bool) -> None:
    ones = np.ones((2, 6))
    with pytest.raises(ComponentFailure, match=r"weights q-ffl .*in round 4: shares .* too little"):
        summed(weighing("q-ffl", q=20.0 if not exact else 5.0), [0.01, 0.01], ones, exact)
    with pytest.raises(ComponentFailure, match=r"weights .*Judge.* in round 4: shares .* add up to 0"):
        summed(judging([(1.0, 0.0), (-1.0, 0.0)]), [1.0, 1.0], ones, exact)
    with pytest.raises(ComponentFailure, match=r"in round 4, client 1: after\(\) returned -0.5: .* not below 0"):
        summed(judging([1.0, -0.5]), [1.0, 1.0], ones, exact)
    assert not summed(judging([]), [], np.ones((0, 6)), exact).any()
    assert not summed(judging([-1.0, 1.0], normalized=False), [1.0, 1.0], ones, exact).any()


@pytest.mark.parametrize("exact", [False, True])
def test_the_norm_of_an_update_leaves_out_its_buffers(exact: bool) -> None:
    update = np.array([[3.0, 4.0, 100.0]])
    found = summed(weighing("q-ffl", q=1.0), [2.0], update, exact)
    np.testing.assert_allclose(found, 2.0 * update[0] / (5.0**2 / LR + 2.0), rtol=1e-5)


def judging(answers: Sequence[Any], normalized: bool = True) -> Weighing:
    """Weights that return a given value for each client k."""

    class Judge:
        def __call__(self, cohort: Cohort, sizes: np.ndarray) -> np.ndarray:
            return np.ones(len(cohort.clients))

        def after(self, work: ClientWork) -> Any:
            return answers[work.client]

    return weighing(weights(normalized=normalized)(Judge))


@pytest.mark.parametrize("answer", [float("nan"), "much", (1.0,), (1.0, 2.0, 3.0), None])
def test_what_is_no_judgement_is_rejected_with_client_and_round(answer: Any) -> None:
    chosen = judging([answer] * 4)
    assert chosen.judges
    with pytest.raises(ComponentFailure, match=r"after\(\) returned"):
        chosen.after(ClientWork(client=3, round=5, coefficient=1.0, loss=1.0, update_norm=1.0, lr=0.1))


def test_a_stratum_that_no_client_can_represent_leaves_its_share_to_the_others() -> None:
    strata = StrataSummary(np.array([4, 6, 10]), np.array([2, 1, 0]), np.zeros(3), np.array([1, 0.5, 0]))
    cohort = Cohort(np.arange(3), stratum=np.array([0, 0, 1]), strata=strata)
    found = weighing("stratified").of(cohort, np.ones(20, np.int64), 0)
    assert found == pytest.approx([0.4 / 2, 0.4 / 2, 0.6 / 0.5])


def test_rank_0_knows_what_other_ranks_have_set_for_their_clients_of_the_round() -> None:
    ranks = [Weighing(resolve("weights", "docs.examples.easing:Easing"), {}, 4) for _ in range(2)]
    ranks[0]._made.times += 1
    for t, order in enumerate(((1, 2), (2, 1))):  # each rank gets the other's client of the round before
        sent: list[np.ndarray] = []
        ranks[1].share(lambda own: [value.numpy() for value in ranks[0].state().values()])
        for rank, client in zip(ranks, order, strict=True):
            rank.after(ClientWork(client, t, coefficient=1.0, loss=1.0 + t, update_norm=1.0, lr=LR))
        away: Any = SimpleNamespace(size=2, gather=sent.append)
        here: Any = SimpleNamespace(size=2, gather=lambda values, sent=sent: [values, sent.pop(0)])
        ranks[1].collect(away)
        ranks[0].collect(here)
    assert ranks[0]._made.mean.tolist() == [0, 2, 2, 0]
