"""The merged engine equals the sequential one, client for client, and rejects what it cannot do exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi import ClientFailure, UserError
from fedmpi.aggregation.exact import SHORT, FixedPointSum, FloatSum
from fedmpi.data.schema import DataDescription
from fedmpi.local import merged as merged_module
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.merged import MergedEngine, Rows
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, Job, LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import (
    IMAGES,
    SMALL_IMAGES,
    STREAMS,
    TEXTS,
    AlphaDropoutNet,
    BatchNormNet,
    InMemorySource,
    flat_model,
    made,
    relative_error,
    summed,
    tasks_of,
)

SIZES = [3, 1, 8, 2, 40, 5, 7]
MODELS = {
    "mlp": (SMALL_IMAGES, {"hidden": [9], "dropout": 0.3}),
    "cnn": (IMAGES, {"dropout": 0.5}),
    "text-cnn": (TEXTS, {"dimension": 6, "filters": 4, "dropout": 0.5}),
}
RULES = {
    "whole set": LocalRule(lr=0.1, epochs=1, batch_size=None),
    "epoch of one batch": LocalRule(lr=0.1, epochs=1, batch_size=40),
    "one drawn batch": LocalRule(lr=0.1, epochs=None, steps=1, batch_size=4, proximal_mu=0.5),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merging_equals_training_one_client_after_the_other(name: str, rule: LocalRule, dtype: torch.dtype):
    description, options = MODELS[name]
    source = InMemorySource(description, SIZES, dtype)
    model = flat_model(name, description, dtype, **options)
    tasks = tasks_of(source, {4: np.array([17, 3, 25]), 2: np.arange(8)[::-1].copy()})
    expected, counted = summed(SequentialEngine(model, source, STREAMS), model, tasks, rule)
    found, report = summed(made(MergedEngine, model, source, STREAMS), model, tasks, rule)
    assert relative_error(found, expected) < (1e-5 if dtype == torch.float32 else 1e-12)
    for field in ("clients", "steps", "samples", "loss_count"):
        assert getattr(report, field) == getattr(counted, field)
    assert report.loss_sum == pytest.approx(counted.loss_sum, rel=1e-5)
    assert report.weight == pytest.approx(counted.weight)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 4, 30])
def test_the_size_of_the_chunks_does_not_matter(name: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    description, options = MODELS[name]
    source, rule = InMemorySource(description, SIZES), RULES["whole set"]
    model = flat_model(name, description, **options)
    whole, _ = summed(made(MergedEngine, model, source, STREAMS), model, tasks_of(source), rule)
    monkeypatch.setitem(merged_module.CHUNK_ROWS, "cpu", rows)
    cut, _ = summed(made(MergedEngine, model, source, STREAMS), model, tasks_of(source), rule)
    assert relative_error(cut, whole) < 1e-5


@pytest.mark.parametrize("kind", [MergedEngine, BatchedEngine])
def test_the_parts_of_a_long_sum_are_counted_so_that_none_grows_too_long(kind: type, monkeypatch: pytest.MonkeyPatch):
    """Chunks of one client each: after 64 of them the partial sum has gone into the long one."""
    source, rule = InMemorySource(SMALL_IMAGES, [2] * (SHORT + 1)), RULES["whole set"]
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    monkeypatch.setitem(merged_module.CHUNK_ROWS, "cpu", 2)
    options = {"chunk": 1} if kind is BatchedEngine else {}
    total = FloatSum(np.zeros(model.size, np.float32))
    kind(model, source, STREAMS, **options).train(tasks_of(source), Job(model.initial, rule, 0, total))
    last = FloatSum(np.zeros(model.size, np.float32))
    latest = float(total.tensor.norm())
    SequentialEngine(model, source, STREAMS).train(tasks_of(source), Job(model.initial, rule, 0, last))
    total.flush()
    last.flush()
    assert 0 < latest < 0.2 * float(total.tensor.norm())
    assert relative_error(total.tensor, last.tensor) < 1e-5


@pytest.mark.parametrize("round", [0, 1, 5])
def test_the_masks_are_those_of_client_and_round_whatever_the_round(round: int):
    source, rule = InMemorySource(SMALL_IMAGES, SIZES), RULES["whole set"]
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=0.5)
    found, _ = summed(made(MergedEngine, model, source, STREAMS), model, tasks_of(source), rule, round)
    expected, _ = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule, round)
    other, _ = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule, round + 1)
    assert relative_error(found, expected) < 1e-5 < 0.01 < relative_error(found, other)


def test_rows_of_many_clients_need_no_task_each():
    source, rule = InMemorySource(SMALL_IMAGES, SIZES), RULES["whole set"]
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    engine = made(MergedEngine, model, source, STREAMS)
    positions = np.array([0, 3, 5, 9, 11, 13, 14, 30, 60])
    clients = np.searchsorted(source.offsets, positions, side="right") - 1
    rows = positions - source.offsets[clients]
    total = FloatSum(np.zeros(model.size, np.float32))
    report = engine.train_rows(Rows(clients, rows, np.full(9, 1 / 9)), Job(model.initial, rule, 0, total))
    model.bind(model.initial)
    _, gradients = model.loss_gradient(source.x[positions], source.y[positions])
    expected = -rule.lr * torch.cat([gradient.flatten() for gradient in gradients])
    assert relative_error(total.tensor, expected) < 1e-6
    assert (report.clients, report.samples, report.steps) == (len(set(clients)), 9, len(set(clients)))
    assert report.weight == pytest.approx(1.0)


def test_a_large_vocabulary_keeps_its_gradient_sparse_and_right():
    description = DataDescription((12,), "int32", 4, "text", 60_000, (), ())
    source, rule = InMemorySource(description, SIZES), RULES["whole set"]
    model = flat_model("text-cnn", description, dimension=4, filters=3)
    engine = made(MergedEngine, model, source, STREAMS)
    assert engine._prefer_sparse()
    found, _ = summed(engine, model, tasks_of(source), rule)
    expected, _ = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule)
    assert relative_error(found, expected) < 1e-5
    assert not model.module.words.sparse


def test_clients_without_samples_count_but_add_nothing():
    source, rule = InMemorySource(SMALL_IMAGES, [0, 4, 0]), RULES["whole set"]
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=0.5)
    tasks = [ClientTask(0, None, 0.5), ClientTask(1, None, 0.25), ClientTask(2, None, 0.25)]
    expected, counted = summed(SequentialEngine(model, source, STREAMS), model, tasks, rule)
    found, report = summed(made(MergedEngine, model, source, STREAMS), model, tasks, rule)
    assert relative_error(found, expected) < 1e-5
    assert (report.clients, report.steps, report.weight) == (counted.clients, counted.steps, counted.weight)
    nothing, _ = summed(made(MergedEngine, model, source, STREAMS), model, tasks[:1], rule)
    assert not nothing.any()


class UncountedBatchNorm(nn.Module):
    """Batch norm without running statistics: no buffers, and yet every sample sees the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(36, track_running_stats=False)
        self.output = nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(x.flatten(1)))


