"""Choice of the engine, the logged reason, and results that do not depend on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedmpi import Config, UserError
from fedmpi.aggregation.exact import FixedPointSum
from fedmpi.local import engines
from fedmpi.local.engines import LocalEngine, choose_engine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import Job, LocalRule
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
    relative_error,
    summed,
    tasks_of,
)

MIXED = [3, 20, 10, 1, 37, 8]


def chosen(source: InMemorySource, model: FlatModel, observer: Any = None, **parts: Any) -> LocalEngine:
    config = Config.model_validate({"clients": {"sampler": "all"}, **parts})
    return choose_engine(config, model, source, STREAMS, observer=observer)


@pytest.mark.parametrize(
    "name, description, options",
    [
        ("mlp", SMALL_IMAGES, {"hidden": [9], "dropout": 0.5}),
        ("cnn", IMAGES, {}),
        ("text-cnn", TEXTS, {"dimension": 6, "filters": 4}),
    ],
)
def test_the_automatic_choice_equals_the_sequential_engine(name: str, description: Any, options: dict[str, Any]):
    source, rule = InMemorySource(description, MIXED), LocalRule(lr=0.1, batch_size=10)
    model = flat_model(name, description, **options)
    expected, counted = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule)
    engine = chosen(source, model)
    found, report = summed(engine, model, tasks_of(source), rule)
    assert relative_error(found, expected) < 1e-5
    assert (report.clients, report.steps, report.samples) == (counted.clients, counted.steps, counted.samples)
    assert report.weight == pytest.approx(counted.weight)
    assert report.loss_sum == pytest.approx(counted.loss_sum, rel=1e-5)
    assert (engine.merged_clients, engine.other_clients) == (4, 2)
    assert "4 merged and 2 others" in engine.description


@pytest.mark.parametrize(
    "parts, observer, words",
    [
        ({"local": {"optimizer": "adam"}}, None, "not linear"),
        ({"server": {"exact": True}}, None, "server.exact"),
        ({}, lambda client, delta: None, "every client's own update"),
        ({"topology": "mediators"}, None, "mediators"),
    ],
)
def test_what_forbids_merging_is_said(parts: Any, observer: Any, words: str):
    source, model = InMemorySource(SMALL_IMAGES, [3, 4]), flat_model("mlp", SMALL_IMAGES, hidden=[9])
    description = chosen(source, model, observer, **parts).description
    assert "nothing is merged" in description
    assert words in description


def test_a_demand_for_merging_is_rejected_where_a_single_update_or_the_model_forbids_it():
    source, demand = InMemorySource(SMALL_IMAGES, [3, 4]), {"engine": "merged", "batch_size": "all"}
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    with pytest.raises(UserError, match="not possible here: clipping, transport, attacks or diagnostics"):
        chosen(source, model, lambda client, delta: None, local=demand)
    with pytest.raises(UserError, match="not possible here: .*buffers"):
        chosen(source, FlatModel(BatchNormNet(36, 5)), local=demand)


@pytest.mark.parametrize("net, words", [(BatchNormNet, "buffers"), (AlphaDropoutNet, "random numbers")])
def test_models_that_cannot_be_merged_are_trained_sequentially(net: Any, words: str):
    source, rule = InMemorySource(SMALL_IMAGES, [3, 20, 10]), LocalRule(lr=0.1, batch_size=10)
    model = FlatModel(net(36, 5))
    engine = chosen(source, model)
    assert words in engine.description
    expected, _ = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule)
    found, _ = summed(engine, model, tasks_of(source), rule)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("wanted", ["sequential", "batched"])
def test_the_named_engine_is_taken(wanted: str):
    source, rule = InMemorySource(SMALL_IMAGES, MIXED), LocalRule(lr=0.1, batch_size=10)
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    engine = chosen(source, model, local={"engine": wanted})
    assert engine.name == wanted
    assert f'local.engine = "{wanted}"' in engine.description
    expected, _ = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule)
    assert relative_error(summed(engine, model, tasks_of(source), rule)[0], expected) < 1e-5


def test_a_batched_engine_is_rejected_for_a_model_without_a_stacked_form():
    source, model = InMemorySource(SMALL_IMAGES, MIXED), FlatModel(AlphaDropoutNet(36, 5))
    with pytest.raises(UserError, match='local.engine = "batched" is not possible here'):
        chosen(source, model, local={"engine": "batched"})


def test_exact_sums_are_bit_identical_whichever_way_the_tasks_are_split():
    source, rule = InMemorySource(SMALL_IMAGES, MIXED), LocalRule(lr=0.1, batch_size=10)
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=0.5)
    tasks = tasks_of(source)
    found = []
    for parts in ([tasks], [tasks[4:], tasks[:1], tasks[1:4]], [[task] for task in reversed(tasks)]):
        buffers = np.zeros((len(parts), model.size), np.int64)
        for buffer, part in zip(buffers, parts, strict=True):
            engine = chosen(source, model, server={"exact": True})
            engine.train(part, Job(model.initial, rule, 0, FixedPointSum(buffer)))
        found.append(torch.from_numpy(buffers.sum(0)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert found[0].any()


@pytest.mark.parametrize(("largest", "rest"), [(1, "sequential"), (1 << 40, "batched")])
def test_large_activations_are_left_to_the_sequential_engine(
    largest: int, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LARGEST_BATCH", largest)
    engine = chosen(InMemorySource(SMALL_IMAGES, MIXED), flat_model("mlp", SMALL_IMAGES, hidden=[9]))
    assert engine.merged is not None and engine.rest.name == rest
