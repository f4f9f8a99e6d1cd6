"""local.precision = "bfloat16": gradients of bfloat16's accuracy, everything else as in float32; some CPUs have no
bfloat16 LSTM.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedmpi
from fedmpi import Config, UserError
from fedmpi.local.engines import LocalEngine, choose_engine
from fedmpi.local.merged import MergedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import Engine, LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import (
    IMAGES,
    SMALL_IMAGES,
    STREAMS,
    TEXTS,
    InMemorySource,
    flat_model,
    made,
    relative_error,
    summed,
    tasks_of,
)

SIZES = [13, 1, 40, 7]
ONE_STEP = LocalRule(lr=0.1, batch_size=None)
SEVERAL = LocalRule(lr=0.02, epochs=1, batch_size=10)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mlp": (SMALL_IMAGES, {"hidden": [9], "dropout": 0.5}),
    "cnn": (IMAGES, {}),
    "text-cnn": (TEXTS, {"dimension": 6, "filters": 4}),
}
BFLOAT16 = {"cnn": 6e-2}
"""Relative errors of an update: bfloat16 keeps 8 significant bits, 2**-9 = 2e-3 a rounding; 3e-2 where nothing is said.
Under max pooling a rounding can make another input the largest, often so on the noise that the tests train on."""


@cache
def in_bfloat16(layer: str, **options: Any) -> bool:
    """Return True if torch has a recurrent layer in bfloat16 on this CPU."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            getattr(nn, layer)(8, 6, **options)(torch.zeros(2, 3, 8))[0].sum().backward()
    except RuntimeError:
        return False
    return True


class Recurrent(nn.Module):
    """Return the lines of the digits as sequences."""

    def __init__(self, layer: str, **options: Any):
        super().__init__()
        self.lines = getattr(nn, layer)(8, 6, batch_first=True, **options)
        self.out = nn.Linear(6 * (1 + self.lines.bidirectional), 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lines(x.view(-1, 8, 8))[0][:, -1])


class ThroughNumpy(nn.Module):
    """Scaled by a number that numpy computes, which has no bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x.flatten(1))
        return self.out(hidden / (1 + float(hidden.detach().numpy().std())))


def engine_of(kind: type, model: FlatModel, source: InMemorySource, precision: str) -> Engine:
    return made(kind, model, source, precision=precision)


def chosen(model: FlatModel, source: InMemorySource, **parts: Any) -> LocalEngine:
    config = Config.model_validate({"clients": {"sampler": "all"}, **parts})
    return choose_engine(config, model, source, STREAMS)


@pytest.mark.parametrize(
    "kind, rule", [(SequentialEngine, ONE_STEP), (SequentialEngine, SEVERAL), (MergedEngine, ONE_STEP)]
)
@pytest.mark.parametrize("name", MODELS)
def test_updates_are_float32_and_those_of_float32_to_the_accuracy_of_bfloat16(name: str, kind: type, rule: LocalRule):
    description, options = MODELS[name]
    source, model = InMemorySource(description, SIZES), flat_model(name, description, **options)
    tasks = tasks_of(source)
    expected, exact = summed(engine_of(kind, model, source, "float32"), model, tasks, rule)
    found, rough = summed(engine_of(kind, model, source, "bfloat16"), model, tasks, rule)
    assert found.dtype == torch.float32
    assert 0 < relative_error(found, expected) < BFLOAT16.get(name, 3e-2)
    assert rough.loss_sum != exact.loss_sum
    assert rough.loss_sum == pytest.approx(exact.loss_sum, rel=1e-2)


@pytest.mark.parametrize("name", ["cnn"])
def test_a_gradient_is_that_of_plain_autocast(name: str):
    description, options = MODELS[name]
    source, model = InMemorySource(description, SIZES), flat_model(name, description, **options)
    x, y = source.load(2)
    model.bind(model.initial.clone())
    model.module.eval()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.module(x)
    nn.functional.cross_entropy(logits.float(), y).backward()
    with model.computing_in("bfloat16"):
        loss, gradients = model.loss_gradient(x, y)
        losses, weighted = model.weighted_gradient(x, y, torch.full((len(y),), 1 / len(y)))
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == losses.dtype == torch.float32
    for parameter, gradient, other in zip(model.parameters, gradients, weighted, strict=True):
        assert torch.equal(parameter.grad, gradient)
        assert torch.allclose(gradient, other, rtol=0.1, atol=0.05 * float(gradient.abs().max()))


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "layer, options",
    [
        ("LSTM", {}),
        ("GRU", {}),
        (None, {}),
    ],
    ids=["lstm", "gru", "numpy"],
)
def test_a_precision_without_gradients_is_rejected_before_the_first_round(
    layer: str | None, options: dict[str, Any], precision: str, tmp_path: Path
):
    def trained() -> int:
        module = ThroughNumpy() if layer is None else Recurrent(layer, **options)
        table = {"rounds": 1, "clients.count": 2, "local.precision": precision}
        return len(fedmpi.run(table, model=module, out=tmp_path / "run").records)

    if precision == "float32" or (layer is not None and in_bfloat16(layer, **options)):
        assert trained() == 1
    else:
        with pytest.raises(UserError, match=r'local.precision = "bfloat16" is not possible .* = "float32".$'):
            trained()
        assert not list(tmp_path.rglob("metrics.jsonl"))


def test_the_batched_engine_is_not_offered_and_rejected_when_named():
    source, model = InMemorySource(SMALL_IMAGES, SIZES), flat_model("mlp", SMALL_IMAGES, hidden=[9])
    engine = chosen(model, source, local={"precision": "bfloat16"})
    assert 'the others sequential (local.precision = "bfloat16": its layers' in engine.description
    with pytest.raises(UserError, match=r'local.engine = "batched" is not possible here: local.precision = "bfloat16"'):
        chosen(model, source, local={"precision": "bfloat16", "engine": "batched"})
