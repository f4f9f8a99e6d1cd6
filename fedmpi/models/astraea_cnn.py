"""Astraea's CNN for EMNIST (Duan et al. 2019, §IV): 68,873 parameters at 28 × 28 and 47 classes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.models.image_layers import flattened, image_shape

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
