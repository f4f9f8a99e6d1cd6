"""Any star run once more, in plain loops and float64: what every round must have planned, drawn, trained and recorded.

Written from the papers, one formula after another, for comparison with the program: McMahan et al. 2017 (FedAvg), Li et
al. 2020 (FedProx; scheme I), Reddi et al. 2020 (server optimizers), Qi et al. 2023 (FedSampling), Lu et al. 2022
(FedSSO), FedSTS and FedSTaS (arXiv 2412.14226), Duan et al. 2019 (Astraea, Algorithm 2). Of fedmpi it takes the
configuration, the stored samples and the fresh module, nothing else. Mediators and bfloat16 are left out.

The keyed streams are part of the specification. A stream is numpy's Philox with key (seed, purpose) and counter
(0, 0, client, round), and feeds one numpy Generator, consumed in this order:

====================  ========  ==================================================================================
stream (purpose)      key       what is drawn
====================  ========  ==================================================================================
MODEL_INIT 0                    one integer below 2**63, torch's seed while the module is built
COHORT 1              t         uniform: choice without replacement, not shuffled; weighted: m integers below n, or a
                                permutation of those not certain and one integer; importance: as STRATUM_DRAW
SAMPLES 2             t, block  bernoulli: geometric gaps, a stream per 2**16 rows of the cohort's axis; ratio: one
                                uniform per client, then rows, a stream per 2**10 clients; exact: rows (block 0)
BATCH_ORDER 3         t, k      a permutation per epoch, or one choice per step; nothing where a batch holds all rows
DROPOUT 4             t, k      64-bit words, layer by layer, step by step
SIZE_ANSWER 5         t         one number (or two) of every client 0 … N − 1, asked or not; t = 0 where memoised
ALLOCATION 6          t         a permutation of the strata, then the start
STRATUM_DRAW 7        t         stratum after stratum: choice; or a permutation and a start; or exponentials
CLUSTERING 8          t         one integer below 2**32, the seed of k-means
PROBE 9               t, k      choice of the probed rows, where they are not all (in the opening: BATCH_ORDER)
AUGMENT_COPIES 10     k         a uniform per sample of a class with a fractional number of copies, class by class
AUGMENT_WARP 11       k         six uniforms per copy
AVAILABILITY 13       t, part   a uniform per client: part 0 who is there, 1 who drops out, 2 order among ties
DEVICE 14             part      a number per client: 0 speed, 1 upload, 2 download, 1000 time zone
DP_NOISE 15           t         a float32 normal per value
PROJECTION 17                   one integer below 2**63
TRANSPORT 18          t, k      a float32 uniform per value
====================  ========  ==================================================================================
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy.stats import binom
from torch import nn
from torch.nn import functional

from fedmpi import Config
from fedmpi.data.opening import open_store
from fedmpi.models import build
from tests.reference.plain_algorithms import PlainAlgorithm
from tests.reference.robust import attackers, combine, fair_mean, lie

COHORT, SAMPLES, BATCH_ORDER, DROPOUT, SIZE_ANSWER, ALLOCATION, STRATUM_DRAW = range(1, 8)
CLUSTERING, PROBE, AUGMENT_COPIES, AUGMENT_WARP = range(8, 12)
AVAILABILITY, DEVICE, DP_NOISE, PROJECTION, TRANSPORT = 13, 14, 15, 17, 18
TIME_ZONES = 1000


@dataclass
class Drawn:
    """Clients that were drawn: how often, with which expected number of draws, and from which stratum."""

    clients: list[int]
    times: list[int]
    inclusion: list[float]
    stratum: list[int] | None = None

    def only(self, keep: Iterable[int]) -> Drawn:
        """Those at these places."""
        at = list(keep)
        stratum = None if self.stratum is None else [self.stratum[i] for i in at]
        return Drawn(
            [self.clients[i] for i in at], [self.times[i] for i in at], [self.inclusion[i] for i in at], stratum
        )


@dataclass
class Grouping:
    """Strata in force: stratum of each client (−1: left out), N_h, S_h, and the clients' gradient norms."""

    labels: np.ndarray
    sizes: list[int]
    spreads: list[float]
    norms: np.ndarray | None


@dataclass
class Round:
    """What a round did: participants, the local rows each used, its share in the update, the record, w after it."""

    clients: list[int]
    rows: dict[int, list[int]]
    shares: dict[int, float]
    record: dict[str, Any]
    model: np.ndarray


@dataclass
class Work:
    """A client's local work: Δ_k, the loss summed over the rows of all steps, those rows, and the steps."""

    change: np.ndarray
    loss_sum: float = 0.0
    loss_rows: int = 0
    steps: int = 0


