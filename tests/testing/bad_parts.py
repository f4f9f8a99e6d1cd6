"""Components that are classes or are started in runs, good ones and ones that break their contracts in one way."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi import Cohort, LocalAlgorithm, aggregator, client_sampler, data_sampler, server_optimizer, weights


def processes() -> int:
    return int(os.environ.get("PMI_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))


@client_sampler
class ForgetsOnResume:
    def __init__(self) -> None:
        self.turn = 0

    def draw(self, view) -> Cohort:
        self.turn += view.count
        return Cohort(np.sort(np.roll(view.available, -self.turn)[: view.count]))


@client_sampler
class Remembers(ForgetsOnResume):
    state = ("turn",)


@client_sampler
def by_processes(view) -> Cohort:
    return Cohort(np.sort(np.roll(view.available, -processes())[: view.count]))


@data_sampler
def half(client) -> np.ndarray:
    count = (len(client.labels) + 1) // 2
    return np.sort(client.generator.choice(len(client.labels), count, replace=False))


@data_sampler
class Alternating:
    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, client) -> np.ndarray:
        self.asked += 1
        return np.arange(len(client.labels) if self.asked % 2 else 0)


@data_sampler(pooled=True)
def from_the_start(pool) -> np.ndarray:
    return np.arange(pool.start, pool.stop, 3)


@aggregator
def shortest(updates, coefficients) -> Tensor:
    return updates[updates.square().sum(1).argmin()]


@weights(normalized=True)
def root(cohort, sizes) -> np.ndarray:
    return np.sqrt(sizes[cohort.clients])


@weights(normalized=True)
def negative(cohort, sizes) -> np.ndarray:
    return sizes[cohort.clients] - sizes.mean()


@weights
def of_everybody(cohort, sizes) -> np.ndarray:
    return sizes / sizes.sum()


def scaled(outputs: Tensor, targets: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale * (1 - outputs.softmax(1).gather(1, targets[:, None]).squeeze(1))


class LeastRecall:
    def __call__(self, outputs: Tensor, targets: Tensor) -> dict:
        right = targets[outputs.argmax(1) == targets]
        return {"all": torch.bincount(targets, minlength=99), "right": torch.bincount(right, minlength=99)}

    def result(self, sums, samples) -> dict:
        there = sums["all"] > 0
        return {"least_recall": (sums["right"][there] / sums["all"][there]).min()}


def points(*, count: int = 60) -> dict:
    rows = np.arange(count)
    return {"x": np.arange(2.0 * count).reshape(count, 2), "y": rows % 3, "user": rows // 9}


class NoisyAlgorithm(LocalAlgorithm):
    def correction(self, client, server, generator) -> Tensor:
        return 0.01 * torch.randn_like(server.model)


class WrongNames(LocalAlgorithm):
    def finish(self, client, server, work, generator) -> dict[str, Tensor]:
        return {"norm": work.delta.norm()}


class NearlyNamed(LocalAlgorithm):
    def __init__(self, *, number: int = 3) -> None:
        self.number = number
        self.proximal = 0.1


class OneName(LocalAlgorithm):
    client_state, server_state, sums, numbers = "seen", "total", "moved", "steps"

    def finish(self, client, server, work, generator) -> dict[str, Any]:
        client.seen = client.seen + work.delta
        return {"moved": client.seen, "steps": work.steps}

    def server_step(self, server, update, sums, totals, generator) -> Tensor:
        server.total = server.total + sums["moved"] / sums["steps"] * totals.participants / totals.weight
        return update + 0.1 * server.total


class PulledByWords(LocalAlgorithm):
    proximal_mu = "a lot"  # type: ignore[assignment]


@server_optimizer
class Counting:
    state = "rounds"

    def __init__(self) -> None:
        self.rounds = 0

    def step(self, w, update) -> None:
        self.rounds += 1
        w.add_(update if self.rounds < 3 else update / self.rounds)


class Steps:
    def __init__(self, parameters, lr) -> None:
        self.parameters, self.lr = list(parameters), lr

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data -= self.lr * self.chosen(parameter.grad)

    def chosen(self, gradient: Tensor) -> Tensor:
        return gradient


class Accumulating(Steps):
    before = 0.0

    def chosen(self, gradient: Tensor) -> Tensor:
        Accumulating.before += float(gradient.sum())
        return gradient + Accumulating.before
