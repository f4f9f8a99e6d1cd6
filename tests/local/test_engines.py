"""Engines agree up to rounding, name clients that fail, and are chosen and rejected by their reasons."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi import ClientFailure, Config, UserError
from fedmpi.aggregation.exact import SHORT, FloatSum
from fedmpi.common.calling import during
from fedmpi.data.schema import DataDescription
from fedmpi.local import engines
from fedmpi.local import merged as merged_module
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.engines import LocalEngine, choose_engine
from fedmpi.local.merged import MergedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule, RoundJob, Rows
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import (
    IMAGES,
    SMALL_IMAGES,
    STREAMS,
    TEXTS,
    AlphaDropoutNet,
    BatchNormNet,
    InMemorySource,
    assert_same_work,
    flat_model,
    made,
    relative_error,
    summed,
    tasks_of,
)

SIZES = [3, 0, 8, 2, 40, 5, 7]
MODELS: dict[str, tuple[DataDescription, dict[str, Any]]] = {
    "mlp": (SMALL_IMAGES, {"hidden": [9], "dropout": 0.3}),
    "cnn": (IMAGES, {"dropout": 0.5}),
    "text-cnn": (TEXTS, {"dimension": 6, "filters": 4, "dropout": 0.5}),
}
WHOLE = LocalRule(lr=0.1, epochs=1, batch_size=None)
EPOCHS = LocalRule(lr=0.1, batch_size=4)
ONE_STEP = {
    "whole set": WHOLE,
    "epoch of one batch": LocalRule(lr=0.1, epochs=1, batch_size=40),
    "one drawn batch": LocalRule(lr=0.1, epochs=None, steps=1, batch_size=4, proximal_mu=0.5),
}


def small() -> FlatModel:
    return flat_model("mlp", SMALL_IMAGES, hidden=[9])


# Merging clients of one step


@pytest.mark.parametrize("rule", ONE_STEP.values(), ids=ONE_STEP.keys())
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [None, 4])
def test_merging_equals_training_one_client_after_the_other(
    name: str, rule: LocalRule, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, options = MODELS[name]
    source, model = (
        InMemorySource(description, SIZES, torch.float64),
        flat_model(name, description, torch.float64, **options),
    )
    tasks = tasks_of(source, {4: np.array([17, 3, 25]), 2: np.arange(8)[::-1].copy()})
    if rows is not None:
        monkeypatch.setitem(merged_module.CHUNK_ROWS, "cpu", rows)
    ways = (made(kind, model, source) for kind in (MergedEngine, SequentialEngine))
    assert_same_work(*(summed(way, model, tasks, rule, round=5) for way in ways), 1e-12)


def test_rows_of_many_clients_need_no_task_each_and_a_client_that_diverges_is_named() -> None:
    model, rows, clients = (
        small(),
        np.concatenate([np.arange(n) for n in SIZES]),
        np.repeat(np.arange(len(SIZES)), SIZES),
    )
    weights = (1 + clients) / 10
    total = FloatSum(np.zeros(model.size, np.float32))
    job = RoundJob(model.initial, WHOLE, 0, total)
    report = made(MergedEngine, model, spoiled(1.0)).train_rows(Rows(clients, rows, weights), job)
    assert (report.clients, report.samples, report.steps) == (6, sum(SIZES), 6)
    assert report.weight == pytest.approx(weights.sum())
    model.bind(model.initial)
    _, gradients = model.weighted_gradient(spoiled(1.0).x, spoiled(1.0).y, torch.from_numpy(weights).float())
    assert relative_error(total.tensor, -0.1 * torch.cat([gradient.flatten() for gradient in gradients])) < 1e-6
    with pytest.raises(ClientFailure, match="client 4 on rank 0"):
        made(MergedEngine, model, spoiled(HUGE, 4)).train_rows(Rows(clients, rows, weights), job)


def test_a_large_vocabulary_keeps_its_gradient_sparse_and_right() -> None:
    description = replace(TEXTS, vocabulary=60_000)
    source, model = InMemorySource(description, SIZES), flat_model("text-cnn", description, dimension=4, filters=3)
    engine, tasks = made(MergedEngine, model, source), tasks_of(source)
    assert model.sparse_pays(512 * 12)
    assert_same_work(summed(engine, model, tasks, WHOLE), summed(engine.sequential, model, tasks, WHOLE), 1e-5)
    assert not model.module.words.sparse


@pytest.mark.parametrize("kind", [MergedEngine, BatchedEngine])
def test_the_parts_of_a_long_sum_are_counted_so_that_none_grows_too_long(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one client each: after 64 of them the partial sum has gone into the long one."""
    source, model = InMemorySource(SMALL_IMAGES, [2] * (SHORT + 1)), small()
    monkeypatch.setitem(merged_module.CHUNK_ROWS, "cpu", 2)
    total = FloatSum(np.zeros(model.size, np.float32))
    made(kind, model, source, chunk=1).train(tasks_of(source), RoundJob(model.initial, WHOLE, 0, total))
    latest = float(total.tensor.norm())
    total.flush()
    assert 0 < latest < 0.2 * float(total.tensor.norm())


# Clients that fail


