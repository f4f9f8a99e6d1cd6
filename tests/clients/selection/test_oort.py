"""Oort beside a plain loop written from Algorithm 1 of Lai et al. 2021."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedmpi.clients.selection.oort import OortByLoss
from fedmpi.common.registry import resolve
from tests.clients.selection.world import ROUNDS, World, play

PAPER = {
    "explore": 0.9,
    "explore_decay": 0.98,
    "explore_least": 0.2,
    "cutoff": 0.95,
    "clip": 0.95,
    "stale": 0.1,
    "penalty": 2.0,
    "window": 20,
}
CODE = {"exclude_after": None, "exclude_most": 0.3, "preferred": 0.3, "pacer": 0.05}


def race(generator: np.random.Generator, weights: dict[int, float], count: int) -> list[int]:
    """Clients sequentially, by weight among those left: the first of exponential arrivals."""
    times = {k: generator.standard_exponential() / weight for k, weight in sorted(weights.items())}
    return sorted(times, key=lambda k: times[k])[:count]


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def oort(world: World, timed: bool, o: dict[str, Any]) -> Iterator[list[int]]:
    """Algorithm 1. E: clients by their U, L: rounds of the last selection, D: seconds, R: round from 1."""
    U: dict[int, float] = {}
    L: dict[int, int] = {}
    D: dict[int, float] = {}
    picked, gained, relaxed = dict.fromkeys(range(world.clients), 0), [0.0], 0
    for t in range(ROUNDS):
        R, W, generator, would = t + 1, o["window"], world.generator(t), world.answer("seconds", t)
        if t >= 2 * W and t % W == 0 and sum(gained[R - 2 * W : R - W]) > sum(gained[R - W : R]):
            relaxed += 1
        banned: list[int] = []
        if o["exclude_after"] is not None:
            banned = [k for k in sorted(picked, key=lambda k: (-picked[k], k)) if picked[k] > o["exclude_after"]]
        banned = banned[: int(o["exclude_most"] * world.clients)]
        here = [k for k in world.available(t) if world.sizes[k] > 0 and k not in banned]
        known, unseen = [k for k in here if k in U], [k for k in here if k not in U]
        durations = [*D.values(), *(float(would[k]) for k in world.available(t) if k not in U)]
        T = at(durations, o["preferred"] + relaxed * o["pacer"])
        util = {}
        for k in known:
            lowest = 0.999 * min(U[i] for i in known)
            clipped = min(U[k], at([U[i] for i in known], o["clip"]))
            util[k] = (clipped - lowest) / max(max(U[i] for i in known) - lowest, 1e-4)
            util[k] += math.sqrt(o["stale"] * math.log(R) / L[k])
            if timed and D[k] > T:
                util[k] *= (T / D[k]) ** o["penalty"]
        K = min(world.count, len(here))
        explored = int(max(o["explore_least"], o["explore"] * o["explore_decay"] ** t) * K)
        explored = min(max(explored, K - len(known)), len(unseen))
        selected: list[int] = []
        if exploited := K - explored:
            cut = sorted(util.values(), reverse=True)[exploited - 1]
            selected = race(generator, {k: u for k, u in util.items() if u >= o["cutoff"] * cut}, exploited)
        selected += race(generator, {k: 1 / float(would[k]) if timed else 1.0 for k in unseen}, explored)
        yield sorted(selected)
        for k in selected:
            picked[k] += 1
        gained.append(0.0)
        for k in world.arrived(t, np.array(sorted(selected), np.int64)).tolist():
            U[k], L[k] = float(world.sizes[k]) * float(world.answer("loss_rms", t)[k]), R
            D[k] = float(would[k])
            gained[-1] += U[k]


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(
    "changed", [{}, {"exclude_after": 12, "window": 4, "explore_decay": 0.7, "cutoff": 0.3, "stale": 1.0}]
)
def test_oort_selects_the_clients_of_a_plain_loop(timed: bool, changed: dict[str, Any]) -> None:
    options = PAPER | CODE | changed
    own = {name: value for name, value in changed.items() if timed or name != "window"}
    for seed in range(3):
        world = World(seed=seed, clients=40)
        plain = oort(world, timed, options)
        for cohort in play("oort" if timed else "oort-loss", world, own):
            assert cohort.clients.tolist() == next(plain) and cohort.inclusion is None


def test_equal_losses_keep_a_small_utility() -> None:
    """The lowest utility counts 0.1 % less than it is; in round 1 there is no temporal uncertainty."""
    view = SimpleNamespace(round=0, sizes=np.array([10, 10, 20]), last=lambda _: np.ones(3), age=lambda _: np.zeros(3))
    np.testing.assert_allclose(OortByLoss().utility(view, np.arange(3)), [0.01 / 10.01, 0.01 / 10.01, 1])


def test_the_defaults_are_those_of_the_paper_and_the_authors_code() -> None:
    fields = resolve("client sampler", "oort").fields
    assert {name: field.default for name, field in fields.items()} == PAPER | CODE
    assert all(field.description for field in fields.values())
