"""The strata FedSSO finds on MNIST (§4.2, Fig 2): one-step changes of a 784-50-10 network, OPTICS(2, 0.25)."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmpi.clients.features import gradient_features, plan_features
from fedmpi.clients.stratifier import optics
from fedmpi.common.streams import Purpose, Streams

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
CLIENTS, CLASSES, PIXELS, HIDDEN = 100, 10, 784, 50
SIZE = PIXELS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES


@pytest.fixture(scope="module")
def mnist(data_folder: Path) -> tuple[torch.Tensor, np.ndarray]:
    """Training images scaled to [0, 1], (60000, 784), and labels."""
    folder = data_folder / "mnist"
    if not (folder / "train-images-idx3-ubyte.gz").is_file():
        pytest.skip(f"no MNIST in {folder}")
    with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, PIXELS)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return torch.from_numpy(images / np.float32(255)), labels


def shards_of_one_class(labels: np.ndarray, per_class: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Every class dealt into `per_class` shards."""
    return [
        shard
        for label in range(CLASSES)
        for shard in np.array_split(rng.permutation(np.flatnonzero(labels == label)), per_class)
    ]


def iid(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    return np.array_split(rng.permutation(len(labels)), CLIENTS)


def one_class(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    return shards_of_one_class(labels, CLIENTS // CLASSES, rng)


def two_shards(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    shards = shards_of_one_class(labels, 2 * CLIENTS // CLASSES, rng)
    return [
        np.concatenate([shards[first], shards[second]]) for first, second in rng.permutation(len(shards)).reshape(-1, 2)
    ]


def full_local_gradients(
    images: torch.Tensor, labels: np.ndarray, partition: list[np.ndarray], streams: Streams
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Gradients of all clients at one random start (uniform in ±1/sqrt(fan-in)), twenty clients a block."""
    rng = streams.generator(Purpose.MODEL_INIT)
    shapes = [((HIDDEN, PIXELS), PIXELS), ((HIDDEN,), PIXELS), ((CLASSES, HIDDEN), HIDDEN), ((CLASSES,), HIDDEN)]
    start = [torch.from_numpy((rng.uniform(-1, 1, shape) / fan_in**0.5).astype(np.float32)) for shape, fan_in in shapes]
    first, first_bias, second, second_bias = (values.requires_grad_() for values in start)
    targets = torch.from_numpy(labels.astype(np.int64))
    for low, high in pairwise(range(0, CLIENTS + 1, 20)):
        block = torch.empty(high - low, SIZE)
        for row, rows in enumerate(partition[low:high]):
            hidden = torch.relu(images[rows] @ first.T + first_bias)
            loss = torch.nn.functional.cross_entropy(hidden @ second.T + second_bias, targets[rows])
            gradient = torch.autograd.grad(loss, [first, first_bias, second, second_bias])
            torch.cat([part.flatten() for part in gradient], out=block[row])
        yield np.arange(low, high), block


def strata(mnist: tuple[torch.Tensor, np.ndarray], partition: list[np.ndarray], seed: int) -> np.ndarray:
    streams = Streams(seed)
    plan = plan_features("one-step-change", CLIENTS, SIZE, streams, lr=0.01)
    features = gradient_features(plan, full_local_gradients(*mnist, partition, streams))
    return optics(features.matrix, min_samples=2, xi=0.25)


def label_sets(labels: np.ndarray, partition: list[np.ndarray]) -> list[tuple[int, ...]]:
    return [tuple(np.unique(labels[rows])) for rows in partition]


@pytest.mark.parametrize("seed", SEEDS)
def test_iid_clients_form_one_stratum(mnist: tuple[torch.Tensor, np.ndarray], seed: int) -> None:
    partition = iid(mnist[1], np.random.default_rng(seed))
    assert strata(mnist, partition, seed).max() == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_clients_of_one_class_form_ten_strata_of_their_classes(
    mnist: tuple[torch.Tensor, np.ndarray], seed: int
) -> None:
    partition = one_class(mnist[1], np.random.default_rng(seed))
    found, classes = strata(mnist, partition, seed), np.repeat(np.arange(CLASSES), CLIENTS // CLASSES)
    assert np.array_equal(found[:, None] == found, classes[:, None] == classes) and found.min() >= 0


@pytest.mark.parametrize("seed", SEEDS)
def test_strata_of_clients_with_two_classes_are_the_pairs_held_by_two_clients_or_more(
    mnist: tuple[torch.Tensor, np.ndarray], seed: int
) -> None:
    partition = two_shards(mnist[1], np.random.default_rng(seed))
    found = strata(mnist, partition, seed)
    pairs = label_sets(mnist[1], partition)
    shared = {pair for pair in pairs if pairs.count(pair) >= 2}
    assert found.max() + 1 == len(shared)
    assert not shared & {pair for pair, stratum in zip(pairs, found, strict=True) if stratum < 0}
