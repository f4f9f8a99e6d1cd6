"""Samplers by the clients' updates, each beside a plain loop written from its paper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedmpi.clients.selection.divfl import DivFL
from tests.clients.selection.world import World, play


def distance(one: Any, other: Any) -> float:
    return math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(one, other, strict=True)))


def holding(world: World, t: int) -> list[int]:
    return [k for k in world.available(t) if world.sizes[k] > 0]


@pytest.mark.parametrize("options", [{"error": 0.0}, {"assigned": True}, {"interval": 8, "error": 0.5}], ids=str)
def test_divfl(options: dict[str, Any]) -> None:
    """Balakrishnan et al. 2022, Algorithm 1 with Eq. 5; updates of the last measurement or participation."""
    world, updates = World(seed=3), dict[int, Any]()
    for t, cohort in enumerate(play("divfl", world, options)):
        there, generator, answers = holding(world, t), world.generator(t), world.answer("update_sketch", t)
        for k in there:
            if k not in updates or t % options.get("interval", 1000) == 0:
                updates[k] = answers[k]
        apart = {(k, i): distance(updates[k], updates[i]) for k in there for i in there}
        error, m = options.get("error", 0.1), min(world.count, len(there))
        tested = len(there) if error == 0 else math.ceil(len(there) / m * math.log(1 / error))
        chosen, left, nearest = list[int](), list(there), dict.fromkeys(there, math.inf)
        while len(chosen) < m:
            rest = left
            if tested < len(left):
                rest = [left[i] for i in generator.choice(len(left), tested, replace=False)]
            costs = {i: sum(min(nearest[k], apart[k, i]) for k in there) for i in rest}
            chosen.append(min(i for i in rest if costs[i] <= 1.00001 * min(costs.values())))
            nearest = {k: min(nearest[k], apart[k, chosen[-1]]) for k in there}
            left[left.index(chosen[-1])] = left[-1]  # the last one takes its place
            left.pop()
        assert sorted(chosen) == cohort.clients.tolist()
        if options.get("assigned"):
            owners = [min(sorted(chosen), key=lambda i: apart[k, i]) for k in there]
            assert [owners.count(k) for k in sorted(chosen)] == cohort.multiplicity.tolist()
        for k in world.arrived(t, cohort.clients).tolist():
            updates[k] = answers[k]


def test_divfl_divides_many_clients_into_groups() -> None:
    world = World(seed=1, clients=40, present=1.0)
    for t, cohort in enumerate(play("divfl", world, {"pool": 15}, rounds=3)):
        there = np.array(holding(world, t))
        groups = np.array_split(world.generator(t).permutation(there), 3)
        assert [np.isin(cohort.clients, group).sum() for group in groups] == [2, 2, 1]


def test_clients_with_equal_updates_represent_themselves() -> None:
    sampler = DivFL()
    sampler.known = np.ones((4, 3))
    clients, times = sampler._greedy(np.arange(4), 3, np.random.default_rng(0))
    assert len(set(clients)) == 3 and sorted(times) == [1, 1, 2]


def dendrogram(points: list[list[float]]) -> list[tuple[list[int], list[int]]]:
    """Return the merges of Ward's method, as the members of both clusters (Lance-Williams formula)."""
    clusters = {i: [i] for i in range(len(points))}
    gap = {(i, j): distance(points[i], points[j]) ** 2 for i in clusters for j in range(i)}
    merges = []
    while len(clusters) > 1:
        i, j = min(gap, key=lambda pair: gap[pair])
        merges.append((clusters[i], clusters[j]))
        n_i, n_j, between = len(clusters[i]), len(clusters.pop(j)), gap.pop((i, j))
        for k in clusters.keys() - {i}:
            n_k, one, other = len(clusters[k]), (max(i, k), min(i, k)), (max(j, k), min(j, k))
            joint = (n_i + n_k) * gap[one] + (n_j + n_k) * gap.pop(other) - n_k * between
            gap[one] = joint / (n_i + n_j + n_k)
        clusters[i] = [*merges[-1][0], *merges[-1][1]]
    return merges


def angle(one: Any, other: Any) -> float:
    """Return arccos of the cosine similarity; 0 if a vector is zero."""
    product = sum(float(a) * float(b) for a, b in zip(one, other, strict=True))
    length = math.sqrt(sum(float(a) ** 2 for a in one)) * math.sqrt(sum(float(b) ** 2 for b in other))
    return math.acos(min(1, max(-1, product / length))) if length > 0 else 0.0


class EqualWorld(World):
    """Clients with one sample each, so that urns are often full exactly."""

    sizes = np.where(np.arange(24) == 2, 0, 1)


