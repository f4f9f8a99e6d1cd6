"""Samples per pass of a model: on a CPU as few as keep its widest layer within the caches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fedmpi.common.registry import resolve
from fedmpi.core.evaluation import rows_evaluated
from fedmpi.data.schema import DataDescription
from fedmpi.local.measures import Gradients
from fedmpi.local.merged import MergedEngine
from fedmpi.local.traits import LEAST_ROWS, forward_traits, rows_of_a_pass
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.losses import Loss
from tests.local.synthetic import STREAMS, InMemorySource, made, relative_error, summed, tasks_of

IMAGES = DataDescription((1, 32, 32), "float32", 4, "image", 0, (), ())
TOKENS = DataDescription((64,), "int32", 50_000, "text", 60, (), (), targets="tokens", target_shape=(64,))
WIDE, WIDE_ROWS = 16, 128
"""Channels of `layers` on IMAGES that make 64 KiB a sample; samples that make 8 MiB, in float64 half as many."""
ONE_STEP = LocalRule(lr=0.1, epochs=None, steps=1, batch_size=None)


Seen = list[int]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Record the number of samples of every pass of the models below."""
    found: Seen = []
    forward = nn.AdaptiveAvgPool2d.forward
    monkeypatch.setattr(nn.AdaptiveAvgPool2d, "forward", lambda layer, x: found.append(len(x)) or forward(layer, x))
    return found


def layers(channels: int, norm: bool | str = False) -> nn.Module:
    """Every pixel becomes so many values."""
    torch.manual_seed(5)
    between = nn.BatchNorm2d(channels, track_running_stats=norm != "always") if norm else nn.Identity()
    mean = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(nn.Conv2d(1, channels, 1), between, nn.ReLU(), *mean, nn.Linear(channels, 4))


def spread(channels: int, norm: bool | str = False, dtype: torch.dtype = torch.float32) -> FlatModel:
    return FlatModel(layers(channels, norm).to(dtype))


def compared(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of a sample by the others beside it."""
    return nn.functional.cross_entropy(outputs - outputs.mean(0), targets, reduction="none")


@pytest.mark.parametrize(
    ("channels", "norm", "training", "rows"),
    [
        (1, False, True, 2000),
        *[(WIDE, False, training, WIDE_ROWS) for training in (False, True)],
        (2 * WIDE, False, True, WIDE_ROWS // 2),
        (32 * WIDE, False, False, LEAST_ROWS),
        (WIDE, True, True, 2000),
        (WIDE, True, False, WIDE_ROWS),
        (WIDE, "always", False, 2000),
    ],
)
def test_a_pass_takes_as_many_samples_as_keep_the_widest_layer_small_and_parts_none_that_influence_one_another(
    channels: int, norm: bool | str, training: bool, rows: int
) -> None:
    model = spread(channels, norm)
    assert rows_of_a_pass(model, IMAGES, 2000, training) == rows
    assert rows_of_a_pass(model, IMAGES, 20, training) == 20
    coupled = FlatModel(layers(channels, norm), loss=Loss(resolve("loss", compared)))
    assert rows_of_a_pass(coupled, IMAGES, 2000, training) == 2000


def test_very_many_outputs_limit_a_pass_on_any_device_whatever_is_requested() -> None:
    """2²⁶ bytes of outputs of 64 · 2,000 values of 4 bytes."""
    model = SimpleNamespace(device=torch.device("cuda"))
    assert rows_of_a_pass(model, IMAGES, 2000) == 2000  # type: ignore[arg-type]
    assert rows_of_a_pass(model, TOKENS, 2000) == (1 << 26) // (4 * 64 * 50_000)  # type: ignore[arg-type]
    words = FlatModel(nn.Sequential(nn.Embedding(60, 2), nn.Linear(2, 2_000, bias=False)))
    for asked, rows in (("auto", 131), (3, 3), (5000, 131)):
        table = SimpleNamespace(batch_size=asked)
        assert rows_evaluated(table, words, replace(TOKENS, classes=2_000)) == rows  # type: ignore[arg-type]


@pytest.mark.parametrize(("norm", "passes"), [(False, [64, 36]), (True, [100])])
def test_probes_and_merged_clients_are_computed_in_such_passes(norm: bool, passes: list[int], seen: Seen) -> None:
    source, model = InMemorySource(IMAGES, [100], torch.float64), spread(WIDE, norm, torch.float64)
    forward_traits(model, IMAGES)
    seen.clear()
    [(_, found)] = Gradients(source, model, STREAMS).each([0], model.initial, 0)
    expected = gradient_of(model, *source.load(0))[: model.trainable]
    assert seen[: len(passes)] == passes and relative_error(found, expected) < 1e-12
    if not norm:
        seen.clear()
        merged, _ = summed(made(MergedEngine, model, source, STREAMS), model, tasks_of(source), ONE_STEP)
        assert seen == passes and relative_error(merged, -0.1 * expected) < 1e-12


def gradient_of(model: FlatModel, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the mean loss of all these samples in one pass."""
    model.bind(model.initial)
    model.module.train()
    loss = nn.functional.cross_entropy(model.module(x), y)
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, model.parameters)])
