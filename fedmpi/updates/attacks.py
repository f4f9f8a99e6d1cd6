"""Simulated attacks for testing aggregation rules: a fixed share of the clients, equal for any number of ranks.

An attack is a function (update (d,), generator) that changes an attacker's update in place or returns what it sends
instead. An attack on the data is a class with a method `labels` (labels, classes) instead: the labels that attackers
train on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from fedmpi.common.calling import calling, result_tensor
from fedmpi.common.imports import Later
from fedmpi.common.registry import Component, register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.updates.compression import what_arrives

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmpi.data.schema import DataDescription
    from fedmpi.data.source import DataSource, Tensors
else:
    torch = Later("torch")

Scale = Annotated[float, Field(gt=0, le=1e30)]


@register("attack", "none")
def honest(update: Tensor, generator: np.random.Generator) -> None:
    """No attack: all clients are honest."""


@register("attack", "sign-flip")
def sign_flip(update: Tensor, generator: np.random.Generator, *, scale: Scale = 1.0) -> None:
    """Attackers send −scale · Δ.

    Parameters
    ----------
    scale : float
        Length of the flipped update in that of the honest one.
    """
    update.mul_(-scale)


@register("attack", "noise")
def noise(update: Tensor, generator: np.random.Generator, *, scale: Scale = 1.0) -> None:
    """Attackers send normal noise instead of Δ (Blanchard et al. 2017, §6, Gaussian Byzantines).

    Parameters
    ----------
    scale : float
        Standard deviation of the noise.
    """
    update.copy_(torch.from_numpy(generator.standard_normal(update.numel())).mul_(scale))


@register("attack", "label-flip")
class LabelFlip:
    """Attackers train on the labels C − 1 − y (data poisoning: Tolpegin et al. 2020; Fang et al. 2020, §3)."""

    def labels(self, labels: Tensor, classes: int) -> Tensor:
        """Return the labels that an attacker trains on."""
        return classes - 1 - labels


def attackers(attack: Component, fraction: float, streams: Streams, clients: int) -> Ints:
    """Return the clients that attack in every round in which they are selected, sorted, int64 (a,).

    They are `clients.attack_fraction` of all clients, rounded half up, drawn uniformly from the stream (ATTACK, 0).
    """
    if attack.name == "none":
        return np.empty(0, np.int64)
    count = int(np.floor(fraction * clients + 0.5))
    return np.sort(streams.generator(Purpose.ATTACK).choice(clients, count, replace=False, shuffle=False))


class AttackedUpdates:
    """Manipulated updates of the attackers."""

    def __init__(self, attack: Component, attackers: Ints, streams: Streams):
        self.part, self.streams = attack, streams
        self._attack, self._attackers = attack.make(), frozenset(attackers.tolist())

    def send(self, round: int, client: int, update: Tensor) -> Tensor:
        """Return the update that the client sends instead of Δ (d,), changed in place."""
        if client not in self._attackers:
            return update
        generator = self.streams.generator(Purpose.ATTACK, 1 + round, client)
        return what_arrives(self.part, self._attack, update, generator, round, client)


class PoisonedLabels:
    """Samples as the clients train on them, with the labels of an attack for its attackers."""

    def __init__(self, data: DataSource, attack: Component, attackers: Ints):
        self._data, self._part, self._attack = data, attack, attack.make()
        self.sizes: Ints = data.sizes
        self.description: DataDescription = data.description
        self._attacks = np.zeros(len(data.sizes), bool)
        self._attacks[attackers] = True
        self._ends = np.cumsum(data.sizes)

    def load(self, client: int, rows: Ints | None = None) -> Tensors:
        """Load samples; see `ClientData.load`."""
        x, y = self._data.load(client, rows)
        return (x, self._poisoned(y)) if self._attacks[client] else (x, y)

    def load_positions(self, positions: Ints) -> Tensors:
        """Load samples; see `ClientData.load_positions`."""
        x, y = self._data.load_positions(positions)
        owners = np.searchsorted(self._ends, positions, side="right")
        attacked = torch.from_numpy(self._attacks[owners]).to(y.device)
        return x, torch.where(attacked, self._poisoned(y), y)

    def _poisoned(self, labels: Tensor) -> Tensor:
        with calling(self._part):
            found = self._attack.labels(labels, self.description.classes)
        return result_tensor(self._part, found, labels.shape)
