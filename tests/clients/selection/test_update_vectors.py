"""Samplers by the clients' updates, each beside a plain loop written from its paper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from .world import World, play


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
        chosen, nearest = list[int](), dict.fromkeys(there, math.inf)
        while len(chosen) < m:
            rest = [k for k in there if k not in chosen]
            if tested < len(rest):
                rest = [rest[i] for i in generator.choice(len(rest), tested, replace=False)]
            costs = {i: sum(min(nearest[k], apart[k, i]) for k in there) for i in rest}
            chosen.append(min(i for i in rest if costs[i] <= 1.00001 * min(costs.values())))
            nearest = {k: min(nearest[k], apart[k, chosen[-1]]) for k in there}
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
