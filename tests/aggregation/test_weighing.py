"""Custom weights are checked and made to add up in any order; q-FFL follows its paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedmpi import Cohort, ComponentFailure, UserError, weights
from fedmpi.aggregation.exact import FixedPointSum, FloatSum, JudgedSum
from fedmpi.aggregation.weights import ClientWork, Weighing
from fedmpi.clients.cohort import StrataSummary, full_participation
from fedmpi.common.plan import Plan
from fedmpi.common.registry import resolve
from fedmpi.mpi import Cluster


class OneOfTwo(Cluster):
    """Rank 0 without clients, beside another rank with one of this weight."""

    def __init__(self, weight: float):
        self.__dict__.update(vars(Cluster.connect()))
        self.other = np.array([weight])

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        return [array, self.other]


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
        (lambda sizes: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_are_no_coefficients_is_rejected_with_the_weights_named(answer: Any, reason: str) -> None:
    with pytest.raises(ComponentFailure, match=f"test_weighing.*round 6.*{reason}"):
        answering(answer).of(Cohort(np.array([1, 4]), np.ones(2, np.int64), np.ones(2)), SIZES, 6)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 3.0, 9.0, 20.0])
@pytest.mark.parametrize("lipschitz", [None, 4.0])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_q_ffl_takes_the_step_of_its_paper(q: float, lipschitz: float | None, scale: float) -> None:
    """Li et al. 2020, Algorithm 2 (q-FedAvg): w − Σ Δ_k / Σ h_k, in plain loops, however small or large losses are."""
    draws = np.random.default_rng(2)
    start, updates, lr = draws.normal(size=6), draws.normal(size=(4, 6)) * scale**0.5, 0.05
    losses = [0.3 * scale, 2.0 * scale, 0.7 * scale, 1.1 * scale]
    bound = 1 / lr if lipschitz is None else lipschitz
    step, total = np.zeros(6), 0.0
    for update, loss in zip(updates, losses, strict=True):
        local = start + update
        gradient = bound * (start - local)
        step += loss**q * gradient
        total += q * loss ** (q - 1) * float(gradient @ gradient) + bound * loss**q
    expected = start - step / total

    total_sum = FloatSum(np.zeros(6, np.float32))
    chosen = weighing("q-ffl", q=q, lipschitz=lipschitz)
    judged = JudgedSum(total_sum, chosen, lambda client, w, t: losses[client], Cluster.connect())
    judged.reset()
    judged.begin(Plan(0, lr, np.arange(4), np.ones(4), False, True), torch.from_numpy(start))
    for client, update in enumerate(updates):
        judged.add(torch.from_numpy(update).float(), 1.0, client)
    judged.flush()
    taken = total_sum.tensor.double().numpy() / judged.weight
    assert taken == pytest.approx(expected - start, rel=2e-6)
    assert 0.5 <= judged.weight < 1


def test_a_rank_without_clients_adds_nothing_to_tiny_weights() -> None:
    judged = JudgedSum(FloatSum(np.zeros(6, np.float32)), weighing("q-ffl", q=20.0), lambda *_: 1.0, OneOfTwo(1e-180))
    judged.reset()
    judged.flush()
    assert not judged.inner.tensor.any() and 0.5 <= judged.weight < 1


def test_updates_of_weights_far_apart_are_added_up() -> None:
    """The first client's weight is 1e-120, the second one's 1: only the second counts."""
    losses, total = {0: 1e-6, 1: 1.0}, FloatSum(np.zeros(6, np.float32))
    judged = JudgedSum(total, weighing("q-ffl", q=20.0), lambda client, w, t: losses[client], Cluster.connect())
    judged.reset()
    judged.begin(Plan(0, 0.5, np.arange(2), np.ones(2), False, True), torch.zeros(6))
    for client in (0, 1):
        judged.add(torch.full((6,), 0.25 + client), 1.0, client)
    judged.flush()
    bound, square = 2.0, 6 * 1.25**2
    expected = 1.25 / (20 * bound * square + 1)
    assert (total.tensor / judged.weight).tolist() == pytest.approx([expected] * 6, rel=1e-6)


def test_exact_sums_reject_weights_finer_than_their_steps() -> None:
    chosen, cluster = weighing("q-ffl", q=5.0), Cluster.connect()
    judged = JudgedSum(FixedPointSum(np.zeros(6, np.int64)), chosen, lambda client, w, t: 0.01, cluster)
    judged.begin(Plan(3, 0.1, np.arange(2), np.ones(2), False, True), torch.zeros(6))
    judged.add(torch.full((6,), 0.1), 1.0, 0)
    with pytest.raises(UserError, match="round 3, too little for exact sums"):
        judged.flush()


def judging(answers: Sequence[Any], normalized: bool = True) -> Weighing:
    """Weights that return a given value for each client k."""

    class Judge:
        def __call__(self, cohort: Cohort, sizes: np.ndarray) -> np.ndarray:
            return np.ones(len(cohort.clients))

        def after(self, work: ClientWork) -> Any:
            return answers[work.client]

    return weighing(weights(normalized=normalized)(Judge))


@pytest.mark.parametrize("exact", [False, True])
def test_shares_by_which_nothing_can_be_divided_are_rejected_with_component_and_round(exact: bool) -> None:
    def flushed(answers: Sequence[Any], normalized: bool = True) -> float:
        inner = FixedPointSum(np.zeros(6, np.int64)) if exact else FloatSum(np.zeros(6, np.float32))
        judged = JudgedSum(inner, judging(answers, normalized), lambda *_: 1.0, Cluster.connect())
        judged.reset()
        judged.begin(Plan(4, 0.1, np.arange(2), np.ones(2), False, normalized), torch.zeros(6))
        for client in range(len(answers)):
            judged.add(torch.ones(6), 1.0, client)
        judged.flush()
        return judged.weight

    with pytest.raises(ComponentFailure, match=r"weights .*Judge.* in round 4: the shares .* 2 clients add up to 0"):
        flushed([(1.0, 0.0), (-1.0, 0.0)])
    with pytest.raises(ComponentFailure, match=r"in round 4, client 1: after\(\) returned -0.5: .* not below 0"):
        flushed([1.0, -0.5])
    assert flushed([]) == 0.0 and flushed([0.0, 1.0]) > 0 and flushed([-1.0, 1.0], normalized=False) == 0.0


def test_coefficients_whose_sum_overflows_are_rejected_with_component_and_round() -> None:
    for normalized, most in ((True, 1e200), (False, 2.0**50)):
        chosen = weighing(weights(normalized=normalized)(lambda cohort, sizes, most=most: np.full(2, most)))
        with pytest.raises(
            ComponentFailure, match="in round 3: gave coefficients that add up to .* more than a sum can hold"
        ):
            chosen.of(Cohort(np.arange(2)), np.ones(4, np.int64), 3)


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
