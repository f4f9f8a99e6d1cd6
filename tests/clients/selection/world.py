"""Synthetic world for the oracle tests of client samplers: clients whose answers change with the round.

`World` has the facts that a plain loop reads: sizes, available clients, answers, arrivals, metrics, random generators.
`play` steps a sampler through the same rounds, as a run does:

    world = World(seed=3)
    for t, cohort in enumerate(play("tifl", world, {"tiers": 3})):
        ...  # the plain loop's own round t, from world.available(t), world.answer("loss", t), world.generator(t)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any
from zlib import crc32

import numpy as np

from fedmpi import Cohort, PastRound
from fedmpi.clients.sampler import ClientNumbers, ClientSampler, View
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams

ROUNDS = 100
REMADE = 7
"""Rounds after which a new sampler continues from the saved state, as in a resumed run."""
VECTORS = {"update_sketch": 16, "head_update": 12}
"""Numbers that are vectors, with their lengths."""
GROUPS = 4
"""Groups of clients with similar labels and updates."""


@dataclass(frozen=True)
class World:
    """Clients of different sizes. Some are unavailable, and some selected ones do not arrive.

    Attributes
    ----------
    clients, count : int
        N and m. Every tenth round has fewer available clients than m.
    present, arrive : float
        Probability that a client is available, and that a selected one arrives.
    evaluated : int
        Rounds from one evaluation to the next; every 25th round is also evaluated.
    """

    clients: int = 24
    count: int = 5
    seed: int = 0
    present: float = 0.8
    arrive: float = 0.9
    evaluated: int = 1

    def draws(self, purpose: str, t: int = -1) -> np.random.Generator:
        """Return a generator of the world itself, which no sampler sees."""
        return np.random.default_rng([self.seed, crc32(purpose.encode()), t + 1])

    @cached_property
    def sizes(self) -> np.ndarray:
        """Samples of every client, int64 (N,); client 2 has none."""
        sizes = self.draws("sizes").integers(1, 80, self.clients)
        sizes[2] = 0
        return sizes

    @cached_property
    def groups(self) -> np.ndarray:
        """Group of every client, int64 (N,)."""
        return self.draws("groups").integers(0, GROUPS, self.clients)

    @cached_property
    def class_counts(self) -> np.ndarray:
        """Samples of five classes, int64 (N, 5), which sum to the sizes."""
        shares = self.draws("classes").dirichlet(np.full(5, 0.5), GROUPS)[self.groups]
        drawn = [self.draws("counts", k).multinomial(n, shares[k]) for k, n in enumerate(self.sizes)]
        return np.array(drawn)

    def available(self, t: int) -> list[int]:
        """Return the clients that can be selected in round t, sorted."""
        there = np.flatnonzero(self.draws("present", t).random(self.clients) < self.present).tolist()
        return there[: self.count - 2] if t % 10 == 9 else there

    def generator(self, t: int) -> np.random.Generator:
        """Return a new generator with the random numbers of `view.generator` in round t."""
        return Streams(self.seed).generator(Purpose.COHORT, t)

    @cache  # noqa: B019 - worlds are few and small
    def answer(self, name: str, t: int) -> np.ndarray:
        """Return the number or vector that each client answers with in round t, (N,) or (N, k), all different."""
        draws, progress = self.draws(name, t), np.exp(-t / 40)
        own = self.draws(name.removeprefix("val_")).lognormal(0, 0.5, self.clients)
        if name in VECTORS:
            centers = self.draws(name).standard_normal((GROUPS, VECTORS[name]))[self.groups]
            noise = 0.3 * draws.standard_normal(centers.shape)
            return (progress * own[:, None] * (centers + noise)).astype(np.float32)
        if name.endswith("accuracy"):
            return 1 - progress * draws.uniform(0.2, 1, self.clients)
        if name == "seconds":
            return 10 * own * draws.uniform(0.8, 1.2, self.clients)
        if name.endswith("load_seconds"):  # downloads and uploads are parts of the seconds
            return self.answer("seconds", t) * draws.uniform(0.05, 0.3, self.clients)
        if name == "loss_rms":
            return self.answer("loss", t) * draws.uniform(1, 1.5, self.clients)
        return 0.1 + (progress + 0.1) * own * draws.uniform(0.5, 1.5, self.clients)

    def arrived(self, t: int, selected: np.ndarray) -> np.ndarray:
        """Return the selected clients whose updates count."""
        return selected[self.draws("arrive", t).random(self.clients)[selected] < self.arrive]

    def metrics(self, t: int) -> dict[str, float]:
        """Return the global metrics in the record of round t; scores are missing without evaluation."""
        draws, progress = self.draws("metrics", t), np.exp(-t / 40)
        metrics = {"train_loss": float(0.1 + 2 * progress * draws.uniform(0.9, 1.1))}
        if t % self.evaluated == self.evaluated - 1 or t % 25 == 0:
            for part in ("test", "val"):
                metrics[f"{part}_accuracy"] = float(0.95 - 0.8 * progress * draws.uniform(0.9, 1.1))
                metrics[f"{part}_loss"] = float(0.2 + 2 * progress * draws.uniform(0.9, 1.1))
        return metrics

    def length(self, t: int, arrived: np.ndarray) -> float:
        """Return the simulated seconds of round t, those of its slowest client."""
        return float(self.answer("seconds", t)[arrived].max(initial=0.0))


def play(chosen: Any, world: World, options: Mapping[str, Any] | None = None, rounds: int = ROUNDS) -> Iterator[Cohort]:
    """Yield the cohorts of a sampler (a name, or the object) with these options, round after round.

    Every REMADE rounds a new sampler continues from the saved state, so that state missing there changes the cohorts.
    """
    part, options = resolve("client sampler", chosen), dict(options or {})
    sampler = ClientSampler(part, options)
    numbers, history = ClientNumbers(sampler.numbers, world.clients, VECTORS), list[PastRound]()
    for t in range(rounds):
        present = np.array(world.available(t), np.int64)
        view = View(
            round=t,
            count=world.count,
            sizes=world.sizes,
            present=present,
            streams=Streams(world.seed),
            numbers=numbers,
            counts=lambda: world.class_counts,
            past=tuple(history) if sampler.needs_history else None,
        )
        if sampler.measures:  # the same view, whose generator continues
            view.measured.update(_measured(view, sampler.candidates(view), sampler.measures, world))
        cohort = sampler.draw(view)
        yield cohort
        arrived = world.arrived(t, cohort.clients)
        for name in numbers.names:
            numbers.enter(name, t, arrived, world.answer(name, t)[arrived])
        history.append(PastRound(t, cohort.clients, arrived, world.metrics(t), world.length(t, arrived)))
        if t % REMADE == REMADE - 1:
            state, sampler = sampler.state(), ClientSampler(part, options)
            sampler.load(state)


def _measured(view: View, candidates: np.ndarray, names: tuple[str, ...], world: World) -> dict[str, np.ndarray]:
    """Return the candidates' answers in this round; those of others are NaN."""
    assert np.isin(candidates, view.available).all()
    fresh = {name: np.full_like(world.answer(name, view.round), np.nan) for name in names}
    for name, values in fresh.items():
        values[candidates] = world.answer(name, view.round)[candidates]
    return fresh
