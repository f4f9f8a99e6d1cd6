"""The CIFAR network of FedSTS's published code: 3 × 3 convolutions of 32, 64 and 64 filters, dense 64, dropout 0.2.

    fedmpi train CONFIG --set model.name=jobs.experiments.fedstas_cnn:network

`main_cifar10.py` of `icesabe/FL`, a fork of that code, has ten outputs; here as many as there are classes. Where it
pools is not known here but from the width of its dense layer, 1,024 at 32 × 32: after the first two convolutions.
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
        Probability of a zero after each of them.
    """
    layers: list[nn.Module] = [
        *(nn.Conv2d(description.feature_shape[0], 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
    ]
    width = 64 * 4 * 4
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout)]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, description.classes))
