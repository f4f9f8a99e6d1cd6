"""A user's model with running statistics, which travel with the model but have no gradient."""

from __future__ import annotations

import math

from torch import nn

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
