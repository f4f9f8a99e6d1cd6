"""The run of the plain loop: local work, transport, server step, and the record of every round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from fedmpi import Config
from tests.reference.plain_algorithms import PlainAlgorithm
from tests.reference.plain_data import (
    ALLOCATION,
    AVAILABILITY,
    BATCH_ORDER,
    DEVICE,
    DP_NOISE,
    DROPOUT,
    STRATUM_DRAW,
    TRANSPORT,
    Drawn,
    Network,
    Population,
    Round,
    Work,
    stream,
)
from tests.reference.plain_draws import (
    Stratification,
    allocation,
    draw_by_norm,
    draw_cohort,
    presence,
    proportional_to,
    sampled_rows,
    size_estimate,
    wanted_clients,
)
from tests.reference.robust import combine, fair_mean, lie

# ---- local work -----------------------------------------------------------------------------------------------------


EPOCH_BITS = 32
"""Bits of the round in a key of random streams; the mediator's epoch is above them."""


@dataclass
class Memory:
    """Adam's moments and steps."""

    first: np.ndarray | float = 0.0
    second: np.ndarray | float = 0.0
    steps: int = 0


def local_rate(config: Config, t: int) -> float:
    """η_t: constant, η/(1 + t) (FedSSO, §4), a half cosine, or steps."""
    part, name = config.local, config.local.schedule.name
    if name == "inverse":
        return part.lr / (1 + t)
    if name == "cosine":
        return part.lr * (1 + math.cos(math.pi * t / config.rounds)) / 2
    if name == "step":
        step = config.local.schedule.options
        return part.lr * step["factor"] ** (t // step["every"])
    return part.lr


def batches(config: Config, t: int, k: int, n: int) -> list[list[int]]:
    """The rows, counted among those that the client uses, of each of its steps."""
    part = config.local
    size = n if part.batch_size == "all" else min(part.batch_size, n)
    epochs = None if part.steps is not None else part.epochs or 1
    if size == n:
        return [list(range(n))] * (part.steps if epochs is None else epochs)
    generator = stream(config.seed, BATCH_ORDER, t, k)
    if epochs is None:
        return [generator.choice(n, size, replace=False, shuffle=False).tolist() for _ in range(part.steps)]
    found = []
    for _ in range(epochs):
        order = generator.permutation(n)[: n - n % size if part.drop_last else n].tolist()
        found += [order[first : first + size] for first in range(0, len(order), size)]
    return found


def train(
    config: Config,
    t: int,
    k: int,
    w: np.ndarray,
    x: torch.Tensor,
    y: torch.Tensor,
    steps: list[list[int]],
    net: Network,
    plain: bool = False,
    term: Callable[[np.ndarray], np.ndarray | float] | None = None,
    memory: Memory | None = None,
) -> Work:
    """A client's steps from w: SGD or Adam (Kingma and Ba 2015, Algorithm 1) on ℓ + μ/2 ‖w − w_t‖² (FedProx, Eq 2).

    `plain`: SGD without dropout, whatever the configuration says. `term`: what an algorithm adds to a gradient.
    """
    part, rate, d = config.local, local_rate(config, t % 2**EPOCH_BITS), net.trainable
    memory = memory or Memory()
    adam = SimpleNamespace(**part.optimizer.options)
    net.shared["words"] = None if plain else stream(config.seed, DROPOUT, t, k)
    own, work = w.copy(), Work(np.zeros_like(w))
    for rows in steps:
        loss, gradient, buffers = net.gradient(own, x[rows], y[rows])
        gradient = gradient + part.proximal_mu * (own[:d] - w[:d])
        if term is not None:
            gradient = gradient + term(own[:d] - w[:d])
        if part.optimizer.name == "sgd" or plain:
            own[:d] -= rate * gradient
        else:
            memory.steps += 1
            memory.first = adam.beta1 * memory.first + (1 - adam.beta1) * gradient
            memory.second = adam.beta2 * memory.second + (1 - adam.beta2) * gradient**2
            mean, square = memory.first / (1 - adam.beta1**memory.steps), memory.second / (1 - adam.beta2**memory.steps)
            own[:d] -= rate * mean / (np.sqrt(square) + adam.epsilon)
        own[d:] = buffers
        work.loss_sum += loss * len(rows)
        work.loss_rows += len(rows)
        work.steps += 1
    work.change = own - w
    return work


class Carrier:
    """Sender of updates: rounded at random to 16 or 8 bits, or the largest values; lost values may follow later."""

    def __init__(self, config: Config):
        self.config, self.part = config, config.compression
        self.lost: dict[int, np.ndarray] = {}

    def send(self, t: int, k: int, update: np.ndarray) -> np.ndarray:
        """Δ_k as the server receives it."""
        if self.part.name == "none":
            return update
        whole = update + self.lost.get(k, 0.0)
        received = self._received(t, k, whole)
        if self.part.values.get("error_feedback"):
            self.lost[k] = whole - received
            return received
        return received

    def _received(self, t: int, k: int, update: np.ndarray) -> np.ndarray:
        if self.part.name == "top-k":
            kept = np.argsort(-np.abs(update), kind="stable")[: self.values_sent(len(update))]
            received = np.zeros_like(update)
            received[kept] = update[kept]
            return received
        up = stream(self.config.seed, TRANSPORT, t, k).random(len(update), np.float32)
        if self.part.name == "int8":
            largest = [np.abs(update[a : a + 512]).max() for a in range(0, len(update), 512)]
            step = np.repeat(np.array(largest) / 127, 512)[: len(update)]
            step[step == 0] = 1
        else:
            bits, lowest = {"float16": (10, -14), "bfloat16": (7, -119)}[self.part.name]
            exponent = np.maximum(np.frexp(update)[1] - 1, lowest)
            step = 2.0 ** (exponent - bits)
        lower = np.floor(update / step)
        return (lower + (up < update / step - lower)) * step

    def values_sent(self, d: int) -> int:
        """Return the number of the largest of d values."""
        return max(1, math.ceil(self.part.values["fraction"] * d))

    def bytes(self, d: int) -> int:
        """Bytes of one update: values, their places, or the scales of buckets of 512."""
        if self.part.name == "top-k":
            return math.ceil(self.values_sent(d) * (32 + max(1, (d - 1).bit_length())) / 8)
        if self.part.name == "int8":
            return d + 4 * math.ceil(d / 512)
        return d * (4 if self.part.name == "none" else 2)


class Server:
    """Reddi et al. 2020, Algorithm 2, and momentum (Hsu et al. 2019), for trainable values; buffers take the mean."""

    def __init__(self, config: Config, trainable: int):
        self.name, self.trainable = config.server.optimizer.name, trainable
        self.part = SimpleNamespace(**{"tau": 0.0} | config.server.optimizer.options)
        self.m, self.v = np.zeros(trainable), np.full(trainable, self.part.tau**2)

    def step(self, w: np.ndarray, mean: np.ndarray) -> np.ndarray:
        """w_{t+1} from w_t and Δ_t."""
        part, d = self.part, self.trainable
        moved, delta = w + mean, mean[:d]
        if self.name == "sgd":
            moved[:d] = w[:d] + part.lr * delta
            return moved
        if self.name == "momentum":
            self.m = part.beta1 * self.m + delta
            moved[:d] = w[:d] + part.lr * self.m
            return moved
        self.m = part.beta1 * self.m + (1 - part.beta1) * delta
        if self.name == "adagrad":
            self.v = self.v + delta**2
        elif self.name == "adam":
            self.v = part.beta2 * self.v + (1 - part.beta2) * delta**2
        else:
            self.v = self.v - (1 - part.beta2) * delta**2 * np.sign(self.v - delta**2)
        moved[:d] = w[:d] + part.lr * self.m / (np.sqrt(self.v) + part.tau)
        return moved


# ---- the run --------------------------------------------------------------------------------------------------------


@dataclass
class Turnout:
    """Clients that were available, received the model and count, and when their updates came (None without a clock)."""

    there: list[int]
    asked: list[int]
    cohort: Drawn
    draws: list[int] | None = None
    expected: list[float] = field(default_factory=list)
    seconds: list[float] | None = None


@dataclass
class Used:
    """Counts so far, for the record."""

    answers: np.ndarray
    clients: np.ndarray
    exposed: set[int] = field(default_factory=set)


class PlainLoop:
    """A run of a star, round after round."""

    def __init__(self, config: Config):
        self.config = config
        self.population = Population(config)
        self.sizes, self.n = self.population.sizes, self.population.clients
        self.network = Network(config, self.population.description)
        self.w = self.network.initial
        self.server = Server(config, self.network.trainable)
        self.strata = Stratification(config, self.population, self.network)
        self.carrier = Carrier(config)
        self.algorithm = PlainAlgorithm(config, self.n, len(self.w))
        self.used = Used(np.zeros(self.n, np.int64), np.zeros(self.n, np.int64))
        self.latest: list[int] = []
        self.start_losses: list[float] = []

    def run(self) -> list[Round]:
        """All rounds."""
        return [self.round(t) for t in range(self.config.rounds)]

    def round(self, t: int) -> Round:
        """One round."""
        config, w = self.config, self.w
        self.strata.observe(t, w, self.latest)
        opening = self.strata.opens(t)
        turnout = self._turnout(t)
        cohort = turnout.cohort
        self.latest = cohort.clients
        p, facts = self._probability(t, turnout)
        rows = sampled_rows("all" if opening else config.samples.sampler.name, config, t, cohort.clients, self.sizes, p)
        factors, normalizes = self._factors(t, turnout, rows)
        total, parts = np.zeros_like(w), []
        if config.server.weights.name == "q-ffl":
            self.start_losses = [float(self.network.losses(w, *self.population.rows(k, None))[0].mean()) for k in rows]
        for k, own in rows.items():
            work, gain = self._work(t, k, own, opening)
            self.algorithm.note(k, work.change, work.steps, local_rate(config, t), factors[k])
            sent = lie(config, t, k, work.change) if k in self.population.attackers else work.change
            change, clipped = self._clipped(self.carrier.send(t, k, sent))
            total = total + factors[k] * change
            parts.append((k, work, gain, change, clipped))
        divisor = sum(factors[k] for k in rows) if normalizes and rows else 1.0
        mean = self._mean(t, [part[3] for part in parts], [factors[k] for k in rows], total, divisor)
        if config.server.weights.name == "literal" and not opening and cohort.clients:
            mean = mean + (sum(factors.values()) - 1) * w  # Eq 3: Σ c_k w_k, those without rows with w_k = w
        mean = self._with_noise(t, mean)
        update = self.algorithm.update(mean, divisor)
        update[self.network.trainable :] = mean[self.network.trainable :]  # statistics of batch norm: plain means
        self.w = self.server.step(w, update)
        record = {"round": t, "lr": local_rate(config, t), **self._counts(rows, parts), **facts}
        record |= self._facts(t, turnout, opening) | self._links(t, turnout, facts)
        record |= self._spent(t, turnout) | self._diagnosed(turnout, rows, parts, factors, total, divisor)
        record |= self._evaluated(t)
        if self.population.attackers:
            record["attackers"] = len(set(cohort.clients) & set(self.population.attackers))
        shares = {k: factors[k] / divisor for k in rows}
        return Round(cohort.clients, rows, shares, record, self.w.copy())

    def _mean(
        self, t: int, changes: list[np.ndarray], factors: list[float], total: np.ndarray, divisor: float
    ) -> np.ndarray:
        """The update: the weighted sum, or what a rule or q-FedAvg makes of all changes."""
        part, losses = self.config.server, self.start_losses
        if changes and part.weights.name == "q-ffl":
            return np.asarray(fair_mean(self.config, local_rate(self.config, t), changes, losses, factors))
        if changes and part.aggregator.name != "mean":
            return combine(self.config, changes, [factor / divisor for factor in factors])
        return total / divisor

    # -- the plan

    def _turnout(self, t: int) -> Turnout:
        config, clients = self.config, self.config.clients
        chance = presence(config, t, self.population)
        if clients.availability.name == "always":
            there = list(range(self.n))
        else:
            here = stream(config.seed, AVAILABILITY, t).random(self.n)
            there = [k for k in range(self.n) if here[k] < chance[k]]
        draws, expected = None, list[float]()
        if self.strata.opens(t):
            asked = Drawn(there, [1] * len(there), [1.0] * len(there))
        elif config.clients.sampler.name == "stratified":
            asked, draws, expected = self._from_strata(t, there)
        else:
            norms = self.strata.grouping.norms if self.strata.grouping else None
            asked = draw_cohort(config, t, there, self.sizes, norms)
        arrived = self._surviving(t, asked, draws)
        if config.devices is None:
            return Turnout(there, asked.clients, arrived, draws, expected)
        seconds = self._seconds(t, asked.clients, arrived.clients, there)
        if clients.over_selection > 1 and not self.strata.opens(t):
            arrived, seconds = self._first(t, arrived, seconds, draws)
        return Turnout(there, asked.clients, arrived, draws, expected, seconds)

    def _from_strata(self, t: int, there: list[int]) -> tuple[Drawn, list[int], list[float]]:
        """m_h of the available clients of every stratum (FedSSO, lines 4-8; FedSTaS, Algorithm 2)."""
        config, part, grouping = self.config, self.strata.part, self.strata.grouping
        assert grouping is not None
        members = [[k for k in there if grouping.labels[k] == h] for h in range(len(grouping.sizes))]
        room, m = [len(own) for own in members], wanted_clients(config, sum(grouping.sizes))
        rounding = stream(config.seed, ALLOCATION, t)
        draws, expected = allocation(part.allocation, grouping.sizes, grouping.spreads, room, m, rounding)
        generator, found = stream(config.seed, STRATUM_DRAW, t), []
        over = config.clients.over_selection
        for h, own in enumerate(members):
            if not draws[h]:
                continue
            asked = min(len(own), math.ceil(draws[h] * over - 1e-9))
            if part.within_stratum == "uniform":
                chosen = generator.choice(len(own), asked, replace=False, shuffle=False).tolist()
                pi = [expected[h] / len(own)] * len(own)
            else:
                assert grouping.norms is not None
                norms = grouping.norms[own]
                chosen = draw_by_norm(norms, asked, generator, part.design)
                pi = self._by_norm(norms, expected[h], over)
            found += [(own[i], pi[i], h) for i in chosen]
        found.sort()
        clients = [k for k, _, _ in found]
        drawn = Drawn(clients, [1] * len(found), [pi for _, pi, _ in found], [h for _, _, h in found])
        return drawn, draws, expected

    def _by_norm(self, norms: np.ndarray, expected: float, over: float) -> list[float]:
        """π_k of systematic draws, over the rounding of m_h, counting those taken among the invited clients."""
        fewer, total = math.floor(expected + 1e-12), np.zeros(len(norms))
        more = max(expected - fewer, 0.0)
        for m, chance in ((fewer, 1 - more), (fewer + 1, more)):
            if m and chance > 1e-12:
                asked = min(len(norms), math.ceil(m * over - 1e-9))
                pi = np.array(proportional_to(norms, asked))
                total += chance * m / asked * pi
        return total.tolist()

    def _surviving(self, t: int, asked: Drawn, draws: list[int] | None) -> Drawn:
        """Leave out clients that drop out; π_k shrinks by the expected share of the places that are still filled."""
        lost = self.config.clients.failure_rate
        if not lost:
            return asked
        chance = stream(self.config.seed, AVAILABILITY, t, 1).random(self.n)
        kept = asked.only(i for i, k in enumerate(asked.clients) if chance[k] >= lost)
        filled = [1 - lost] * len(kept.clients)
        if draws is not None and asked.stratum is not None and kept.stratum is not None:
            counts = [asked.stratum.count(h) for h in range(len(draws))]
            law = [
                [binom.pmf(a, counts[h], 1 - lost) * min(a, draws[h]) for a in range(counts[h] + 1)]
                for h in range(len(draws))
            ]
            filled = [sum(law[h]) / draws[h] for h in kept.stratum]
        kept.inclusion = [pi * share for pi, share in zip(kept.inclusion, filled, strict=True)]
        return kept

    def _first(
        self, t: int, arrived: Drawn, seconds: list[float], draws: list[int] | None
    ) -> tuple[Drawn, list[float]]:
        """The first m to arrive, or the first m_h of every stratum (FedSSO, §3.4.2); any of those who tie."""
        ties = stream(self.config.seed, AVAILABILITY, t, 2).random(self.n)
        order = sorted(range(len(seconds)), key=lambda i: (seconds[i], ties[arrived.clients[i]]))
        if draws is None or arrived.stratum is None:
            m = wanted_clients(self.config, self.n)
            keep, shrink = sorted(order[:m]), min(m / max(len(arrived.clients), 1), 1.0)
        else:
            left, keep, shrink = list(draws), [], 1.0
            for i in order:
                if left[arrived.stratum[i]] > 0:
                    left[arrived.stratum[i]] -= 1
                    keep.append(i)
            keep.sort()
        taken = arrived.only(keep)
        taken.inclusion = [pi * shrink for pi in taken.inclusion]
        return taken, [seconds[i] for i in keep]

    def _seconds(self, t: int, asked: list[int], clients: list[int], there: list[int]) -> list[float]:
        """Return the arrival time of each update: rows through the model, the model's way down and the update's up."""
        devices, local, part = self.config.devices, self.config.local, self.config.samples

        def rates(place: int, table: Any, median: float) -> np.ndarray:
            generator = stream(self.config.seed, DEVICE, 0, place)
            options = table.options
            if table.name == "classes":
                ends = np.cumsum(options["shares"])
                kinds = [min(int((ends <= u).sum()), len(ends) - 1) for u in generator.random(self.n)]
                return np.array([options["rates"][kind] for kind in kinds])
            middle = median if options["median"] is None else options["median"]
            if table.name == "constant":
                return np.full(self.n, middle)
            return np.asarray(middle * np.exp(options["sigma"] * generator.standard_normal(self.n)))

        speed, upload = rates(0, devices.speed, 1e3), rates(1, devices.upload, 1e6)
        download = rates(2, devices.download, 4e6)
        pools = {"exact": clients, "bernoulli": asked if part.size.query == "selected" else there}
        share = 1.0
        if part.sampler.name == "ratio":
            share = part.sampler.options["ratio"]
        elif part.sampler.name in pools:
            pool = sum(int(self.sizes[k]) for k in pools[part.sampler.name])
            share = min(1.0, part.budget / max(1, pool))
        found = []
        for k in clients:
            rows = float(self.sizes[k]) * share
            if self.strata.opens(t):
                probed = self.strata.probe_rows(t, k)
                passed = float(self.sizes[k]) if probed is None else len(probed)
            elif local.steps is not None:
                passed = local.steps * (rows if local.batch_size == "all" else min(rows, local.batch_size))
            else:
                size = rows if local.batch_size == "all" else min(rows, local.batch_size)
                passed = (local.epochs or 1) * (rows - rows % max(size, 1) if local.drop_last else rows)
            d = len(self.w)
            more_down, more_up, numbers = self.algorithm.vectors()
            down, up = 4 * d * (1 + more_down), self.carrier.bytes(d) + 4 * d * more_up + 4 * numbers
            found.append(passed / speed[k] + down / download[k] + up / upload[k])
        return [float(second) for second in found]

    def _probability(self, t: int, turnout: Turnout) -> tuple[float, dict[str, Any]]:
        """p = min(1, K/Ñ) (FedSampling, Eq 8), Ñ over those there, or over those who receive the model (FedSTaS)."""
        part = self.config.samples
        if self.strata.opens(t) or part.sampler.name not in ("bernoulli", "ratio"):
            return 1.0, {}
        if part.sampler.name == "ratio":
            ratio = part.sampler.options["ratio"]
            return ratio, {"sampling_probability": ratio}
        asked = self._queried(turnout)
        facts = {"size_asked": len(asked)} | size_estimate(self.config, t, self.sizes, asked)
        p = min(1.0, part.budget / facts["size_estimate"]) if facts["size_estimate"] > 0 else 1.0
        return p, {"sampling_probability": p, **facts}

    def _queried(self, turnout: Turnout) -> list[int]:
        """Return the clients that answer the size query: all available ones, or those that receive the model."""
        return turnout.there if self.config.samples.size.query == "all" else turnout.asked

    # -- weights

    def _kind(self, opening: bool) -> tuple[str, str]:
        """Return the kind of weights and their population; the opening's are ρ_k (FedSSO, Algorithm 1, line 3)."""
        weights = self.config.server.weights
        name, population = weights.name, weights.options.get("population", "samples")
        if not opening:
            return name, population
        sums = dict.fromkeys(("gradient-sum", "gradient-sum-squared"), "samples")
        kinds = {**sums, "stratified": "normalized", "literal": "normalized"}
        return kinds.get(name, name), "clients" if name == "stratified" else population

    def _factors(self, t: int, turnout: Turnout, rows: dict[int, list[int]]) -> tuple[dict[int, float], bool]:
        """c_k of every participant, and whether Δ = Σ c_k Δ_k is divided by Σ c_k of those who have rows."""
        kind, over = self._kind(self.strata.opens(t))
        cohort, sizes, labels = turnout.cohort, self.population.weight_sizes, self._labels()
        if self.config.privacy.clip_norm is not None:
            return {
                k: times / self._denominator(t) for k, times in zip(cohort.clients, cohort.times, strict=True)
            }, False
        opening = self.strata.opens(t)  # it also selects clients that the strata leave out
        everybody = [k for k in range(self.n) if opening or labels[k] >= 0]
        mass = {k: float(sizes[k]) if over == "samples" else 1.0 for k in everybody}
        rho = {k: mass[k] / sum(mass.values()) for k in everybody}
        chance, m = presence(self.config, t, self.population), sum(cohort.times)
        found = {}
        for i, k in enumerate(cohort.clients):
            if kind in ("samples", "gradient-sum", "gradient-sum-squared"):
                counted = sum(row < sizes[k] for row in rows.get(k, []))
                wanted = self.config.samples.budget or max(1, sum(int(self.sizes[c]) for c in cohort.clients))
                # McMahan et al. 2017, Algorithm 1: n_k; FedSampling, Algorithm 1, line 14: 1/K for every sample
                factor = counted / (1 if kind == "samples" else wanted)
                if kind == "gradient-sum-squared":  # FedSampling's published code: once more for every sample
                    factor *= counted
            elif kind in ("uniform", "q-ffl"):
                factor = 1.0
            elif kind == "stratified":
                factor = self._of_stratum(cohort, turnout, i)
            elif kind == "literal":  # FedSSO, Eq 3: (N/K) ρ_k
                factor = len(everybody) / m * rho.get(k, 0.0)
            elif kind == "unbiased":  # Horvitz and Thompson 1952: divided by the chance to be there and to be drawn
                factor = rho.get(k, 0.0) / (cohort.inclusion[i] * chance[k])
            else:  # Hájek's ratio, every stratum with its share whichever of its clients are available (FedSSO, Eq 6)
                own = [j for j in everybody if labels[j] == labels[k]]
                all_there = self.config.clients.sampler.name != "stratified"
                there = sum(rho[j] for j in own if j in turnout.there)
                share = 1.0 if all_there or not there else there / sum(rho[j] for j in own)
                factor = rho.get(k, 0.0) / (cohort.inclusion[i] * share)
            found[k] = cohort.times[i] * factor
        return found, kind in ("samples", "uniform", "normalized", "q-ffl")

    def _denominator(self, t: int) -> int:
        """Return the divisor of clipped updates: the requested number of clients (McMahan et al. 2018, §3, f̃_f)."""
        all_take_part = self.config.clients.sampler.name == "all" or self.strata.opens(t)
        return self.n if all_take_part else wanted_clients(self.config, self.n)

    def _labels(self) -> list[int]:
        """Every client's stratum; 0 where there are no strata."""
        if self.config.clients.sampler.name != "stratified" or self.strata.grouping is None:
            return [0] * self.n
        return self.strata.grouping.labels.tolist()

    def _represented(self, turnout: Turnout) -> list[float]:
        """P_h that a stratum has a participant at all: min(1, E[m_h]), and not all invited clients drop out."""
        labels, lost = self._labels(), self.config.clients.failure_rate
        asked = [sum(labels[k] == h for k in turnout.asked) for h in range(len(turnout.expected))]
        chances = [1.0 if e > 1 - 1e-9 else e for e in turnout.expected]
        return [p * (1 - lost**a) if a and lost else p for p, a in zip(chances, asked, strict=True)]

    def _of_stratum(self, cohort: Drawn, turnout: Turnout, i: int) -> float:
        """(1/N) N_h/m_h (FedSTaS, Algorithm 2), over P_h where the stratum might have had no client."""
        assert cohort.stratum is not None and self.strata.grouping is not None
        chances, sizes, h = self._represented(turnout), self.strata.grouping.sizes, cohort.stratum[i]
        reached = sum(size for size, p in zip(sizes, chances, strict=True) if p > 0)
        return sizes[h] / reached / cohort.stratum.count(h) / chances[h]

    # -- the work

    def _work(self, t: int, k: int, rows: list[int], opening: bool) -> tuple[Work, float]:
        """Δ_k, and by how much less the client loses on all its samples with its own model."""
        config, w = self.config, self.w
        x, y = self.population.rows(k, rows)
        if opening:  # one SGD step on the rows that the probe sees, nothing dropped
            steps = [self.strata.probe_rows(t, k) or list(range(len(rows)))]
        else:
            steps = batches(config, t, k, len(rows))
        work = train(config, t, k, w, x, y, steps, self.network, opening, lambda moved: self.algorithm.term(k, moved))
        gain = 0.0
        if config.logging.diagnostics:
            whole = self.population.rows(k, None)
            gain = float(np.mean(self.network.losses(w, *whole)[0] - self.network.losses(w + work.change, *whole)[0]))
        return work, gain

    def _clipped(self, update: np.ndarray) -> tuple[np.ndarray, bool]:
        """Δ_k no longer than C (McMahan et al. 2018)."""
        bound, length = self.config.privacy.clip_norm, float(np.linalg.norm(update))
        if bound is None or length <= bound:
            return update, False
        return update * (bound / length), True

    def _with_noise(self, t: int, mean: np.ndarray) -> np.ndarray:
        """N(0, (σ C/W)²) on every value (McMahan et al. 2018, Algorithm 1)."""
        privacy = self.config.privacy
        if privacy.clip_norm is None or not privacy.noise_multiplier:
            return mean
        noise = stream(self.config.seed, DP_NOISE, t).standard_normal(len(mean), np.float32)
        return mean + privacy.noise_multiplier * privacy.clip_norm / self._denominator(t) * noise

    # -- the record

    def _counts(self, rows: dict[int, list[int]], parts: list[Any]) -> dict[str, Any]:
        """Distinct samples, steps, and the mean loss before the steps."""
        losses, passed = sum(work.loss_sum for _, work, *_ in parts), sum(work.loss_rows for _, work, *_ in parts)
        facts: dict[str, Any] = {"samples": sum(map(len, rows.values())), "steps": sum(p[1].steps for p in parts)}
        if self.config.privacy.clip_norm is not None:
            facts["clipped_updates"] = sum(bool(p[4]) for p in parts)
        return facts | ({"train_loss": losses / passed} if passed else {})

    def _facts(self, t: int, turnout: Turnout, opening: bool) -> dict[str, Any]:
        table, grouping = self.config.clients, self.strata.grouping
        facts: dict[str, Any] = {"participants": len(turnout.cohort.clients)}
        if opening:
            facts["opening"] = True
        if table.availability.name != "always":
            facts["available"] = len(turnout.there)
        if table.failure_rate or table.over_selection > 1:
            facts["asked"] = len(turnout.asked)
        if turnout.seconds is not None:
            facts["virtual_seconds"] = max(turnout.seconds, default=0.0)
        if self.config.clients.sampler.name == "stratified" and grouping is not None:
            facts |= {"strata": len(grouping.sizes), "stratum_sizes": grouping.sizes}
            if self.strata.noise is not None:
                facts["noise_clients"] = self.strata.noise
            if not opening:
                facts["allocation"] = turnout.draws
        return facts

    def _links(self, t: int, turnout: Turnout, facts: dict[str, Any]) -> dict[str, Any]:
        """Bytes of models, updates, size answers, probes and class counts, four a number."""
        config, part, d = self.config, self.strata.part, len(self.w)
        received, returned = len(turnout.asked), len(turnout.cohort.clients)
        more_down, more_up, numbers = self.algorithm.vectors()
        down = 4 * d * received * (1 + more_down)
        up = (self.carrier.bytes(d) + 4 * d * more_up + 4 * numbers) * returned
        classes, trainable = self.population.description.classes, self.network.trainable
        if "size_asked" in facts:
            up += 4 * facts["size_asked"]
            down += 8 * received
        if self.strata.measured:
            if part.features.name == "label-histogram":
                one = 4 * classes
            elif part.features.name == "compressed-gradient":  # centres, norm, an index per value
                levels = part.features.options["codebook_size"]
                one = 4 * (levels + 1) + math.ceil(d * max(1, (levels - 1).bit_length()) / 8)
            else:
                one = 4 * d
            assert trainable <= d
            up += one * self.strata.measured
            down += 4 * d * self.strata.measured if part.features.name != "label-histogram" else 0
        if t == 0 and config.rebalance is not None:
            up, down = up + 4 * classes * self.n, down + 4 * classes * self.n
        found = {"bytes_client_up": up, "bytes_client_down": down}
        return {key: value for key, value in found.items() if value} | {"bytes_paper_formula": 8 * d * returned}

    def _spent(self, t: int, turnout: Turnout) -> dict[str, Any]:
        """ε spent on size answers so far, by basic composition: a repeated answer is paid for once, a size that is
        disclosed otherwise has none."""
        part = self.config.samples.size
        if self.config.samples.sampler.name != "bernoulli" or part.estimate == "exact":
            return {}
        asked = [] if self.strata.opens(t) else self._queried(turnout)
        fresh, exposed = False, len(self.used.exposed)
        for k in asked:
            fresh |= self.used.answers[k] == 0 or not part.reuse_reports
            self.used.answers[k] = 1 if part.reuse_reports else self.used.answers[k] + 1
        self.used.exposed |= self._exposed(turnout, asked)
        any_exposed = bool(self.used.exposed)
        return {
            "size_unprotected": len(self.used.exposed),
            "size_epsilon_round": None if len(self.used.exposed) > exposed else part.epsilon if fresh else 0.0,
            "size_epsilon_max": None if any_exposed else part.epsilon * int(self.used.answers.max()),
            "size_epsilon_mean": None if any_exposed else part.epsilon * float(self.used.answers.mean()),
        }

    def _exposed(self, turnout: Turnout, asked: list[int]) -> set[int]:
        """Clients whose n_k the server learns in this round without any noise."""
        sampler, part, weights = self.strata.sampler, self.strata.part, self.config.server.weights.name
        by_samples = self.config.server.weights.options.get("population", "samples") == "samples"
        opened = (
            sampler == "stratified"
            and part.initial_step
            and weights in ("samples", "gradient-sum", "gradient-sum-squared")
        )
        if (
            sampler == "weighted"
            or self.config.rebalance is not None
            or (sampler == "stratified" and part.features.name == "label-histogram")
            or (by_samples and (opened or weights in ("normalized", "unbiased", "literal")))
        ):
            return set(range(self.n))
        open_answers = {k for k in asked if self.sizes[k] >= self.config.samples.size.max_size}
        found = set() if self.config.samples.size.clip else open_answers
        return found | (set(turnout.cohort.clients) if weights == "samples" else set())

    def _diagnosed(
        self,
        turnout: Turnout,
        rows: dict[int, list[int]],
        parts: list[Any],
        factors: dict[int, float],
        total: np.ndarray,
        divisor: float,
    ) -> dict[str, Any]:
        if not self.config.logging.diagnostics:
            return {}
        cohort, grouping = turnout.cohort, self.strata.grouping
        facts: dict[str, Any] = {}
        if cohort.clients:
            pi = cohort.inclusion
            facts |= {"inclusion_min": min(pi), "inclusion_mean": sum(pi) / len(pi), "inclusion_max": max(pi)}
        if turnout.draws is not None and grouping is not None and any(grouping.spreads):
            facts["stratum_spreads"] = grouping.spreads
        shares = {k: factors[k] / sum(factors[j] for j in rows) for k in rows}
        changes = {k: change for k, _, _, change, _ in parts}
        length = float(np.linalg.norm(total / divisor))
        terms = sum(float(np.linalg.norm(factors[k] / divisor * changes[k])) ** 2 for k in rows)
        centre = sum((shares[k] * changes[k] for k in rows), np.zeros_like(total))
        facts |= {
            "update_norm": length,
            "gradient_diversity": terms / length**2 if length else 0.0,  # Yin et al. 2018, Definition 1
            "client_drift": sum(shares[k] * float(((changes[k] - centre) ** 2).sum()) for k in rows),  # FedSSO, Eq 24
            "gamma": sum(shares[k] * gain for k, _, gain, _, _ in parts),
        }
        for k, times in zip(cohort.clients, cohort.times, strict=True):
            self.used.clients[k] += times
        names = ("clients_used", "client_use_effective", "client_use_gini")
        return facts | dict(zip(names, evenness(self.used.clients), strict=True))

    def _evaluated(self, t: int) -> dict[str, float]:
        """Mean cross-entropy, accuracy and macro-F1 on the test set."""
        if (t + 1) % self.config.evaluation.every and t + 1 < self.config.rounds:
            return {}
        x, y = self.population.test
        losses, predicted = self.network.losses(self.w, x, y)
        truth, scores = y.numpy(), []
        for c in range(self.population.description.classes):
            right = int(((truth == c) & (predicted == c)).sum())
            involved = int((truth == c).sum() + (predicted == c).sum())
            scores += [2 * right / involved] if involved else []
        return {
            "test_loss": float(losses.mean()),
            "test_accuracy": float((truth == predicted).mean()),
            "test_macro_f1": sum(scores) / len(scores),
        }


def evenness(counts: np.ndarray) -> tuple[float, float, float]:
    """Share used at all, (Σu)²/(n Σu²) (Kish 1965), and the Gini coefficient Σ|u_i − u_j|/(2 n Σu)."""
    use = counts.astype(np.float64)
    if not use.sum():
        return 0.0, 0.0, 0.0
    gaps = np.abs(use[:, None] - use[None, :]).sum()
    n, total = len(use), float(use.sum())
    return float((use > 0).mean()), total**2 / (n * float((use**2).sum())), float(gaps / (2 * n * total))
