"""Robust aggregators resist Byzantine clients and reject useless rounds; tests/reference has them as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedmpi import ComponentFailure, UserError, aggregator
from fedmpi.aggregation.aggregators import BLOCK_WIDTH, Aggregator, CombinedSum
from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.plan import Plan
from fedmpi.common.registry import resolve
from fedmpi.mpi import Cluster


def built_in(name: str, **options: Any) -> Aggregator:
    return Aggregator(resolve("aggregator", name.removeprefix("multi-")), options)


def some_updates(m: int, d: int, seed: int = 0) -> np.ndarray:
    """Return rows of different lengths; two coordinates are equal in all of them."""
    draws = np.random.default_rng(seed)
    updates = draws.normal(size=(m, d)) * draws.uniform(0.3, 3, (m, 1))
    updates[:, 1], updates[:, 2] = 0.0, 1.5
    return updates


def combined(chosen: Aggregator, updates: torch.Tensor, coefficients: torch.Tensor, slices: int = 1) -> torch.Tensor:
    parts, clients = torch.tensor_split(updates, slices, dim=1), np.arange(len(updates))
    measured = sum(chosen.measure(part, 0, clients) for part in parts) if chosen.measures else None
    return torch.cat([chosen.combine(part, coefficients, measured, 0, clients) for part in parts])


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_no_attack_moves_a_robust_aggregator_out_of_the_range_of_the_honest(name: str) -> None:
    """Two of nine send what they like; the weighted mean goes along with them."""
    options: dict[str, Any] = {"krum": {"byzantine": 2}, "multi-krum": {"byzantine": 2, "keep": 3}}.get(name, {})
    options |= {"trim": 2 / 9} if name == "trimmed-mean" else {}
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
    [(6, {"byzantine": 2}, "more than 6 clients"), (7, {"byzantine": 2, "keep": 4}, "Keep at most 3")],
)
def test_krum_rejects_rounds_that_attackers_could_outvote(participants: int, options: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        built_in("krum", **options).measure(torch.zeros(participants, 3), 0, np.arange(participants))
    built_in("krum", byzantine=2, keep=3).measure(torch.zeros(7, 3), 0, np.arange(7))


def plan(round: int = 0, normalize: bool = True) -> Plan:
    return Plan(round, 0.1, np.arange(0), np.zeros(0), False, normalize)


def summed(chosen: Aggregator, updates: dict[int, torch.Tensor], normalize: bool) -> torch.Tensor:
    """Combine the updates of clients k with the coefficients 0.5 + k, block by block."""
    values, cluster = len(next(iter(updates.values()))), Cluster.connect()
    inner = FloatSum(cluster.sum_tensor(values, np.float32, torch.device("cpu")))
    kept = CombinedSum(inner, chosen, cluster, torch.zeros(values))
    for _ in range(2):  # the first sum is forgotten
        kept.reset()
        kept.begin(plan(normalize=normalize), torch.zeros(values))
        for client, update in updates.items():
            kept.add(update, 0.5 + client, client)
    kept.flush()
    return kept.to_update(cluster.reduce_tensor())


def test_updates_and_coefficients_come_in_the_order_of_their_clients_in_every_block() -> None:
    @aggregator
    def outer(updates: torch.Tensor, coefficients: torch.Tensor, *, clients: np.ndarray) -> torch.Tensor:
        assert clients.tolist() == [0, 4, 7] and not clients.flags.writeable
        return 100 * updates[0] + 10 * updates[-1] + coefficients[0] - coefficients[-1]

    places = torch.arange(3.0 * BLOCK_WIDTH - 5)
    updates = {client: client + places for client in (4, 0, 7)}
    found = summed(Aggregator(resolve("aggregator", outer), {}), updates, normalize=False)
    assert torch.equal(found, 63 + 110 * places)


def test_an_aggregator_keeps_its_numbers_and_a_zero_per_client_for_what_it_does_not_set() -> None:
    @aggregator
    class Keeping:
        state = ("count", "seen")

        def __init__(self) -> None:
            self.count = 3

        def combine(self, updates: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
            return coefficients @ updates

    one, other = (Aggregator(resolve("aggregator", Keeping), {}, 4) for _ in range(2))
    assert (one._made.count, one._made.seen.tolist()) == (3, [0.0] * 4)
    one._made.count = 5
    other.load(one.state())
    assert type(other._made.count) is int and other._made.count == 5


def test_what_is_measured_is_summed_over_all_blocks() -> None:
    updates = dict(enumerate(torch.from_numpy(some_updates(5, 2 * BLOCK_WIDTH + 9).astype(np.float32))))
    lengths = [update.double().norm() for update in updates.values()]
    bound = float(lengths[1])
    shares = [(0.5 + k) / 12.5 * min(1.0, bound / float(length)) for k, length in enumerate(lengths)]
    expected = sum(share * update.double() for share, update in zip(shares, updates.values(), strict=True))
    torch.testing.assert_close(
        summed(built_in("norm-clip", bound=bound), updates, normalize=True).double(), expected, rtol=1e-5, atol=1e-6
    )


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
