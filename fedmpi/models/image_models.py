"""Models of images and vectors: the multilayer perceptron, convolutional networks of published papers, ResNet-18.

The MLP is that of McMahan et al. 2017 (§3), 784-200-200-10 on MNIST. Astraea's CNN for EMNIST (Duan et al. 2019, §IV)
has 68,873 parameters at 28 × 28 and 47 classes; the CIFAR-10 CNN of the Keras documentation is what it trains on
CINIC-10. FedSampling's image model (Qi et al., §4.4; authors' code) has 1,709,566 parameters for 62 classes of 28 × 28.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.models.layers import Probability

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription

Count = Annotated[int, Field(ge=1)]
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU}


def dense_layers(
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    dropout: float = 0.0,
    activation: str = "relu",
    batch_norm: bool = False,
) -> OrderedDict[str, nn.Module]:
    """Return dense layers, each but the last one with batch norm, if chosen, its activation and, above 0, dropout."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, width in enumerate(hidden, 1):
        layers[f"dense{number}"] = nn.Linear(inputs, width)
        if batch_norm:
            layers[f"bn{number}"] = nn.BatchNorm1d(width)
        layers[f"{activation}{number}"] = ACTIVATIONS[activation]()
        if dropout:
            layers[f"dropout{number}"] = nn.Dropout(dropout)
        inputs = width
    layers["output"] = nn.Linear(inputs, outputs)
    return layers


@register("model", "mlp")
def mlp(
    description: DataDescription,
    *,
    hidden: Sequence[Count] = (200, 200),
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = "relu",
    dropout: Probability = 0.0,
    batch_norm: bool = False,
) -> nn.Sequential:
    """Dense layers on the flattened sample; torch's default initialization.

    Parameters
    ----------
    hidden : sequence of int
        Units of the hidden layers; empty = softmax regression.
    activation : {"relu", "tanh", "sigmoid", "gelu"}
        Function after every hidden layer.
    dropout : float
        Probability of a zero after every hidden layer.
    batch_norm : bool
        Batch normalization before the activations.
    """
    if description.task == "text":
        raise UserError('model.name = "mlp" cannot read token ids. Choose a text model, e.g. "text-cnn"')
    inputs = math.prod(description.feature_shape)
    dense = dense_layers(inputs, hidden, description.classes, dropout, activation, batch_norm)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten()) | dense)


@register("model", "cnn")
def astraea_cnn(description: DataDescription, *, dropout: Probability = 0.5, dense: Count = 150) -> nn.Sequential:
    """Conv 12 of 5 × 5 stride 2, conv 18 of 3 × 3 stride 2, conv 24 of 2 × 2, dense 150, the logits.

    ReLU follows every layer but the last, dropout the first two convolutions.

    Parameters
    ----------
    dropout : float
        Probability of a zero after the first and the second convolution.
    dense : int
        Units of the dense layer.
    """
    shape = image_shape(description)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(shape[0], 12, 5, stride=2),
        relu1=nn.ReLU(),
        dropout1=nn.Dropout(dropout),
        conv2=nn.Conv2d(12, 18, 3, stride=2),
        relu2=nn.ReLU(),
        dropout2=nn.Dropout(dropout),
        conv3=nn.Conv2d(18, 24, 2),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
    )
    layers["dense"] = nn.Linear(flattened(layers, shape), dense)
    layers["relu4"] = nn.ReLU()
    layers["output"] = nn.Linear(dense, description.classes)
    return nn.Sequential(layers)


