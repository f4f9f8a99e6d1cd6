"""Clients for the tests of the batched engine: ragged, synthetic, given to engines as a `DataSource`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, Job, LocalRule, WorkReport
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import made

CLASSES = 5
IMAGES = DataDescription((1, 14, 14), "float32", CLASSES, "image", 0, (), ())
COLORED = DataDescription((3, 16, 16), "float32", CLASSES, "image", 0, (), ())
TEXTS = DataDescription((12,), "int32", CLASSES, "text", 60, (), ())


@dataclass
class Source:
    """Random samples of every client, in memory."""

    description: DataDescription
    sizes: Ints
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        shape = self.description.feature_shape
        self.x: list[Tensor] = []
        self.y: list[Tensor] = []
        for size in self.sizes:
            if self.description.task == "text":
                tokens = generator.integers(0, self.description.vocabulary, (size, *shape), dtype=np.int32)
                self.x.append(torch.from_numpy(tokens))
            else:
                self.x.append(torch.from_numpy(generator.standard_normal((size, *shape))).to(self.dtype))
            self.y.append(torch.from_numpy(generator.integers(0, CLASSES, size)))

    def load(self, client: int, rows: Ints | None = None) -> tuple[Tensor, Tensor]:
        if rows is None:
            return self.x[client], self.y[client]
        index = torch.from_numpy(rows)
        return self.x[client][index], self.y[client][index]

    def load_positions(self, positions: Ints) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(positions)
        return torch.cat(self.x)[index], torch.cat(self.y)[index]


def ragged_sizes(clients: int, most: int, seed: int = 3) -> Ints:
    """Sizes from 1 to `most`, many small, a few large."""
    return np.maximum(1, np.rint(most * np.random.default_rng(seed).beta(0.7, 2.0, clients))).astype(np.int64)


def flat_model(name: str, description: DataDescription, dtype: torch.dtype, **options: object) -> FlatModel:
    return FlatModel(build(name, options, description, seed=1).to(dtype))


def tasks_for(sizes: Ints) -> list[ClientTask]:
    """Every client once, weighted by size; every fifth trains on a sample of its rows."""
    total = float(sizes.sum())
    tasks = []
    for client, size in enumerate(sizes.tolist()):
        rows = np.arange(0, size, 2) if client % 5 == 4 else None
        tasks.append(ClientTask(client, rows, size / total))
    return tasks


def train(engine, tasks: list[ClientTask], start: Tensor, rule: LocalRule, round: int = 2) -> tuple[Tensor, WorkReport]:
    """The model after one round, and the report."""
    buffer = np.zeros(start.numel(), np.float64 if start.dtype == torch.float64 else np.float32)
    total = FloatSum(buffer)
    report = engine.train(tasks, Job(start, rule, round, total))
    total.flush()
    return start + torch.from_numpy(buffer), report


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def image_network(layers: Sequence[nn.Module], description: DataDescription) -> nn.Sequential:
    """Copies of the layers, with values that do not depend on what was imported, and a classifier after them."""
    torch.manual_seed(2)
    layers = deepcopy(list(layers))
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            layer.reset_parameters()
    units = nn.Sequential(*layers, nn.Flatten())(torch.zeros(1, *description.feature_shape)).shape[1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(units, description.classes))


def assert_trains_as_one_by_one(
    module: nn.Module, description: DataDescription, dtype: torch.dtype, tolerance: float
) -> None:
    """Ragged clients in batches of one and four reach the weights that the sequential engine reaches."""
    model, sizes = FlatModel(module.to(dtype)), ragged_sizes(9, 50)
    source, rule = Source(description, sizes, dtype), LocalRule(lr=0.1, epochs=2, batch_size=20)
    start = model.initial
    by_one, _ = train(SequentialEngine(model, source, Streams(5)), tasks_for(sizes), start, rule)
    for chunk in (1, 4):
        beside, _ = train(made(BatchedEngine, model, source, Streams(5), chunk=chunk), tasks_for(sizes), start, rule)
        assert relative_difference(beside - start, by_one - start) < 10 * tolerance
        assert relative_difference(beside, by_one) < tolerance
