"""Robust aggregators compared with plain loops over Python floats, and their resistance to Byzantine clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedmpi import ComponentFailure, UserError, aggregator
from fedmpi.aggregation import aggregators
from fedmpi.aggregation.aggregators import Aggregator, CombinedSum
from fedmpi.aggregation.exact import FixedPointSum, FloatSum
from fedmpi.common.plan import Plan
from fedmpi.common.registry import resolve
from fedmpi.mpi import Cluster

Rows = list[list[float]]


def mean(updates: Rows, coefficients: list[float]) -> list[float]:
    return [math.fsum(c * row[i] for c, row in zip(coefficients, updates, strict=True)) for i in range(len(updates[0]))]


def median(updates: Rows, coefficients: list[float]) -> list[float]:
    return [statistics.median(row[i] for row in updates) for i in range(len(updates[0]))]


def trimmed_mean(updates: Rows, coefficients: list[float], trim: float) -> list[float]:
    """Yin et al. 2018, Definition 2, with β m rounded up."""
    cut = math.ceil(round(trim * len(updates), 9))
    columns = [sorted(row[i] for row in updates) for i in range(len(updates[0]))]
    return [math.fsum(column[cut : len(column) - cut]) / (len(column) - 2 * cut) for column in columns]


def krum(updates: Rows, coefficients: list[float], byzantine: int, keep: int = 1) -> list[float]:
    """Blanchard et al. 2017: the score of i is the sum over its m − f − 2 nearest others."""
    m, scores = len(updates), []
    for i in range(m):
        to_others = sorted(
            math.fsum((a - b) ** 2 for a, b in zip(updates[i], updates[j], strict=True)) for j in range(m) if j != i
        )
        scores.append(math.fsum(to_others[: m - byzantine - 2]))
    best = sorted(range(m), key=lambda i: (scores[i], i))[:keep]
    return [math.fsum(updates[i][c] for i in best) / keep for c in range(len(updates[0]))]


def norm_clip(updates: Rows, coefficients: list[float], bound: float) -> list[float]:
    """Sun et al. 2019: Δ_k / max(1, ‖Δ_k‖ / M)."""
    lengths = [math.sqrt(math.fsum(a * a for a in row)) for row in updates]
    clipped = [[a / max(1.0, length / bound) for a in row] for row, length in zip(updates, lengths, strict=True)]
    return mean(clipped, coefficients)


CASES: dict[str, tuple[Callable[..., list[float]], dict[str, Any]]] = {
    "mean": (mean, {}),
    "median": (median, {}),
    "trimmed-mean": (trimmed_mean, {"trim": 0.2}),
    "krum": (krum, {"byzantine": 2}),
    "multi-krum": (krum, {"byzantine": 2, "keep": 3}),
    "norm-clip": (norm_clip, {"bound": 20.0}),
}


def built_in(name: str, **options: Any) -> Aggregator:
    return Aggregator(resolve("aggregator", name.removeprefix("multi-")), options)


def some_updates(m: int, d: int, seed: int = 0) -> np.ndarray:
    """Return rows of different lengths; two coordinates are equal in all of them."""
    draws = np.random.default_rng(seed)
    updates = draws.normal(size=(m, d)) * draws.uniform(0.3, 3, (m, 1))
    updates[:, 1], updates[:, 2] = 0.0, 1.5
    return updates


def combined(chosen: Aggregator, updates: torch.Tensor, coefficients: torch.Tensor, slices: int = 1) -> torch.Tensor:
    parts = torch.tensor_split(updates, slices, dim=1)
    measured = sum(chosen.measure(part, 0) for part in parts) if chosen.measures else None
    return torch.cat([chosen.combine(part, coefficients, measured, 0) for part in parts])


@pytest.mark.parametrize("m", [7, 10])
@pytest.mark.parametrize("name", CASES)
def test_an_aggregator_does_what_a_plain_loop_does(name: str, m: int) -> None:
    plain, options = CASES[name]
    updates = some_updates(m, 203)
    coefficients = np.random.default_rng(1).dirichlet(np.ones(m))
    expected = plain(updates.tolist(), coefficients.tolist(), **options)
    for slices in (1, 5):
        found = combined(built_in(name, **options), torch.from_numpy(updates), torch.from_numpy(coefficients), slices)
        assert found.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_no_attack_moves_a_robust_aggregator_out_of_the_range_of_the_honest(name: str) -> None:
    """Two of nine send what they like; the weighted mean goes along with them."""
    options = {"trimmed-mean": {"trim": 2 / 9}}.get(name, CASES[name][1])
    updates = torch.from_numpy(some_updates(9, 40))
    updates[[2, 5]] = torch.tensor([1e6, -1e5], dtype=torch.float64)[:, None]
    honest = updates[[0, 1, 3, 4, 6, 7, 8]]
    equal = torch.full((9,), 1 / 9, dtype=torch.float64)
    found = combined(built_in(name, **options), updates, equal)
    assert bool(((honest.amin(0) - 1e-9 <= found) & (found <= honest.amax(0) + 1e-9)).all())
    assert float(combined(built_in("mean"), updates, equal).abs().max()) > 1e4


def test_the_trimmed_mean_cuts_at_either_end_and_leaves_a_value() -> None:
    column = torch.tensor([[1.0], [2.0], [3.0], [10.0]])
    cuts = {0.0: 4.0, 0.05: 2.5, 0.25: 2.5, 0.26: 2.5, 0.49: 2.5}
    for trim, expected in cuts.items():
        assert combined(built_in("trimmed-mean", trim=trim), column, torch.ones(4)).item() == expected
    assert combined(built_in("trimmed-mean", trim=0.4), column[:1], torch.ones(1)).item() == 1.0
    squares = torch.arange(25.0)[:, None] ** 2  # 0.28 · 25 is more than 7 in floats
    assert combined(built_in("trimmed-mean", trim=0.28), squares, torch.ones(25)).item() == squares[7:18].mean()


@pytest.mark.parametrize(
    "participants, options, reason",
    [
        (6, {"byzantine": 2}, "more than 6 clients"),
        (7, {"byzantine": 2, "keep": 4}, "Keep at most 3"),
    ],
)
def test_krum_rejects_rounds_that_attackers_could_outvote(participants: int, options: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        built_in("krum", **options).measure(torch.zeros(participants, 3), 0)
    built_in("krum", byzantine=2, keep=3).measure(torch.zeros(7, 3), 0)


def plan(round: int = 0, normalize: bool = True) -> Plan:
    return Plan(round, 0.1, np.arange(0), np.zeros(0), False, normalize)


@pytest.mark.parametrize(("name", "exact"), [("norm-clip", True), ("multi-krum", False)])
def test_an_aggregated_sum_is_what_the_aggregator_makes_of_all_kept_updates(
    name: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregators, "BLOCK_WIDTH", 64)
    plain, options = CASES[name]
    updates, cluster = some_updates(9, 700).astype(np.float32), Cluster.connect()
    clients, coefficients = [4, 0, 7, 1, 8, 2, 3, 6, 5], np.linspace(1, 2, 9)
    buffer = cluster.sum_tensor(700, np.int64 if exact else np.float32, torch.device("cpu"))
    inner = FixedPointSum(buffer) if exact else FloatSum(buffer)
    kept = CombinedSum(inner, built_in(name, **options), cluster, torch.zeros(700))
    for round in range(2):
        kept.reset()
        kept.begin(plan(round), torch.zeros(700))
        for client in clients[: 9 if round else 8]:
            kept.add(torch.from_numpy(updates[client]), coefficients[client], client)
        kept.flush()
    found = kept.to_update(cluster.reduce_tensor())
    expected = plain(updates.astype(np.float64).tolist(), (coefficients / coefficients.sum()).tolist(), **options)
    assert kept.combined == 9
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_updates_and_coefficients_come_in_the_order_of_their_clients() -> None:
    @aggregator
    def outer(updates: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        return 100 * updates[0] + 10 * updates[-1] + coefficients[0] - coefficients[-1]

    cluster = Cluster.connect()
    inner = FloatSum(cluster.sum_tensor(4, np.float32, torch.device("cpu")))
    kept = CombinedSum(inner, Aggregator(resolve("aggregator", outer), {}), cluster, torch.zeros(4))
    kept.reset()
    kept.begin(plan(normalize=False), torch.zeros(4))
    for client in (4, 0, 7):
        kept.add(torch.full((4,), float(client)), 0.5 + client, client)
    kept.flush()
    assert kept.to_update(cluster.reduce_tensor()).tolist() == [63.0] * 4


@pytest.mark.parametrize(
    "answer, reason",
    [
        (lambda updates: updates, r"shape \(3, 5\)"),
        (lambda updates: updates[0] / 0, "finite"),
        (lambda updates: [0.0], "list"),
        (lambda updates: updates[0].double() * 1e300, "finite"),  # finite there, and not among the updates' floats
    ],
)
def test_what_is_no_update_is_rejected_with_the_aggregator_named(answer: Any, reason: str) -> None:
    @aggregator
    def wrong(updates: torch.Tensor, coefficients: torch.Tensor) -> Any:
        return answer(updates)

    with pytest.raises(ComponentFailure, match=f"test_aggregators.*round 0.*{reason}"):
        combined(Aggregator(resolve("aggregator", wrong), {}), torch.ones(3, 5), torch.ones(3))


@pytest.mark.parametrize("measured", [torch.tensor(torch.nan), [1.0]], ids=str)
def test_what_is_no_measurement_is_rejected(measured: Any) -> None:
    @aggregator
    class Measuring:
        def measure(self, updates: torch.Tensor) -> Any:
            return measured

        def combine(self, updates: torch.Tensor, coefficients: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
            return updates[0]

    with pytest.raises(ComponentFailure, match="Measuring"):
        combined(Aggregator(resolve("aggregator", Measuring), {}), torch.ones(3, 5), torch.ones(3))
