"""Convolutional networks for images from published papers, and their common parts.

Astraea's CNN for EMNIST (Duan et al. 2019, §IV): 68,873 parameters at 28 × 28 and 47 classes. The CIFAR-10 CNN of the
Keras documentation, which Astraea trains on CINIC-10. FedSampling's image model (Qi et al., §4.4; authors' code):
1,709,566 parameters for 62 classes of 28 × 28.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


@register("model", "cnn")
def astraea_cnn(description: DataDescription, *, dropout: float = 0.5, dense: int = 150) -> nn.Sequential:
    """Conv 12 of 5 × 5 stride 2, conv 18 of 3 × 3 stride 2, conv 24 of 2 × 2, dense 150, the logits.

    ReLU follows every layer but the last, dropout the first two convolutions.

    Parameters
    ----------
    description : DataDescription
        Images, e.g. (1, 28, 28).
    dropout : float
        Probability of a zero after the first and the second convolution.
    dense : int
        Units of the dense layer.

    Raises
    ------
    UserError
        The data are no images or too small, or an option has an impossible value.
    """
    if not 0 <= dropout < 1:
        raise UserError(f"model.dropout = {dropout} must lie in [0, 1)")
    if dense < 1:
        raise UserError(f"model.dense = {dense} must be a positive number of units")
    shape = image_shape(description, "cnn")
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
    layers["dense"] = nn.Linear(flattened(layers, shape, "cnn"), dense)
    layers["relu4"] = nn.ReLU()
    layers["output"] = nn.Linear(dense, description.classes)
    return nn.Sequential(layers).train()


@register("model", "cifar-cnn")
def cifar_cnn(
    description: DataDescription, *, hidden: int = 512, dropout: float = 0.25, dense_dropout: float = 0.5
) -> nn.Sequential:
    """Two blocks of (conv 'same', conv 'valid', pool, dropout) with 32 and 64 filters of 3 × 3, a dense layer, logits.

    Parameters
    ----------
    description : DataDescription
        Images, e.g. (3, 32, 32).
    hidden : int
        Units of the dense ReLU layer.
    dropout : float
        Dropout after each block.
    dense_dropout : float
        Dropout before the output.

    Raises
    ------
    UserError
        The data are no images, or too small.
    """
    shape = image_shape(description, "cifar-cnn")
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
    layers["dense"] = nn.Linear(flattened(layers, shape, "cifar-cnn"), hidden)
    layers["relu"] = nn.ReLU()
    layers["dropout"] = nn.Dropout(dense_dropout)
    layers["output"] = nn.Linear(hidden, description.classes)
    return nn.Sequential(layers).train()


@register("model", "image-cnn")
def image_cnn(
    description: DataDescription,
    *,
    filters: Sequence[int] = (32, 128),
    hidden: Sequence[int] = (512, 512, 512),
    dropout: float = 0.2,
) -> nn.Sequential:
    """Convolutions of 5 × 5 without activation, each pooled by 2, then dense ReLU layers; dropout after every stage.

    Parameters
    ----------
    description : DataDescription
        Images, e.g. (1, 28, 28).
    filters : sequence of int
        Filters of the convolutions.
    hidden : sequence of int
        Units of the dense layers.
    dropout : float
        Probability of a zero after every stage.

    Raises
    ------
    UserError
        The data are no images, or too small.
    """
    shape = image_shape(description, "image-cnn")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = shape[0]
    for number, count in enumerate(filters, 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, count, 5)
        layers[f"pool{number}"] = nn.MaxPool2d(2)
        layers[f"conv_dropout{number}"] = nn.Dropout(dropout)
        channels = count
    layers["flatten"] = nn.Flatten()
    width = flattened(layers, shape, "image-cnn")
    for number, units in enumerate(hidden, 1):
        layers[f"dense{number}"] = nn.Linear(width, units)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"dropout{number}"] = nn.Dropout(dropout)
        width = units
    layers["output"] = nn.Linear(width, description.classes)
    return nn.Sequential(layers).train()


def image_shape(description: DataDescription, model: str) -> tuple[int, int, int]:
    """Return (channels, height, width) of the data."""
    shape = tuple(int(size) for size in description.feature_shape)
    if description.task != "image" or len(shape) != 3:
        raise UserError(
            f"model.name = {model!r} reads images, but the data have task {description.task!r} and shape "
            f"{tuple(description.feature_shape)}: choose another model"
        )
    return shape[0], shape[1], shape[2]


def flattened(layers: OrderedDict[str, nn.Module], shape: tuple[int, int, int], model: str) -> int:
    """Return the number of values that `layers` compute from one image."""
    try:
        with torch.no_grad():
            values: Tensor = nn.Sequential(layers).eval()(torch.zeros(1, *shape))
            return values.numel()
    except RuntimeError as error:
        last = f": {shape[0]} channels? They come first, before height and width" * (shape[2] < min(shape[:2]))
        raise UserError(
            f"model.name = {model!r}: images of {shape[1]} × {shape[2]} pixels are too small{last}"
        ) from error
