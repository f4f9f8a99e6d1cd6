"""K-Vib beside a plain loop written from Zeng et al. 2023."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from tests.clients.selection.world import ROUNDS, World, play


def filled_up(scores: dict[int, float], k: int) -> dict[int, float]:
    """Probabilities in proportion to the scores that sum to k: those above 1 are 1, and the rest is divided again."""
    certain: set[int] = set()
    while True:
        rest = sum(score for i, score in scores.items() if i not in certain)
        p = {i: 1.0 if i in certain else (k - len(certain)) * score / rest for i, score in scores.items()}
        if not (above := {i for i in p if p[i] > 1}):
            return p
        certain |= above


def kvib(world: World, horizon: int, bound: float | None) -> Iterator[dict[int, float]]:
    N, K, sizes = world.clients, world.count, world.sizes.tolist()
    omega, G = [0.0] * N, bound
    theta = min(1.0, (N / (horizon * K)) ** (1 / 3))
    for t in range(ROUNDS):
        here = [i for i in world.available(t) if sizes[i] > 0]
        k, p = min(K, len(here)), dict.fromkeys(here, min(K, len(here)) / len(here))
        if G is not None:
            best = filled_up({i: math.sqrt(omega[i] + G**2 * N / (theta * K)) for i in here}, k)
            p = {i: (1 - theta) * best[i] + theta * k / len(here) for i in here}
        generator = world.generator(t)
        drawn = [i for i in here if generator.random() < p[i]]
        yield {i: p[i] for i in drawn}
        values = {}
        for i in world.arrived(t, np.array(drawn, np.int64)).tolist():
            values[i] = sizes[i] / sum(sizes) * float(world.answer("update_norm", t)[i])
            omega[i] += values[i] ** 2 / p[i]
        if G is None and values:
            G = max(values.values())


@pytest.mark.parametrize(("horizon", "bound"), [(500, None), (500, 0.001), (1, None)])
def test_k_vib_draws_the_clients_of_a_plain_loop(horizon: int, bound: float | None) -> None:
    spread = []
    for seed in range(3):
        world = World(seed=seed)
        plain, options = kvib(world, horizon, bound), {"horizon": horizon}
        for cohort in play("k-vib", world, options if bound is None else options | {"bound": bound}):
            expected = next(plain)
            assert cohort.clients.tolist() == list(expected)
            np.testing.assert_allclose(cohort.inclusion, list(expected.values()), rtol=1e-9)
            spread.append(cohort.inclusion.max(initial=0) - cohort.inclusion.min(initial=1))
    assert max(spread) > 0.1 or horizon == 1
