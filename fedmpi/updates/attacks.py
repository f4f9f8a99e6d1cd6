"""Simulated attacks for testing aggregation rules: a fixed share of the clients, equal for any number of ranks.

sign-flip: sends −scale · Δ. noise: sends scale · N(0, I) instead of Δ (Blanchard et al. 2017, §6, Gaussian Byzantines).
label-flip: trains honestly on labels C − 1 − y (data poisoning: Tolpegin et al. 2020; Fang et al. 2020, §3).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.server_tables import UpdateAttack
from fedmpi.data.schema import DataDescription
from fedmpi.data.source import DataSource, Tensors


def attackers(config: Config, streams: Streams, clients: int) -> Ints:
    """Return the clients that attack in every round in which they are selected, sorted, int64 (a,).

    They are `clients.attack_fraction` of all clients, rounded half up, drawn uniformly from the stream (ATTACK, 0).
    """
    if config.attack.name == "none":
        return np.empty(0, np.int64)
    count = int(np.floor(config.clients.attack_fraction * clients + 0.5))
    return np.sort(streams.generator(Purpose.ATTACK).choice(clients, count, replace=False, shuffle=False))


class AttackedUpdates:
    """Manipulated updates of the attackers."""

    def __init__(self, attack: UpdateAttack, attackers: Ints, streams: Streams):
        self.attack, self.streams = attack, streams
        self._attackers = frozenset(attackers.tolist())

    def send(self, round: int, client: int, update: Tensor) -> Tensor:
        """Return the update that the client sends instead of Δ (d,), changed in place."""
        if client not in self._attackers:
            return update
        if self.attack.name == "sign-flip":
            return update.mul_(-self.attack.scale)
        drawn = self.streams.generator(Purpose.ATTACK, 1 + round, client).standard_normal(update.numel())
        return update.copy_(torch.from_numpy(drawn).mul_(self.attack.scale))


class FlippedLabels:
    """Samples as the clients train on them: an attacker's labels y are C − 1 − y."""

    def __init__(self, data: DataSource, attackers: Ints):
        self._data = data
        self.sizes: Ints = data.sizes
        self.description: DataDescription = data.description
        self._attacks = np.zeros(len(data.sizes), bool)
        self._attacks[attackers] = True
        self._ends = np.cumsum(data.sizes)

    def load(self, client: int, rows: Ints | None = None) -> Tensors:
        """Load samples; see `ClientData.load`."""
        x, y = self._data.load(client, rows)
        return (x, self.description.classes - 1 - y) if self._attacks[client] else (x, y)

    def load_positions(self, positions: Ints) -> Tensors:
        """Load samples; see `ClientData.load_positions`."""
        x, y = self._data.load_positions(positions)
        owners = np.searchsorted(self._ends, positions, side="right")
        attacked = torch.from_numpy(self._attacks[owners]).to(y.device)
        return x, torch.where(attacked, self.description.classes - 1 - y, y)


def attacked_updates(config: Config, streams: Streams, attackers: Ints) -> AttackedUpdates | None:
    """Return the manipulation of a configuration's attacks; None if attackers send their trained updates."""
    attack = config.attack
    return AttackedUpdates(attack, attackers, streams) if isinstance(attack, UpdateAttack) else None
