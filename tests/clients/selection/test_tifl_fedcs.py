"""TiFL and FedCS, each beside a plain loop written from the paper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.clients.selection.tifl import TierBased
from tests.clients.selection.world import World, play


class PlainTiers:
    """The server of Algorithm 2: tiers as lists of clients, credits and probabilities as lists."""

    def __init__(self, world: World, tiers: int, interval: int, credits: Any, timeout: float = math.inf):
        self.world, self.count, self.interval, self.timeout = world, tiers, interval, timeout
        self.initial = [credits] * tiers if isinstance(credits, int) else list(credits)
        self.credits, self.probabilities = list(self.initial), [1 / tiers] * tiers
        self.latency = dict[int, float]()
        self.accuracy, self.current = [0.0] * tiers, 0
        self.changes = self.refills = 0

    def tiers(self) -> list[list[int]]:
        """Sort the profiled clients by latency and cut the list into parts of equal length."""
        ordered = sorted(k for k, seconds in self.latency.items() if seconds <= self.timeout)
        ordered.sort(key=self.latency.__getitem__)
        return [
            [k for place, k in enumerate(ordered) if place * self.count // len(ordered) == tier]
            for tier in range(self.count)
        ]

    def change_probabilities(self) -> None:
        eligible = [tier for tier in range(self.count) if self.credits[tier] > 0]
        n, self.probabilities = len(eligible), [0.0] * self.count
        for rank, tier in enumerate(sorted(eligible, key=self.accuracy.__getitem__)):
            self.probabilities[tier] = (n - rank) / (n * (n + 1) / 2)
        self.changes += 1

    def round(self, r: int) -> list[int]:
        world, available = self.world, [k for k in self.world.available(r) if self.world.sizes[k] > 0]
        for k in available:
            if r % self.interval == 0 or k not in self.latency:
                self.latency[k] = float(world.answer("seconds", r)[k])
        tiers = self.tiers()
        if r % self.interval == 0:
            before = list(self.accuracy)
            for tier, members in enumerate(tiers):
                tested = [k for k in members if k in available]
                if tested:
                    right = sum(float(world.answer("val_accuracy", r)[k]) * int(world.sizes[k]) for k in tested)
                    self.accuracy[tier] = right / sum(int(world.sizes[k]) for k in tested)
            if r >= self.interval and self.accuracy[self.current] <= before[self.current]:
                self.change_probabilities()
        there = [[k for k in members if k in available] for members in tiers]
        if not any(there):
            return []
        if not any(members and self.credits[tier] > 0 for tier, members in enumerate(there)):
            self.credits = list(self.initial)
            self.refills += 1
        open_tiers = [tier for tier, members in enumerate(there) if members and self.credits[tier] > 0]
        chances = {tier: self.probabilities[tier] for tier in open_tiers}
        if not sum(chances.values()):
            chances = dict.fromkeys(open_tiers, 1.0)
        generator = world.generator(r)
        point, reached = generator.random() * sum(chances.values()), 0.0
        for tier, chance in chances.items():
            reached += chance
            if point < reached:
                self.current = tier
                break
        self.credits[self.current] -= 1
        members = sorted(there[self.current])
        return sorted(generator.choice(members, min(world.count, len(members)), replace=False).tolist())


class WrongWorld(World):
    """Clients whose models are never right, so that no tier improves."""

    def answer(self, name: str, t: int) -> np.ndarray:
        return np.zeros(self.clients) if name == "val_accuracy" else super().answer(name, t)


@pytest.mark.parametrize(
    "options",
    [
        {"tiers": 5, "interval": 10, "credits": 20},
        {"tiers": 3, "interval": 4, "credits": (9, 6, 3)},
        {"tiers": 4, "interval": 1, "credits": 8, "timeout": 14.0},
        {"tiers": 1, "interval": 7, "credits": 100},
    ],
    ids=str,
)
@pytest.mark.parametrize("world", [World(seed=0, clients=30), World(seed=5, clients=30), WrongWorld(clients=30)])
def test_tifl_selects_the_clients_of_the_plain_loop(options: dict[str, Any], world: World) -> None:
    plain, drawn = PlainTiers(world, **options), list[int]()
    for r, cohort in enumerate(play("tifl", world, options)):
        assert cohort.clients.tolist() == plain.round(r) and cohort.inclusion is None
        assert cohort.numbers == ({"tier": plain.current} if len(cohort.clients) else {})
        drawn.append(plain.current)
    assert len(set(drawn)) == options["tiers"] and (plain.changes or options["tiers"] == 1 or options["interval"] > 4)
    assert bool(plain.refills) == (options["tiers"] > 1)


def test_tifl_has_one_number_of_credits_per_tier() -> None:
    with pytest.raises(UserError, match="credits has 3 values for 2 tiers. Give one per tier, or one number"):
        TierBased(tiers=2, credits=(1, 2, 3))


def plain_schedule(candidates: list[int], compute: Any, up: Any, down: Any, deadline: float) -> tuple[list[int], float]:
    """Algorithm 3: the argmax of the reciprocal, one candidate after the other removed, tried and perhaps added."""

    def distribution(clients: list[int]) -> float:
        return max((down[k] for k in clients), default=0.0)

    left, selected, elapsed = list(candidates), list[int](), 0.0
    while left:
        gains = [
            1 / (distribution([*selected, k]) - distribution(selected) + up[k] + max(0, compute[k] - elapsed))
            for k in left
        ]
        x = left.pop(gains.index(max(gains)))
        later = elapsed + up[x] + max(0, compute[x] - elapsed)
        if distribution([*selected, x]) + later < deadline:
            elapsed = later
            selected.append(x)
    return sorted(selected), distribution(selected) + elapsed


@pytest.mark.parametrize("options", [{"deadline": 15.0}, {"deadline": 25.0, "candidates": 18}, {"deadline": 4.0}, {}])
def test_fedcs_selects_the_clients_of_the_plain_loop(options: dict[str, Any]) -> None:
    world, sizes = World(seed=1), list[int]()
    for t, cohort in enumerate(play("fedcs", world, options)):
        available = [k for k in world.available(t) if world.sizes[k] > 0]
        count = min(options.get("candidates", world.count), len(available))
        candidates = sorted(world.generator(t).choice(available, count, replace=False).tolist())
        seconds, down, up = (
            world.answer(name, t).tolist() for name in ("seconds", "download_seconds", "upload_seconds")
        )
        compute = [whole - first - last for whole, first, last in zip(seconds, down, up, strict=True)]
        selected, end = plain_schedule(candidates, compute, up, down, options.get("deadline", 180.0))
        assert cohort.clients.tolist() == selected
        assert cohort.numbers["scheduled"] == pytest.approx(end) and end < options.get("deadline", 180.0)
        sizes.append(len(selected))
    assert np.ptp(sizes) >= 1
