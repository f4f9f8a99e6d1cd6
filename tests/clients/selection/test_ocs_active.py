"""Active federated learning beside a plain loop written from the paper."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from fedmpi.clients.selection.active import ActiveFederatedLearning
from fedmpi.testing import selection
from tests.clients.selection.world import World, play


def plain_active(world: World, t: int, losses: dict[int, float], alphas: tuple[float, float, float]) -> list[int]:
    """Algorithm 1, with the draw without replacement as a race of exponential times with rates p_k."""
    alpha1, alpha2, alpha3 = alphas
    generator = world.generator(t)
    users = generator.permutation([k for k in world.available(t) if world.sizes[k] > 0]).tolist()
    m = min(world.count, len(users))
    v = {k: math.sqrt(world.sizes[k]) * losses.get(k, 0.0) for k in users}
    users.sort(key=v.__getitem__)  # keeps the random order of ties
    for k in users[: int(alpha1 * len(users))]:
        v[k] = -math.inf
    rates = {k: math.exp(alpha2 * v[k]) for k in users if v[k] > -math.inf}
    race = dict(zip(rates, generator.standard_exponential(len(rates)).tolist(), strict=True))
    first = sorted(rates, key=lambda k: race[k] / rates[k])[: int((1 - alpha3) * m + 1e-9)]
    rest = sorted(set(users) - set(first))
    return sorted([*first, *generator.choice(rest, m - len(first), replace=False).tolist()])


@pytest.mark.parametrize("alphas", [(0.75, 0.01, 0.1), (0.3, 0.5, 0.4), (0.0, 3.0, 0.0), (1.0, 0.1, 0.5)])
def test_active_selects_the_clients_of_the_plain_loop(alphas: tuple[float, float, float]) -> None:
    world, losses = World(seed=4), dict[int, float]()
    options = dict(zip(("alpha1", "alpha2", "alpha3"), alphas, strict=True))
    for t, cohort in enumerate(play("active", world, options)):
        assert cohort.clients.tolist() == plain_active(world, t, losses, alphas)
        for k in world.arrived(t, cohort.clients).tolist():
            losses[k] = float(world.answer("loss", t)[k])
    assert len(losses) > 10


def test_active_draws_in_proportion_to_the_softmax() -> None:
    """Chi-square over 3,000 rounds that draw one client; false-alarm rate 1e-4."""
    view = selection.world()
    values = np.sqrt(view.sizes) * np.nan_to_num(view.last("loss"))
    expected = np.exp(0.3 * values[view.available])
    sampler = ActiveFederatedLearning(alpha1=0, alpha2=0.3, alpha3=0)
    drawn = Counter(int(sampler.draw(replace(view, round=t, count=1)).clients[0]) for t in range(3_000))
    seen = [drawn[k] for k in view.available.tolist()]
    assert chisquare(seen, 3_000 * expected / expected.sum()).pvalue > 1e-4
