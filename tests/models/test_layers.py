"""Every batched form of a layer against the module itself; what is translated by hand, as a graph, and not at all."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedmpi.models.stacked import check, forms
from fedmpi.models.stacked.base import Place, Slot, Step, Workspace
from fedmpi.models.stacked.graph import GraphLayer
from fedmpi.models.stacked.image import Convolution, Geometry, ImageColumns, Maps, MaxPool, Patches
from fedmpi.models.stacked.net import translate, why_not_stackable
from fedmpi.models.stacked.pooled import EvenColumnsFirst, PooledConvolution, to_the_larger
from fedmpi.models.stacked.text import Peaks, find_peaks
from fedmpi.models.stacked.trace import trace
from torch import Tensor, autograd, nn
from torch.nn import functional

from benchmarks.engines import CASES
from fedmpi.common.streams import Streams
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.engine import BatchedEngine, why_not_side_by_side
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule
from fedmpi.models.flat import FlatModel
from fedmpi.models.text_layers import FrozenEmbedding, MaxOverTime
from tests.local.stacks import CLASSES, Source, image_network, train

STREAMS = Streams(7)
IMAGES = DataDescription((2, 13, 12), "float32", CLASSES, "image", 0, (), ())
TEXTS = DataDescription((12,), "int32", CLASSES, "text", 60, (), ())
SIZES = np.array([5, 2, 3])
"""Samples of the clients, in one batch each: of three at once, the batches of two are filled up."""

IMAGE_LAYERS: dict[str, list[nn.Module]] = {
    "dense": [nn.Flatten(), nn.Linear(312, 20), nn.ReLU(), nn.Linear(20, 9, bias=False), nn.Tanh(), nn.Sigmoid()],
    "convolutions": [
        nn.Conv2d(2, 3, (3, 5), stride=(2, 1), padding=(0, 2), bias=False), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(3, 5, 3, padding="same"), nn.Identity(),
    ],
    "means over windows": [
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.Sigmoid(),
        nn.AdaptiveAvgPool2d((3, 2)),
    ],
    "a row and a column that no window reads": [nn.Conv2d(2, 3, 2), nn.ReLU(), nn.MaxPool2d(2)],
    "pool behind padding": [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
    "pool behind strides": [nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(0, 1)), nn.MaxPool2d(2), nn.ReLU()],
    "pool without bias": [nn.Conv2d(2, 4, 3, bias=False), nn.MaxPool2d(2), nn.Tanh()],
    "eight filters": [nn.Conv2d(2, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 9, 3), nn.ReLU(), nn.MaxPool2d(2)],
    "a mean of eight filters": [
        nn.Conv2d(2, 8, (3, 2), stride=(1, 2)), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 9, 2, padding=1),
        nn.AvgPool2d(2),
    ],
    "many filters": [
        nn.Conv2d(2, 64, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 65, 2, bias=False), nn.MaxPool2d(2)
    ],
    "a mean of what ReLU leaves": [
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
    ],
    "group norm": [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.GroupNorm(1, 4, affine=False)],
    "other norms": [nn.LayerNorm(12), nn.RMSNorm([13, 12]), nn.InstanceNorm2d(2, affine=True)],
    "a norm without bias": [nn.LayerNorm([2, 13, 12], bias=False), nn.LayerNorm(12, elementwise_affine=False)],
    "groups and dilation": [nn.Conv2d(2, 4, 3, groups=2), nn.ELU(), nn.Conv2d(4, 3, 3, dilation=2, padding=1)],
    "mirrored images": [nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), nn.ReLU(), nn.Conv2d(3, 8, 1, stride=2)],
    "transposed": [nn.ConvTranspose2d(2, 3, 2, stride=2), nn.PReLU(3), nn.MaxPool2d(4, ceil_mode=True)],
}  # fmt: skip
"""Layers between an image and a dense layer."""


class Words(nn.Module):
    """Vectors of words, what `read` makes of them with some layers and parameters, and a dense layer."""

    def __init__(self, read: Callable[..., Tensor], padding: int | None = None, **own: Any):
        super().__init__()
        self.words, self.read = nn.Embedding(TEXTS.vocabulary, 8, padding_idx=padding), read
        for name, value in own.items():
            setattr(self, name, value)
        example = torch.zeros(2, 12, dtype=torch.int32)
        self.fc = nn.Linear(read(self, self.words(example), example).shape[1], CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.read(self, self.words(tokens), tokens))


def gru_begun(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    states, last = s.gru(x, s.first.expand(-1, x.shape[1], -1).contiguous())
    return torch.cat([states.mul_(2).sum(0), last[0] + last[1]], 1)


def of_lstm(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    begin = torch.zeros(4, tokens.shape[0], 3, dtype=x.dtype), torch.ones(4, tokens.size(0), 6, dtype=x.dtype)
    states, (h, c) = s.lstm(x, begin)
    return torch.cat([states.square().mean(1), h[-2] - s.other(states)[1][0][0], c[-1] + c[0]], 1)


def cells(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    h = c = x.new_zeros(x.size(0), 6)
    for t in range(3):
        h, c = s.lstm(x[:, t], (h, c))
        c = s.gru(x[:, t], s.rnn(x[:, -t], c))
    return h + c


def attended(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    empty = (tokens < 20) & (torch.arange(12) > 0)
    x, shares = s.first(x, x, x, key_padding_mask=empty, attn_mask=torch.triu(torch.ones(12, 12).bool(), 1))
    turned = x.transpose(0, 1)
    asked, _ = s.second(turned[:1], turned, turned, need_weights=False)
    return s.encoder(x).mean(1) + asked[0] + shares.square().sum((1, 2)).unsqueeze(1)


def heads(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    b, n, size = x.shape
    q, k, v = s.qkv(x).reshape(b, n, 3, 4, size // 4).permute(2, 0, 3, 1, 4)
    shares = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    short = functional.scaled_dot_product_attention(q.repeat(1, 16, 1, 1), k.repeat(1, 16, 1, 1), v.repeat(1, 16, 1, 1))
    return shares.transpose(1, 2).flatten(2).mean(1) + short[:, :4].transpose(1, 2).reshape(b, n, size).amax(1)


def parameters(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    x = torch.cat([s.token.expand(x.shape[0], -1, -1), x], 1) + s.places
    x = functional.linear(x, s.weight, s.gain.exp()) * s.gain
    x = s.shared(torch.tanh(s.shared(s.frozen(x)))) @ s.mix.softmax(1) / (1 + s.gain.square().sum())
    return x.mean(1) + torch.einsum("bi,ij->bj", x[:, 0], s.mix)


def maxima(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    found = [s.a(x).relu().max(2).values, torch.max(s.b(x), dim=-1)[0], s.pool(s.c(x)).squeeze(-1)]
    y = functional.relu(s.d(x))
    return torch.cat([*found, functional.max_pool1d(y, y.shape[2]).squeeze(2), s.e(x).max(2)[0].mul_(2)], 1)


def in_place(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    x = (functional.elu(s.linear(x), inplace=True) + 1).mul_(2)
    x += tokens.unsqueeze(2) > 20
    return nn.Softmax(dim=1)(x.relu_().sum(1).view(-1, 6))


WORDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Words(lambda s, x, t: s.a(x).tanh().mean(1), 0, a=nn.Linear(8, 6)),
    "gru": lambda: Words(
        lambda s, x, t: s.gru(x)[0].mean(1) + torch.cat([s.gru(x)[1][-2], s.gru(x)[1][0]], 1),
        gru=nn.GRU(8, 7, 2, batch_first=True, bidirectional=True),
    ),
    "gru begun": lambda: Words(gru_begun, gru=nn.GRU(8, 6, 2, bias=False), first=nn.Parameter(torch.randn(2, 1, 6))),
    "lstm": lambda: Words(
        of_lstm, 3, lstm=nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, proj_size=3),
        other=nn.LSTM(6, 3, bias=False, batch_first=True),
    ),
    "rnn": lambda: Words(lambda s, x, t: s.rnn(x)[0][:, -1], rnn=nn.RNN(8, 6, nonlinearity="relu", batch_first=True)),
    "cells": lambda: Words(cells, lstm=nn.LSTMCell(8, 6), gru=nn.GRUCell(8, 6, bias=False), rnn=nn.RNNCell(8, 6)),
    "attention": lambda: Words(
        attended, first=nn.MultiheadAttention(8, 2, batch_first=True), second=nn.MultiheadAttention(8, 4, bias=False),
        encoder=nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
    ),
    "dot products": lambda: Words(heads, qkv=nn.Linear(8, 24)),
    "parameters": lambda: Words(
        parameters, token=nn.Parameter(torch.randn(1, 1, 8)), places=nn.Parameter(torch.randn(1, 13, 8)),
        weight=nn.Parameter(torch.randn(6, 8)), gain=nn.Parameter(torch.randn(6)), mix=nn.Parameter(torch.eye(6)),
        shared=nn.Linear(6, 6), frozen=nn.Linear(6, 6).requires_grad_(False), unread=nn.Linear(2, 2),
    ),
    "maxima": lambda: Words(
        maxima, a=nn.Conv1d(8, 3, 3), b=nn.Conv1d(8, 17, 2, bias=False), c=nn.Conv1d(8, 3, 1), d=nn.Conv1d(8, 4, 2),
        e=nn.Conv1d(8, 2, 2, padding=1), pool=nn.AdaptiveMaxPool1d(1),
    ),
    "max over time": lambda: Words(lambda s, x, t: s.max(x), max=MaxOverTime(8, 5, (1, 2, 3))),
    "texts": lambda: Words(
        lambda s, x, t: s.c(s.b(s.a(x.transpose(1, 2)).relu())).sum(2), a=nn.Conv1d(8, 6, 4, padding="same"),
        b=nn.Conv1d(6, 4, 3, stride=2, padding=2, bias=False), c=nn.Conv1d(4, 4, 2, groups=2, dilation=2),
    ),
    "two tables": lambda: Words(
        lambda s, x, t: (x * s.moods(t).sigmoid() + s.places(torch.arange(12))).amax(1) + s.bag(t),
        moods=nn.Embedding(60, 8, padding_idx=0), places=nn.Embedding(12, 8), bag=nn.EmbeddingBag(60, 8),
    ),
    "frozen vectors": lambda: Words(
        lambda s, x, t: torch.cat([x.detach(), s.known(t)], 2).mean(1), known=FrozenEmbedding(torch.randn(60, 4))
    ),
    "bilinear": lambda: Words(lambda s, x, t: s.pairs(x[:, 1:], x[:, :-1]).sum(1), pairs=nn.Bilinear(8, 8, 6)),
    "in place": lambda: Words(in_place, linear=nn.Linear(8, 6)),
    "one bias frozen": lambda: Words(
        lambda s, x, t: s.gru(x)[0][:, -1] + s.a(x[:, 0]), gru=nn.GRU(8, 6, batch_first=True), a=nn.Linear(8, 6)
    ),
}  # fmt: skip
"""Networks that read texts."""


def made(name: str) -> tuple[nn.Module, DataDescription]:
    torch.manual_seed(3)
    if name in IMAGE_LAYERS:
        return image_network(IMAGE_LAYERS[name], IMAGES).double(), IMAGES
    module = WORDS[name]().double()
    if name == "one bias frozen":
        module.gru.bias_ih_l0.requires_grad_(False)
        module.a.bias.requires_grad_(False)
    return module, TEXTS


def own_update(module: nn.Module, x: Tensor, y: Tensor, rule: LocalRule) -> Tensor:
    """What two steps of SGD on all samples change, by torch alone."""
    module = copy.deepcopy(module).train()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    start = torch.cat([one.detach().flatten() for one in trained])
    for _ in range(2):
        loss = functional.cross_entropy(module(x), y)
        for one, gradient in zip(trained, autograd.grad(loss, trained, allow_unused=True), strict=True):
            if gradient is not None:
                one.data.sub_(gradient, alpha=rule.lr)
    return torch.cat([one.detach().flatten() for one in trained]) - start


@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:.*nested_tensor")
@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("name", [*IMAGE_LAYERS, *WORDS])
def test_every_form_trains_clients_as_the_module_itself_does(name: str, together: int):
    module, description = made(name)
    rule = LocalRule(lr=0.1, epochs=2, batch_size=None)
    model, source = FlatModel(copy.deepcopy(module)), Source(description, SIZES, torch.float64)
    found: dict[int, Tensor] = {}
    engine = BatchedEngine(model, source, STREAMS, observe=lambda k, delta: found.setdefault(k, delta), chunk=together)
    train(engine, [ClientTask(client, None, 1 / 3) for client in range(3)], model.initial, rule)
    for client in range(3):
        expected = own_update(module, *source.load(client), rule)
        assert expected.norm() > 1e-4
        assert float((found[client][: len(expected)] - expected).norm() / expected.norm()) < 1e-10


def test_buffers_that_are_averaged_are_those_of_the_round():
    torch.manual_seed(0)
    module = Words(lambda s, x, t: x.mean(1))
    module.read = lambda s, x, t: (x.mean(1) - s.mean) * s.scale
    module.register_buffer("mean", torch.randn(8))
    module.register_buffer("scale", torch.full([8], 2.0), persistent=False)
    model, source = FlatModel(module.double()), Source(TEXTS, SIZES, torch.float64)
    tasks, rule = [ClientTask(client, None, 1 / 3) for client in range(3)], LocalRule(lr=0.1, batch_size=2)
    engines = BatchedEngine(model, source, STREAMS), SequentialEngine(model, source, STREAMS)
    for factor in (1, 3):
        start = model.initial * factor
        found, expected = (train(engine, tasks, start, rule)[0] for engine in engines)
        assert float((found - expected).norm() / (expected - start).norm()) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_the_networks_of_the_benchmark_are_batched(name: str):
    assert why_not_side_by_side(FlatModel(CASES[name].make()), CASES[name].description) is None


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.BatchNorm2d(2), "BatchNorm2d has no batched form"),
        (nn.BatchNorm2d(2, track_running_stats=False), "influence one another"),
        (lambda x: x if x.sum() > 0 else -x, "cannot trace"),
        (lambda x: x / (1 if x.shape[0] > 2 else 2), "cannot trace"),
        (lambda x: x / len(x), "cannot trace"),
        (lambda x: x - x.mean(0), "influence one another"),
        (lambda x: x.flatten(1).T @ x.flatten(1), "one row of outputs"),
        (lambda x: functional.alpha_dropout(x, 0.5, True), "influence one another"),
        (lambda x: x[torch.arange(x.shape[0]).flip(0)], "influence one another"),
        (lambda x: (x.relu_(), x)[1], "influence one another"),
        (lambda x: x * torch.ones(1).item() + x.amax().item(), "a number of a tensor's values"),
        (lambda x: Doubling.apply(x), "a backward pass of its own"),
    ],
)
def test_what_has_no_batched_form_is_refused_with_the_reason(module: Any, reason: str):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = module if isinstance(module, nn.Module) else nn.Identity()
            self.first, self.fc = nn.Conv2d(2, 2, 1), nn.Linear(312, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(self.first(x))
            return self.fc((x if isinstance(module, nn.Module) else module(x)).flatten(1))

    assert re.search(reason, str(why_not_stackable(Network(), IMAGES)))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e9, 1e9) * 2


def test_hooks_are_refused():
    hooked = nn.Sequential(nn.Flatten(), nn.Linear(312, 3))
    hooked[1].register_forward_hook(lambda *_: None)
    assert "hooks" in str(why_not_stackable(hooked, IMAGES))


@pytest.mark.parametrize("part", [0, 1], ids=["outputs", "gradients"])
def test_a_form_that_is_off_is_refused(part: int, monkeypatch: pytest.MonkeyPatch):
    found = check._stacked

    def off(*given: Any) -> Any:
        pairs = found(*given)
        pairs[1][part].mul_(1.01)
        return pairs

    module, description = made("dense")
    assert why_not_stackable(module, description) is None
    monkeypatch.setattr(check, "_stacked", off)
    assert f"gives other {('outputs', 'gradients')[part]}" in str(why_not_stackable(module, description))


def test_a_translation_leaves_the_module_and_the_generators_as_they_were():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(330, 5))
    before, state = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    assert why_not_stackable(module.eval(), IMAGES) is None
    assert not module.training and module[2].p == 0.5
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert vars(module).keys() == vars(nn.Sequential()).keys()


def test_every_parameter_of_a_stack_starts_at_a_multiple_of_64_bytes_and_none_overlap():
    net = translate(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(330, 7), nn.Linear(7, 5)), IMAGES)
    ends = [0] + [slot.start + slot.size for slot in net.slots]
    assert all(slot.start % 16 == 0 and slot.start >= end for slot, end in zip(net.slots, ends, strict=False))
    assert [slot.offset for slot in net.slots] == [0, 54, 57, 2367, 2374, 2409]
    assert net.size == 2414


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.other, self.fc = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 1), nn.Linear(75, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv(x)), 2)
        x = functional.adaptive_avg_pool2d(torch.tanh(self.other(x)), (5, 5))
        return self.fc(x.view(x.size(0), -1))


def test_layers_one_after_another_have_the_forms_written_by_hand_however_they_are_called():
    pools = nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 3, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(5)
    modules = nn.Sequential(*pools, nn.Flatten(), nn.Linear(75, 5))
    assert translate(Functional(), IMAGES).layers == translate(modules, IMAGES).layers
    assert isinstance(translate(modules, IMAGES).layers[0], ImageColumns)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")],
        [nn.Conv2d(2, 60, 3, padding=1), nn.ReLU(), nn.Conv2d(60, 2, 4)],
        [nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Sigmoid()],
    ],
)
def test_other_layers_are_left_to_the_graph(layers: list[nn.Module], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedmpi.models.stacked.chain.LARGEST_UNFOLDED", 50_000)
    assert isinstance(translate(image_network(layers, IMAGES), IMAGES).layers[0], GraphLayer)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [((3, 3), (1, 1), (0, 0)), ((5, 2), (2, 3), (0, 0)), ((3, 5), (2, 1), (1, 2))]
)
def test_unfolding_by_the_index_is_torchs_unfolding(kernel: Any, stride: Any, padding: Any):
    geometry = Geometry((2, 9, 8), kernel, stride, padding)
    image = torch.randn(1, 2, 9, 8)
    padded = torch.cat([image.reshape(-1), torch.zeros(1)])
    expected = nn.functional.unfold(image, kernel, stride=stride, padding=padding)
    assert torch.equal(padded[geometry.unfold_index()].view(expected.shape), expected)
    assert expected.shape[1:] == (geometry.patch, math.prod(geometry.output))


def pooled(filters: int, *layers: nn.Module) -> PooledConvolution:
    net = translate(image_network(layers or [nn.Conv2d(2, filters, (3, 4)), nn.MaxPool2d(2)], IMAGES), IMAGES)
    return next(layer for layer in net.layers if isinstance(layer, PooledConvolution))


@pytest.mark.parametrize(
    ("filters", "copies", "output", "patch"),
    [
        (7, (2, 2), (5, 4), 2 * 4 * 5),
        (8, (1, 2), (10, 4), 2 * 3 * 5),
        (63, (1, 2), (10, 4), 2 * 3 * 5),
        (64, (1, 1), (10, 8), 2 * 3 * 4),
    ],
)
def test_filters_are_written_for_the_outputs_of_a_window(filters: int, copies: Any, output: Any, patch: int):
    """And only outputs that a window reads are made."""
    layer = pooled(filters)
    assert (layer.copies, layer.patches.output, layer.patches.patch) == (copies, output, patch)


def test_many_filters_have_even_columns_before_odd_ones():
    split = EvenColumnsFirst((1, 1, 5), (1, 1), (1, 1), (0, 0))
    assert split.output == (1, 4)
    assert torch.arange(5.0)[split.unfold_index()].tolist() == [0, 2, 1, 3]


def test_a_gradient_goes_to_the_larger_value_and_of_equal_ones_to_the_first():
    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 2.0, -1.0])
    to_the_larger(torch.tensor([10.0, 20.0, 30.0]), first, second)
    assert (first.tolist(), second.tolist()) == ([0, 20, 30], [10, 0, 0])


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(3), nn.MaxPool2d(2, stride=1), nn.MaxPool2d((2, 1)), nn.MaxPool2d(2, padding=1)]
)
def test_other_windows_are_pooled_by_torch(pool: nn.Module):
    layers = translate(image_network([nn.Conv2d(2, 3, 3), nn.ReLU(), pool], IMAGES), IMAGES).layers
    assert [type(layer) for layer in layers if isinstance(layer, Convolution | MaxPool)] == [Convolution, MaxPool]


class Stack:
    """Values of two clients."""

    step = Step(1, 0)

    def __init__(self, size: int):
        self.values = torch.zeros(2, size)

    def value(self, slot: Slot, *shape: int) -> Tensor:
        return slot.of_stack(self.values, shape)

    target = value


def test_patches_are_filled_up_to_whole_blocks_by_those_of_the_next_client():
    workspace, geometry = Workspace(torch.float32, torch.device("cpu")), Geometry((1, 4, 3), (3, 3), (1, 1), (0, 0))
    x = workspace.take("x", 2, 12, 5, guard=5)
    patches = Patches(Maps(geometry), Place(2, 5, workspace, Stack(0)), x)
    patches.of_clients.copy_(torch.arange(1.0, 2 * 9 * 10 + 1).view(2, 9, 10))
    assert torch.equal(patches.filled[:, :9], patches.of_clients)
    assert torch.equal(patches.filled[0, 9:], patches.of_clients[1, :7])
    assert patches.filled.shape == (2, 16, 10) and not patches.filled[1, 9:].any()


@pytest.mark.parametrize("filters", [7, 63, 64])
def test_a_sample_takes_the_memory_that_is_said(filters: int):
    layer = pooled(0, nn.Conv2d(2, 8, 1), nn.Conv2d(8, filters, 3), nn.MaxPool2d(2))
    workspace, rows = Workspace(torch.float32, torch.device("cpu")), 100
    x = workspace.take("x", 2, layer.geometry.units, rows, guard=rows)
    layer.bind(Place(2, rows, workspace, Stack(10_000)), x)
    taken = sum(held.numel() for held in workspace._storage.values()) / (2 * rows)
    assert 0.8 * layer.values < taken < 1.05 * layer.values  # the filters themselves are no part of it


READERS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "max": (lambda y: y.max(2)[0], True),
    "max_pool1d": (lambda y: functional.max_pool1d(y, 11), True),
    "dilation": (nn.MaxPool1d(6, stride=20, padding=0, dilation=2), False),
    "layers": (nn.Sequential(nn.ReLU(), nn.MaxPool1d(11)), True),
    "adaptive": (lambda y: functional.adaptive_max_pool1d(functional.relu(y), 1), True),
    "a last position left out": (nn.MaxPool1d(10), False),
    "places": (lambda y: y.max(2)[1] * 1.0, False),
    "both": (lambda y: torch.stack(y.max(2), 0)[0], False),
    "several windows": (lambda y: functional.max_pool1d(y, 24, 1, 12)[:, :, 0], False),
    "over filters": (lambda y: y.max(1)[0], False),
}


@pytest.mark.parametrize("name", READERS)
def test_a_maximum_over_all_positions_is_found_where_nothing_else_is_read(name: str):
    """Of filters over two words of twelve: eleven positions."""
    read, found = READERS[name]
    module = Words(lambda s, x, t: read(s.conv(x.transpose(1, 2))).flatten(1), conv=nn.Conv1d(8, 3, 2))
    if isinstance(read, nn.Module):
        module.reader = read
    assert [str(node.target) for node in find_peaks(trace(module, module, TEXTS))[0]] == ["conv"] * found


@pytest.mark.parametrize(("filters", "patches"), [(8, 0), (9, 1)])
def test_many_filters_of_short_vectors_go_back_patch_by_patch(filters: int, patches: int, monkeypatch: Any):
    generator = torch.Generator().manual_seed(6)
    at = Peaks(clients=2, rows=3, length=5, width=2, filters=filters, device=torch.device("cpu"))
    where = torch.randint(0, 4, (2, 3, filters), generator=generator)
    gradient = torch.randn(2, 3, filters, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, filters, 2 * 4, generator=generator, dtype=torch.float64)
    calls, by_patch = [], Peaks._add_patch_gradients
    monkeypatch.setattr(Peaks, "_add_patch_gradients", lambda *given: calls.append(given) or by_patch(*given))
    expected = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    for client, row, one in np.ndindex(2, 3, filters):
        place = int(where[client, row, one])
        expected[client, row, place : place + 2] += gradient[client, row, one] * weight[client, one].view(2, 4)
    into = torch.ones_like(expected)
    at.of_words(where, gradient, weight, into, gradient.new_empty)
    assert torch.allclose(into, expected, rtol=1e-12)
    assert len(calls) == patches


def test_a_layer_of_ones_own_is_registered_as_the_page_says():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text()
    [snippet] = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "register_layer" in one]
    found: dict[str, Any] = {}
    exec(snippet, found)
    module = nn.Sequential(nn.Flatten(), nn.Linear(312, 6), found["Gate"](6), nn.Linear(6, 5)).double()
    assert why_not_stackable(module, IMAGES) is None
    assert forms.LAYERS.pop(found["Gate"])
