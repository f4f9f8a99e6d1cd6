"""Workloads of all contestants: the same clients, cohorts and initial weights, made from fixed seeds.

W1  100 clients of 600 images, MLP 784-200-200-10, 10 clients per round, B = 10
W2  500 clients of about 235 images, Astraea's CNN, 25 clients per round, B = 20
W3  5,000 clients of about 2 texts, Text-CNN, 500 clients per round, B = 20
S4, S6  10^4 and 10^6 clients of about 2 texts, Text-CNN, FedSampling with K = 2048 samples per round
MODELS  the built-in models, a few clients of equal sizes
OWN     networks as users write them (`own_networks`), OddCNN's clients of 1 to 900 images and with three epochs

Samples are noise around a pattern of their class: they have the cost of real ones, but results have no meaning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import networks
from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi.clients.cohort import uniform
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST
from fedmpi.data.shards import ShardStore
from fedmpi.models import build

PIXELS = (1, 28, 28)
WORDS, VOCABULARY = 30, 5000
TOPIC_WORDS = 40
SHARDS = 4
SIZES, PATTERNS, SAMPLES, TEST_SAMPLES = range(4)  # tags of the generators


@dataclass(frozen=True)
class Workload:
    """One task that all contestants run."""

    name: str
    task: str  # Kind of a sample: float32 values, or 30 words
    model: str  # Network: a function of `benchmarks.networks`, "module:function", or a built-in one
    clients: int  # N and, for federated averaging, the clients per round
    cohort: int
    batch: int  # B
    lr: float
    classes: int
    rounds: int  # Rounds of one measurement, the first `WARM_UP` of them not counted
    seed: int
    wanted: int = 0  # Sample budget K of FedSampling; 0 = federated averaging
    each: int = 0  # Samples of every client; 0 = drawn per client
    # Samples of the last client, if the first has one and the others are evenly spaced in logarithms between them
    largest: int = 0
    shape: tuple[int, ...] = PIXELS  # Shape of an image
    vocabulary: int = VOCABULARY  # Number of words
    built_in: bool = False  # True if `model` is the name of a built-in model of fedmpi
    epochs: int = 1  # Local epochs E; more than one for the naive loop, the tight one, pfl and fedmpi only

    def sizes(self) -> Ints:
        """Return the samples of every client, int64 (N,)."""
        generator = np.random.default_rng([self.seed, SIZES])
        if self.each:
            return np.full(self.clients, self.each)
        if self.largest:
            return np.geomspace(1, self.largest, self.clients).astype(np.int64)
        if self.name == "W2":
            return np.clip(np.rint(generator.normal(235, 60, self.clients)), 60, 420).astype(np.int64)
        return np.maximum(1, np.rint(generator.lognormal(np.log(2) - 0.5, 1.0, self.clients))).astype(np.int64)

    def participants(self, round: int) -> Ints:
        """Return fedmpi's cohort of a round, for contestants that do not draw it themselves; sorted int64 (m,)."""
        generator = Streams(0).generator(Purpose.COHORT, round)
        return uniform(generator, self.clients, self.cohort).clients

    def model_name(self, own: bool = False) -> str:
        """Return the network's name in fedmpi's configuration; with `own`, as a user's module."""
        if self.built_in or ":" in self.model:
            return self.model
        return f"benchmarks.networks:{'own_' * own}{self.model}"

    def network(self, store: ShardStore) -> nn.Module:
        """Return the network of the naive loop, the floors and the peers, with fedmpi's initial weights."""
        return networks.as_users_write_it(build(self.model_name(), {}, store.description, 0))


WARM_UP = 2
WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", "image", "mlp", 100, 10, 10, 0.01, 10, 22, 101, each=600),
        Workload("W2", "image", "cnn", 500, 25, 20, 0.01, 47, 12, 202),
        Workload("W3", "text", "text_cnn", 5_000, 500, 20, 0.05, 5, 10, 303),
        Workload("S4", "text", "text_cnn", 10_000, 0, 0, 0.05, 5, 17, 404, wanted=2048),
        Workload("S6", "text", "text_cnn", 1_000_000, 0, 0, 0.05, 5, 17, 505, wanted=2048),
    )
}


def _built_in(model: str, task: str, clients: int, each: int, rounds: int, **more: Any) -> Workload:
    """Return a workload of a built-in model on clients of equal sizes, all selected in every round."""
    text = task == "text"
    shape = {"classes": 17 if text else 10, "vocabulary": 20_002 if text else 0, **more}
    return Workload(
        model, task, model, clients, clients, 20, 0.01, rounds=rounds, seed=606, each=each, built_in=True, **shape
    )


COLOURED = (3, 32, 32)
MODELS = {
    w.name: w
    for w in (
        _built_in("mlp", "image", 10, 100, 42),
        _built_in("cnn", "image", 10, 100, 22),
        _built_in("cifar-cnn", "image", 5, 100, 7, shape=COLOURED),
        _built_in("image-cnn", "image", 5, 100, 12),
        _built_in("resnet18", "image", 2, 40, 5, shape=COLOURED),
        _built_in("text-cnn", "text", 10, 60, 22),
        _built_in("fedsampling-text-cnn", "text", 10, 60, 9),
        _built_in("transformer", "text", 10, 60, 8),
        _built_in("lstm", "text", 10, 60, 17),
        _built_in("bilstm", "text", 10, 60, 7),
    )
}
"""Built-in models: B = 20, one epoch; texts of 30 out of 20,002 words and 17 classes, as in the papers' data."""