@pytest.mark.parametrize(
    ("world", "pool"),
    [(World(seed=4), 1000), (World(seed=5, clients=12, count=6), 1000), (EqualWorld(seed=6), 1000), (World(seed=7), 9)],
    ids=["", "large clients", "equal clients", "small pool"],
)
def test_clustered_similarity(world: World, pool: int) -> None:
    """Fraboni et al. 2021, Algorithm 2, with urns of integer balls."""
    updates, latest = {k: [0.0] * 16 for k in range(world.clients)}, dict.fromkeys(range(world.clients), -1)
    for t, cohort in enumerate(play("clustered-similarity", world, {"pool": pool})):
        there, generator = holding(world, t), world.generator(t)
        n = sum(int(world.sizes[k]) for k in there)
        balls = {k: world.count * int(world.sizes[k]) for k in there}
        drawn = [k for k in there for _ in range(balls[k] // n)]
        balls = {k: ball % n for k, ball in balls.items() if ball % n}
        nodes, m = sorted(sorted(balls, key=lambda k: -latest[k])[:pool]), world.count - len(drawn)

        similarity = [[angle(updates[i], updates[j]) if i != j else 0.0 for j in nodes] for i in nodes]
        groups = {(k,): [[k]] for k in nodes}  # of every cluster
        for one, other in dendrogram(similarity):
            a, b = tuple(nodes[i] for i in one), tuple(nodes[i] for i in other)
            parts = groups.pop(a) + groups.pop(b)
            groups[a + b] = [list(a + b)] if sum(balls[k] for k in a + b) <= n else parts
        cut = [sorted(group) for parts in groups.values() for group in parts]
        unseen = [k for k in nodes if not any(updates[k])]
        if sum(balls[k] for k in unseen) > n:
            cut = [group for group in cut if group[0] not in unseen]
            for k in unseen:
                last = cut[-1] if k != unseen[0] else []
                if last and sum(balls[i] for i in last) + balls[k] <= n:
                    last.append(k)
                else:
                    cut.append([k])

        cut += [[k] for k in balls if k not in nodes]
        key = dict(zip(balls, generator.random(len(balls)), strict=True)) if m else {}
        cut.sort(key=lambda group: (sum(balls[k] for k in group), group[0]))
        ranked = [sorted(group, key=lambda k: key[k]) for group in cut] if m else []
        urns = [[(k, balls[k]) for k in group] for group in ranked[len(ranked) - m :]]
        fullest = 0
        for k in (k for group in ranked[: len(ranked) - m] for k in group):
            while balls[k]:
                part = min(balls[k], n - sum(count for _, count in urns[fullest]))
                if part:
                    urns[fullest].append((k, part))
                    balls[k] -= part
                else:
                    fullest += 1
        assert all(sum(count for _, count in urn) == n for urn in urns)
        for urn, ball in zip(urns, generator.integers(0, n, m) if m else [], strict=True):
            left = int(ball)
            for k, count in urn:
                if 0 <= left < count:
                    drawn.append(k)
                left -= count
        assert cohort.clients.tolist() == sorted(set(drawn))
        assert cohort.multiplicity.tolist() == [drawn.count(k) for k in sorted(set(drawn))]
        assert np.allclose(cohort.inclusion, [world.count * world.sizes[k] / n for k in sorted(set(drawn))])
        for k in world.arrived(t, cohort.clients).tolist():
            updates[k], latest[k] = world.answer("update_sketch", t)[k].tolist(), t


@pytest.mark.parametrize(
    "options",
    [{"horizon": 60}, {"horizon": 30, "gamma": 60.0, "groups": 3, "temperature": 0.2}, {"gamma": 9.0, "pool": 8}],
    ids=str,
)
def test_hics(options: dict[str, Any]) -> None:
    """Chen and Vikalo 2024, Algorithm 1; draws by group as the shortest of exponential waiting times."""
    world, updates, classes = World(seed=6), dict[int, Any](), 5
    for t, cohort in enumerate(play("hics", world, options)):
        there, generator = holding(world, t), world.generator(t)
        unseen, m = [k for k in there if k not in updates], min(world.count, len(there))
        chosen = generator.choice(unseen, min(m, len(unseen)), replace=False).tolist()
        seen = [k for k in there if k in updates]
        if len(chosen) < m:
            entropy = {}
            for k in seen:
                powers = [math.exp(value / options.get("temperature", 0.0025)) for value in shifted(updates[k])]
                entropy[k] = -sum(p / sum(powers) * math.log(p / sum(powers)) for p in powers if p > 0)
            core = seen
            if len(seen) > options.get("pool", 1000):
                core = sorted(generator.choice(seen, options["pool"], replace=False).tolist())
            apart = {
                (u, k): (angle(updates[u], updates[k]) if u != k else 0) + 10 * abs(entropy[u] - entropy[k])
                for u in seen
                for k in core
            }
            groups = [[k] for k in core]
            merges = dendrogram([[apart[u, k] for k in core] for u in core])
            for one, other in merges[: max(0, len(core) - options.get("groups", world.count))]:
                a, b = {core[i] for i in one}, {core[i] for i in other}
                groups = [group for group in groups if set(group) not in (a, b)] + [sorted(a | b)]
            for u in (u for u in seen if u not in core):
                nearest = min(core, key=lambda k: apart[u, k])
                next(group for group in groups if nearest in group).append(u)
            gamma = options.get("gamma", 4.0) * max(0, 1 - (t + 1) / options.get("horizon", 500))
            power = [math.exp(gamma * sum(entropy[k] for k in group) / len(group)) for group in groups]
            chance = {
                k: own / sum(power) * world.sizes[k] / sum(world.sizes[i] for i in group)
                for group, own in zip(groups, power, strict=True)
                for k in group
            }
            waiting = {k: time / chance[k] for k, time in zip(seen, generator.exponential(size=len(seen)), strict=True)}
            chosen += sorted(seen, key=lambda k: waiting[k])[: m - len(chosen)]
        assert sorted(chosen) == cohort.clients.tolist()
        for k in world.arrived(t, cohort.clients).tolist():
            updates[k] = world.answer("head_update", t)[k, -classes:].tolist()


def shifted(values: list[float]) -> list[float]:
    return [value - max(values) for value in values]
