"""What the image models share: the shape of the data and the size of what their convolutions leave."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


def image_shape(description: DataDescription, model: str) -> tuple[int, int, int]:
    """(channels, height, width) of the data.

    Raises
    ------
    UserError
        The data are no images.
    """
    shape = tuple(int(size) for size in description.feature_shape)
    if description.task != "image" or len(shape) != 3:
        raise UserError(
            f"model.name = {model!r} reads images, but the data have task {description.task!r} and shape "
            f"{tuple(description.feature_shape)}: choose another model"
        )
    return shape[0], shape[1], shape[2]


def flattened(layers: OrderedDict[str, nn.Module], shape: tuple[int, int, int], model: str) -> int:
    """The number of values that `layers` make of one image.

    Raises
    ------
    UserError
        The images are too small for the layers.
    """
    try:
        with torch.no_grad():
            values: Tensor = nn.Sequential(layers).eval()(torch.zeros(1, *shape))
            return values.numel()
    except RuntimeError as error:
        raise UserError(f"model.name = {model!r}: images of {shape[1]} × {shape[2]} pixels are too small") from error
