"""Optimal client sampling and active federated learning, each beside a plain loop written from the paper."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from fedmpi.clients.selection.active import ActiveFederatedLearning
from fedmpi.clients.selection.ocs import OptimalClientSampling
from fedmpi.testing import selection
from tests.clients.selection.world import ROUNDS, World, play


def optimal(norms: dict[int, float], m: int) -> dict[int, float]:
    """Equation 7, for every l from the largest: the l smallest norms share m + l − n, the others are certain."""
    n, ascending = len(norms), sorted(norms, key=norms.__getitem__)
    if m >= n:
        return dict.fromkeys(norms, 1.0)
    for l in range(n, 0, -1):  # noqa: E741 - the paper's letter
        total = sum(norms[i] for i in ascending[:l])
        if 0 < m + l - n <= total / norms[ascending[l - 1]]:
            small = {i: (m + l - n) * norms[i] / total for i in ascending[:l]}
            return dict.fromkeys(norms, 1.0) | small
    raise AssertionError("l = n − m + 1 always holds")


def approximate(norms: dict[int, float], m: int, j_max: int) -> dict[int, float]:
    """Algorithm 2 (AOCS), as messages between clients and master."""
    n, u = len(norms), sum(norms.values())
    p = {i: min(m * norm / u, 1.0) for i, norm in norms.items()}
    for _ in range(j_max):
        answers = [(1, p[i]) if p[i] < 1 else (0, 0.0) for i in p]
        count, total = sum(one for one, _ in answers), sum(chance for _, chance in answers)
        if not count:
            break
        factor = (m - n + count) / total
        p = {i: min(factor * p[i], 1.0) if p[i] < 1 else p[i] for i in p}
        if factor <= 1:
            break
    return p


@pytest.mark.parametrize(
    "options",
    [{}, {"population": "clients"}, {"j_max": 4}, {"candidates": 11}, {"candidates": 11, "j_max": 1}],
    ids=str,
)
def test_ocs_selects_the_clients_of_the_plain_loop(options: dict) -> None:
    world, sent, certain = World(seed=2), 0.0, 0
    for t, cohort in enumerate(play("ocs", world, options)):
        generator, candidates = world.generator(t), world.available(t)
        share = 1.0
        if options.get("candidates", math.inf) < len(candidates):
            share = options["candidates"] / len(candidates)
            candidates = sorted(generator.choice(candidates, options["candidates"], replace=False).tolist())
        norms = {}
        for i in candidates:
            weight = (
                int(world.sizes[i]) if options.get("population", "samples") == "samples" else int(world.sizes[i] > 0)
            )
            if norm := weight * float(world.answer("update_norm", t)[i]):
                norms[i] = norm
        j_max = options.get("j_max", 0)
        p = (
            approximate(norms, world.count, j_max)
            if j_max and world.count < len(norms)
            else optimal(norms, world.count)
        )
        coins = generator.random(len(norms)).tolist()
        selected = [i for i, coin in zip(sorted(norms), coins, strict=True) if coin < p[i]]
        assert cohort.clients.tolist() == selected
        np.testing.assert_allclose(cohort.inclusion, [share * p[i] for i in selected], rtol=1e-12)
        sent, certain = sent + len(selected), certain + sum(chance == 1 for chance in p.values())
        if not j_max:
            assert math.isclose(sum(p.values()), min(world.count, len(norms)))
    full = sum(min(world.count, options.get("candidates", 99), len(world.available(t))) for t in range(ROUNDS))
    assert abs(sent - full) < 5 * math.sqrt(full) and certain > 10


def test_clients_with_zero_updates_are_never_drawn() -> None:
    chances = OptimalClientSampling().chances
    np.testing.assert_allclose(chances(np.array([1.0, 1.0, 2.0]), 2), [0.5, 0.5, 1.0])
    np.testing.assert_allclose(chances(np.array([1.0, 1.0]), 5), [1.0, 1.0])
    assert chances(np.empty(0), 3).shape == (0,)


def test_aocs_iterates_until_no_probability_grows() -> None:
    norms = dict(enumerate((1.0, 1.0, 1.0, 8.0, 20.0)))
    found = OptimalClientSampling(j_max=4).chances(np.array(list(norms.values())), 3)
    np.testing.assert_allclose(found, list(approximate(norms, 3, 4).values()))
    np.testing.assert_allclose(found, [1 / 3, 1 / 3, 1 / 3, 1, 1])


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
