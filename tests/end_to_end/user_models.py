"""Models of a user, named in configurations as "tests.end_to_end.user_models:…"."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from fedmpi.data.schema import DataDescription


class Unhurried(nn.Sequential):
    """Layer that lets a test stop a run at a chosen moment.

    It sleeps $NAP seconds in every training step. Once the file $STAY_IN contains $STAY_AFTER lines, training stays
    where it is until its process has been asked to stop, or is killed. It reads the number of samples, so that its
    forward pass is not traced, which would leave out the sleeps.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes)."""
        if self.training and len(x):
            time.sleep(float(os.environ.get("NAP", "0")))
            while _enough_recorded() and not _asked_to_stop():
                time.sleep(0.005)
        return super().forward(x)


def _enough_recorded() -> bool:
    recorded = Path(os.environ.get("STAY_IN", os.devnull))
    return recorded.is_file() and recorded.read_bytes().count(b"\n") >= int(os.environ["STAY_AFTER"])


def _asked_to_stop() -> bool:
    """Return True if the round loop's handler of signals has been called in this process."""
    return bool(signal.getsignal(signal.SIGTERM).__self__.requested)  # type: ignore[union-attr]


def unhurried_mlp(description: DataDescription, width: int = 16) -> nn.Module:
    """A perceptron with dropout that can be slowed down."""
    features = math.prod(description.feature_shape)
    layers = nn.Flatten(), nn.Linear(features, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, description.classes)
    return Unhurried(*layers)


def linear_from_zero(description: DataDescription) -> nn.Module:
    """Softmax regression that starts at zero: with two classes the gradients of the two labels are opposite."""
    layer = nn.Linear(math.prod(description.feature_shape), description.classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


class Choosy(nn.Sequential):
    """Fails on batches of a certain length."""

    def __init__(self, refused: int, *layers: nn.Module):
        super().__init__(*layers)
        self.refused = refused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes)."""
        if self.training and len(x) == self.refused:
            raise ValueError(f"this model takes no batch of {self.refused}")
        return super().forward(x)


def choosy(description: DataDescription, refused: int) -> nn.Module:
    """A linear model that fails on training batches of `refused` rows."""
    return Choosy(refused, nn.Flatten(), nn.Linear(math.prod(description.feature_shape), description.classes))


def normed(description: DataDescription, width: int = 6) -> nn.Module:
    """A perceptron with batch norm: its running mean and variance travel, but have no gradient."""
    features = math.prod(description.feature_shape)
    layers = nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, description.classes)
    return nn.Sequential(nn.Flatten(), *layers)


def tied(description: DataDescription) -> nn.Sequential:
    """Two layers that share one matrix, as language models share the matrix of their embedding with their output."""
    features = math.prod(description.feature_shape)
    first, again = nn.Linear(features, features), nn.Linear(features, features)
    again.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), again, nn.Linear(features, description.classes))
