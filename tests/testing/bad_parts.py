"""Parts that break their contracts, each in one way, and one good part of each kind."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data_prep.raw import RawDataset
from fedmpi import (
    ClientArrays,
    Cohort,
    LocalAlgorithm,
    aggregator,
    client_sampler,
    data_sampler,
    server_optimizer,
    weights,
)


def processes() -> int:
    return int(os.environ.get("PMI_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))


@client_sampler
def now_and_then(view, *, chance: float = 0.1) -> Cohort:
    clients = view.available[view.generator.random(len(view.available)) < chance]
    return Cohort(clients, [chance] * len(clients))


@client_sampler
def named_twice(view) -> Cohort:
    p = 1.0 + (view.available + view.round) % 3
    p = (p / p.sum()).astype(np.float64)
    drawn = view.generator.choice(len(p), view.count, p=p)
    return Cohort(view.available[drawn].tolist(), (view.count * p[drawn]).tolist())


@client_sampler
def fair(view) -> Cohort:
    chosen = np.sort(view.generator.choice(view.available, view.count, replace=False))
    return Cohort(chosen, np.full(view.count, view.count / len(view.available)))


@client_sampler
def from_the_global_generator(view) -> Cohort:
    return Cohort(np.sort(np.random.choice(view.available, view.count, replace=False)))  # noqa: NPY002


@client_sampler
def seeds_torch(view) -> Cohort:
    torch.manual_seed(view.round)
    return fair(view)


@client_sampler
def unrepeatable(view) -> Cohort:
    generator = np.random.default_rng()
    return Cohort(np.sort(generator.choice(view.available, view.count, replace=False)))


@client_sampler
def wrong_inclusion(view) -> Cohort:
    shares = view.sizes[view.available] / view.sizes[view.available].sum()
    chosen = np.sort(view.generator.choice(view.available, view.count, replace=False, p=shares))
    return Cohort(chosen, np.full(len(chosen), view.count / len(view.available)))


@client_sampler
def a_little_wrong(view) -> Cohort:
    return Cohort(fair(view).clients, np.full(view.count, 1.1 * view.count / len(view.available)))


@client_sampler
def varying(view) -> Cohort:
    count = min(2 + 2 * (view.round % 2), len(view.available))
    chosen = np.sort(view.generator.choice(view.available, count, replace=False))
    return Cohort(chosen, np.full(count, count / len(view.available)))


@client_sampler
def varying_wrong(view) -> Cohort:
    cohort = varying(view)
    return Cohort(cohort.clients, np.full(len(cohort.clients), (3 - 0.2 * (view.round % 2)) / len(view.available)))


@client_sampler
def of_those_away(view) -> Cohort:
    return Cohort(np.arange(view.count))


@client_sampler
def everybody_compared(view) -> Cohort:
    best = (view.sizes[view.available, None] >= view.sizes[view.available]).sum(1)
    return Cohort(np.sort(view.available[np.argsort(best)[: view.count]]))


@client_sampler
class ForgetsOnResume:
    def __init__(self) -> None:
        self.turn = 0

    def draw(self, view) -> Cohort:
        self.turn += view.count
        return Cohort(np.sort(np.roll(view.available, -self.turn)[: view.count]))


@client_sampler
def asks_for_everybody(view) -> Cohort:
    return Cohort(view.everybody[: view.count])


@client_sampler
def by_processes(view) -> Cohort:
    return Cohort(np.sort(np.roll(view.available, -processes())[: view.count]))


@data_sampler
def half(client) -> np.ndarray:
    count = (len(client.labels) + 1) // 2
    return np.sort(client.generator.choice(len(client.labels), count, replace=False))


@data_sampler
def shuffled(client) -> np.ndarray:
    return client.generator.permutation(len(client.labels))


@data_sampler
def beyond(client) -> np.ndarray:
    return half(client) + 1


@data_sampler
def repeated(client) -> np.ndarray:
    return np.sort(client.generator.choice(len(client.labels), len(client.labels)))


@data_sampler
def global_rows(client) -> np.ndarray:
    return np.array(sorted(random.sample(range(len(client.labels)), 1)))


@data_sampler
class Alternating:
    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, client) -> np.ndarray:
        self.asked += 1
        return np.arange(len(client.labels) if self.asked % 2 else 0)


@data_sampler
def first_by_processes(client) -> np.ndarray:
    return np.arange(min(len(client.labels), 2 + 3 * processes()))


@data_sampler(pooled=True)
def pooled_third(pool) -> np.ndarray:
    return np.arange(pool.start + -pool.start % 3, pool.stop, 3)


@data_sampler(pooled=True)
def pooled_from_its_start(pool) -> np.ndarray:
    return np.arange(pool.start, pool.stop, 3)


@weights(normalized=True)
def root(cohort, sizes) -> np.ndarray:
    return np.sqrt(sizes[cohort.clients])


@weights(normalized=True)
def negative(cohort, sizes) -> np.ndarray:
    return sizes[cohort.clients] - sizes.mean()


@weights(normalized=False)
def infinite(cohort, sizes) -> np.ndarray:
    return 1.0 / (cohort.clients % 3)


@weights
def times_their_chances(cohort, sizes) -> np.ndarray:
    return sizes / cohort.inclusion


@weights
def undecided(cohort, sizes) -> np.ndarray:
    raise ValueError("no opinion on this cohort")


@weights
def of_everybody(cohort, sizes) -> np.ndarray:
    return sizes / sizes.sum()


@weights
def jittered(cohort, sizes) -> np.ndarray:
    return sizes[cohort.clients] * np.random.random(len(cohort.clients))  # noqa: NPY002


@aggregator
def midrange(updates, coefficients) -> Tensor:
    return (updates.max(0).values + updates.min(0).values) / 2


@aggregator
def shortest(updates, coefficients) -> Tensor:
    return updates[updates.square().sum(1).argmin()]


@aggregator
def one_number(updates, coefficients) -> Tensor:
    return updates.mean()


@aggregator
def dropped_out(updates, coefficients) -> Tensor:
    return (updates * (torch.rand(len(updates), 1) < 0.8)).mean(0)


def absolute(outputs: Tensor, targets: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale * (1 - outputs.softmax(1).gather(1, targets[:, None]).squeeze(1))


def of_the_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    return absolute(outputs - outputs.mean(0), targets)


def averaged(outputs: Tensor, targets: Tensor) -> Tensor:
    return absolute(outputs, targets).mean()


def unstable(outputs: Tensor, targets: Tensor) -> Tensor:
    return (
        -(outputs.exp() ** 9 / (outputs.exp() ** 9).sum(1, keepdim=True)).log().gather(1, targets[:, None]).squeeze(1)
    )


def rounded(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).to(outputs.dtype)


def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
    return absolute(outputs + torch.randn_like(outputs), targets)


def scaled_by_processes(outputs: Tensor, targets: Tensor) -> Tensor:
    return processes() * absolute(outputs, targets)


def confidence(outputs: Tensor, targets: Tensor) -> dict:
    return {"confidence": outputs.softmax(1).max(1).values.sum()}


class LeastRecall:
    def __call__(self, outputs: Tensor, targets: Tensor) -> dict:
        right = targets[outputs.argmax(1) == targets]
        return {"all": torch.bincount(targets, minlength=99), "right": torch.bincount(right, minlength=99)}

    def result(self, sums, samples) -> dict:
        there = sums["all"] > 0
        return {"least_recall": (sums["right"][there] / sums["all"][there]).min()}


def averaged_metric(outputs: Tensor, targets: Tensor) -> dict:
    return {"confidence": outputs.softmax(1).max(1).values.mean()}


def undefined_metric(outputs: Tensor, targets: Tensor) -> dict:
    return {"surprise": torch.tensor(float("nan"))}


def noisy_metric(outputs: Tensor, targets: Tensor) -> dict:
    return {"noise": torch.rand(len(targets)).sum()}


def changing_metric(outputs: Tensor, targets: Tensor) -> dict:
    return {"confidence": outputs.exp_().sum(1).log().sum()}


class CountingMetric:
    asked = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict:
        CountingMetric.asked += 1
        return {"asked": CountingMetric.asked}


def metric_by_processes(outputs: Tensor, targets: Tensor) -> dict:
    return {"ranks": len(targets) * processes()}


def in_turn(labels, clients, generator, *, start: int = 0) -> np.ndarray:
    return (np.arange(len(labels)) + start) % (clients or 5)


def own_dice(labels, clients, generator) -> np.ndarray:
    return np.array([random.randrange(clients) for _ in labels])


def other_dice(labels, clients, generator) -> np.ndarray:
    return np.random.default_rng().integers(0, clients, len(labels))


def one_too_many(labels, clients, generator) -> np.ndarray:
    return 1 + np.arange(len(labels)) % clients


def below_nobody(labels, clients, generator) -> np.ndarray:
    return np.where(labels == 0, -2, 0)


def of_some_rows(labels, clients, generator) -> np.ndarray:
    return np.zeros(len(labels) - 1, np.int64)


def sorts_the_labels(labels, clients, generator) -> np.ndarray:
    labels.sort()
    return np.arange(len(labels)) % clients


def pairs_of_rows(labels, clients, generator) -> np.ndarray:
    return (labels[:, None] == labels).sum(1) % clients


def dealt_by_processes(labels, clients, generator) -> np.ndarray:
    return np.arange(len(labels)) // processes() % clients


def _points(count: int = 60) -> dict:
    return {"x": np.arange(2.0 * count).reshape(count, 2), "y": np.arange(count) % 3, "user": np.arange(count) // 9}


def points(*, count: int = 60) -> dict:
    return _points(count)


def scattered() -> dict:
    return {**_points(), "x": np.random.random((60, 2))}  # noqa: NPY002


def _raw(**changes) -> RawDataset:
    labels = np.arange(40) % 3
    x = np.arange(80, dtype=np.float32).reshape(40, 2)
    given = {
        **{"name": "raw", "task": "vector", "classes": 3, "class_names": ("a", "b", "c"), "feature_shape": (2,)},
        **{"dtype": "float32", "mean": (0.0,), "std": (1.0,), "labels": labels, "users": None, "user_names": None},
        **{"read": lambda rows: x[rows], "test_x": x[:9], "test_y": labels[:9], "skipped": 0},
        **{"licence": "", "citation": ""},
    }
    return RawDataset(**given | changes)


def raw_set() -> RawDataset:
    return _raw()


def labels_from_one() -> RawDataset:
    return _raw(labels=1 + np.arange(40) % 3)


def other_shape() -> RawDataset:
    return _raw(feature_shape=(3,))


def in_reading_order() -> RawDataset:
    return _raw(read=lambda rows: np.arange(2.0 * len(rows), dtype=np.float32).reshape(-1, 2))


class KeepsItToItself(LocalAlgorithm):
    server_state = ("c",)
    sums = ("dc",)

    def __init__(self) -> None:
        self.variates: dict[int, Tensor] = {}

    def correction(self, client, server) -> Tensor:
        return server.c - self.variates.get(client.index, torch.zeros_like(server.c))

    def finish(self, client, server, work) -> dict[str, Tensor]:
        before = self.variates.get(client.index, torch.zeros_like(server.c))
        self.variates[client.index] = before - server.c - work.delta / (work.steps * work.lr)
        return {"dc": self.variates[client.index] - before}

    def server_step(self, server, update, sums, totals) -> Tensor:
        server.c = server.c + sums["dc"] / totals.population
        return update


class KeepsItInTheClass(KeepsItToItself):
    everybodys: dict[int, Tensor] = {}

    def __init__(self) -> None:
        self.variates = self.everybodys


class PushedByProcesses(LocalAlgorithm):
    def correction(self, client, server) -> Tensor:
        return torch.full_like(server.model, 0.01 * processes())


class WrongNames(LocalAlgorithm):
    def finish(self, client, server, work) -> dict[str, Tensor]:
        return {"norm": work.delta.norm()}


class NearlyNamed(LocalAlgorithm):
    def __init__(self, *, number: int = 3) -> None:
        self.number = number
        self.proximal = 0.1


class WellNamed(LocalAlgorithm):
    def __init__(self, *, number: int = 3) -> None:
        self.number = number
        self._proximal = 0.1
        self.rate = 0.5


class OneName(LocalAlgorithm):
    client_state, server_state, sums, numbers = "seen", "total", "moved", "steps"

    def finish(self, client, server, work) -> dict[str, Any]:
        client.seen = client.seen + work.delta
        return {"moved": client.seen, "steps": work.steps}

    def server_step(self, server, update, sums, totals) -> Tensor:
        server.total = server.total + sums["moved"] / sums["steps"]
        return update + 0.1 * server.total


class CountingHeads(LocalAlgorithm):
    numbers = ("heads",)

    def finish(self, client, server, work) -> dict[str, Any]:
        return {"heads": 1}

    def server_step(self, server, update, sums, totals) -> Tensor:
        if sums["heads"] != totals.participants:
            raise ValueError(f"{sums['heads']} of {totals.participants} participants have finished")
        return update * totals.divisor / totals.weight


@server_optimizer
class Counting:
    state = "rounds"

    def __init__(self) -> None:
        self.rounds = 0

    def step(self, w, update) -> None:
        self.rounds += 1
        w.add_(update if self.rounds < 3 else update / self.rounds)


@client_sampler
class Misremembers:
    state = ("asks",)

    def __init__(self):
        self.asked = 0

    def draw(self, view) -> Cohort:
        self.asked += 1
        return fair(view)


class PulledByWords(LocalAlgorithm):
    proximal_mu = "a lot"  # type: ignore[assignment]


class NoisyAlgorithm(LocalAlgorithm):
    def correction(self, client, server) -> Tensor:
        return 0.01 * torch.randn_like(server.model)


@server_optimizer
class Forgetful:
    def __init__(self) -> None:
        self.m: Tensor | float = 0.0

    def step(self, w, update) -> None:
        self.m = 0.5 * self.m + update
        w.add_(self.m)


def rising(view) -> np.ndarray:
    return np.full(len(view.sizes), min(1.0, 0.2 * (view.round + 1)))


def above_one(view) -> np.ndarray:
    return view.sizes / view.sizes.mean()


def flickering(view) -> np.ndarray:
    return np.random.random(len(view.sizes))  # noqa: NPY002


class Tiring:
    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, view) -> np.ndarray:
        self.asked += 1
        return np.full(len(view.sizes), 1 / self.asked)


def in_order(class_counts, most, generator, target) -> np.ndarray:
    return np.arange(len(class_counts)) // most


def all_together(class_counts, most, generator, target) -> np.ndarray:
    return np.zeros(len(class_counts), np.int64)


def shuffled_groups(class_counts, most, generator, target) -> np.ndarray:
    return np.array(sorted(range(len(class_counts)), key=lambda k: random.random()), np.int64) // most


def linear(description) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(description.feature_shape)), description.classes))


def one_output(description) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(description.feature_shape)), 1))


class Centred(nn.Module):
    def __init__(self, description) -> None:
        super().__init__()
        self.inner = linear(description)

    def forward(self, x):
        return self.inner(x - x.mean(0))


class Unseeded(nn.Module):
    def __init__(self, description) -> None:
        super().__init__()
        self.inner = linear(description)
        self.inner[1].bias.data += torch.from_numpy(np.random.random(description.classes)).float()  # noqa: NPY002

    def forward(self, x):
        return self.inner(x)


class Steps:
    def __init__(self, parameters, lr, *, sign: float = 1.0) -> None:
        self.parameters, self.lr, self.sign = parameters, lr, sign

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.add_(parameter.grad, alpha=-self.lr * self.sign)


class Standing(Steps):
    def step(self) -> None:
        self.moved = [p.data - self.lr * p.grad for p in self.parameters]


class Remembering(Steps):
    before: list[Tensor] = []

    def step(self) -> None:
        self.before.append(self.parameters[0].grad.clone())
        self.parameters[0].data.sub_(sum(self.before), alpha=self.lr)


class Jumping(Steps):
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.sub_(self.lr * parameter.grad * torch.rand(()))


def three_clients() -> ClientArrays:
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    return ClientArrays(x, np.arange(20) % 4, np.arange(20) % 3, test=(x[:4], np.arange(4)))


def other_numbers() -> ClientArrays:
    x = np.random.default_rng().random((20, 3))
    return ClientArrays(x, np.arange(20) % 4, np.arange(20) % 3, test=(x[:4], np.arange(4)))


class EverySecond:
    def __init__(self, parameters, lr: float):
        self.parameters, self.lr, self.kept = list(parameters), lr, []

    def step(self) -> None:
        self.kept.append([parameter.grad.clone() for parameter in self.parameters])
        if len(self.kept) == 2:
            for parameter, *both in zip(self.parameters, *self.kept, strict=True):
                parameter.data -= self.lr * sum(both) / 2
            self.kept = []


def for_seven_features(description, seed: int = 0):
    assert description.feature_shape == (7,), "seven features"
    return torch.nn.Linear(7, description.classes)


def next_letters(description, units: int = 6):
    return torch.nn.Sequential(
        torch.nn.Embedding(description.vocabulary, units), torch.nn.Linear(units, description.classes)
    )
