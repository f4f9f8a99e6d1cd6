"""Any star run once more, in plain loops and float64: what every round must have planned, drawn, trained and recorded.

Written from the papers, one formula after another, for comparison with the program: McMahan et al. 2017 (FedAvg), Li et
al. 2020 (FedProx; scheme I), Reddi et al. 2020 (server optimizers), Qi et al. 2023 (FedSampling), Lu et al. 2022
(FedSSO), FedSTS and FedSTaS (arXiv 2412.14226), Duan et al. 2019 (Astraea, Algorithm 2). Of fedmpi it takes the
configuration, the stored samples and the fresh module, nothing else.

The keyed streams are part of the specification. A stream is numpy's Philox with key (seed, purpose) and counter
(0, 0, client, round), and feeds one numpy Generator, consumed in this order:

====================  ========  ==================================================================================
stream (purpose)      key       what is drawn
====================  ========  ==================================================================================
MODEL_INIT 0                    one integer below 2**63, torch's seed while the module is built
COHORT 1              t         uniform: choice without replacement, not shuffled; weighted: m integers below n, or a
                                permutation and a start; importance: as STRATUM_DRAW
SAMPLES 2             t, block  bernoulli: geometric gaps, a stream per 2**16 rows of the cohort's axis; ratio: one
                                uniform per client, then rows, a stream per 2**10 clients; exact: rows (block 0)
BATCH_ORDER 3         t, k      a permutation per epoch, or one choice per step; nothing where a batch holds all rows
DROPOUT 4             t, k      64-bit words, layer by layer, step by step
SIZE_ANSWER 5         t         one number (or two) of every client 0 … N − 1, queried or not; t = 0 where memoized
ALLOCATION 6          t         a permutation of the strata, then the start
STRATUM_DRAW 7        t         stratum after stratum: choice; or a permutation and a start; or exponentials
CLUSTERING 8          t         one integer below 2**32, the seed of k-means
PROBE 9               t, k      choice of the probed rows, where they are not all (in the opening: BATCH_ORDER)
AUGMENT_COPIES 10     k         a uniform per sample of a class with a fractional number of copies, class by class
AUGMENT_WARP 11       k         six uniforms per copy
AVAILABILITY 13       t, part   a uniform per client: part 0 available, 1 drops out, 2 order among ties
DEVICE 14             part      a number per client: 0 speed, 1 upload, 2 download
DP_NOISE 15           t         a float32 normal per value
PROJECTION 17                   one integer below 2**63
TRANSPORT 18          t, k      a float32 uniform per value
ATTACK 20             t, k      t = 0: choice of the attackers, not shuffled; 1 + t: a float64 normal per value of noise
====================  ========  ==================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedmpi import Config
from fedmpi.data.opening import open_store
from fedmpi.models import build

COHORT, SAMPLES, BATCH_ORDER, DROPOUT, SIZE_ANSWER, ALLOCATION, STRATUM_DRAW = range(1, 8)
CLUSTERING, PROBE, AUGMENT_COPIES, AUGMENT_WARP = range(8, 12)
AVAILABILITY, DEVICE, DP_NOISE, PROJECTION, TRANSPORT, ATTACK = 13, 14, 15, 17, 18, 20


@dataclass
class Drawn:
    """Clients that were drawn: how often, with which expected number of draws, and from which stratum."""

    clients: list[int]
    times: list[int]
    inclusion: list[float]
    stratum: list[int] | None = None

    def only(self, keep: Iterable[int]) -> Drawn:
        """Return the clients at these positions."""
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
    """One round: participants, the local rows each used, its share in the update, the record, w after it."""

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
    """The loss of every sample, (b,): cross-entropy, label smoothing (Szegedy et al. 2016, §7), squared distance of the
    probabilities (custom)."""
    logs = logits - logits.exp().sum(1, keepdim=True).log()
    own = logs[torch.arange(len(y)), y]
    if task.loss.name == "label-smoothing":
        share = task.loss.options.get("smoothing", 0.1)
        return -(1 - share) * own - share * logs.mean(1)
    if task.loss.name.endswith(":squared"):
        shares = logs.exp()
        return task.loss.options.get("scale", 1.0) * ((shares**2).sum(1) - 2 * own.exp() + 1)
    return -own


class Population:
    """The clients' samples in float64, the augmented copies behind each client's own where rebalancing is on."""

    def __init__(self, config: Config):
        self.store = open_store(config.data.source.choice, config.data.source.options)
        self.description, self.seed = self.store.description, config.seed
        self.standardized = config.data.normalize
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
        if self.standardized and self.description.mean:
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


def attackers(config: Config, clients: int) -> list[int]:
    """The clients that attack, in every round."""
    if config.attack.name == "none":
        return []
    count = math.floor(config.clients.attack_fraction * clients + 0.5)
    return sorted(stream(config.seed, ATTACK).choice(clients, count, replace=False, shuffle=False).tolist())


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
