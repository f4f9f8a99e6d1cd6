"""Networks as users write them, in the style of public tutorials: classes with custom forward passes.

The lower-case functions build each network for a data set, as in `model = "benchmarks.own_networks:lenet"`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.data.schema import DataDescription


class OddCNN(nn.Module):
    """A CNN of odd widths, 1 × 28 × 28."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 7, 3), nn.Conv2d(7, 13, 3)
        self.fc1, self.fc2 = nn.Linear(13 * 5 * 5, 57), nn.Linear(57, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        y: Tensor = self.fc2(functional.relu(self.fc1(torch.flatten(x, 1))))
        return y


class LeNet(nn.Module):
    """LeNet of LeCun et al. 1998, with ReLU, 1 × 28 × 28."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.avg_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.avg_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.view(x.size(0), -1)))
        y: Tensor = self.fc3(functional.relu(self.fc2(x)))
        return y


class VGGLike(nn.Module):
    """Two blocks of two convolutions, adaptive pooling, a classifier, 3 × 32 × 32."""

    def __init__(self, classes: int):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(nn.Linear(512, 128), nn.ReLU(True), nn.Linear(128, classes))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(torch.flatten(self.pool(self.features(x)), 1))
        return y


class Block(nn.Module):
    def __init__(self, channels: int, filters: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False), nn.GroupNorm(4, filters)
        self.conv2, self.norm2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False), nn.GroupNorm(4, filters)
        self.short = nn.Conv2d(channels, filters, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(inner + self.short(x))


class Residual(nn.Module):
    """A small residual network with group norm, 3 × 32 × 32."""

    def __init__(self, classes: int):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.blocks(functional.relu(self.stem(x))).mean((2, 3)))
        return y


class GRUClassifier(nn.Module):
    """Word vectors, a GRU, and a classifier on its last state."""

    def __init__(self, vocabulary: int, classes: int):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(vocabulary, 64, padding_idx=0), nn.GRU(64, 64, batch_first=True)
        self.fc = nn.Linear(64, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        _, hidden = self.gru(self.embedding(tokens))
        y: Tensor = self.fc(hidden[-1])
        return y


class TextCNN(nn.Module):
    """Text-CNN of Kim 2014 with functional calls."""

    def __init__(self, vocabulary: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.convolutions = nn.ModuleList([nn.Conv1d(64, 32, width) for width in (3, 4, 5)])
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(96, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        found = [functional.relu(one(x)) for one in self.convolutions]
        pooled = [functional.max_pool1d(one, one.shape[2]).squeeze(2) for one in found]
        y: Tensor = self.fc(self.dropout(torch.cat(pooled, 1)))
        return y


class Attending(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        b, n, size = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, size)
        x = x + self.out(attended)
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    """Patches of 4 × 4, 64 values, two blocks of four heads, a class token, 3 × 32 × 32."""

    def __init__(self, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, stride=4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 64)), nn.Parameter(torch.randn(1, 65, 64) * 0.02)
        self.blocks, self.norm = nn.Sequential(Attending(64, 4), Attending(64, 4)), nn.LayerNorm(64)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        y: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return y


def odd_layers(data: DataDescription) -> nn.Module:
    """Build OddCNN as a sequence of layers."""
    return nn.Sequential(
        nn.Conv2d(1, 7, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(7, 13, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(13 * 5 * 5, 57), nn.ReLU(), nn.Linear(57, data.classes),
    )  # fmt: skip


def odd_cnn(data: DataDescription) -> nn.Module:
    return OddCNN(data.classes)


def residual(data: DataDescription) -> nn.Module:
    return Residual(data.classes)


def lenet(data: DataDescription) -> nn.Module:
    return LeNet(data.classes)


def vgg_like(data: DataDescription) -> nn.Module:
    return VGGLike(data.classes)


def gru_classifier(data: DataDescription) -> nn.Module:
    return GRUClassifier(data.vocabulary, data.classes)


def kim_cnn(data: DataDescription) -> nn.Module:
    return TextCNN(data.vocabulary, data.classes)


def tiny_vit(data: DataDescription) -> nn.Module:
    return TinyViT(data.classes)
