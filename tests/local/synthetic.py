"""Small synthetic clients in memory, and helpers of the tests of local work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, Engine, LocalRule, RoundJob, WorkReport
from fedmpi.models import build
from fedmpi.models.flat import FlatModel

IMAGES = DataDescription((1, 28, 28), "float32", 47, "image", 0, (), ())
MIDDLE_IMAGES = DataDescription((1, 14, 14), "float32", 5, "image", 0, (), ())
SMALL_IMAGES = DataDescription((1, 6, 6), "float32", 5, "image", 0, (), ())
TEXTS = DataDescription((12,), "int32", 4, "text", 60, (), ())
STREAMS = Streams(7)


class InMemorySource:
    """Clients of the given sizes with random samples of the described kind; the labels depend on the samples."""

    def __init__(
        self,
        description: DataDescription,
        sizes: Sequence[int] | Ints,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        generator = np.random.default_rng(11)
        self.description, self.device = description, device
        self.sizes = np.array(sizes, np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        shape = (int(self.sizes.sum()), *description.feature_shape)
        if description.task == "text":
            self.x = torch.from_numpy(generator.integers(0, description.vocabulary, shape, dtype=np.int32))
        else:
            self.x = torch.from_numpy(generator.standard_normal(shape)).to(dtype)
        flat = self.x.double().reshape(len(self.x), -1)
        teacher = torch.from_numpy(generator.standard_normal((flat.shape[1], description.classes)))
        self.y = (flat @ teacher).argmax(1)

    def load(self, client: int, rows: Ints | None = None) -> tuple[Tensor, Tensor]:
        part = np.arange(self.offsets[client], self.offsets[client + 1])
        return self.load_positions(part if rows is None else part[rows])

    def load_positions(self, positions: Ints) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(positions)
        return self.x[index].to(self.device), self.y[index].to(self.device)


def ragged_sizes(clients: int, most: int) -> Ints:
    """Sizes from 1 to `most`, many small, a few large."""
    return np.maximum(1, np.rint(most * np.random.default_rng(3).beta(0.7, 2.0, clients))).astype(np.int64)


def flat_model(name: str, description: DataDescription, dtype: torch.dtype = torch.float32, **options) -> FlatModel:
    return FlatModel(build(name, options, description, seed=3).to(dtype))


def tasks_of(source: InMemorySource, rows: dict[int, Ints] | None = None) -> list[ClientTask]:
    """One task per client, weighted by size."""
    sampled = rows or {}
    total = float(source.sizes.sum())
    return [ClientTask(k, sampled.get(k), float(n) / total) for k, n in enumerate(source.sizes)]


def summed(
    engine: Engine,
    model: FlatModel,
    tasks: Sequence[ClientTask],
    rule: LocalRule,
    round: int = 0,
    start: Tensor | None = None,
) -> tuple[Tensor, WorkReport]:
    """Σ coefficient · Δ of the tasks, by default from the model's initial values, and the report."""
    start = model.initial if start is None else start
    before = start.clone()
    total = FloatSum(torch.zeros_like(model.initial))
    report = engine.train(tasks, RoundJob(start, rule, round, total))
    total.flush()
    assert torch.equal(start, before), "the start stays as it is"
    return total.tensor.clone(), report


def made(kind, model: FlatModel, source, streams: Streams = STREAMS, rank: int = 0, chunk: int | None = None, **more):
    """An engine of this class."""
    sequential = SequentialEngine(model, source, streams, rank, **more)
    if kind is SequentialEngine:
        return sequential
    return BatchedEngine(sequential, chunk) if kind is BatchedEngine else kind(sequential)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def assert_same_work(found: tuple[Tensor, WorkReport], expected: tuple[Tensor, WorkReport], tolerance: float) -> None:
    """The same sum up to the tolerance, and the same report."""
    assert expected[0].any() and relative_error(found[0], expected[0]) < tolerance
    for fact in ("clients", "steps", "samples", "loss_count"):
        assert getattr(found[1], fact) == getattr(expected[1], fact), fact
    for fact in ("loss_sum", "weight"):
        assert abs(getattr(found[1], fact) / getattr(expected[1], fact) - 1) < 1e-5, fact


class BatchNormNet(nn.Module):
    """A dense layer, batch norm, the logits."""

    def __init__(self, inputs: int, classes: int):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense = nn.Linear(inputs, 8)
        self.norm = nn.BatchNorm1d(8)
        self.output = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(self.dense(self.flatten(x))).relu())


class AlphaDropoutNet(nn.Module):
    """Draws from torch's global generator in its forward pass."""

    def __init__(self, inputs: int, classes: int):
        super().__init__()
        self.dense = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(nn.functional.alpha_dropout(x.flatten(1), 0.5, self.training))