class ClientDropout(nn.Module):
    """Dropout whose masks are read off the words of a client's stream; `words` is set before a client trains."""

    words: np.random.Generator | None = None

    def __init__(self, p: float, shared: dict[str, Any]):
        super().__init__()
        self.p, self.shared = p, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.shared["words"]
        if not self.training or words is None or self.p == 0:
            return x
        return x * torch.from_numpy(self._kept(words, x.numel()).reshape(x.shape) / (1 - self.p))

    def _kept(self, words: np.random.Generator, count: int) -> np.ndarray:
        """One bit a unit at p = 1/2, highest first; a byte at multiples of 1/256; else two bytes, low one first."""

        def raw(size: int) -> np.ndarray:
            return np.frombuffer(words.bit_generator.random_raw(-(-size // 8)).astype("<u8").tobytes(), np.uint8)

        if self.p == 0.5:
            return np.unpackbits(raw(-(-count // 8)))[:count].astype(np.float64)
        if (self.p * 256).is_integer():
            return (raw(count)[:count] >= self.p * 256).astype(np.float64)
        pairs = raw(2 * count)[: 2 * count].astype(np.int64)
        return (pairs[0::2] + 256 * pairs[1::2] >= round(self.p * 65536)).astype(np.float64)


class Network:
    """The module in float64 with its values as one vector: trainable ones first, then the float buffers."""

    def __init__(self, config: Config, description: Any):
        self.task = config.task
        self.module = build(config.model.name, config.model.options, description, config.seed)
        self.shared: dict[str, Any] = {"words": None}
        for parent in list(self.module.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.Dropout):
                    setattr(parent, name, ClientDropout(child.p, self.shared))
        self.module.double()
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.buffers = [b for b in self.module.buffers() if b.is_floating_point()]
        self.trainable = sum(p.numel() for p in self.parameters)
        self.initial = self.values()

    def values(self) -> np.ndarray:
        """A copy of all values, (d,)."""
        return np.concatenate([t.detach().numpy().ravel() for t in [*self.parameters, *self.buffers]])

    def put(self, w: np.ndarray) -> None:
        """Set all values."""
        first = 0
        for tensor in [*self.parameters, *self.buffers]:
            part = w[first : first + tensor.numel()]
            tensor.data = torch.from_numpy(part.copy()).view(tensor.shape)
            first += tensor.numel()

    def gradient(self, w: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> tuple[float, np.ndarray, np.ndarray]:
        """Mean loss in training mode at w, its gradient, and the buffers afterwards."""
        self.put(w)
        self.module.train()
        loss = sample_losses(self.task, self.module(x), y).mean()
        gradients = torch.autograd.grad(loss, self.parameters)
        flat = np.concatenate([g.numpy().ravel() for g in gradients])
        return float(loss.detach()), flat, self.values()[self.trainable :]

    def losses(self, w: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Every sample's loss and predicted class, in evaluation mode."""
        self.put(w)
        self.module.eval()
        with torch.no_grad():
            logits = self.module(x)
            return sample_losses(self.task, logits, y).numpy(), logits.argmax(1).numpy()


def sample_losses(task: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of every sample, (b,): cross-entropy, label smoothing (Szegedy et al. 2016, §7), the focal loss (Lin et
    al. 2017, Eq 4), squared distance of the probabilities (a user's own)."""
    logs = logits - logits.exp().sum(1, keepdim=True).log()
    own = logs[torch.arange(len(y)), y]
    if task.loss.name == "label-smoothing":
        share = task.loss.options.get("smoothing", 0.1)
        return -(1 - share) * own - share * logs.mean(1)
    if task.loss.name == "focal":
        return -((1 - own.exp()) ** task.loss.options.get("gamma", 2.0)) * own
    if task.loss.name.endswith(":squared"):
        shares = logs.exp()
        return task.loss.options.get("scale", 1.0) * ((shares**2).sum(1) - 2 * own.exp() + 1)
    return -own


class Population:
    """The clients' samples in float64, the augmented copies behind each client's own where rebalancing is on."""

    def __init__(self, config: Config):
        self.store = open_store(config.data.source.choice, config.data.source.options)
        self.description, self.seed = self.store.description, config.seed
        self.standardised = config.data.normalize
        self.clients = len(self.store.sizes)
        part, counts = config.rebalance, np.asarray(self.store.class_counts(), np.int64)
        images = [self.store.client(k) for k in range(self.clients)]
        self.raw = [(np.asarray(x), np.asarray(y, np.int64)) for x, y in images]
        self.original = np.array([len(y) for _, y in self.raw])
        if part is not None:
            copies = scarce_copies(counts.sum(axis=0), part.alpha, part.copies)
            self.raw = [self._with_copies(k, *pair, copies, part) for k, pair in enumerate(self.raw)]
        self.sizes = np.array([len(y) for _, y in self.raw])
        classes = self.description.classes
        self.class_counts = np.array([[int((y == c).sum()) for c in range(classes)] for _, y in self.raw])
        self.weight_sizes = self.original if part is not None and part.weights == "original" else self.sizes
        self.attackers = attackers(config, self.clients)
        flipping = self.attackers if config.attack.name == "label-flip" else []
        trained = [classes - 1 - y if k in flipping else y.copy() for k, (_, y) in enumerate(self.raw)]
        self._ready = [(self._input(x), torch.from_numpy(y)) for (x, _), y in zip(self.raw, trained, strict=True)]
        test_x, test_y = self.store.test()
        self.test = self._input(np.asarray(test_x)), torch.from_numpy(np.asarray(test_y, np.int64))

    def rows(self, k: int, rows: list[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y of a client's local rows, all of them for None."""
        x, y = self._ready[k]
        return (x, y) if rows is None else (x[rows], y[rows])

    def _input(self, x: np.ndarray) -> torch.Tensor:
        """(x/255 − mean)/deviation for bytes, (x − mean)/deviation for other numbers, word numbers as they are."""
        if self.description.dtype == "int32":
            return torch.from_numpy(x.astype(np.int32))
        values = x.astype(np.float64) / (255.0 if self.description.dtype == "uint8" else 1.0)
        if self.standardised and self.description.mean:
            shape = (-1,) + (1,) * (values.ndim - 2)
            values = (values - np.reshape(self.description.mean, shape)) / np.reshape(self.description.std, shape)
        return torch.from_numpy(values)

    def _with_copies(self, k: int, x: np.ndarray, y: np.ndarray, copies: np.ndarray, part: Any) -> Any:
        """Astraea, Algorithm 2: the client's samples, then warped copies of those of scarce classes."""
        numbers = [int(copies[c]) for c in y]
        chance = stream(self.seed, AUGMENT_COPIES, 0, k)
        for c in range(len(copies)):
            for row in np.flatnonzero(y == c) if copies[c] % 1 else []:
                numbers[row] += bool(chance.random() < copies[c] % 1)
        source = [row for row, number in enumerate(numbers) for _ in range(number)]
        if not source:
            return x, y
        amounts = stream(self.seed, AUGMENT_WARP, 0, k).random((len(source), 6)) * 2 - 1
        maps = np.array([warp_matrix(a, part, *x.shape[-2:]) for a in amounts])
        grid = functional.affine_grid(torch.from_numpy(maps).float(), [len(source), *x.shape[1:]], align_corners=False)
        made = functional.grid_sample(
            torch.from_numpy(x[source]).float(), grid, padding_mode="border", align_corners=False
        )
        made = made.round() if x.dtype == np.uint8 else made
        return np.concatenate([x, made.numpy().astype(x.dtype)]), np.concatenate([y, y[source]])


def stream(seed: int, purpose: int, round: int = 0, client: int = 0) -> np.random.Generator:
    """The generator of a purpose, round and client."""
    key, counter = np.array([seed, purpose], np.uint64), np.array([0, 0, client, round], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def scarce_copies(totals: np.ndarray, alpha: float, reading: str) -> np.ndarray:
    """(C̄/C_y)^α copies of every sample of a class with 0 < C_y < C̄ (Astraea, Algorithm 2); one less if so read."""
    mean = totals.sum() / len(totals)
    less = 1 if reading == "ratio-minus-one" else 0
    return np.array([(mean / c) ** alpha - less if 0 < c < mean else 0.0 for c in totals.tolist()])


def warp_matrix(amount: np.ndarray, part: Any, height: int, width: int) -> np.ndarray:
    """Rotation · shear · zoom in pixels about the centre, then the shift, between axes that run from −1 to 1."""
    angle, slant = math.radians(amount[0] * part.rotation), math.radians(amount[1] * part.shear)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    shear = np.array([[1.0, -math.sin(slant)], [0.0, math.cos(slant)]])
    zoom = np.diag(1 + amount[2:4] * part.zoom)
    pixels = np.diag([width / 2, height / 2])
    linear = np.linalg.inv(pixels) @ turn @ shear @ zoom @ pixels
    return np.concatenate([linear, 2 * part.shift * amount[4:6, None]], axis=1)


# ---- who is there, who is drawn -------------------------------------------------------------------------------------


def presence(config: Config, t: int, population: Population) -> np.ndarray:
    """Every client's probability to be there in round t (FedSSO, §2.1: unequal availability)."""
    law, n = config.clients.availability, population.clients
    system = SimpleNamespace(**law.options)
    if law.name == "bernoulli":
        return np.full(n, system.probability)
    if law.name == "time-of-day":
        zones = stream(config.seed, DEVICE, 0, TIME_ZONES).random(n)
        day = (1 + np.cos(2 * np.pi * (t / system.period - zones))) / 2
        return np.asarray(system.lowest + (system.probability - system.lowest) * day)
    if law.name == "label-group":
        groups = [int(np.argmax(counts)) % len(system.by_label) for counts in population.class_counts]
        return np.array([system.by_label[g] for g in groups])
    return np.ones(n)


def wanted_clients(config: Config, n: int) -> int:
    """m: the count given, or the share of all clients rounded half up, at least one."""
    part = config.clients
    return part.count if part.count is not None else max(1, math.floor(part.fraction * n + 0.5))


def proportional_to(norms: np.ndarray, m: int) -> list[float]:
    """π_k = min(1, c · norm_k) with Σ π_k = m; where fewer than m have a norm, the others share what is left."""
    positive = int((norms > 0).sum())
    if positive <= m:
        rest = (m - positive) / max(len(norms) - positive, 1)
        return [1.0 if norm > 0 else rest for norm in norms]
    order = sorted(norms.tolist(), reverse=True)
    for certain in range(m + 1):  # the largest `certain` are surely drawn, the others share m − certain
        share = (m - certain) / sum(order[certain:])
        if order[certain] * share < 1 or certain == m:
            break
    return [min(1.0, share * norm) if norm * share < 1 else 1.0 for norm in norms.tolist()]


def one_after_another(norms: np.ndarray, m: int) -> list[float]:
    """P(drawn) when m are drawn one by one with p ∝ norm among those left (Rosén 1972).

    The order is that of independent exponential times with rates ∝ norm: π_k = ∫ norm_k e^{−norm_k s} P(fewer than m of
    the others before s) ds, by the trapezoidal rule in log s.
    """
    rates = norms[norms > 0] / norms[norms > 0].mean()
    if len(rates) <= m:
        return proportional_to(norms, m)
    times = np.exp(np.linspace(math.log(1e-13), math.log(60 / rates.min()), 3001))
    before = 1 - np.exp(-np.outer(times, rates))
    found = []
    for k, rate in enumerate(rates):
        fewer = np.zeros((len(times), m))
        fewer[:, 0] = 1
        for other in range(len(rates)):
            if other != k:
                p = before[:, other, None]
                fewer[:, 1:] = fewer[:, 1:] * (1 - p) + fewer[:, :-1] * p
                fewer[:, :1] *= 1 - p
        density = rate * np.exp(-rate * times) * fewer.sum(axis=1) * times
        found.append(float(np.trapezoid(density, np.log(times))))
    places = iter(found)
    return [next(places) if norm > 0 else 0.0 for norm in norms]


def inclusion_by_norm(norms: np.ndarray, m: int, design: str) -> list[float]:
    """First-order inclusion probabilities of a draw of m by gradient norm (FedSTaS, Algorithm 2)."""
    return proportional_to(norms, m) if design == "systematic" else one_after_another(norms, m)


def draw_by_norm(norms: np.ndarray, m: int, generator: np.random.Generator, design: str) -> list[int]:
    """m places: whoever covers start, start + 1, … of the π_k laid end to end at random; or an exponential race."""
    if design == "sequential":
        times = generator.standard_exponential(len(norms))
        arrival = [(norm <= 0, time / (norm if norm > 0 else 1.0)) for norm, time in zip(norms, times, strict=True)]
        return sorted(sorted(range(len(norms)), key=lambda k: arrival[k])[:m])
    inclusion = proportional_to(norms, m)
    order, start = generator.permutation(len(norms)), generator.random()
    chosen = {k for k, pi in enumerate(inclusion) if pi >= 1}
    end, points = 0.0, 0
    open_ = [int(k) for k in order if 0 < inclusion[k] < 1]
    count = m - len(chosen)
    scale = count / sum(inclusion[k] for k in open_) if open_ else 0.0
    for k in open_:
        end += inclusion[k] * scale
        if points < count and start + points < end:
            chosen.add(k)
            points += 1
    return sorted(chosen)


def draw_cohort(config: Config, t: int, there: list[int], sizes: np.ndarray, norms: np.ndarray | None) -> Drawn:
    """Those who are asked in round t where there are no strata."""
    name, n = config.clients.sampler.name, len(sizes)
    part = SimpleNamespace(**config.clients.sampler.options)
    if name == "all":
        return Drawn(there, [1] * len(there), [1.0] * len(there))
    generator = stream(config.seed, COHORT, t)
    m = min(n, math.ceil(wanted_clients(config, n) * config.clients.over_selection - 1e-9))
    if name == "weighted":
        return draw_by_size(generator, there, sizes, m, part.replace)
    m = min(m, len(there))
    if name == "importance":
        assert norms is not None
        own = norms[there]
        chosen = draw_by_norm(own, m, generator, part.design)
        pi = inclusion_by_norm(own, m, part.design)
        return Drawn([there[i] for i in chosen], [1] * m, [pi[i] for i in chosen])
    if m == len(there):
        return Drawn(there, [1] * m, [1.0] * m)
    chosen = sorted(generator.choice(len(there), m, replace=False, shuffle=False).tolist())
    return Drawn([there[i] for i in chosen], [1] * m, [m / len(there)] * m)


def draw_by_size(generator: np.random.Generator, there: list[int], sizes: np.ndarray, m: int, replace: bool) -> Drawn:
    """m draws with p_k = n_k/n (Li et al. 2020, scheme I), or m clients with π_k ∝ n_k, none above 1."""
    own = [int(sizes[k]) for k in there]
    if not own:
        return Drawn([], [], [])
    if replace:
        times = dict.fromkeys(range(len(own)), 0)
        for point in generator.integers(0, sum(own), m).tolist():
            times[next(i for i in range(len(own)) if point < sum(own[: i + 1]))] += 1
        drawn = [i for i, count in times.items() if count]
        expected = [m * own[i] / sum(own) for i in drawn]
        return Drawn([there[i] for i in drawn], [times[i] for i in drawn], expected)
    pi = [Fraction(0)] * len(own)
    certain: set[int] = set()
    if m >= sum(size > 0 for size in own):
        certain = {i for i, size in enumerate(own) if size}
        rest = total = 0
    else:
        while True:
            rest, total = m - len(certain), sum(size for i, size in enumerate(own) if i not in certain)
            more = {i for i, size in enumerate(own) if i not in certain and rest * size >= total}
            if not rest or not more:
                break
            certain |= more
    chosen = set(certain)
    others = [i for i in range(len(own)) if i not in certain]
    for i in range(len(own)):
        pi[i] = Fraction(1) if i in certain else Fraction(rest * own[i], total) if total else Fraction(0)
    if rest:
        order = generator.permutation(np.array(others)).tolist()
        start, end, tick = Fraction(int(generator.integers(0, total)), total), Fraction(0), 0
        for i in order:
            end += pi[i]
            if tick < rest and start + tick < end:
                chosen.add(i)
                tick += 1
    at = sorted(chosen)
    return Drawn([there[i] for i in at], [1] * len(at), [float(pi[i]) for i in at])


# ---- strata ---------------------------------------------------------------------------------------------------------


def squeeze(gradient: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """X = the sorted centres of a gradient's values, Z = the values replaced by their centres (FedSTaS, IS()).

    One-dimensional k-means: the best partition of 128 cells of the sorted values, then Lloyd's iteration on all values.
    """
    values = gradient.astype(np.float32)
    ordered = np.sort(values).astype(np.float64)
    d = len(ordered)
    edges = list(range(d + 1))
    if d > 128:
        low, high = ordered[0], ordered[-1]
        counts = [i * d // 64 for i in range(1, 64)]
        widths = [int((ordered <= low + (high - low) * j / 65).sum()) for j in range(1, 65)]
        edges = [0, *sorted(counts + widths), d]
    centred = ordered - ordered.mean()
    sums = np.concatenate([[0.0], np.cumsum(centred)])
    squares = np.concatenate([[0.0], np.cumsum(centred**2)])

    def cost(first: np.ndarray, last: int) -> np.ndarray:
        count = np.maximum(last - first, 1)
        return np.maximum(squares[last] - squares[first] - (sums[last] - sums[first]) ** 2 / count, 0.0)

    at = np.array(edges)
    best = np.array([math.inf, *(float(cost(at[:1], e)[0]) for e in edges[1:])])
    came: list[list[int]] = []
    for _ in range(levels - 1):  # Bellman: the best cut of the first cells into one cluster more
        step, origins = np.full(len(edges), math.inf), [0] * len(edges)
        for j in range(1, len(edges)):
            candidates = best[:j] + cost(at[:j], edges[j])
            origins[j] = int(candidates.argmin())
            step[j] = candidates[origins[j]]
        came.append(origins)
        best = step
    place, cuts = len(edges) - 1, [d]
    for origins in reversed(came):
        place = origins[place]
        cuts.append(edges[place])
    cuts = [0, *reversed(cuts)]
    centres = [
        float(ordered[a:b].mean()) if b > a else float(ordered[min(a, d - 1)])
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    for _ in range(300):
        middles = [(a + b) / 2 for a, b in zip(centres, centres[1:], strict=False)]
        moved = [0, *(int((ordered <= middle).sum()) for middle in middles), d]
        if moved == cuts:
            break
        cuts = moved
        pairs = zip(centres, cuts, cuts[1:], strict=False)
        centres = [float(ordered[a:b].mean()) if b > a else centre for centre, a, b in pairs]
    found = np.sort(np.array(centres)).astype(np.float32)
    middles32 = (0.5 * (found[:-1].astype(np.float64) + found[1:])).astype(np.float32)
    return found, found[(values[:, None] > middles32).sum(axis=1)]


def numbered(labels: Iterable[int]) -> np.ndarray:
    """Parts numbered 0, 1, … in the order of their first members; −1 stays."""
    names: dict[int, int] = {}
    return np.array([-1 if a == -1 else names.setdefault(int(a), len(names)) for a in labels], np.int64)


class Stratification:
    """The strata, from what every client shows of itself."""

    def __init__(self, config: Config, population: Population, network: Network):
        self.config, self.sampler = config, config.clients.sampler.name
        self.part = SimpleNamespace(**{"initial_step": False, "refresh": 0} | config.clients.sampler.values)
        self.population, self.network = population, network
        self.wanted = self.sampler in ("stratified", "importance")
        self.kept: tuple[np.ndarray, np.ndarray | None] | None = None
        self.grouping: Grouping | None = None
        self.measured = 0
        self.noise: int | None = None

    def observe(self, t: int, w: np.ndarray, latest: list[int]) -> None:
        """Group the clients anew where round t asks for it."""
        refresh, self.measured, self.noise = self.part.refresh, 0, None
        due = self.grouping is None or (refresh > 0 and t % refresh == 0)
        if not (self.wanted and due):
            return
        everybody = list(range(self.population.clients))
        renewed = everybody if self.kept is None or self.part.refresh_clients == "all" else latest
        self.measured = len(renewed)
        shown = [self._shown(t, w, k) for k in renewed]
        if self.kept is None:
            norms = np.array([length for _, length in shown]) if shown[0][1] is not None else None
            self.kept = np.array([vector for vector, _ in shown]), norms
        else:
            for k, (vector, length) in zip(renewed, shown, strict=True):
                self.kept[0][k] = vector
                if self.kept[1] is not None and length is not None:
                    self.kept[1][k] = length
        self.grouping = self._grouped(t, *self.kept)

    def probe_rows(self, t: int, k: int) -> list[int] | None:
        """The rows that a client's probe sees; None for all."""
        n = int(self.population.sizes[k])
        batch = self.config.local.batch_size
        count = {"full": n, "sample": 1, "batch": n if batch == "all" else batch}[self.part.features.probe]
        if count >= n:
            return None
        purpose = BATCH_ORDER if self.opens(t) else PROBE
        return stream(self.config.seed, purpose, t, k).choice(n, count, replace=False, shuffle=False).tolist()

    def opens(self, t: int) -> bool:
        """Whether everybody takes the one step w_1^k that also makes the strata (FedSSO, Algorithm 1, lines 1-3)."""
        return t == 0 and self.sampler == "stratified" and self.part.initial_step

    def _shown(self, t: int, w: np.ndarray, k: int) -> tuple[np.ndarray, float | None]:
        """A client's feature vector, and the length of what it sent."""
        if self.part.features.name == "label-histogram":
            counts = self.population.class_counts[k]
            return (counts / max(int(counts.sum()), 1)).astype(np.float32), None
        x, y = self.population.rows(k, self.probe_rows(t, k))
        gradient = np.zeros(self.network.trainable)
        if len(y):
            self.network.shared["words"] = None
            gradient = self.network.gradient(w, x, y)[1]
        length = float(np.linalg.norm(gradient))
        if self.part.features.name == "one-step-change":  # FedSSO, Algorithm 1, line 1
            vector = -self.config.local.lr * gradient
        elif self.part.features.name == "full-gradient":
            vector = gradient
        else:
            centres, restored = squeeze(gradient, self.part.features.codebook_size)
            length = float(np.linalg.norm(restored.astype(np.float64)))
            vector = restored if self.part.features.decompress else centres
        return self._projected(vector.astype(np.float32)), length

    def _projected(self, vector: np.ndarray) -> np.ndarray:
        from sklearn.random_projection import SparseRandomProjection, johnson_lindenstrauss_min_dim

        n = self.population.clients
        shorter = int(johnson_lindenstrauss_min_dim(max(n, 2), eps=0.25))
        if n * len(vector) <= self.part.projection_above or shorter >= len(vector):
            return vector
        seed = int(stream(self.config.seed, PROJECTION).integers(0, 2**63)) % 2**32
        projection = SparseRandomProjection(shorter, dense_output=True, random_state=seed)
        return np.asarray(projection.fit(vector[None]).transform(vector[None])[0], np.float32)

    def _grouped(self, t: int, matrix: np.ndarray, norms: np.ndarray | None) -> Grouping:
        n = self.population.clients
        if self.sampler == "importance":
            return Grouping(np.zeros(n, np.int64), [n], [0.0], norms)
        labels = self._optics(matrix) if self.part.clustering.name == "optics" else self._kmeans(t, matrix)
        strata = range(int(labels.max()) + 1)
        spreads = [0.0] * len(strata)
        if self.part.allocation == "neyman":
            spreads = [spread(matrix[labels == h].astype(np.float64), self.part.spread) for h in strata]
        return Grouping(labels, [int((labels == h).sum()) for h in strata], spreads, norms)

    def _kmeans(self, t: int, matrix: np.ndarray) -> np.ndarray:
        from sklearn.cluster import KMeans

        seed = int(stream(self.config.seed, CLUSTERING, t).integers(2**32))
        model = KMeans(min(self.part.strata, len(matrix)), init="random", n_init=1, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return numbered(model.fit_predict(matrix))

    def _optics(self, matrix: np.ndarray) -> np.ndarray:
        from sklearn.cluster import OPTICS
        from sklearn.metrics import pairwise_distances

        distances = pairwise_distances(matrix)
        model = OPTICS(
            min_samples=self.part.clustering.min_samples,
            xi=self.part.clustering.xi,
            cluster_method="xi",
            metric="precomputed",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model.fit_predict(np.maximum(distances, distances.T)).tolist()
        alone = [k for k, label in enumerate(found) if label == -1]
        others = [k for k, label in enumerate(found) if label != -1]
        self.noise = len(alone)
        if self.part.clustering.outliers == "drop":
            return numbered(found)
        free = max(found) + 1
        for place, k in enumerate(alone):
            if self.part.clustering.outliers == "nearest" and others:
                found[k] = found[min(others, key=lambda j: float(np.linalg.norm(matrix[k].astype(float) - matrix[j])))]
            else:
                found[k] = free + (place if self.part.clustering.outliers == "singletons" else 0)
        return numbered(found)


def spread(vectors: np.ndarray, kind: str) -> float:
    """S_h: sqrt of the mean squared distance from the mean (FedSTaS, Algorithm 2), or the mean distance of pairs."""
    count = len(vectors)
    if count < 2:
        return 0.0
    if kind == "std":
        return math.sqrt(sum(float(((v - vectors.mean(axis=0)) ** 2).sum()) for v in vectors) / count)
    pairs = [float(np.linalg.norm(vectors[a] - vectors[b])) for a in range(count) for b in range(a)]
    return sum(pairs) / len(pairs)


def boxed_shares(weights: list[float], lower: list[float], upper: list[float], total: float) -> list[float]:
    """q_h = λ·weight_h moved into [lower_h, upper_h], with the λ for which Σ q_h = total."""

    def shares(scale: float) -> list[float]:
        return [min(max(scale * a, low), high) for a, low, high in zip(weights, lower, upper, strict=True)]

    if total >= sum(shares(1e300)) - 1e-9:  # those with a weight are full
        return shares(1e300)
    low, high = 0.0, 1.0
    while sum(shares(high)) < total:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < total else (low, middle)
    return shares(high)


def allocation(
    rule: str, sizes: list[int], spreads: list[float], room: list[int], m: int, generator: np.random.Generator
) -> tuple[list[int], list[float]]:
    """m_h and E[m_h]: m N_h/N (FedSSO, line 7), m N_h S_h/Σ N_h S_h (FedSTaS, Algorithm 2) or equal; m_h ≤ room."""
    m = min(m, sum(room))
    if rule != "neyman":
        return _whole_shares(sizes if rule == "proportional" else [int(r > 0) for r in room], room, m, generator)
    open_ = [r > 0 for r in room]
    if not any(s > 0 for s, o in zip(spreads, open_, strict=True) if o):
        spreads = [1.0] * len(sizes)
    weights = [n * s for n, s in zip(sizes, spreads, strict=True)]
    room_ = [float(r) for r in room]
    if m >= sum(open_):
        lower = [1.0 if o else 0.0 for o in open_]
        quotas = boxed_shares(weights, lower, room_, m)
        if sum(quotas) < m - 1e-6:  # those with a spread are full: the others share the rest by their sizes
            rest = [0.0 if w > 0 else float(n) for n, w in zip(sizes, weights, strict=True)]
            quotas = boxed_shares(rest, quotas, room_, m)
        whole = [math.floor(q + 1e-9) for q in quotas]
        by_rest = sorted(range(len(quotas)), key=lambda h: (-round(quotas[h] - whole[h], 9), h))
        for h in by_rest[: m - sum(whole)]:
            whole[h] += 1
        return whole, [float(a) for a in whole]
    least = min(s for s, o in zip(spreads, open_, strict=True) if o and s > 0)
    weights = [n * (s if s > 0 else least) for n, s in zip(sizes, spreads, strict=True)]
    quotas = boxed_shares(weights, [0.0] * len(sizes), room_, m)
    whole = [math.floor(q + 1e-9) for q in quotas]
    missing = m - sum(whole)
    if missing:
        order, start, end, point = generator.permutation(len(quotas)), generator.random(), 0.0, 0
        parts = [max(q - a, 0.0) for q, a in zip(quotas, whole, strict=True)]
        for h in order.tolist():
            end += parts[h] * missing / sum(parts)
            if point < missing and start + point < end:
                whole[h] += 1
                point += 1
    return whole, quotas


def _whole_shares(
    weights: list[int], room: list[int], m: int, generator: np.random.Generator
) -> tuple[list[int], list[float]]:
    """Shares ∝ weights within the room, exactly, and their systematic rounding in random order."""
    quota = [Fraction(0)] * len(weights)
    left = [h for h in range(len(weights)) if room[h] and weights[h]]
    denominator = 1
    while left:
        rest = m - sum(quota[h] for h in range(len(weights)) if h not in left)
        total = sum(weights[h] for h in left)
        full = [h for h in left if rest * weights[h] > room[h] * total]
        for h in full or left:
            quota[h] = Fraction(room[h]) if full else Fraction(rest * weights[h], total)
        if not full:
            denominator = total
            break
        left = [h for h in left if h not in full]
    order = generator.permutation(len(weights)).tolist()
    end = Fraction(int(generator.integers(denominator)), denominator)
    whole = [0] * len(weights)
    for h in order:
        whole[h] = math.floor(end + quota[h]) - math.floor(end)
        end += quota[h]
    return whole, [float(q) for q in quota]


# ---- sizes and rows -------------------------------------------------------------------------------------------------


def size_estimate(config: Config, t: int, sizes: np.ndarray, asked: list[int]) -> dict[str, Any]:
    """Ñ from the answers of those asked (FedSampling, Eq 1, 2, 21), or by Duchi's or the piecewise mechanism."""
    part = config.samples.size
    true = sum(int(sizes[k]) for k in asked)
    facts: dict[str, Any] = {"size_true": true, "clipped_fraction": 0.0, "size_estimate": float(true)}
    if part.estimate == "exact":
        return facts
    generator = stream(config.seed, SIZE_ANSWER, 0 if part.reuse_reports else t)
    m, epsilon, n = part.max_size, part.epsilon, len(sizes)
    inputs = [min(max(int(size), 1), m - 1) if part.clip else int(size) for size in sizes]
    if part.estimate == "randomized-response":
        alpha = (math.exp(epsilon) - 1) / (math.exp(epsilon) + m - 2)  # Eq 21
        truthful, fake = generator.random(n) < alpha, generator.integers(1, m, n)
        answers = [inputs[k] if truthful[k] else int(fake[k]) for k in asked]  # Eq 1
        raw = (sum(answers) - (1 - alpha) * m * len(asked) / 2) / alpha  # Eq 2
    else:
        unit = [(size - m / 2) / (m / 2 - 1) for size in inputs]  # 1 … M − 1 on [−1, 1]
        if part.estimate == "duchi":
            c = (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
            draws = generator.random(n)
            signs = [c if draws[k] < 0.5 + unit[k] / (2 * c) else -c for k in asked]
        else:
            half = math.exp(epsilon / 2)
            c = (half + 1) / (half - 1)
            inside, place = generator.random(n), generator.random(n)
            signs = []
            for k in asked:  # Wang et al. 2019, Algorithm 2
                left = (c + 1) / 2 * unit[k] - (c - 1) / 2
                right = left + c - 1
                if inside[k] < half / (half + 1):
                    signs.append(left + place[k] * (right - left))
                else:
                    outside = -c + place[k] * (c + 1)
                    signs.append(outside if outside < left else outside + right - left)
        raw = sum(m / 2 + (m / 2 - 1) * sign for sign in signs)
    facts["size_estimate"] = max(raw, float(len(asked)))
    facts["clipped_fraction"] = sum(sizes[k] >= m for k in asked) / max(len(asked), 1)
    return facts


def sampled_rows(
    rule: str, config: Config, t: int, cohort: list[int], sizes: np.ndarray, p: float
) -> dict[int, list[int]]:
    """The local rows that each participant uses, those without any left out."""
    part = config.samples
    if rule == "all":
        return {k: list(range(sizes[k])) for k in cohort if sizes[k]}
    axis = [(k, row) for k in cohort for row in range(sizes[k])]
    if rule == "bernoulli":
        places = _bernoulli_places(config.seed, t, len(axis), p)
    elif rule == "exact":
        generator = stream(config.seed, SAMPLES, t)
        places = _distinct(generator, [len(axis)], [min(part.budget, len(axis))]) if axis else []
    else:
        places, first = [], 0
        for block in range(0, len(cohort), 1024):
            members = cohort[block : block + 1024]
            generator = stream(config.seed, SAMPLES, t, block // 1024)
            chance = generator.random(len(members))
            exact = [part.sampler.options["ratio"] * int(sizes[k]) for k in members]
            counts = [int(e) + bool(u < e - int(e)) for e, u in zip(exact, chance, strict=True)]
            own = [int(sizes[k]) for k in members]
            places += [first + place for place in _distinct(generator, own, counts)]
            first += sum(own)
    found: dict[int, list[int]] = {}
    for place in places:
        k, row = axis[place]
        found.setdefault(k, []).append(row)
    return found


def _bernoulli_places(seed: int, t: int, length: int, p: float) -> list[int]:
    """Places kept independently with p: the gaps between them are geometric (FedSampling, Algorithm 1)."""
    if p >= 1:
        return list(range(length))
    kept = []
    for first in range(0, length, 2**16):
        generator, place = stream(seed, SAMPLES, t, first // 2**16), -1
        while (place := place + int(generator.geometric(p))) < min(2**16, length - first):
            kept.append(first + place)
    return kept


def _distinct(generator: np.random.Generator, sizes: list[int], counts: list[int]) -> list[int]:
    """A simple random sample of every client: drawn with repeats and topped up; what is left out where that is less."""
    inverted = [2 * c > s for s, c in zip(sizes, counts, strict=True)]
    targets = [s - c if i else c for s, c, i in zip(sizes, counts, inverted, strict=True)]
    drawn: list[set[int]] = [set() for _ in sizes]
    while any(len(d) < goal for d, goal in zip(drawn, targets, strict=True)):
        owners = [k for k, d in enumerate(drawn) for _ in range(targets[k] - len(d))]
        for k, row in zip(owners, generator.integers(0, [sizes[k] for k in owners]).tolist(), strict=True):
            drawn[k].add(row)
    first, places = 0, []
    for k, size in enumerate(sizes):
        places += [first + row for row in range(size) if (row in drawn[k]) != inverted[k]]
        first += size
    return places


# ---- local work -----------------------------------------------------------------------------------------------------


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
) -> Work:
    """A client's steps from w: SGD or Adam (Kingma and Ba 2015, Algorithm 1) on ℓ + μ/2 ‖w − w_t‖² (FedProx, Eq 2).

    `plain`: SGD without dropout, whatever the configuration says. `term`: what an algorithm adds to a gradient.
    """
    part, rate, d = config.local, local_rate(config, t), net.trainable
    adam = SimpleNamespace(**part.optimizer.options)
    net.shared["words"] = None if plain else stream(config.seed, DROPOUT, t, k)
    own, work = w.copy(), Work(np.zeros_like(w))
    first, second = np.zeros(d), np.zeros(d)
    for number, rows in enumerate(steps, 1):
        loss, gradient, buffers = net.gradient(own, x[rows], y[rows])
        gradient = gradient + part.proximal_mu * (own[:d] - w[:d])
        if term is not None:
            gradient = gradient + term(own[:d] - w[:d])
        if part.optimizer.name == "sgd" or plain:
            own[:d] -= rate * gradient
        else:
            first = adam.beta1 * first + (1 - adam.beta1) * gradient
            second = adam.beta2 * second + (1 - adam.beta2) * gradient**2
            mean, square = first / (1 - adam.beta1**number), second / (1 - adam.beta2**number)
            own[:d] -= rate * mean / (np.sqrt(square) + adam.epsilon)
        own[d:] = buffers
        work.loss_sum += loss * len(rows)
        work.loss_rows += len(rows)
        work.steps += 1
    work.change = own - w
    return work


class Carrier:
    """What arrives of an update: rounded at random to 16 or 8 bits, or the largest values; what got lost may follow."""

    def __init__(self, config: Config):
        self.config, self.part = config, config.compression
        self.lost: dict[int, np.ndarray] = {}

    def send(self, t: int, k: int, update: np.ndarray) -> np.ndarray:
        """Δ_k as the server receives it."""
        if self.part.name == "none":
            return update
        whole = update + self.lost.get(k, 0.0)
        received = self._received(t, k, whole)
        if self.part.error_feedback:
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
        """How many of d values the largest are."""
        return max(1, math.ceil(self.part.fraction * d))

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
    """Who was there, who received the model, who counts, and when their updates came (None without a clock)."""

    there: list[int]
    asked: list[int]
    cohort: Drawn
    draws: list[int] | None = None
    expected: list[float] = field(default_factory=list)
    seconds: list[float] | None = None


@dataclass
class Used:
    """What has been counted so far, for the record."""

    answers: np.ndarray
    clients: np.ndarray
    rows: list[np.ndarray]
    exposed: set[int] = field(default_factory=set)


class PlainLoop:
    """A run of a star, round after round."""

    def __init__(self, config: Config):
        if config.topology.name != "star" or config.local.precision != "float32":
            raise ValueError("the plain loop replays stars in full precision only")
        self.config = config
        self.population = Population(config)
        self.sizes, self.n = self.population.sizes, self.population.clients
        self.network = Network(config, self.population.description)
        self.w = self.network.initial
        self.server = Server(config, self.network.trainable)
        self.strata = Stratification(config, self.population, self.network)
        self.carrier = Carrier(config)
        self.algorithm = PlainAlgorithm(config, self.n, len(self.w))
        self.used = Used(
            np.zeros(self.n, np.int64), np.zeros(self.n, np.int64), [np.zeros(s, np.int64) for s in self.sizes]
        )
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
        """π_k over the random rounding of m_h down or up, counting those taken among those asked."""
        fewer, total = math.floor(expected + 1e-12), np.zeros(len(norms))
        more = max(expected - fewer, 0.0)
        for m, chance in ((fewer, 1 - more), (fewer + 1, more)):
            if m and chance > 1e-12:
                asked = min(len(norms), math.ceil(m * over - 1e-9))
                pi = np.array(inclusion_by_norm(norms, asked, self.strata.part.design))
                total += chance * m / asked * pi
        return total.tolist()

    def _surviving(self, t: int, asked: Drawn, draws: list[int] | None) -> Drawn:
        """Without those who drop out; π_k shrinks by the expected share of the places that are still filled."""
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
        """When each update arrives: rows through the model, the model's way down and the update's up."""
        devices, local, part = self.config.devices, self.config.local, self.config.samples

        def rates(place: int, table: Any, median: float) -> np.ndarray:
            generator = stream(self.config.seed, DEVICE, 0, place)
            if table.name == "classes":
                ends = np.cumsum(table.shares)
                kinds = [min(int((ends <= u).sum()), len(ends) - 1) for u in generator.random(self.n)]
                return np.array([table.rates[kind] for kind in kinds])
            middle = median if table.median is None else table.median
            if table.name == "constant":
                return np.full(self.n, middle)
            return np.asarray(middle * np.exp(table.sigma * generator.standard_normal(self.n)))

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
        """Who answers the size query: all who are there, or those who receive the model, whoever drops out later."""
        return turnout.there if self.config.samples.size.query == "all" else turnout.asked

    # -- weights

    def _kind(self, opening: bool) -> tuple[str, str]:
        """Which weights, of which population; the opening's are ρ_k (FedSSO, Algorithm 1, line 3)."""
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
        opening = self.strata.opens(t)  # in which even those that the strata leave out take part
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
            else:  # Hájek's ratio, every stratum with its own share whoever of it is there (FedSSO, Eq 6)
                own = [j for j in everybody if labels[j] == labels[k]]
                all_there = self.config.clients.sampler.name != "stratified"
                there = sum(rho[j] for j in own if j in turnout.there)
                share = 1.0 if all_there or not there else there / sum(rho[j] for j in own)
                factor = rho.get(k, 0.0) / (cohort.inclusion[i] * share)
            found[k] = cohort.times[i] * factor
        return found, kind in ("samples", "uniform", "normalized", "q-ffl")

    def _denominator(self, t: int) -> int:
        """What clipped updates are divided by, whoever returns: the clients wanted (McMahan et al. 2018, §3, f̃_f)."""
        all_take_part = self.config.clients.sampler.name == "all" or self.strata.opens(t)
        return self.n if all_take_part else wanted_clients(self.config, self.n)

    def _labels(self) -> list[int]:
        """Every client's stratum; 0 where there are no strata."""
        if self.config.clients.sampler.name != "stratified" or self.strata.grouping is None:
            return [0] * self.n
        return self.strata.grouping.labels.tolist()

    def _represented(self, turnout: Turnout) -> list[float]:
        """P_h that a stratum has a participant at all: min(1, E[m_h]), and not all of those asked drop out."""
        labels, lost = self._labels(), self.config.clients.failure_rate
        asked = [sum(labels[k] == h for k in turnout.asked) for h in range(len(turnout.expected))]
        chances = [1.0 if e > 1 - 1e-9 else e for e in turnout.expected]
        return [p * (1 - lost**a) if a and lost else p for p, a in zip(chances, asked, strict=True)]

    def _of_stratum(self, cohort: Drawn, turnout: Turnout, i: int) -> float:
        """(1/N) N_h/m_h (FedSTaS, Algorithm 2), over P_h where the stratum might have had nobody."""
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
                levels = part.features.codebook_size
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
        """ε spent on size answers so far, by basic composition: a repeated answer is paid for once, a size that is told
        otherwise has none."""
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
        for k, own in rows.items():
            self.used.rows[k][own] += 1
        clients = evenness(self.used.clients.tolist())
        if self.config.samples.sampler.name == "all":
            samples = evenness([count for k, count in enumerate(self.used.clients) for _ in range(self.sizes[k])])
        else:
            samples = evenness(np.concatenate(self.used.rows).tolist())
        names = ("clients_used", "client_use_effective", "client_use_gini")
        facts |= dict(zip(names, clients, strict=True))
        names = ("samples_used", "sample_use_effective", "sample_use_gini")
        return facts | dict(zip(names, samples, strict=True))

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


def evenness(counts: list[int]) -> tuple[float, float, float]:
    """Share used at all, (Σu)²/(n Σu²) (Kish 1965), and the Gini coefficient Σ|u_i − u_j|/(2 n Σu)."""
    use = np.array(counts, np.float64)
    if not use.sum():
        return 0.0, 0.0, 0.0
    gaps = np.abs(use[:, None] - use[None, :]).sum()
    n, total = len(use), float(use.sum())
    return float((use > 0).mean()), total**2 / (n * float((use**2).sum())), float(gaps / (2 * n * total))