@register("model", "cifar-cnn")
def cifar_cnn(
    description: DataDescription, *, hidden: Count = 512, dropout: Probability = 0.25, dense_dropout: Probability = 0.5
) -> nn.Sequential:
    """Two blocks of (conv 'same', conv 'valid', pool, dropout) with 32 and 64 filters of 3 × 3, a dense layer, logits.

    Parameters
    ----------
    hidden : int
        Units of the dense ReLU layer.
    dropout : float
        Dropout after each block.
    dense_dropout : float
        Dropout before the output.
    """
    shape = image_shape(description)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = shape[0]
    for block, filters in enumerate((32, 64), 1):
        layers[f"conv{block}a"] = nn.Conv2d(channels, filters, 3, padding=1)
        layers[f"relu{block}a"] = nn.ReLU()
        layers[f"conv{block}b"] = nn.Conv2d(filters, filters, 3)
        layers[f"relu{block}b"] = nn.ReLU()
        layers[f"pool{block}"] = nn.MaxPool2d(2)
        layers[f"dropout{block}"] = nn.Dropout(dropout)
        channels = filters
    layers["flatten"] = nn.Flatten()
    layers["dense"] = nn.Linear(flattened(layers, shape), hidden)
    layers["relu"] = nn.ReLU()
    layers["dropout"] = nn.Dropout(dense_dropout)
    layers["output"] = nn.Linear(hidden, description.classes)
    return nn.Sequential(layers)


@register("model", "image-cnn")
def image_cnn(
    description: DataDescription,
    *,
    filters: Sequence[Count] = (32, 128),
    hidden: Sequence[Count] = (512, 512, 512),
    dropout: Probability = 0.2,
) -> nn.Sequential:
    """Convolutions of 5 × 5 without activation, each pooled by 2, then dense ReLU layers; dropout after every stage.

    Parameters
    ----------
    filters : sequence of int
        Filters of the convolutions.
    hidden : sequence of int
        Units of the dense layers.
    dropout : float
        Probability of a zero after every stage.
    """
    shape = image_shape(description)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = shape[0]
    for number, count in enumerate(filters, 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, count, 5)
        layers[f"pool{number}"] = nn.MaxPool2d(2)
        layers[f"conv_dropout{number}"] = nn.Dropout(dropout)
        channels = count
    layers["flatten"] = nn.Flatten()
    return nn.Sequential(layers | dense_layers(flattened(layers, shape), hidden, description.classes, dropout))


def image_shape(description: DataDescription) -> tuple[int, int, int]:
    """Return (channels, height, width) of the data."""
    if description.task != "image" or len(description.feature_shape) != 3:
        raise UserError(
            f"the model reads images, but the data have task {description.task!r} and shape "
            f"{description.feature_shape}. Choose another model.name"
        )
    channels, height, width = description.feature_shape
    return channels, height, width


def flattened(layers: OrderedDict[str, nn.Module], shape: tuple[int, int, int]) -> int:
    """Return the number of values that `layers` compute from one image."""
    network = nn.Sequential(layers)
    try:
        with torch.no_grad():
            values: Tensor = network.eval()(torch.zeros(1, *shape))
    except RuntimeError as error:
        last = f": {shape[0]} channels? They come first, before height and width" * (shape[2] < min(shape[:2]))
        raise UserError(f"images of {shape[1]} × {shape[2]} pixels are too small for the model{last}") from error
    network.train()
    return values.numel()


class ResidualBlock(nn.Module):
    """Two convolutions of 3 × 3 with group norm, added to their input (projected if the shape changes)."""

    def __init__(self, channels: int, filters: int, stride: int, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, filters)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != filters:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride, bias=False), nn.GroupNorm(groups, filters)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


@register("model", "resnet18")
def resnet18(description: DataDescription, *, width: int = 64, groups: int = 32) -> nn.Sequential:
    """ResNet-18 with group norm for small images (He et al. 2016; Wu & He 2018): a stem of 3 × 3, no first pooling.

    Batch norm's running statistics mix badly over clients of different distributions (Hsieh et al. 2020).

    Parameters
    ----------
    width : int
        Filters of the first stage; they double at each further one.
    groups : int
        Groups of every group norm; must divide `width`.
    """
    channels, _, _ = image_shape(description)
    if width % groups:
        raise UserError(f"model.groups = {groups} does not divide model.width = {width}. Choose a divisor")
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.GroupNorm(groups, width), nn.ReLU()
    ]  # fmt: skip
    filters = width
    for stage in range(4):
        layers.append(ResidualBlock(filters, width * 2**stage, 1 if stage == 0 else 2, groups))
        filters = width * 2**stage
        layers.append(ResidualBlock(filters, filters, 1, groups))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(filters, description.classes)]
    return nn.Sequential(*layers)
