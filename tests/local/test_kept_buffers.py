"""Float buffers that a forward pass only reads (masks, positions, means of images) are no statistics: clients train
side by side, or merged, with the values that travel.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmpi.common.streams import Streams
from fedmpi.local.batched.engine import BatchedEngine, why_not_side_by_side
from fedmpi.local.batched.probes import BatchedProbe
from fedmpi.local.merged import MergedEngine
from fedmpi.local.probes import client_gradients, gradient_blocks
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.stacks import CLASSES, IMAGES, TEXTS, Source, ragged_sizes, relative_difference, tasks_for, train

STREAMS = Streams(7)
SIZES = ragged_sizes(6, 20)
RULE = LocalRule(lr=0.1, epochs=2, batch_size=7)


class Causal(nn.Module):
    """Attention over texts with its mask and the positions' waves in buffers."""

    def __init__(self):
        super().__init__()
        self.words, self.qkv, self.fc = nn.Embedding(60, 8), nn.Linear(8, 24), nn.Linear(8, CLASSES)
        self.register_buffer("mask", torch.tril(torch.ones(1, 12, 12)))
        self.register_buffer("waves", torch.outer(torch.arange(12.0), torch.linspace(0, 1, 8)).sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.waves[: tokens.size(1)]
        q, k, v = self.qkv(x).split(8, dim=2)
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(self.mask[:, :12, :12] == 0, float("-inf"))
        return self.fc((x + scores.softmax(-1) @ v).mean(1))


class Forbidding(nn.Module):
    """torch's own encoder under its own mask, of which nothing can be averaged: most of it is −∞."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8), nn.Linear(8, CLASSES)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(12))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.encoder(self.words(tokens), mask=self.mask, is_causal=True).mean(1))


MODULES = {"causal": (TEXTS, Causal)}


def prepared(name: str) -> tuple[FlatModel, Source, Tensor]:
    """The model, its clients, and values to start from whose buffers are others than the module's first ones."""
    description, make = MODULES[name]
    torch.manual_seed(1)
    model = FlatModel(make().double())
    assert why_not_side_by_side(model, description) is None
    start = model.initial.clone()
    start[model.trainable :] += 0.25 * (start[model.trainable :] != 0)
    return model, Source(description, SIZES, torch.float64), start


@pytest.mark.parametrize("name", MODULES)
def test_clients_side_by_side_read_the_buffers_that_travel_and_leave_them(name: str):
    model, source, start = prepared(name)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks_for(SIZES), start, RULE)
    found, _ = train(BatchedEngine(model, source, STREAMS), tasks_for(SIZES), start, RULE)
    unmoved, _ = train(BatchedEngine(model, source, STREAMS), tasks_for(SIZES), model.initial, RULE)
    assert relative_difference(found, expected) < 1e-12
    assert torch.equal(found[model.trainable :], start[model.trainable :])
    assert relative_difference(unmoved[: model.trainable], expected[: model.trainable]) > 1e-4, "buffers must count"


@pytest.mark.parametrize("name", MODULES)
def test_every_clients_own_update_has_zeros_for_buffers(name: str):
    model, source, start = prepared(name)
    seen: dict[str, dict[int, Tensor]] = {"sequential": {}, "batched": {}}
    for engine in (SequentialEngine(model, source, STREAMS), BatchedEngine(model, source, STREAMS)):
        notes = seen[engine.name]
        engine.observe = lambda client, delta, notes=notes: notes.setdefault(client, delta.clone())
        train(engine, tasks_for(SIZES), start, RULE)
    assert seen["batched"].keys() == seen["sequential"].keys()
    for client, delta in seen["batched"].items():
        assert delta.shape == (model.size,)
        assert not delta[model.trainable :].any()
        assert relative_difference(delta, seen["sequential"][client]) < 1e-10


@pytest.mark.parametrize("name", MODULES)
def test_gradients_side_by_side_are_those_at_the_buffers_given(name: str):
    model, source, start = prepared(name)
    probe, clients = BatchedProbe(model, source), range(len(SIZES))
    blocks = gradient_blocks(source, model, clients, start, "full", STREAMS, 2, block_bytes=1, batched=probe)
    found = {}
    for members, gradients in blocks:
        model.bind(model.initial)  # what others do with the model between two blocks
        found |= dict(zip(members.tolist(), gradients, strict=True))
    for client, gradient in client_gradients(source, model, clients, start, "full", STREAMS, 2):
        assert relative_difference(found[client], gradient) < 1e-12


@pytest.mark.parametrize("name", MODULES)
def test_single_steps_are_merged(name: str):
    model, source, start = prepared(name)
    rule, tasks = LocalRule(lr=0.1, batch_size=None), tasks_for(SIZES)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks, start, rule)
    found, _ = train(MergedEngine(model, source, STREAMS), tasks, start, rule)
    assert relative_difference(found, expected) < 1e-12


def test_a_mask_of_minus_infinity_makes_no_update_infinite():
    torch.manual_seed(1)
    model = FlatModel(Forbidding().double())
    source, tasks = Source(TEXTS, SIZES, torch.float64), tasks_for(SIZES)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks, model.initial, RULE)
    found, _ = train(BatchedEngine(model, source, STREAMS), tasks, model.initial, RULE)
    assert relative_difference(expected, model.initial) > 1e-4
    assert relative_difference(found, expected) < 1e-12


class Statistics(nn.Module):
    """A mean over the batches, changed in place or replaced, or those that instance norm keeps."""

    def __init__(self, how: str):
        super().__init__()
        self.fc, self.how = nn.Linear(196, CLASSES), how
        if how == "instance norm":
            self.norm = nn.InstanceNorm2d(1, track_running_stats=True)
        else:
            self.register_buffer("mean", torch.zeros(196))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "instance norm":
            return self.fc(self.norm(x).flatten(1))
        x = x.flatten(1)
        if self.how == "replaced":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        else:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.fc(x if self.how == "only kept" else x - self.mean)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("how", ["replaced", "in place", "only kept", "instance norm"])
def test_statistics_are_left_to_one_client_after_the_other(how: str, bound: bool):
    model = FlatModel(Statistics(how).double())
    if bound:  # where a run asks, parameters and buffers lie in one vector
        model.bind(model.initial.clone())
    assert "keeps something" in str(why_not_side_by_side(model, IMAGES))
    assert "buffers" in str(MergedEngine(model, Source(IMAGES, np.array([3])), STREAMS).model_refusal())
