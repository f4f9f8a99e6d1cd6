"""Networks of the workloads, each in two forms: as a sequence of layers, and as a user's own module.

Both forms have the same parameters in the same order, so that they start from the same weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.data.schema import DataDescription
from fedmpi.models.mlp import mlp as layered_mlp
from fedmpi.models.text_layers import MaxOverTime
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


def wide(description: DataDescription, width: int) -> nn.Sequential:
    """Build an MLP of one hidden layer, to scale the number of parameters."""
    return layered_mlp(description, hidden=(width,))


def parameters_of(network: nn.Module) -> Tensor:
    """Return all parameters as one vector (d,)."""
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])
