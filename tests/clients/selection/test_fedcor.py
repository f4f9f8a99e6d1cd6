"""FedCor beside a plain loop with the full covariance matrix, written from Tang et al. 2022."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tests.clients.selection.world import ROUNDS, World, play

OPTIONS = {"warmup": 6, "interval": 5, "anneal": 0.8, "forget": 0.9, "memory": 30, "dimension": 4}
STEPS, FIRST_STEPS, NOISE = 10, 40, 0.01


def covariance(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x + NOISE**2 * torch.eye(x.shape[1], dtype=torch.float64)


def trained(start: np.ndarray, data: dict[int, dict[int, float]], now: int, steps: int) -> np.ndarray:
    """Maximum of the discounted likelihood of {round: {client: Δl}}, by Adam with automatic gradients."""
    gamma = {t: OPTIONS["forget"] ** (now - t) for t in data}
    mean = {}
    for i in range(start.shape[1]):
        rows = [t for t in data if i in data[t]]
        mean[i] = sum(gamma[t] * data[t][i] for t in rows) / max(sum(gamma[t] for t in rows), 1e-6)
    x = torch.tensor(start, requires_grad=True)
    adam = torch.optim.Adam([x], lr=0.01)
    for _ in range(steps):
        loss = torch.zeros((), dtype=torch.float64)
        for t, changes in data.items():
            ids = sorted(changes)
            y = torch.tensor([changes[i] - mean[i] for i in ids], dtype=torch.float64)
            sigma = covariance(x[:, ids])
            loss = loss + gamma[t] * 0.5 * (y @ torch.linalg.solve(sigma, y) + torch.logdet(sigma))
        adam.zero_grad()
        loss.backward()
        adam.step()
    return x.detach().numpy().copy()


def fedcor(world: World) -> Iterator[tuple[list[int], bool]]:
    sizes = world.sizes.tolist()
    p = [n / sum(sizes) for n in sizes]
    data: dict[int, dict[int, float]] = {}
    x, tau, before = np.zeros((0, 0)), [0] * len(sizes), dict[int, float]()
    for t in range(ROUNDS):
        generator, here = world.generator(t), world.available(t)
        now = {k: float(world.answer("loss", t)[k]) for k in here}
        if t and (t - 1 < OPTIONS["warmup"] or (t - 1) % OPTIONS["interval"] == 0):
            data[t - 1] = {k: now[k] - before[k] for k in here if k in before}
            data = {s: changes for s, changes in data.items() if s + OPTIONS["memory"] >= t - 1}
            if t >= OPTIONS["warmup"]:
                steps = STEPS if x.size else FIRST_STEPS
                shape = (OPTIONS["dimension"], len(sizes))
                x = x if x.size else generator.standard_normal(shape) / np.sqrt(OPTIONS["dimension"])
                x, tau = trained(x, data, t - 1, steps), [0] * len(sizes)
        before = now
        fit = [k for k in here if sizes[k] > 0]
        m = min(world.count, len(fit))
        if t < OPTIONS["warmup"] or t % OPTIONS["interval"] == 0:
            yield sorted(generator.choice(fit, m, replace=False).tolist()), True
            continue
        sigma, chosen = covariance(torch.tensor(x)).numpy(), list[int]()
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
    for cohort in play("fedcor", world, OPTIONS | {"steps": STEPS, "first_steps": FIRST_STEPS}):
        clients, uniform = next(plain)
        assert cohort.clients.tolist() == clients and cohort.inclusion is None
        drawn += uniform
        greedy.add(tuple(clients))
    assert drawn == 6 + 18 and len(greedy) > 40
