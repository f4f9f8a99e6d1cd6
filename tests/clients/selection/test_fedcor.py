"""FedCor beside a plain loop with the full covariance matrix, written from Tang et al. 2022."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fedmpi.clients.selection.fedcor import FedCor
from tests.clients.selection.world import ROUNDS, World, play

OPTIONS = {"warmup": 6, "interval": 5, "anneal": 0.8, "forget": 0.9, "memory": 30, "dimension": 4}
NOISE = 0.01


def covariance(data: dict[int, dict[int, float]], clients: int, now: int) -> np.ndarray:
    """Σ of the highest discounted likelihood of {round: {client: Δl}} (Tipping and Bishop 1999, equation 7)."""
    gamma = {t: OPTIONS["forget"] ** (now - t) for t in data}
    S = np.zeros((clients, clients))
    for t, changes in data.items():
        y = np.zeros(clients)
        for i in changes:
            rows = [s for s in data if i in data[s]]
            y[i] = changes[i] - sum(gamma[s] * data[s][i] for s in rows) / sum(gamma[s] for s in rows)
        S += gamma[t] * np.outer(y, y) / sum(gamma.values())
    values, vectors = np.linalg.eigh(S)
    sigma = NOISE**2 * np.eye(clients)
    for j in np.argsort(-values)[: OPTIONS["dimension"]]:
        sigma += max(values[j] - NOISE**2, 0.0) * np.outer(vectors[:, j], vectors[:, j])
    return sigma


def fedcor(world: World) -> Iterator[tuple[list[int], bool]]:
    sizes = world.sizes.tolist()
    p = [n / sum(sizes) for n in sizes]
    data: dict[int, dict[int, float]] = {}
    start, tau, before = np.zeros((0, 0)), [0] * len(sizes), dict[int, float]()
    for t in range(ROUNDS):
        generator, here = world.generator(t), world.available(t)
        now = {k: float(world.answer("loss", t)[k]) for k in here}
        if t and (t - 1 < OPTIONS["warmup"] or (t - 1) % OPTIONS["interval"] == 0):
            data[t - 1] = {k: now[k] - before[k] for k in here if k in before}
            data = {s: changes for s, changes in data.items() if s + OPTIONS["memory"] >= t - 1}
            if t >= OPTIONS["warmup"]:
                start, tau = covariance(data, len(sizes), t - 1), [0] * len(sizes)
        before = now
        fit = [k for k in here if sizes[k] > 0]
        m = min(world.count, len(fit))
        if t < OPTIONS["warmup"] or t % OPTIONS["interval"] == 0:
            yield sorted(generator.choice(fit, m, replace=False).tolist()), True
            continue
        sigma, chosen = start, list[int]()
        for _ in range(m):
            gain = {
                k: OPTIONS["anneal"] ** tau[k] * sum(p[i] * sigma[i, k] for i in range(len(p))) / np.sqrt(sigma[k, k])
                for k in fit
                if k not in chosen
            }
            k = max(gain, key=lambda k: gain[k])
            sigma = sigma - np.outer(sigma[:, k], sigma[k]) / sigma[k, k]
            chosen.append(k)
        for k in chosen:
            tau[k] += 1
        yield sorted(chosen), False


def test_fedcor_selects_the_clients_of_a_plain_loop() -> None:
    world = World(seed=1, clients=20)
    plain, drawn, greedy = fedcor(world), 0, set[tuple[int, ...]]()
    for cohort in play("fedcor", world, OPTIONS):
        clients, uniform = next(plain)
        assert cohort.clients.tolist() == clients and cohort.inclusion is None
        drawn += uniform
        greedy.add(tuple(clients))
    assert drawn == 6 + 18 and len(greedy) > 40


def test_no_other_embedding_has_a_higher_likelihood() -> None:
    """The gradient of the likelihood at X vanishes, and random steps lower it."""
    random = np.random.default_rng(0)
    sampler = FedCor(dimension=3, forget=0.9)
    sampler.losses, sampler.rounds = np.zeros(9), np.arange(8.0)
    sampler.changes = random.standard_normal((8, 9)) * random.uniform(0.05, 0.5, 9)
    sampler._train()
    weights = torch.tensor(0.9 ** (7 - np.arange(8)))
    y = torch.tensor(sampler.changes) - weights @ torch.tensor(sampler.changes) / weights.sum()

    def likelihood(x: torch.Tensor) -> torch.Tensor:
        sigma = x.T @ x + NOISE**2 * torch.eye(9, dtype=torch.float64)
        return -0.5 * (weights * ((y @ torch.linalg.inv(sigma) * y).sum(1) + torch.logdet(sigma))).sum()

    best = torch.tensor(sampler.embedding, requires_grad=True)
    highest = likelihood(best)
    highest.backward()
    assert best.grad is not None and best.grad.abs().max() < 1e-6 * highest.abs().item() / NOISE
    for scale in (1e-3, 1e-2, 0.1):
        for _ in range(50):
            assert likelihood(best.detach() + scale * torch.tensor(random.standard_normal((3, 9)))) < highest
