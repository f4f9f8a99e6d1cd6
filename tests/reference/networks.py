"""Models of a user: one with running statistics, and one in float64 that undoes the rounding of its input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedmpi.data.schema import DataDescription


def batch_norm_mlp(description: DataDescription, width: int = 10) -> nn.Module:
    """A perceptron with batch norm."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(description.feature_shape), width),
        nn.BatchNorm1d(width),
        nn.Tanh(),
        nn.Linear(width, description.classes),
    )


def dropout_mlp(description: DataDescription, width: int = 32) -> nn.Module:
    """A perceptron with plain torch dropout, smooth: a rounding changes its steps by no more than that."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(description.feature_shape), width),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(width, description.classes),
    )


class CumulativeNorm(nn.Module):
    """A perceptron whose batch norm averages over all batches so far, which it counts in an integer buffer."""

    def __init__(self, inputs: int, width: int, classes: int, dtype: str):
        super().__init__()
        norm = nn.BatchNorm1d(width, momentum=None)
        self.layers = nn.Sequential(nn.Linear(inputs, width), norm, nn.Tanh(), nn.Linear(width, classes))
        self.to(getattr(torch, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(self.layers[0].weight.dtype).flatten(1))


def cumulative_norm(description: DataDescription, hidden: tuple[int] = (9,), dtype: str = "float32") -> nn.Module:
    """Network that counts its batches."""
    return CumulativeNorm(math.prod(description.feature_shape), *hidden, description.classes, dtype)


class DoublePerceptron(nn.Module):
    """One hidden layer on the grey levels 0 … 16 of the digits, which arrive divided by 255 in float32."""

    def __init__(self, inputs: int, classes: int, width: int, norm: bool):
        super().__init__()
        self.hidden = nn.Linear(inputs, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.output = nn.Linear(width, classes)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        levels = (x.to(torch.float64) * 255).round() / 16
        return self.output(torch.tanh(self.norm(self.hidden(levels.flatten(1)))))


def double_perceptron(description: DataDescription, width: int = 9, norm: bool = False) -> nn.Module:
    """Network for `data.normalize = false`, with or without batch norm."""
    return DoublePerceptron(math.prod(description.feature_shape), description.classes, width, norm)
