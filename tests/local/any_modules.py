"""Models as users write them: classes with a forward pass of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.models.resnet import ResidualBlock
from tests.local.further_modules import FURTHER
from tests.local.stacks import CLASSES, COLOURED, IMAGES, TEXTS


class LeNet(nn.Module):
    """In the style of the tutorials: 1 × 14 × 14."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 20), nn.Linear(20, CLASSES)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), (2, 2))
        x = x.view(x.size(0), -1)
        return self.fc2(self.drop(functional.relu(self.fc1(x))))


class Classic(nn.Module):
    """Means over windows and squashing, layer after layer."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3, padding=1)
        self.pool, self.fc = nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.Linear(8 * 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.avg_pool2d(torch.tanh(self.conv1(x)), (2, 1), padding=(1, 0))
        x = self.pool(torch.sigmoid(self.conv2(x)))
        return self.fc(functional.adaptive_avg_pool2d(x, (2, 1)).flatten(1))


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(196, 20), nn.Linear(20, 16, bias=False), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = torch.relu(self.fc1(x))
        x = self.fc2(x).relu()
        return functional.log_softmax(self.fc3(x), dim=1)


class VGGLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((3, 3))
        self.classifier = nn.Sequential(nn.Linear(72, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.block1, self.block2 = ResidualBlock(8, 8, 1, 2), ResidualBlock(8, 12, 2, 4)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.block1(functional.relu(self.stem(x))))
        return self.fc(x.mean((2, 3)))


class Inverted(nn.Module):
    """Depthwise convolution, strides, dilation, 'same' with an even kernel, instance norm, several activations."""

    def __init__(self):
        super().__init__()
        self.expand, self.depth = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, stride=(2, 1), padding=1, groups=6)
        self.norm = nn.InstanceNorm2d(6, affine=True)
        self.wide, self.even = nn.Conv2d(6, 4, 3, dilation=2, padding=(2, 1)), nn.Conv2d(4, 4, 2, padding="same")
        self.grouped = nn.Conv2d(4, 4, 2, padding="same", groups=2)
        self.fc = nn.Linear(8 * 8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.norm(self.depth(functional.gelu(self.expand(x)))))
        x = functional.leaky_relu(self.even(functional.elu(self.wide(x))), 0.1)
        a, b = functional.avg_pool2d(x, (1, 2)), functional.adaptive_max_pool2d(torch.tanh(self.grouped(x)), (8, 7))
        x = torch.cat((a.mean(1), b.amax(1)), dim=2).sum(2)
        return self.fc(torch.cat([x, x.square(), x.abs(), x.sigmoid(), *[x * scale for scale in range(4)]], 1))


class GRUClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 8, padding_idx=0)
        self.gru = nn.GRU(8, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(14, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        _, hidden = self.gru(self.embedding(tokens))
        return self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1))


class LSTMClassifier(nn.Module):
    """Time first, states handed in, the last state of all layers read."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2)
        self.fc = nn.Linear(18, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embedding(tokens.long()).permute(1, 0, 2)
        h0 = torch.zeros(2, tokens.shape[0], 6, dtype=words.dtype)
        out, (h, c) = self.lstm(words, (h0, torch.ones_like(h0)))
        return self.fc(torch.cat((out[-1], h[0], c[-1]), 1))


class Cells(nn.Module):
    """A loop over time in Python."""

    def __init__(self):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(60, 5), nn.Linear(6, CLASSES)
        self.cell, self.gate = nn.LSTMCell(5, 6), nn.GRUCell(5, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embedding(tokens)
        h = c = words.new_zeros(words.size(0), 6)
        g = torch.zeros(len(h.T), dtype=h.dtype) + h
        for t in range(words.size(1)):
            h, c = self.cell(words[:, t], (h, c))
            g = self.gate(words[:, t], g)
        return self.fc(h + g)


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 8)
        self.convs = nn.ModuleList([nn.Conv1d(8, 5, width) for width in (2, 3)])
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(10, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        found = [functional.relu(conv(x)) for conv in self.convs]
        pooled = [functional.max_pool1d(one, one.shape[2]).squeeze(2) for one in found]
        return self.fc(self.dropout(torch.cat(pooled, 1)))


class Peaks(nn.Module):
    """Maxima over a text in all the ways to write them; a convolution read twice, one called twice, one frozen."""

    def __init__(self):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(60, 8), nn.Linear(3 + 4 + 3 + 3 + 3 + 2 + 2 + 2 + 1, CLASSES)
        self.a, self.b, self.c = nn.Conv1d(8, 3, 3), nn.Conv1d(8, 4, 2, bias=False), nn.Conv1d(8, 3, 1)
        self.d, self.e, self.f = nn.Conv1d(8, 3, 2), nn.Conv1d(8, 2, 2), nn.Conv1d(8, 2, 2, padding=1)
        self.g = nn.Conv1d(8, 2, 2).requires_grad_(False)
        self.pool = nn.AdaptiveMaxPool1d(1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        d = self.d(x)
        found = [self.a(x).relu().max(2).values, torch.max(self.b(x), dim=-1)[0], self.pool(self.c(x)).squeeze(-1)]
        found += [d.max(2)[0], d.mean(2), functional.relu(self.e(x)).max(2)[0], self.e(x).max(2)[0]]
        found += [self.f(x).max(2)[0] * self.g(x).max(2)[0].mean(1, keepdim=True)]
        found += [functional.max_pool1d(self.g(x), 3).amax(2)[:, :1]]
        return self.fc(torch.cat(found, 1))


class Attention(nn.Module):
    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        b, n, size = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        weights = ((q @ k.transpose(-2, -1)) / math.sqrt(size // self.heads)).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, size))


class TinyViT(nn.Module):
    """Patches, a class token, learned positions, blocks with layer norm."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8) * 0.1)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8), nn.RMSNorm(8)])
        self.attention = Attention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x)[:, 0])


class Encoder(nn.Module):
    """torch's own transformer layer, an embedding of positions, a mean over the words that are no padding."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(60, 8), nn.Embedding(12, 8, padding_idx=3)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = self.layers(x)
        present = (tokens != 0).unsqueeze(-1).to(x.dtype)
        return self.fc((x * present).sum(1) / present.sum(1).clamp(min=1))


class Masked(nn.Module):
    """torch's attention with masks of padding and of places, its weights read; one word asks about the others."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8), nn.Linear(8, CLASSES)
        self.first, self.second = nn.MultiheadAttention(8, 2, batch_first=True), nn.MultiheadAttention(8, 4, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        later = torch.triu(torch.ones(12, 12, dtype=torch.bool), 1)
        empty = (tokens < 20) & (torch.arange(12) > 0)
        x, chances = self.first(x, x, x, key_padding_mask=empty, attn_mask=later)
        query, keys = x[:, -1:].transpose(0, 1), x.transpose(0, 1)
        attended, _ = self.second(query, keys, keys, key_padding_mask=empty, need_weights=False)
        return self.fc(attended[0] + chances.square().sum((1, 2)).unsqueeze(1))


class Doubled(nn.Module):
    """Two tables of words."""

    def __init__(self):
        super().__init__()
        self.words, self.moods = nn.Embedding(60, 8), nn.Embedding(60, 8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc((self.words(tokens) * self.moods(tokens).sigmoid()).amax(1))


class Unit(nn.Module):
    """Divides by what is zero for an image without any light."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3 * 16 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.fc(x / x.norm(dim=1, keepdim=True)) * 9


class Large(nn.Module):
    """Norms of many values."""

    def __init__(self):
        super().__init__()
        self.conv, self.group = nn.Conv2d(3, 16, 1), nn.GroupNorm(2, 16)
        self.layer, self.fc = nn.LayerNorm([16, 16], bias=False), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(self.group(self.conv(x))).square().mean((2, 3)))


class Scaled(nn.Module):
    """Parameters of its own, used in functions; a weight used twice; frozen layers; scaled dot products."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(12, 14) * 0.2), nn.Parameter(torch.zeros(12))
        self.gain, self.mix = nn.Parameter(torch.ones(12)), nn.Parameter(torch.eye(12))
        self.frozen, self.shared = nn.Linear(12, 12), nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.fc, self.unread = nn.Linear(12, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x.squeeze(1), self.weight, self.bias) * self.gain
        x = self.shared(torch.tanh(self.shared(self.frozen(x)))) @ self.mix.softmax(1)
        x = functional.scaled_dot_product_attention(x, x, x) + functional.softplus(self.gain).sum()
        return self.fc(x.mean(dim=1))


def squashed() -> nn.Module:
    """What follows a squashing works in place on what it gave."""
    layers = (nn.Tanh(), nn.Dropout(0.25), nn.Linear(10, 9), nn.Sigmoid(), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 5))
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 10), *layers)


def squashed_images() -> nn.Module:
    """The same between convolutions."""
    layers = (nn.Sigmoid(), nn.Dropout(0.25), nn.Conv2d(4, 3, 3), nn.Tanh(), nn.Dropout(0.25), nn.Flatten())
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Linear(300, 5))


class Dropping(nn.Module):
    """torch's own transformer layer with its dropout, but for that on the shares of attention."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8, padding_idx=0), nn.Linear(8, CLASSES)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.layer.self_attn.dropout = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.layer(self.words(tokens)).mean(1))


MODULES: dict[str, tuple[object, Callable[[], nn.Module]]] = {
    "lenet": (IMAGES, LeNet),
    "classic": (COLOURED, Classic),
    "perceptron": (IMAGES, Perceptron),
    "squashed": (IMAGES, squashed),
    "squashed-images": (IMAGES, squashed_images),
    "vgg": (COLOURED, VGGLike),
    "residual": (COLOURED, Residual),
    "inverted": (COLOURED, Inverted),
    "vit": (COLOURED, TinyViT),
    "scaled": (IMAGES, Scaled),
    "unit": (COLOURED, Unit),
    "large": (COLOURED, Large),
    "masked": (TEXTS, Masked),
    "gru": (TEXTS, GRUClassifier),
    "stateful-lstm": (TEXTS, LSTMClassifier),
    "cells": (TEXTS, Cells),
    "text-cnn": (TEXTS, TextCNN),
    "peaks": (TEXTS, Peaks),
    "encoder": (TEXTS, Encoder),
    "doubled": (TEXTS, Doubled),
    "dropping": (TEXTS, Dropping),
    **FURTHER,
}