def _own(name: str, task: str, rounds: int, clients: int = 10, **more: Any) -> Workload:
    """Return a workload of a network of `own_networks`, with all clients selected in every round."""
    model = f"benchmarks.own_networks:{name}"
    common = {"batch": 20, "lr": 0.01, "classes": 17 if task == "text" else 10, "rounds": rounds, "seed": 707}
    words = {"vocabulary": 20_002} if task == "text" else {}
    return Workload(name, task, model, clients, clients, **{**common, **words, **more})


OWN = {
    w.name: w
    for w in (
        _own("odd_layers", "image", 12, clients=12, largest=900, batch=32, epochs=3),
        _own("odd_cnn", "image", 12, clients=12, largest=900, batch=32, epochs=3),
        _own("residual", "image", 9, clients=4, each=96, shape=COLOURED, batch=16),
        _own("lenet", "image", 22, each=100),
        _own("vgg_like", "image", 12, clients=4, each=100, shape=COLOURED),
        _own("gru_classifier", "text", 17, each=60),
        _own("kim_cnn", "text", 22, each=60),
        _own("tiny_vit", "image", 12, clients=4, each=100, shape=COLOURED),
    )
}
"""Users' own networks: three that were held out, two of them with three epochs; five in the style of tutorials."""
QUICK = {
    w.name: w
    for w in (
        replace(WORKLOADS["W2"], clients=20, cohort=4, rounds=4),
        replace(WORKLOADS["W3"], clients=200, cohort=20, rounds=4),
        replace(WORKLOADS["S4"], clients=1000, wanted=64, rounds=4),
    )
}
QUICK_MODELS = {"text-cnn": replace(MODELS["text-cnn"], clients=4, cohort=4, rounds=4)}


def find(name: str, quick: bool = False) -> Workload:
    """Return the workload of this name, or the tiny one of this name."""
    return (QUICK | QUICK_MODELS if quick else WORKLOADS | MODELS | OWN)[name]


def samples(workload: Workload, n: int, tag: int) -> tuple[AnyArray, Ints]:
    """Draw n samples and their labels; `tag` names the generator, the classes' patterns are shared by all tags."""
    generator = np.random.default_rng([workload.seed, tag])
    labels = generator.integers(0, workload.classes, n)
    if workload.task == "text":
        words = generator.integers(0, workload.vocabulary, (n, WORDS), dtype=np.int32)
        topical = generator.integers(0, TOPIC_WORDS, (n, WORDS), dtype=np.int32) + TOPIC_WORDS * labels[:, None]
        return np.where(generator.random((n, WORDS)) < 0.4, topical, words).astype(np.int32), labels
    pixels = math.prod(workload.shape)
    patterns = np.random.default_rng([workload.seed, PATTERNS]).standard_normal((workload.classes, pixels))
    values = generator.standard_normal((n, pixels), dtype=np.float32) * np.float32(0.5)
    for label, pattern in enumerate(patterns.astype(np.float32)):
        values[labels == label] += np.float32(0.5) * pattern
    return values.reshape(n, *workload.shape), labels


def prepare(workload: Workload, folder: Path) -> ShardStore:
    """Return the workload's shards under `folder`; write them if they are missing."""
    home = folder / f"{workload.name}-{workload.clients}"
    if not (home / MANIFEST).exists():
        write_shards(
            _raw(workload),
            _one_after_another(workload.sizes()),
            home,
            min(SHARDS, workload.clients),
            0,
            "python -m benchmarks",
        )
    return open_store(home)


def _raw(workload: Workload) -> RawDataset:
    x, y = samples(workload, int(workload.sizes().sum()), SAMPLES)
    test_x, test_y = samples(workload, 2000, TEST_SAMPLES)
    text = workload.task == "text"
    return RawDataset(
        name=f"synthetic-{workload.name}",
        task="text" if text else "image",
        classes=workload.classes,
        class_names=tuple(map(str, range(workload.classes))),
        feature_shape=x.shape[1:],
        dtype="int32" if text else "float32",
        mean=(),
        std=(),
        labels=y,
        users=None,
        user_names=None,
        read=lambda rows: x[rows],
        test_x=test_x,
        test_y=test_y,
        skipped=0,
        licence="none: generated",
        citation="",
        vocabulary=tuple(f"w{number}" for number in range(workload.vocabulary)) if text else (),
    )


def _one_after_another(sizes: Ints) -> Partition:
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    return Partition(np.arange(offsets[-1]), offsets, "contiguous", {})


def all_samples(store: ShardStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of all clients, copied into plain memory."""
    pieces = store.span(0, store.samples)
    x = torch.from_numpy(np.concatenate([x for x, _ in pieces]))
    y = torch.from_numpy(np.concatenate([y for _, y in pieces]).astype(np.int64))
    return x, y


def client_tensors(store: ShardStore) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the samples of each client, in the order of the clients."""
    x, y = all_samples(store)
    sizes = store.sizes.tolist()
    return list(zip(torch.split(x, sizes), torch.split(y, sizes), strict=True))


def mean_loss(store: ShardStore, network: nn.Module) -> float:
    """Return the cross-entropy on the test part."""
    x, y = store.test()
    training = network.training
    network.eval()
    device = next(network.parameters()).device
    with torch.no_grad():
        logits = network(torch.from_numpy(np.array(x)).to(device))
        loss = float(nn.functional.cross_entropy(logits, torch.from_numpy(y.astype(np.int64)).to(device)))
    network.train(training)
    return loss


__all__ = [
    "MODELS",
    "QUICK",
    "QUICK_MODELS",
    "WARM_UP",
    "WORKLOADS",
    "Workload",
    "client_tensors",
    "find",
    "mean_loss",
    "networks",
    "prepare",
]