class Overflowing(nn.Module):
    """sqrt(0) has a finite value and an infinite slope."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(36, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x.flatten(1)).abs().sqrt()


WAYS = [(SequentialEngine, EPOCHS), (BatchedEngine, EPOCHS), (MergedEngine, WHOLE), (BatchedEngine, WHOLE)]
HUGE, LARGE, ZERO = 1e30, 1e14, 0.0
"""Factors of features: the loss is no number, is finite and far from what is learned, has an infinite slope."""


def spoiled(factor: float, *clients: int) -> InMemorySource:
    source = InMemorySource(SMALL_IMAGES, SIZES)
    for client in clients:
        source.x[source.offsets[client] : source.offsets[client + 1]] *= factor
    return source


@pytest.mark.parametrize("factor", [HUGE, LARGE, ZERO])
@pytest.mark.parametrize(("kind", "rule"), WAYS)
def test_a_client_that_diverges_is_named_by_every_engine(kind: type, rule: LocalRule, factor: float) -> None:
    model = small() if factor else FlatModel(Overflowing())
    options: dict[str, Any] = {"chunk": 4} if kind is BatchedEngine else {}
    with pytest.raises(ClientFailure, match=r"client 4 on rank 3: .*lower local.lr"):
        summed(made(kind, model, spoiled(factor, 4), rank=3, **options), model, tasks_of(spoiled(1.0)), rule)


@pytest.mark.parametrize(("kind", "rule"), WAYS)
def test_an_update_that_is_too_large_to_be_squared_is_a_divergence(kind: type, rule: LocalRule) -> None:
    model = small()
    with pytest.raises(ClientFailure, match="client .* lower local.lr"):
        summed(made(kind, model, spoiled(1.0)), model, tasks_of(spoiled(1.0))[2:], replace(rule, lr=1e25))


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise KeyError("seven")
        return super().forward(x.flatten(1))


def test_a_model_that_fails_on_a_client_is_named_with_its_line_and_the_round() -> None:
    source, model = InMemorySource(SMALL_IMAGES, [5, 3]), FlatModel(Failing(36, 5))
    line = r"^client 1 on rank 0: KeyError: 'seven' \(\S+test_engines.py:\d+, round 4\)$"
    with pytest.raises(ClientFailure, match=line), during(9), during(4):
        summed(made(SequentialEngine, model, source), model, tasks_of(source), WHOLE)


# The choice

MIXED = [3, 20, 10, 1, 37, 8]


def chosen(source: InMemorySource, model: FlatModel, observer: Any = None, **parts: Any) -> LocalEngine:
    config = Config.model_validate({"clients": {"sampler": "all"}, **parts})
    return choose_engine(config, SequentialEngine(model, source, STREAMS, observe=observer))


@pytest.mark.parametrize("engine", ["auto", "sequential", "batched"])
@pytest.mark.parametrize("name", MODELS)
def test_the_chosen_engine_equals_the_sequential_one(name: str, engine: str) -> None:
    description, options = MODELS[name]
    source, rule = InMemorySource(description, MIXED), LocalRule(lr=0.1, batch_size=10)
    model = flat_model(name, description, **options)
    expected = summed(made(SequentialEngine, model, source), model, tasks_of(source), rule)
    way = chosen(source, model, local={"engine": engine})
    assert_same_work(summed(way, model, tasks_of(source), rule), expected, 1e-5)
    if engine == "auto":
        assert "one-step clients are merged" in way.description
        assert [way.merged.accepts(task, rule) for task in tasks_of(source)] == [True, False, True, True, False, True]
    else:
        assert way.rest.name == engine and f'local.engine = "{engine}"' in way.description


def observed(client: int, delta: torch.Tensor) -> None:
    """Read every client's own update."""


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


COUPLED = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36, track_running_stats=False), nn.Linear(36, 5))


@pytest.mark.parametrize(
    ("parts", "observer", "net", "words"),
    [
        ({"local": {"optimizer": "adam"}}, None, None, "local.optimizer .* is not linear"),
        ({"server": {"exact": True}}, None, None, "server.exact"),
        ({}, observed, None, "every client's own update"),
        ({"topology": "mediators"}, None, None, "mediators"),
        *[
            ({}, None, net, words)
            for net, words in (
                (BatchNormNet(36, 5), "buffers"),
                (COUPLED, "other samples"),
                (AlphaDropoutNet(36, 5), "random numbers"),
                (PlacesFirst(), "depend on the other samples"),
                (clipped(), "hooks"),
            )
        ],
    ],
)
def test_why_clients_are_not_merged_is_said(parts: Any, observer: Any, net: nn.Module | None, words: str) -> None:
    model = small() if net is None else FlatModel(net)
    description = chosen(InMemorySource(SMALL_IMAGES, [3, 4]), model, observer, **parts).description
    assert re.search(f"nothing is merged: .*{words}", description)


def test_why_clients_cannot_be_batched_is_said() -> None:
    with pytest.raises(UserError, match=r'local.engine = "batched" is not possible here: .*random numbers'):
        chosen(InMemorySource(SMALL_IMAGES, [3]), FlatModel(AlphaDropoutNet(36, 5)), local={"engine": "batched"})


@pytest.mark.parametrize(("largest", "rest"), [(1, "sequential"), (1 << 40, "batched")])
def test_large_activations_are_left_to_the_sequential_engine(
    largest: int, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LARGEST_BATCH", largest)
    engine = chosen(InMemorySource(SMALL_IMAGES, MIXED), small())
    assert engine.merged is not None and engine.rest.name == rest
