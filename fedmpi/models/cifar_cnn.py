"""The CIFAR-10 CNN of the Keras documentation, which Astraea trains on CINIC-10 (Duan et al. 2019, §IV)."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from torch import nn

from fedmpi.common.registry import register
from fedmpi.models.image_layers import flattened, image_shape

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


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
    dropout, dense_dropout : float
        After each block; before the output.

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
