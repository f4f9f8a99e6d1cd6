"""Networks of the workloads.

Those of W1 to S6 have two forms: a sequence of layers, and a custom module with the same parameters in the same
order, so that both start from the same weights. The classes from OddCNN on are networks as users write them, in the
style of public tutorials; their names are models, as in `model.name = "benchmarks.networks:LeNet"`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.data.schema import DataDescription
from fedmpi.models.image_models import mlp as layered_mlp
from fedmpi.models.text_models import MaxOverTime
from fedmpi.models.text_models import text_cnn as layered_text_cnn


def mlp(description: DataDescription) -> nn.Sequential:
    """Build an MLP 784-200-200-10 with 199,210 parameters."""
    return layered_mlp(description, hidden=(200, 200))


def cnn(description: DataDescription) -> nn.Sequential:
    """Build Astraea's CNN with only the second of its dropouts, as for the peers; 68,873 parameters at 47 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(12, 18, 3, stride=2),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(18, 24, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 150),
        nn.ReLU(),
        nn.Linear(150, description.classes),
    )


def text_cnn(description: DataDescription) -> nn.Sequential:
    """Build a Text-CNN of 64 values per word and 64 filters of 3, 4 and 5 words.

    It has 370,309 parameters at 5,000 words and 5 classes.
    """
    return layered_text_cnn(description)


class OwnModule(nn.Module):
    """Network with a custom forward function, as users write them."""

    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def own_mlp(description: DataDescription) -> nn.Module:
    return OwnModule(mlp(description))


def own_cnn(description: DataDescription) -> nn.Module:
    return OwnModule(cnn(description))


def own_text_cnn(description: DataDescription) -> nn.Module:
    return OwnModule(as_users_write_it(text_cnn(description)))


class PlainMaxOverTime(MaxOverTime):
    """Max over time in plain torch operations."""

    def forward(self, words: Tensor) -> Tensor:
        channels_first = words.transpose(1, 2)
        return torch.cat([part(channels_first).max(2).values for part in self.convolutions], 1).relu()


def as_users_write_it(network: nn.Module) -> nn.Module:
    """Return the network with plain max over time instead of the faster version of fedmpi's own models."""
    for part in network.modules():
        if type(part) is MaxOverTime:
            part.__class__ = PlainMaxOverTime
    return network


def parameters_of(network: nn.Module) -> Tensor:
    """Return all parameters as one vector (d,)."""
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])


class OddCNN(nn.Module):
    """A CNN of odd widths, 1 × 28 × 28."""

    def __init__(self, data: DataDescription):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 7, 3), nn.Conv2d(7, 13, 3)
        self.fc1, self.fc2 = nn.Linear(13 * 5 * 5, 57), nn.Linear(57, data.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        y: Tensor = self.fc2(functional.relu(self.fc1(torch.flatten(x, 1))))
        return y


class LeNet(nn.Module):
    """LeNet of LeCun et al. 1998, with ReLU, 1 × 28 × 28."""

    def __init__(self, data: DataDescription):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, data.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.avg_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.avg_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.view(x.size(0), -1)))
        y: Tensor = self.fc3(functional.relu(self.fc2(x)))
        return y


class VGGLike(nn.Module):
    """Two blocks of two convolutions, adaptive pooling, a classifier, 3 × 32 × 32."""

    def __init__(self, data: DataDescription):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(nn.Linear(512, 128), nn.ReLU(True), nn.Linear(128, data.classes))

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

    def __init__(self, data: DataDescription):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.fc = nn.Linear(64, data.classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.blocks(functional.relu(self.stem(x))).mean((2, 3)))
        return y


class GRUClassifier(nn.Module):
    """Word vectors, a GRU, and a classifier on its last state."""

    def __init__(self, data: DataDescription):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(data.vocabulary, 64, padding_idx=0), nn.GRU(64, 64, batch_first=True)
        self.fc = nn.Linear(64, data.classes)

    def forward(self, tokens: Tensor) -> Tensor:
        _, hidden = self.gru(self.embedding(tokens))
        y: Tensor = self.fc(hidden[-1])
        return y


class TextCNN(nn.Module):
    """Text-CNN of Kim 2014 with functional calls."""

    def __init__(self, data: DataDescription):
        super().__init__()
        self.embedding = nn.Embedding(data.vocabulary, 64)
        self.convolutions = nn.ModuleList([nn.Conv1d(64, 32, width) for width in (3, 4, 5)])
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(96, data.classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        found = [functional.relu(one(x)) for one in self.convolutions]
        pooled = [functional.max_pool1d(one, one.shape[2]).squeeze(2) for one in found]
        y: Tensor = self.fc(self.dropout(torch.cat(pooled, 1)))
        return y
