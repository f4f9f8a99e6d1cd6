"""Any ordinary module side by side: classes as users write them, and the built-in models that are no plain sequence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi.common.streams import Streams
from fedmpi.local.batched.engine import BatchedEngine, why_not_side_by_side
from fedmpi.local.batched.probes import BatchedProbe
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.dropout import NoMasks
from fedmpi.models.flat import FlatModel
from fedmpi.models.stacked import convolution, forms, recurrent
from fedmpi.models.stacked import sequence as sequences
from fedmpi.models.stacked.graph import GraphLayer
from fedmpi.models.stacked.net import translate
from fedmpi.models.stacked.peaks_of_graph import find_peaks
from fedmpi.models.stacked.trace import trace
from tests.end_to_end.user_models import unhurried_mlp
from tests.local import any_modules
from tests.local.dropping_modules import DROPPING
from tests.local.stacks import (
    COLOURED,
    IMAGES,
    TEXTS,
    Source,
    flat_model,
    ragged_sizes,
    relative_difference,
    tasks_for,
    train,
)

STREAMS = Streams(7)
MODULES = any_modules.MODULES | DROPPING
EPOCHS = LocalRule(lr=0.05, epochs=2, batch_size=7)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
BUILT_IN = {
    "resnet18": (COLOURED, {"width": 8, "groups": 4}),
    "fedsampling-text-cnn": (TEXTS, {"dimension": 8, "filters": 6, "hidden": [10, 8]}),
    "transformer": (TEXTS, {"dimension": 8, "heads": 2, "head_size": 4, "hidden": [10, 8]}),
    "lstm": (TEXTS, {"dimension": 8, "units": 7, "dropout": 0.3}),
    "bilstm": (TEXTS, {"dimension": 8, "units": 6, "hidden": [10, 8]}),
}


assert not set(MODULES) & set(BUILT_IN), "a name that stands for two models hides one of them"


def the_model(name: str, dtype: torch.dtype) -> tuple[FlatModel, object]:
    if name in BUILT_IN:
        description, options = BUILT_IN[name]
        return flat_model(name, description, dtype, **options), description
    description, make = MODULES[name]
    torch.manual_seed(1)
    return FlatModel(make().to(dtype)), description


def assert_same_round(name: str, dtype: torch.dtype, rule: LocalRule, sizes: np.ndarray) -> None:
    model, description = the_model(name, dtype)
    source, tasks = Source(description, sizes, dtype), tasks_for(sizes)
    sequential, batched = SequentialEngine(model, source, STREAMS), BatchedEngine(model, source, STREAMS)
    expected, wanted = train(sequential, tasks, model.initial, rule)
    found, report = train(batched, tasks, model.initial, rule)
    assert relative_difference(expected, model.initial) > 1e-4, "training must have changed the model"
    assert relative_difference(found, expected) < TOLERANCE[dtype]
    assert report.steps == wanted.steps
    assert report.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5 if dtype == torch.float32 else 1e-11)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in (*MODULES, *BUILT_IN)]
    + [(name, torch.float32) for name in BUILT_IN]
    + [pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in MODULES],
)
def test_ragged_clients_reach_the_weights_of_the_sequential_engine(name: str, dtype: torch.dtype):
    assert_same_round(name, dtype, EPOCHS, ragged_sizes(12, 20))


@pytest.mark.parametrize("name", ["lstm", "bilstm", "stateful-lstm", "deep-lstm"])
def test_wide_lstms_one_after_another_reach_them_too(name: str, monkeypatch):
    calls = []
    one_by_one = recurrent._client_by_client
    monkeypatch.setattr(recurrent, "WIDE", 0)
    monkeypatch.setattr(recurrent, "_client_by_client", lambda *given: calls.append(given) or one_by_one(*given))
    assert_same_round(name, torch.float32, EPOCHS, ragged_sizes(12, 20))
    assert calls
    calls.clear()
    assert_same_round(name, torch.float64, EPOCHS, ragged_sizes(12, 20))
    assert not calls, "oneDNN has single precision alone"


@pytest.mark.parametrize("name", ["projected", "begun-projected"])
def test_wide_lstms_with_projections_stay_side_by_side(name: str, monkeypatch):
    """oneDNN has none."""
    monkeypatch.setattr(recurrent, "WIDE", 0)
    monkeypatch.delattr(recurrent, "_client_by_client")
    assert_same_round(name, torch.float32, EPOCHS, ragged_sizes(12, 20))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["classic", "vgg", "lenet"])
def test_images_too_large_to_be_unfolded_reach_them_too(name: str, dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(sequences, "LARGEST_UNFOLDED", 0)
    model, description = the_model(name, dtype)
    assert any(isinstance(layer, GraphLayer) for layer in translate(model.module, description).layers)
    assert_same_round(name, dtype, EPOCHS, ragged_sizes(12, 20))


def test_images_lie_pixel_by_pixel_between_the_convolutions_of_a_graph(monkeypatch):
    model, description = the_model("residual", torch.float32)
    net = translate(model.module, description)
    assert any(slot.axes == (0, 2, 3, 1) for slot in net.slots if len(slot.shape) == 4)
    seen = []
    apply = convolution.OneByOne.apply
    monkeypatch.setattr(convolution, "_one_by_one", lambda x, *more: seen.append(x) or apply(x, *more))
    sizes = ragged_sizes(3, 8)
    train(BatchedEngine(model, Source(description, sizes), STREAMS), tasks_for(sizes), model.initial, EPOCHS)
    later = [x for x in seen if x.shape[1] > 3]
    assert later and all(x.is_contiguous(memory_format=torch.channels_last) for x in later)


@pytest.mark.parametrize("name", ["residual", "gru", "scaled", "text-cnn"])
@pytest.mark.parametrize(
    "rule",
    [
        LocalRule(lr=0.05, epochs=None, steps=3, batch_size=7, proximal_mu=0.3),
        LocalRule(lr=0.05, epochs=None, steps=3, batch_size=7, proximal_mu=14.0),
        LocalRule(optimizer="adam", lr=0.003, epochs=1, batch_size=7, epsilon=1e-3),
        LocalRule(lr=0.05, epochs=2, batch_size=None),
    ],
    ids=["proximal", "strongly-proximal", "adam", "whole-sets"],
)
def test_every_rule_agrees(name: str, rule: LocalRule):
    assert_same_round(name, torch.float64, rule, ragged_sizes(7, 20))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [*MODULES, *BUILT_IN])
def test_fifty_ragged_clients_agree(name: str, dtype: torch.dtype):
    """One epoch each: rounding grows with the steps (twice as many give 2e-5 in the residual network)."""
    assert_same_round(name, dtype, LocalRule(lr=0.05, epochs=1, batch_size=7), ragged_sizes(50, 40))


@pytest.mark.parametrize("name", ["vit", "residual", "inverted", "vgg", "reflected"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)], ids=["double", "single"]
)
def test_the_size_of_the_chunk_does_not_matter(name: str, dtype: torch.dtype, tolerance: float):
    """A client by itself takes other calls than several, and in single precision its images lie pixel by pixel."""
    model, description = the_model(name, dtype)
    source, sizes = Source(description, ragged_sizes(7, 20), dtype), ragged_sizes(7, 20)
    results = []
    for chunk in (1, 3, 7):
        engine = BatchedEngine(model, source, STREAMS, chunk=chunk)
        results.append(train(engine, tasks_for(sizes), model.initial, EPOCHS)[0])
    assert relative_difference(results[1], results[0]) < tolerance
    assert relative_difference(results[2], results[0]) < tolerance


@pytest.mark.parametrize("name", ["gru", "residual"])
def test_clients_may_be_probed_side_by_side(name: str):
    model, description = the_model(name, torch.float64)
    sizes = ragged_sizes(5, 20)
    source = Source(description, sizes, torch.float64)
    clients, rows = np.arange(5), [None] * 5
    found = {}
    for some, gradients in BatchedProbe(model, source).gradients(clients, rows, sizes, model.initial, 5):
        found |= dict(zip(some.tolist(), gradients, strict=True))
    model.bind(model.initial.clone())
    model.masks.source = NoMasks()
    for client in range(5):
        own = torch.cat([one.reshape(-1) for one in model.loss_gradient(*source.load(client))[1]])
        assert relative_difference(found[client], own) < 1e-12


def test_the_form_of_a_graph_is_made_once_for_a_model():
    model, description = the_model("residual", torch.float32)
    assert why_not_side_by_side(model, description) is None
    source = Source(description, ragged_sizes(2, 5))
    assert BatchedEngine(model, source, STREAMS).net is BatchedEngine(model, source, STREAMS).net
    assert BatchedEngine(model, source, STREAMS).net is BatchedProbe(model, source).net


@pytest.mark.parametrize("name", ["lenet", "lenet-with-calls", "classic", "squashed", "squashed-images"])
def test_chains_of_layers_keep_their_forms_written_by_hand(name: str):
    description, make = MODULES[name]
    net = translate(FlatModel(make()).module, description)
    assert not any(isinstance(layer, GraphLayer) for layer in net.layers)


def test_no_layer_of_the_built_in_models_is_left_to_the_sequential_engine():
    for name, (description, options) in BUILT_IN.items():
        assert why_not_side_by_side(flat_model(name, description, torch.float32, **options), description) is None


def test_a_forward_pass_that_cannot_be_followed_is_named_with_its_line():
    reason = why_not_side_by_side(FlatModel(unhurried_mlp(IMAGES)), IMAGES)
    assert reason is not None and "Unhurried cannot be followed: user_models.py, line " in reason


PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_maxima_over_a_text_are_found_where_nothing_else_is_read():
    module = MODULES["peaks"][1]()
    found = find_peaks(trace(module, TEXTS, forms.LAYERS))
    cuts = [(node.target, cut) for node, (_, cut) in found.items()]
    assert cuts == [("a", True), ("b", False), ("c", False), ("e", True), ("e", False)]


def test_the_first_of_equal_words_gets_the_gradient():
    model, description = the_model("peaks", torch.float64)
    sizes = np.full(3, 6)
    source = Source(description, sizes, torch.float64)
    source.x = [one % 2 for one in source.x]
    sequential, batched = SequentialEngine(model, source, STREAMS), BatchedEngine(model, source, STREAMS)
    by_one, _ = train(sequential, tasks_for(sizes), model.initial, EPOCHS)
    beside, _ = train(batched, tasks_for(sizes), model.initial, EPOCHS)
    assert relative_difference(beside, by_one) < TOLERANCE[torch.float64]


def test_a_layer_of_ones_own_is_registered_as_the_page_says():
    [snippet] = [one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "register_layer" in one]
    found: dict[str, Any] = {}
    exec(snippet, found)
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(196, 6), found["Gate"](6), nn.Linear(6, 5)).double())
    sizes = ragged_sizes(6, 20)
    source = Source(IMAGES, sizes, torch.float64)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks_for(sizes), model.initial, EPOCHS)
    result, _ = train(BatchedEngine(model, source, STREAMS), tasks_for(sizes), model.initial, EPOCHS)
    assert relative_difference(result, expected) < 1e-12
    assert forms.LAYERS.pop(found["Gate"])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("chunk", [1, 3])
def test_one_column_of_outputs_on_images_of_one_channel(channels: int, chunk: int):
    """Of which torch, given filters that lie pixel by pixel and enough samples, writes the first row alone."""
    torch.manual_seed(0)
    strided = nn.Conv2d(1, 2, (1, 3), stride=(1, 2))
    before = [] if channels == 1 else [nn.Conv2d(3, 1, 3, padding=1), nn.Tanh()]
    module = nn.Sequential(*before, strided, nn.Tanh(), nn.Flatten(), nn.Linear(2 * 5, 5))
    module[-1].bias.requires_grad_(False)
    description, sizes = replace(COLOURED, feature_shape=(channels, 5, 3)), ragged_sizes(8, 40)
    model, source = FlatModel(module), Source(description, sizes)
    assert any(isinstance(layer, GraphLayer) for layer in translate(model.module, description).layers)
    rule = LocalRule(lr=0.05, epochs=2, batch_size=20)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks_for(sizes), model.initial, rule)
    result, _ = train(BatchedEngine(model, source, STREAMS, chunk=chunk), tasks_for(sizes), model.initial, rule)
    assert relative_difference(result, expected) < 1e-5


@pytest.mark.parametrize("stride", [2, (2, 3), (1, 2)])
@pytest.mark.parametrize("size", [(12, 20), (20, 7)])
def test_filters_of_one_pixel_with_a_stride_read_images_that_are_not_square(
    stride: int | tuple[int, int], size: tuple[int, int]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.strided = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1, stride=stride)
            self.norm, self.last = nn.GroupNorm(2, 4), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x))
            x = torch.relu(self.norm(self.strided(x)) + self.strided(x))
            return self.last(x.mean((2, 3)))

    torch.manual_seed(0)
    description, sizes = replace(COLOURED, feature_shape=(3, *size)), ragged_sizes(8, 25)
    model = FlatModel(Net().double())
    assert why_not_side_by_side(model, description) is None
    source = Source(description, sizes, torch.float64)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks_for(sizes), model.initial, EPOCHS)
    result, _ = train(BatchedEngine(model, source, STREAMS), tasks_for(sizes), model.initial, EPOCHS)
    assert relative_difference(result, expected) < 1e-12
