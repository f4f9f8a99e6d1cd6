"""The multilayer perceptron, e.g. 784-200-200-10 on MNIST (McMahan et al. 2017, §3)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}


@register("model", "mlp")
def mlp(
    description: DataDescription, *, hidden: Sequence[int] = (200, 200), activation: str = "relu", dropout: float = 0.0
) -> nn.Sequential:
    """Dense layers on the flattened sample; torch's default initialization.

    Parameters
    ----------
    description : DataDescription
        Images or vectors.
    hidden : sequence of int
        Units of the hidden layers; empty = softmax regression.
    activation : {"relu", "tanh", "sigmoid", "gelu"}
        Function after every hidden layer.
    dropout : float
        Probability of a zero after every hidden layer.

    Raises
    ------
    UserError
        The data are token ids, or an option has an impossible value.
    """
    if description.task == "text":
        raise UserError('model.name = "mlp" cannot read token ids: choose a text model, e.g. "text-cnn"')
    widths = [hidden] if isinstance(hidden, int) else list(hidden)
    if not all(isinstance(width, int) and width > 0 for width in widths):
        raise UserError(f"model.hidden = {hidden!r} must be a list of positive numbers of units, e.g. [200, 200]")
    if activation not in ACTIVATIONS:
        raise UserError(f"model.activation = {activation!r} is none of {', '.join(ACTIVATIONS)}")
    if not 0 <= dropout < 1:
        raise UserError(f"model.dropout = {dropout} must lie in [0, 1)")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    inputs = math.prod(description.feature_shape)
    for number, width in enumerate(widths, 1):
        layers[f"dense{number}"] = nn.Linear(inputs, width)
        layers[f"{activation}{number}"] = ACTIVATIONS[activation]()
        if dropout:
            layers[f"dropout{number}"] = nn.Dropout(dropout)
        inputs = width
    layers["output"] = nn.Linear(inputs, description.classes)
    return nn.Sequential(layers)
