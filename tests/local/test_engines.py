"""Engines agree up to rounding, name or leave out clients that fail, and are chosen and rejected by their reasons."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmpi
from fedmpi import ClientFailure, Config, UserError
from fedmpi.aggregation.exact import SHORT, FloatSum
from fedmpi.data.schema import DataDescription
from fedmpi.local import engines
from fedmpi.local import merged as merged_module
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.batched.stack import Stack
from fedmpi.local.engines import LocalEngine, choose_engine
from fedmpi.local.merged import MergedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule, OnDivergence, RoundJob, Rows, enter_round
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


def test_rows_of_many_clients_need_no_task_each_and_those_that_diverge_are_left_out() -> None:
    model, rows, found = small(), np.concatenate([np.arange(n) for n in SIZES]), []
    clients = np.repeat(np.arange(len(SIZES)), SIZES)
    weights = (1 + clients) / 10
    for away in ([2, 4], []):
        engine = made(MergedEngine, model, spoiled(HUGE, *away), on_divergence=OnDivergence(True))
        kept = ~np.isin(clients, [] if away else [2, 4])
        total = FloatSum(np.zeros(model.size, np.float32))
        job = RoundJob(model.initial, WHOLE, 0, total)
        found.append((total, engine.train_rows(Rows(clients[kept], rows[kept], weights[kept]), job)))
    assert relative_error(*(total.tensor for total, _ in found)) < 1e-5
    for fact in ("clients", "weight", "samples", "steps"):
        assert getattr(found[0][1], fact) == pytest.approx(getattr(found[1][1], fact)), fact
    model.bind(model.initial)
    x, y = (part[torch.from_numpy(~np.isin(clients, [2, 4]))] for part in (spoiled(1.0).x, spoiled(1.0).y))
    _, gradients = model.weighted_gradient(x, y, torch.from_numpy(weights[~np.isin(clients, [2, 4])]).float())
    assert relative_error(total.tensor, -0.1 * torch.cat([gradient.flatten() for gradient in gradients])) < 1e-6


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


def alone(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(36, 5))


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (BatchNormNet(36, 5), "buffers"),
        (alone(nn.BatchNorm1d(36, track_running_stats=False)), "other samples"),
        (AlphaDropoutNet(36, 5), "random numbers"),
        (PlacesFirst(), "depend on the other samples"),
        (clipped(), "hooks"),
    ],
)
def test_models_that_cannot_be_merged_exactly_are_named(net: nn.Module, words: str) -> None:
    config = Config.model_validate({"clients": {"sampler": "all"}})
    engine = made(SequentialEngine, FlatModel(net), InMemorySource(SMALL_IMAGES, SIZES))
    assert words in (engines.why_not_merged(config, engine) or "")


def test_merging_is_for_clients_of_one_step() -> None:
    source, model = InMemorySource(SMALL_IMAGES, SIZES), small()
    with pytest.raises(UserError, match="single step"):
        summed(made(MergedEngine, model, source), model, tasks_of(source), LocalRule(batch_size=2))


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
def test_a_client_that_diverges_is_named_or_left_out_by_every_engine(
    kind: type, rule: LocalRule, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = small() if factor else FlatModel(Overflowing())
    options: dict[str, Any] = {"chunk": 4} if kind is BatchedEngine else {}
    tasks = tasks_of(spoiled(1.0))
    with pytest.raises(ClientFailure, match=r"client 4 on rank 3: .*lower local.lr"):
        summed(made(kind, model, spoiled(factor, 4), rank=3, **options), model, tasks, rule)
    away = [2, 4]
    with caplog.at_level(logging.WARNING, logger="fedmpi"):
        leaving = made(kind, model, spoiled(factor, *away), on_divergence=OnDivergence(True), **options)
        found = summed(leaving, model, tasks, rule)
    assert found[1].diverged == 2
    found[1].diverged = 0
    kept = [task for task in tasks if task.client not in away]
    assert_same_work(found, summed(made(kind, model, spoiled(1.0), **options), model, kept, rule), 1e-4)
    assert sum("continues without a client that diverged: client" in message for message in caplog.messages) == 1


KEYS = {"rounds": 2, "model.name": "mlp", "model.hidden": [6], "clients.sampler": "all", "cluster.threads": 1}


def clients(spoilt: bool) -> fedmpi.ClientArrays:
    """Five clients, the last one with features that no number holds, or no samples."""
    generator = np.random.default_rng(5)
    x = generator.standard_normal((60, 4)).astype(np.float32)
    owner = np.repeat(np.arange(5), 12)
    y = (x.sum(1) > 0).astype(np.int64)
    x[owner == 4] *= 1e35
    kept = slice(None) if spoilt else owner < 4
    return fedmpi.ClientArrays(x[kept], y[kept], owner[kept], test=(x[:12], y[:12]), clients=5, mean=0.0, std=1.0)


@pytest.mark.parametrize(
    "more",
    [
        {"server.exact": True},
        {"local.engine": "batched", "compression": "int8"},
        {"preset": "fedsampling", "samples.budget": 10_000},
        {"server.weights": "uniform", "privacy.clip_norm": 1.0, "privacy.noise_multiplier": 0.5},
        {"local.algorithm": "scaffold"},
        {"server.aggregator": "median"},
    ],
    ids=lambda more: " ".join(f"{key}={value}" for key, value in more.items()),
)
def test_a_run_continues_without_clients_that_diverge_and_counts_them(more: dict[str, object]) -> None:
    settings = {"preset": "fedavg"} | KEYS | more
    with pytest.raises(ClientFailure, match=r"client 4 on rank 0: .* in round 0. Training diverged .*lower local.lr"):
        fedmpi.run(settings, data=clients(True))
    run = fedmpi.run(settings | {"local.on_divergence": "drop"}, data=clients(True))
    assert [record["diverged"] for record in run.records] == [1, 1]
    assert all(np.isfinite(record["train_loss"]) for record in run.records)
    assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())


@pytest.mark.parametrize("spoilt", [True, False], ids=["diverged", "without samples"])
@pytest.mark.parametrize(("weights", "share"), [("unbiased", 4 / 5), ("normalized", 1.0)])
def test_a_participant_without_an_update_counts_as_unchanged_unless_the_sum_is_divided(
    spoilt: bool, weights: str, share: float
) -> None:
    """All five are selected: the model goes this share of the way that the mean update of the four others goes."""
    strata = {"features": "label-histogram", "within_stratum": "uniform", "strata": 1}
    chosen = {"clients.sampler": {"name": "stratified", **strata}, "clients.count": 5}
    chosen |= {"local.on_divergence": "drop", "server.weights": {"name": weights, "population": "clients"}}
    run = fedmpi.run("fedavg", KEYS | chosen, data=clients(spoilt))
    plain = KEYS | {"server.weights": "uniform", "server.optimizer.lr": share}
    expected = fedmpi.run("fedavg", plain, data=clients(False))
    for found, wanted in zip(run.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise KeyError("seven")
        return super().forward(x.flatten(1))


def test_a_model_that_fails_on_a_client_is_named_with_its_line_and_the_round() -> None:
    source, model = InMemorySource(SMALL_IMAGES, [5, 3]), FlatModel(Failing(36, 5))
    for round, said in ((None, ""), (4, ", round 4")):
        enter_round(round)
        line = rf"^client 1 on rank 0: KeyError: 'seven' \(\S+test_engines.py:\d+{said}\)$"
        with pytest.raises(ClientFailure, match=line):
            summed(made(SequentialEngine, model, source), model, tasks_of(source), WHOLE)
    enter_round(None)


# Device memory too small for a pass


def with_room_for(most: int, function, count):
    """The function, on a device that has no memory for more than so many."""

    def limited(*args, **named):
        if count(*args) > most:
            raise torch.OutOfMemoryError("a test fault")
        return function(*args, **named)

    return limited


@pytest.mark.parametrize(
    ("engine", "rule", "owner", "name", "count", "most", "said"),
    [
        (MergedEngine, WHOLE, FlatModel, "weighted_gradient", lambda _, x, *rest: len(x), 8, "samples in a pass"),
        (BatchedEngine, EPOCHS, Stack, "open", lambda _, features, *rest: len(features), 1, "batched clients"),
        (BatchedEngine, EPOCHS, Stack, "__init__", lambda _, net, capacity, *rest: capacity, 2, "batched clients"),
    ],
)
def test_training_continues_with_less_at_once(
    engine, rule, owner, name, count, most, said, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, source = small(), InMemorySource(SMALL_IMAGES, SIZES)
    expected = summed(made(engine, model, source), model, tasks_of(source), rule)
    monkeypatch.setattr(owner, name, with_room_for(most, getattr(owner, name), count))
    trainer = made(engine, model, source)
    with caplog.at_level(logging.WARNING, logger="fedmpi"):
        for _ in range(2):
            assert_same_work(summed(trainer, model, tasks_of(source), rule), expected, 1e-5)
    warnings = [message for message in caplog.messages if message.startswith("out of memory") and said in message]
    assert 1 <= len(warnings) <= 6  # in the first round only, until it fits
    monkeypatch.setattr(owner, name, with_room_for(0, getattr(owner, name), count))
    if engine is MergedEngine:
        with pytest.raises(torch.OutOfMemoryError):  # not even one fits
            summed(made(engine, model, source), model, tasks_of(source), rule)


class Limited(nn.Linear):
    """A model on a device that has no memory for more than `most` samples in evaluation mode."""

    most = 60

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tried = len(x) in (2, 4)  # before round 0
        if not self.training and not tried and len(x) > self.most:
            raise torch.OutOfMemoryError("a test fault")
        return super().forward(x)


@pytest.mark.parametrize("batch", [7, 4000])
def test_an_evaluation_continues_with_fewer_samples_at_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part smaller than a pass is halved from its own size."""
    settings = {"preset": "fedavg", "rounds": 1, "evaluation.batch_size": batch, "cluster.threads": 1}
    losses = []
    for most in (60, 7, 1):
        monkeypatch.setattr(Limited, "most", most)
        run = fedmpi.run(settings, data=clients(False), model=lambda description: Limited(4, 2))
        losses.append(run.records[-1]["test_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    monkeypatch.setattr(Limited, "most", 0)
    with pytest.raises(torch.OutOfMemoryError):
        fedmpi.run(settings, data=clients(False), model=lambda description: Limited(4, 2))


# The choice

MIXED = [3, 20, 10, 1, 37, 8]


def chosen(source: InMemorySource, model: FlatModel, observer: Any = None, **parts: Any) -> LocalEngine:
    config = Config.model_validate({"clients": {"sampler": "all"}, **parts})
    return choose_engine(config, model, source, STREAMS, observer=observer)


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


@pytest.mark.parametrize(
    ("parts", "observer", "net", "words"),
    [
        ({"local": {"optimizer": "adam"}}, None, None, "nothing is merged: local.optimizer .* is not linear"),
        ({"server": {"exact": True}}, None, None, "nothing is merged: server.exact"),
        ({}, observed, None, "nothing is merged: .*every client's own update"),
        ({"topology": "mediators"}, None, None, "nothing is merged: mediators"),
        ({}, None, BatchNormNet, "buffers"),
        ({}, None, AlphaDropoutNet, "random numbers"),
        ({"local": {"engine": "merged", "batch_size": "all"}}, observed, None, "clipping, transport, attacks or diag"),
        ({"local": {"engine": "merged", "batch_size": "all"}}, None, BatchNormNet, "buffers"),
        ({"local": {"engine": "batched"}}, None, AlphaDropoutNet, "random numbers"),
    ],
)
def test_why_clients_are_not_merged_or_batched_is_said(parts: Any, observer: Any, net: Any, words: str) -> None:
    source, model = InMemorySource(SMALL_IMAGES, [3, 4]), small() if net is None else FlatModel(net(36, 5))
    if engine := parts.get("local", {}).get("engine"):
        with pytest.raises(UserError, match=f'local.engine = "{engine}" is not possible here: .*{words}'):
            chosen(source, model, observer, **parts)
    else:
        assert re.search(words, chosen(source, model, observer, **parts).description)


@pytest.mark.parametrize(("largest", "rest"), [(1, "sequential"), (1 << 40, "batched")])
def test_large_activations_are_left_to_the_sequential_engine(
    largest: int, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LARGEST_BATCH", largest)
    engine = chosen(InMemorySource(SMALL_IMAGES, MIXED), small())
    assert engine.merged is not None and engine.rest.name == rest
