"""Networks with batched forms, and networks without: layers between an image and classes, readers of texts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.data.schema import DataDescription
from fedmpi.models.lora import LoraLinear
from fedmpi.models.text_models import FrozenEmbedding, MaxOverTime

IMAGES = DataDescription((2, 13, 12), "float32", 5, "image", 0, (), ())
TEXTS = DataDescription((12,), "int32", 5, "text", 60, (), ())

CHAINS: dict[str, list[nn.Module]] = {
    "dense": [nn.Flatten(), nn.Linear(312, 20), nn.ReLU(), nn.Linear(20, 9, bias=False), nn.Tanh(), nn.Sigmoid()],
    "wide": [nn.Flatten(), nn.Linear(312, 300), nn.ReLU(), nn.Dropout(0.4), nn.Linear(300, 9)],
    "wide without bias": [nn.Flatten(), nn.Linear(312, 260, bias=False), nn.Tanh()],
    "convolutions": [
        nn.Conv2d(2, 3, (3, 5), stride=(2, 1), padding=(0, 2), bias=False), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(3, 5, 3, padding="same"), nn.Identity(), nn.Dropout(0.3),
    ],
    "means": [
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.Sigmoid(),
        nn.AdaptiveAvgPool2d([3, 2]),
    ],
    "odd sizes": [nn.Conv2d(2, 3, 2), nn.ReLU(), nn.MaxPool2d([2, 2]), nn.ReLU(), nn.Dropout(0.25), nn.Tanh()],
    "pool after padding": [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
    "pool after strides": [nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(0, 1)), nn.MaxPool2d(2), nn.ReLU()],
    "pool without bias": [nn.Conv2d(2, 4, 3, bias=False), nn.MaxPool2d(2), nn.Tanh()],
    "eight filters": [nn.Conv2d(2, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 9, 3), nn.ReLU(), nn.MaxPool2d(2)],
    "means of eight filters": [
        nn.Conv2d(2, 8, (3, 2), stride=(1, 2)), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 9, 2, padding=1),
        nn.AvgPool2d(2),
    ],
    "many filters": [
        nn.Conv2d(2, 64, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 65, 2, bias=False), nn.MaxPool2d(2)
    ],
}  # fmt: skip


class Network(nn.Module):
    """An image's two dense layers, or a text's word vectors, with `read` and further layers in between."""

    def __init__(self, read: Callable[..., Tensor], text: bool = True, **parts: Any):
        super().__init__()
        padding = parts.pop("padding", None)
        self.read, self.text, self.drop = read, text, nn.Dropout(0.3)
        self.first: nn.Module = nn.Embedding(60, 8, padding_idx=padding) if text else nn.Linear(312, 12)
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter) or not isinstance(part, Tensor):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)
        self.fc = nn.Linear(parts.pop("width", 8) if text else 12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.read(self, self.first(x if self.text else x.flatten(1)), x))


def time_first(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    states, last = s.gru(x.transpose(0, 1))
    return torch.cat([states.transpose(0, 1)[:, -1].mul_(2), last[0] + last[1]], 1)


def of_lstm(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    states, (h, c) = s.lstm(x)
    return torch.cat([states.square().mean(1)[:, :2] + h[-2][:, :2], c[-1]], 1) + s.other(states)[1][0][0][:, :1]


def in_place(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    x = (functional.elu(s.linear(x), inplace=True) + 1).mul_(2)
    x += tokens.unsqueeze(2) > 20
    return nn.Softmax(dim=1)(x.relu_().sum(1).view(-1, 8))


def dropped_twice(s: Any, h: Tensor, x: Tensor) -> Tensor:
    h = torch.tanh(s.drop(h))
    return s.drop(s.wide(h.view(-1, 3, 2, 2)).flatten(1) + s.drop(s.hidden(h)) + s.hidden(h))


def heads(s: Any, x: Tensor, tokens: Tensor) -> Tensor:
    b, n, size = x.shape
    q, k, v = s.qkv(x).reshape(b, n, 3, 4, size // 4).permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).mean(1)


GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Network(lambda s, x, t: s.a(x).tanh().mean(1), padding=0, a=nn.Linear(8, 8)),
    "gru": lambda: Network(
        lambda s, x, t: s.gru(x)[0].mean(1) + torch.cat([s.gru(x)[1][-2], s.gru(x)[1][0]], 1),
        gru=nn.GRU(8, 4, 2, batch_first=True, bidirectional=True),
    ),
    "gru, time first": lambda: Network(time_first, gru=nn.GRU(8, 4, 2, bias=False)),
    "lstm": lambda: Network(
        of_lstm, padding=3, lstm=nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, proj_size=3),
        other=nn.LSTM(6, 3, bias=False, batch_first=True),
    ),
    "attention": lambda: Network(heads, qkv=nn.Linear(8, 24)),
    "max over time": lambda: Network(lambda s, x, t: s.max(x), max=MaxOverTime(8, 5, (1, 2, 3)), width=15),
    "convolutions": lambda: Network(
        lambda s, x, t: s.b(s.drop(s.a(x.transpose(1, 2)).relu())).amax(2), a=nn.Conv1d(8, 6, 4, padding="same"),
        b=nn.Conv1d(6, 8, 3, stride=2, padding=2, bias=False),
    ),
    "two tables": lambda: Network(
        lambda s, x, t: (x * s.moods(t).sigmoid() + s.places(t * 0 + torch.arange(12, device=t.device))).amax(1),
        moods=nn.Embedding(60, 8, padding_idx=0), places=nn.Embedding(12, 8),
    ),
    "frozen vectors": lambda: Network(
        lambda s, x, t: torch.cat([x.detach(), s.known(t)], 2).mean(1), known=FrozenEmbedding(torch.randn(60, 4)),
        width=12,
    ),
    "frozen layer": lambda: Network(
        lambda s, x, t: s.a(s.frozen(x)).mean(1), a=nn.Linear(8, 8), frozen=nn.Linear(8, 8).requires_grad_(False)
    ),
    "lora": lambda: Network(
        lambda s, x, t: s.a(x).mean(1), a=LoraLinear(nn.Linear(8, 8).requires_grad_(False), 2, 1.0)
    ),
    "in place": lambda: Network(in_place, linear=nn.Linear(8, 8)),
    "buffer": lambda: Network(lambda s, x, t: (x.mean(1) - s.mean) * 2, mean=torch.linspace(-1, 1, 8)),
    "dropout at several places": lambda: Network(
        dropped_twice, False, hidden=nn.Linear(12, 12), wide=nn.Sequential(nn.Identity(), nn.Dropout2d(0.1))
    ),
    "shared layer": lambda: Network(lambda s, h, x: s.a(s.a(h).relu()), False, a=nn.Linear(12, 12)),
}  # fmt: skip
"""Networks that are no chains of layers."""


class Straight(torch.autograd.Function):
    """ReLU that passes the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return functional.relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def counting(s: Any, h: Tensor, x: Tensor) -> Tensor:
    s.count.add_(1)
    return h * s.count


