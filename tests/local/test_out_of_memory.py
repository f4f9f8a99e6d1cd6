"""Device memory too small for a pass: the pass is halved, this is logged, and the result is equal up to rounding."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fedmpi import Config
from fedmpi.core.evaluation import EvaluatedParts
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.batched.stack import Stack
from fedmpi.local.merged import MergedEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import SMALL_IMAGES, STREAMS, InMemorySource, flat_model, made, summed, tasks_of

SIZES = [5, 12, 9, 7, 20, 3]
ONE_STEP, EPOCHS = LocalRule(lr=0.1, epochs=None, steps=1, batch_size=None), LocalRule(lr=0.1, batch_size=4)


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
        (MergedEngine, ONE_STEP, FlatModel, "weighted_gradient", lambda _, x, *rest: len(x), 8, "samples in a pass"),
        (BatchedEngine, EPOCHS, Stack, "open", lambda _, features, *rest: len(features), 1, "batched clients"),
        (BatchedEngine, EPOCHS, Stack, "__init__", lambda _, net, capacity, *rest: capacity, 2, "batched clients"),
    ],
)
def test_training_continues_with_less_at_once(
    engine, rule, owner, name, count, most, said, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, source = flat_model("mlp", SMALL_IMAGES, hidden=[9]), InMemorySource(SMALL_IMAGES, SIZES)
    expected, plain = summed(made(engine, model, source, STREAMS), model, tasks_of(source), rule)
    monkeypatch.setattr(owner, name, with_room_for(most, getattr(owner, name), count))
    trainer = made(engine, model, source, STREAMS)
    with caplog.at_level(logging.WARNING, logger="fedmpi"):
        for _ in range(2):
            found, report = summed(trainer, model, tasks_of(source), rule)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
            assert (report.clients, report.steps, report.samples) == (plain.clients, plain.steps, plain.samples)
            assert report.weight == pytest.approx(plain.weight)
    warnings = [message for message in caplog.messages if message.startswith("out of memory") and said in message]
    assert 1 <= len(warnings) <= 6  # in the first round only, until it fits
    monkeypatch.setattr(owner, name, with_room_for(0, getattr(owner, name), count))
    with pytest.raises(Exception, match="a test fault"):  # not even one fits
        summed(made(engine, model, source, STREAMS), model, tasks_of(source), rule)


class Small(nn.Module):
    """A model on a device that has no memory for more than `most` samples in evaluation mode."""

    most = 50

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x) > self.most:
            raise torch.OutOfMemoryError("a test fault")
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("name", ["mlp", Small], ids=["a built-in model", "a custom model"])
def test_an_evaluation_continues_with_fewer_samples_at_once(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(50, 16), torch.arange(50) % 4
    store = SimpleNamespace(
        part_samples=lambda part: 50 if part == "test" else 0, manifest=SimpleNamespace(class_names=tuple("abcd"))
    )
    data = SimpleNamespace(description=FLAT, test=lambda: (x, y))
    config = Config(preset="fedavg", evaluation={"batch_size": 40, "on": "test"}, model={"name": name})
    parts = EvaluatedParts(config, store, data)  # type: ignore[arg-type]
    torch.manual_seed(1)
    model = FlatModel(Small())
    whole = parts.scores(model, model.initial, 0)
    for most, rows in [(7, 5), (1, 1)]:
        monkeypatch.setattr(Small, "most", most)
        assert parts.scores(model, model.initial, 0) == pytest.approx(whole, rel=1e-6)
        assert parts._rows == rows
    monkeypatch.setattr(Small, "most", 0)
    with pytest.raises(torch.OutOfMemoryError):
        parts.scores(model, model.initial, 0)


def test_a_part_smaller_than_a_pass_is_halved_from_its_own_size(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(50, 16), torch.arange(50) % 4
    store = SimpleNamespace(part_samples=lambda part: 50 * (part == "test"), manifest=SimpleNamespace(class_names=()))
    data = SimpleNamespace(description=FLAT, test=lambda: (x, y))
    config = Config(preset="fedavg", evaluation={"batch_size": 4000, "on": "test"})
    parts = EvaluatedParts(config, store, data)  # type: ignore[arg-type]
    monkeypatch.setattr(Small, "most", 25)
    model = FlatModel(Small())
    with caplog.at_level(logging.WARNING, logger="fedmpi"):
        parts.scores(model, model.initial, 0)
    assert [one for one in caplog.messages if "samples evaluated" in one] == [
        "out of memory on the device with 50 samples evaluated at once; continuing with 25"
    ]


FLAT = DataDescription((16,), "float32", 4, "vector", 0, (0.0,), (1.0,))
