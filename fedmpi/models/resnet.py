"""ResNet-18 with group norm for small images (He et al. 2016; Wu & He 2018).

Batch norm's running statistics mix badly over clients of different distributions (Hsieh et al. 2020); group norm
has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.models.image_cnns import image_shape

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


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
    """ResNet-18 with the CIFAR stem: one convolution of 3 × 3, no pooling before the four stages of two blocks.

    Parameters
    ----------
    description : DataDescription
        Images, e.g. (3, 32, 32).
    width : int
        Filters of the first stage; they double at each further one.
    groups : int
        Groups of every group norm; must divide `width`.

    Raises
    ------
    UserError
        The data are no images, or `groups` does not divide `width`.
    """
    channels, _, _ = image_shape(description, "resnet18")
    if width % groups:
        raise UserError(f"model.groups = {groups} does not divide model.width = {width}: choose a divisor")
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