def without_gradient(s: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = s.gate(h).mean(1, keepdim=True)
    return h * (1 + gate)


def in_time(s: Any, h: Tensor, x: Tensor) -> Tensor:
    h = s.drop(h.view(-1, 4, 3).transpose(0, 1).reshape(-1, 3)).view(4, -1, 3)
    return h.transpose(0, 1).flatten(1)


def half_frozen(layer: nn.Linear) -> nn.Linear:
    layer.bias.requires_grad_(False)
    return layer


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a first state": lambda: Network(
        lambda s, h, x: s.gru(h.view(-1, 3, 4), h.view(-1, 1, 12).transpose(0, 1))[0][:, -1],
        False,
        gru=nn.GRU(4, 12, batch_first=True),
    ),
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(312, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
    "layers without a form": lambda: Network(lambda s, h, x: s.norm(h), False, norm=nn.LayerNorm(12)),
    "a frozen bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(312, 8), half_frozen(nn.Linear(8, 5))),
    "a parameter by itself": lambda: Network(lambda s, h, x: h * s.gain, False, gain=nn.Parameter(torch.ones(12))),
    "a weight read again": lambda: Network(lambda s, h, x: h @ s.fc.weight.T @ s.fc.weight, False),
    "values decide": lambda: Network(lambda s, h, x: h if h.sum() > 0 else -h, False),
    "mean over samples": lambda: Network(lambda s, h, x: h - h.mean(0), False),
    "custom gradient": lambda: Network(lambda s, h, x: Straight.apply(h - 0.1), False),
    "no gradient": lambda: Network(without_gradient, False, gate=nn.Linear(12, 12)),
    "random numbers": lambda: Network(lambda s, h, x: functional.alpha_dropout(h, 0.5, True), False),
    "counted passes": lambda: Network(counting, False, count=torch.tensor(0)),
    "dropout in time": lambda: Network(in_time, False),
    "large convolution": lambda: nn.Sequential(
        nn.Conv2d(2, 300, 1), nn.Conv2d(300, 2, 5), nn.Flatten(), nn.Linear(144, 5)
    ),
}
"""Networks that the sequential engine must train."""


def made(name: str) -> tuple[nn.Module, DataDescription]:
    """Build a network in float64, with values that do not depend on what was imported."""
    torch.manual_seed(3)
    if name in REFUSED:
        return REFUSED[name]().double(), IMAGES
    if name in CHAINS:
        layers = nn.Sequential(*copy.deepcopy(CHAINS[name]))
        for layer in layers:
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.reset_parameters()
        width = nn.Sequential(layers, nn.Flatten())(torch.zeros(1, 2, 13, 12)).shape[1]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 5)).double(), IMAGES
    module = (GRAPHS[name.removeprefix("graph ")])()
    return module.double(), TEXTS if getattr(module, "text", True) else IMAGES
