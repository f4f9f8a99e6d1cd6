"""Workloads of all contestants: the same clients, cohorts and initial weights, made from fixed seeds.

W1  100 clients of 600 images, MLP 784-200-200-10, 10 clients per round, B = 10
W2  500 clients of about 235 images, Astraea's CNN, 25 clients per round, B = 20
W3  5,000 clients of about 2 texts, Text-CNN, 500 clients per round, B = 20
S4, S6  10^4 and 10^6 clients of about 2 texts, Text-CNN, FedSampling with K = 2048 samples per round
MODELS  the built-in models and networks as users write them, all of a few clients in every round

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

from benchmarks.networks import as_users_write_it
from data_prep.partitions import Partition
from data_prep.raw import RawDataset, rows_of
from data_prep.writer import write_shards
from fedmpi.clients.designs import uniform
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST, DataDescription
from fedmpi.data.shards import ShardStore
from fedmpi.models import build

PIXELS, COLORED = (1, 28, 28), (3, 32, 32)
WORDS, VOCABULARY = 30, 5000
TOPIC_WORDS = 40
WARM_UP = 2
SIZES, PATTERNS, SAMPLES, TEST_SAMPLES = range(4)  # tags of the generators


@dataclass(frozen=True)
class Workload:
    """One task that all contestants run."""

    name: str
    task: str  # Kind of a sample: float32 values, or 30 words
    model: str  # Name of the network in fedmpi's configuration
    clients: int  # N and, for federated averaging, the clients per round
    cohort: int
    batch: int  # B
    lr: float
    classes: int
    rounds: int  # Rounds of one measurement, the first `WARM_UP` of them not counted
    seed: int
    own: str = ""  # Name of the same network with a custom forward pass
    wanted: int = 0  # Sample budget K of FedSampling; 0 = federated averaging
    each: int = 0  # Samples of every client; 0 = drawn per client
    # Samples of the last client, if the first has one and the others are evenly spaced in logarithms between them
    largest: int = 0
    shape: tuple[int, ...] = PIXELS  # Shape of an image
    vocabulary: int = VOCABULARY  # Number of words
    epochs: int = 1  # Local epochs E; more than one for the naive loop, pfl and fedmpi only

    @property
    def description(self) -> DataDescription:
        """Description of the samples."""
        if self.task == "text":
            return DataDescription((WORDS,), "int32", self.classes, "text", self.vocabulary, (), ())
        return DataDescription(self.shape, "float32", self.classes, "image", 0, (), ())

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

    def network(self) -> nn.Module:
        """Return the network of the naive loop and the peers, with fedmpi's initial weights."""
        return as_users_write_it(build(self.model, {}, self.description, 0))


def _paper(name: str, task: str, network: str, *numbers: Any, **more: Any) -> Workload:
    networks = "benchmarks.networks"
    return Workload(name, task, f"{networks}:{network}", *numbers, own=f"{networks}:own_{network}", **more)


WORKLOADS = {
    w.name: w
    for w in (
        _paper("W1", "image", "mlp", 100, 10, 10, 0.01, 10, 22, 101, each=600),
        _paper("W2", "image", "cnn", 500, 25, 20, 0.01, 47, 12, 202),
        _paper("W3", "text", "text_cnn", 5_000, 500, 20, 0.05, 5, 10, 303),
        _paper("S4", "text", "text_cnn", 10_000, 0, 0, 0.05, 5, 17, 404, wanted=2048),
        _paper("S6", "text", "text_cnn", 1_000_000, 0, 0, 0.05, 5, 17, 505, wanted=2048),
    )
}


def _model(name: str, task: str, clients: int, each: int, rounds: int, batch: int = 20, **more: Any) -> Workload:
    """Return a workload of one model with all clients in every round; texts have 17 classes, as in the papers."""
    model = f"benchmarks.networks:{name}" if name[0].isupper() else name
    classes, seed = (17 if task == "text" else 10), (707 if name[0].isupper() else 606)
    return Workload(
        name, task, model, clients, clients, batch, 0.01, classes, rounds, seed, each=each, vocabulary=20_002, **more
    )


MODELS = {
    w.name: w
    for w in (
        _model("mlp", "image", 10, 100, 42),
        _model("cnn", "image", 10, 100, 22),
        _model("cifar-cnn", "image", 5, 100, 7, shape=COLORED),
        _model("image-cnn", "image", 5, 100, 12),
        _model("resnet18", "image", 2, 40, 5, shape=COLORED),
        _model("text-cnn", "text", 10, 60, 22),
        _model("fedsampling-text-cnn", "text", 10, 60, 9),
        _model("transformer", "text", 10, 60, 8),
        _model("lstm", "text", 10, 60, 17),
        _model("OddCNN", "image", 12, 0, 12, 32, largest=900, epochs=3),
        _model("Residual", "image", 4, 96, 9, 16, shape=COLORED),
        _model("LeNet", "image", 10, 100, 22),
        _model("VGGLike", "image", 4, 100, 12, shape=COLORED),
        _model("GRUClassifier", "text", 10, 60, 17),
        _model("TextCNN", "text", 10, 60, 22),
    )
}
"""Built-in models, and networks as users write them."""
QUICK = {
    w.name: w
    for w in (
        replace(WORKLOADS["W2"], clients=20, cohort=4, rounds=4),
        replace(WORKLOADS["W3"], clients=200, cohort=20, rounds=4),
        replace(WORKLOADS["S4"], clients=1000, wanted=64, rounds=4),
        replace(MODELS["text-cnn"], clients=4, cohort=4, rounds=4),
    )
}


def find(name: str, quick: bool = False) -> Workload:
    """Return the workload of this name, or the tiny one of this name."""
    return (QUICK if quick else WORKLOADS | MODELS)[name]


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
        sizes = workload.sizes()
        x, y = samples(workload, int(sizes.sum()), SAMPLES)
        test = samples(workload, 2000, TEST_SAMPLES)
        write(home, workload.task, sizes, (x, y), test, workload.classes, workload.vocabulary)
    return open_store(home)


def write(
    home: Path,
    task: str,
    sizes: Ints,
    train: tuple[AnyArray, Ints],
    test: tuple[AnyArray, Ints],
    classes: int,
    vocabulary: int = 0,
) -> None:
    """Write synthetic samples as shards; client k has the next `sizes[k]` of them."""
    x, y = train
    text = task == "text"
    raw = RawDataset(
        name="synthetic",
        task=task,  # type: ignore[arg-type]
        classes=classes,
        class_names=tuple(map(str, range(classes))),
        feature_shape=x.shape[1:],
        dtype="int32" if text else "float32",
        read=rows_of(x, test[0]),
        y=np.concatenate([y, test[1]]),
        train=np.arange(len(y)),
        test=np.arange(len(y), len(y) + len(test[1])),
        licence="none: generated",
        vocabulary=tuple(f"w{number}" for number in range(vocabulary)) if text else (),
    )
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    one_after_another = Partition(np.arange(offsets[-1]), offsets, "contiguous", {})
    write_shards(raw, one_after_another, home, min(4, len(sizes)), 0, "python -m benchmarks")


def client_tensors(store: ShardStore) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the samples of each client, copied into plain memory, in the order of the clients."""
    x, y = store.rows(np.arange(store.samples))
    parts = (torch.split(torch.from_numpy(part), store.sizes.tolist()) for part in (x, y.astype(np.int64)))
    return list(zip(*parts, strict=True))


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