class PlacesFirst(nn.Linear):
    """Drops values that have another axis before the samples."""

    def __init__(self) -> None:
        super().__init__(36, 5)
        self.layer = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layer(x.flatten(1).T).T)


def clipped() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
    net[1].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return net


@pytest.mark.parametrize(
    "net, rule, words",
    [
        (BatchNormNet(36, 5), LocalRule(batch_size=None), "buffers"),
        (UncountedBatchNorm(), LocalRule(batch_size=None), "other samples"),
        (AlphaDropoutNet(36, 5), LocalRule(batch_size=None), "random numbers"),
        (PlacesFirst(), LocalRule(batch_size=None), "depend on the other samples"),
        (clipped(), LocalRule(batch_size=None), "hooks"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 5)), LocalRule(optimizer="adam", batch_size=None), "not linear"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 5)), LocalRule(batch_size=2), "single step"),
    ],
)
def test_what_would_not_be_exact_is_rejected_with_the_reason(net: nn.Module, rule: LocalRule, words: str):
    source, model = InMemorySource(SMALL_IMAGES, SIZES), FlatModel(net)
    with pytest.raises(UserError, match=words):
        summed(made(MergedEngine, model, source, STREAMS), model, tasks_of(source), rule)


def test_exact_sums_are_rejected():
    source, model = InMemorySource(SMALL_IMAGES, SIZES), flat_model("mlp", SMALL_IMAGES, hidden=[9])
    total = FixedPointSum(np.zeros(model.size, np.int64))
    with pytest.raises(UserError, match="own update"):
        made(MergedEngine, model, source, STREAMS).train(
            tasks_of(source), Job(model.initial, RULES["whole set"], 0, total)
        )


def test_the_client_whose_loss_is_not_finite_is_named():
    source = InMemorySource(SMALL_IMAGES, SIZES)
    source.x[4:12] *= np.inf
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    with pytest.raises(ClientFailure, match=r"client 2 on rank 1: .*lower local.lr"):
        summed(made(MergedEngine, model, source, STREAMS, rank=1), model, tasks_of(source), RULES["whole set"])


def test_the_client_whose_gradient_is_not_finite_is_named():
    class Overflowing(nn.Module):
        """sqrt(0) has a finite value and an infinite slope."""

        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(36, 5, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dense(x.flatten(1)).abs().sqrt()

    source = InMemorySource(SMALL_IMAGES, SIZES)
    source.x[4:12] = 0
    model = FlatModel(Overflowing())
    with pytest.raises(ClientFailure, match="client 2 on rank 0"):
        summed(made(MergedEngine, model, source, STREAMS), model, tasks_of(source), RULES["whole set"])
