"""The CIFAR network of FedSTS's published code: 3 × 3 convolutions of 32, 64 and 64 filters, dense 64, dropout 0.2.

    fedmpi train CONFIG --set model=jobs.experiments.fedstas_cnn:network

As in `main_cifar10.py` of `icesabe/FL` at 6a95927, a fork of that code: the first two convolutions are followed by a
ReLU and pooling, the third is not, dropout follows each of them and not the dense layer. It has ten outputs there, here
as many as there are classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedmpi.data.schema import DataDescription


def network(description: DataDescription, *, hidden: Sequence[int] = (64,), dropout: float = 0.2) -> nn.Sequential:
    """Logits of images of 32 × 32.

    Parameters
    ----------
    description : DataDescription
        Images, (channels, 32, 32).
    hidden : sequence of int
        Units of the dense ReLU layers.
    dropout : float
        Probability of a zero after each convolution.
    """
    layers: list[nn.Module] = []
    channels = description.feature_shape[0]
    for filters in (32, 64):
        layers += [nn.Conv2d(channels, filters, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout)]
        channels = filters
    layers += [nn.Conv2d(channels, 64, 3), nn.Dropout(dropout), nn.Flatten()]
    width = 64 * 4 * 4
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, description.classes))
