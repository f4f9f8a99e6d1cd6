"""FedGS, UCB and Thompson sampling against plain loops written from the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.clients.selection.fedgs import FedGS
from tests.clients.selection.world import ROUNDS, World, play

WORLDS = [World(seed=1), World(seed=2, clients=31, count=8), World(seed=3, count=1)]
WIDTH = {"epsilon": 0.3, "sigma2": 0.5}


def shortest_paths(counts: list[list[int]], epsilon: float, sigma2: float) -> list[list[float]]:
    clients = range(len(counts))
    shares = [[n / sum(row) if sum(row) else 0.0 for n in row] for row in counts]
    norms = [math.sqrt(sum(p * p for p in row)) for row in shares]
    like = {
        (i, j): sum(p * q for p, q in zip(shares[i], shares[j], strict=True)) / (norms[i] * norms[j])
        for i in clients
        for j in clients
        if i != j and norms[i] and norms[j]
    }
    top = max(like.values())
    far = [[0.0 if i == j else math.inf for j in clients] for i in clients]
    for (i, j), value in like.items():
        if value / top > epsilon:
            far[i][j] = math.exp(-((value / top) ** 2) / sigma2)
    for k in clients:
        for i in clients:
            for j in clients:
                far[i][j] = min(far[i][j], far[i][k] + far[k][j])
    longest = max(value for row in far for value in row if value < math.inf)
    return [[value / longest if value < math.inf else 1.0 for value in row] for row in far]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"seed{world.seed}")
def test_fedgs_selects_as_a_plain_loop(world: World, alpha: float) -> None:
    far, n = shortest_paths(world.class_counts.tolist(), **WIDTH), world.clients
    times, found, swaps = [0] * n, 0, 0
    for t, cohort in enumerate(play("fedgs", world, {"alpha": alpha, **WIDTH})):
        there = world.generator(t).permutation([k for k in world.available(t) if world.sizes[k]]).tolist()
        m = min(world.count, len(there))

        def objective(chosen: list[int], m: int = m, times: list[int] = times) -> float:
            pairs = sum(far[i][j] for i in chosen for j in chosen if i < j)
            variance = sum(2 * (times[i] - sum(times) / n - m / n) + 1 for i in chosen) / (n - 1)
            return alpha * (2 / (m * (m - 1)) if m > 1 else 0.0) * pairs - variance

        chosen: list[int] = []
        for _ in range(m):
            gains = {k: round(objective([*chosen, k]) - objective(chosen), 12) for k in there if k not in chosen}
            chosen.append(next(k for k, gain in gains.items() if gain == max(gains.values())))
        while True:
            now, best, swap = objective(chosen), 0.0, None
            for leaves in (k for k in there if k in chosen):
                for enters in (k for k in there if k not in chosen):
                    gain = round(objective([k for k in chosen if k != leaves] + [enters]) - now, 12)
                    if gain > best:
                        best, swap = gain, (leaves, enters)
            if swap is None:
                break
            chosen, swaps = [k for k in chosen if k != swap[0]] + [swap[1]], swaps + 1
        assert cohort.clients.tolist() == sorted(chosen)
        for k in chosen:
            times[k] += 1
        found += 1
    assert found == ROUNDS
    assert (swaps > 0) == (alpha > 0 and world.count > 1)
    drawn = [times[k] for k in range(n) if world.sizes[k]]
    assert max(drawn) - min(drawn) < (ROUNDS if alpha > 1 else 4)


def test_fedgs_has_the_paths_of_a_graph_in_parts() -> None:
    """No pair of clients is as similar as 1, and some pairs have no path."""
    counts = np.kron(
        np.eye(3, dtype=np.int64), np.random.default_rng(5).integers(0, 9, (6, 4)) + np.eye(6, 4, dtype=np.int64)
    )
    far = np.array(shortest_paths(counts.tolist(), **WIDTH))
    assert (far == 1).sum() >= 2 * 3 * 36 and (far < 1).any()
    np.testing.assert_allclose(FedGS(**WIDTH).distances(counts), far, atol=1e-12)


def test_fedgs_rejects_more_clients_than_it_can_compare() -> None:
    with pytest.raises(UserError, match="at most 5,000 clients. The data have 5,001"):
        FedGS().distances(np.ones((5001, 2), np.int64))


def rewards_of(world: World, metric: str, past: list[list[int]]) -> list[list[float]]:
    """Return the scaled rewards of every client after these arrivals, from the definition of the docstring."""
    values = [world.metrics(t).get(metric) for t in range(len(past))]
    known = [t for t, value in enumerate(values) if value is not None]
    raw = {}
    for before, after in zip(known, known[1:], strict=False):
        for t in range(before + 1, after + 1):
            raw[t] = (values[after] - values[before]) / (after - before) * (-1 if "loss" in metric else 1)
    low, high = min(raw.values(), default=0.0), max(raw.values(), default=0.0)
    earned: list[list[float]] = [[] for _ in range(world.clients)]
    for t, reward in raw.items():
        for k in past[t]:
            earned[k].append((reward - low) / (high - low) if high > low else 0.0)
    return earned


@pytest.mark.parametrize("metric, evaluated", [("train_loss", 1), ("test_accuracy", 1), ("val_loss", 4)])
@pytest.mark.parametrize("name", ["ucb", "thompson"])
@pytest.mark.parametrize("seed", [4, 5])
def test_bandits_select_as_a_plain_loop(name: str, metric: str, evaluated: int, seed: int) -> None:
    world = World(seed=seed, evaluated=evaluated)
    option = {"exploration": 0.7} if name == "ucb" else {"deviation": 0.4}
    past: list[list[int]] = []
    for t, cohort in enumerate(play(name, world, {"metric": metric, **option})):
        generator, earned = world.generator(t), rewards_of(world, metric, past)
        score = []
        for mine in earned:
            if name == "thompson":
                mean, spread = sum(mine) / (len(mine) + 1), 0.4 / math.sqrt(len(mine) + 1)
                score.append(mean + spread * generator.standard_normal())
            elif mine:
                score.append(sum(mine) / len(mine) + math.sqrt(0.7 * math.log(t + 1) / len(mine)))
            else:
                score.append(math.inf)
        there = generator.permutation([k for k in world.available(t) if world.sizes[k]]).tolist()
        there.sort(key=lambda k: -score[k])
        assert cohort.clients.tolist() == sorted(there[: world.count])
        past.append(world.arrived(t, cohort.clients).tolist())
    assert len(past) == ROUNDS


def test_bandits_reject_a_metric_that_is_not_recorded() -> None:
    with pytest.raises(UserError, match=r'metric = "test_acc" is not in .* Choose from test_accuracy, test_loss$'):
        list(play("ucb", WORLDS[0], {"metric": "test_acc"}))
