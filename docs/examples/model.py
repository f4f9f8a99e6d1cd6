"""A custom model: model = "model:narrow"."""

import math

from torch import nn


def narrow(description, width: int = 16) -> nn.Module:
    """Return a perceptron with one hidden layer.

    Parameters
    ----------
    width : int
        Width of the hidden layer.
    """
    inputs = math.prod(description.feature_shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, description.classes))
