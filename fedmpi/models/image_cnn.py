"""FedSampling's image model (Qi et al., §4.4; authors' code): 1,709,566 parameters for 62 classes of 28 × 28."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from fedmpi.common.registry import register
from fedmpi.models.image_layers import flattened, image_shape

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


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
