"""Observation of every client's update before it is summed: attacks, transmission, clipping, metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.streams import Streams
from fedmpi.config import Config
from fedmpi.local.client_metrics import ClientMeasures
from fedmpi.local.diagnostics import UpdateMoments, update_moments
from fedmpi.local.work import ClientTask
from fedmpi.privacy.updates import clip
from fedmpi.updates.attacks import AttackedUpdates
from fedmpi.updates.compression import Transport


class UpdateObserver:
    """Observer of the updates of one rank's clients, round after round."""

    def __init__(
        self,
        clip_norm: float | None,
        measures: bool,
        transport: Transport | None,
        attacks: AttackedUpdates | None,
        keeps_norms: bool,
    ):
        self.keeps_norms = keeps_norms
        self.norms: dict[int, float] = {}
        self.losses: ClientMeasures | None = None
        self.clip_norm = clip_norm
        self.measures = measures
        self.transport = transport
        self.attacks = attacks
        self.begin([], 0)

    @classmethod
    def wanted_by(
        cls, config: Config, streams: Streams, attacks: AttackedUpdates | None = None
    ) -> UpdateObserver | None:
        """Return the observer of a configuration, or None if nothing needs single updates (they may then be merged)."""
        clip_norm, measures, chosen = config.privacy.clip_norm, config.logging.diagnostics, config.compression
        norms = "update_norm" in config.clients.sampler.component.marks.get("needs", ())
        if chosen.name == "none":
            wanted = measures or norms or clip_norm is not None or attacks is not None
            return cls(clip_norm, measures, None, attacks, norms) if wanted else None
        return cls(clip_norm, measures, Transport(chosen, streams), attacks, norms)

    def begin(self, tasks: Sequence[ClientTask], round: int, start: Tensor | None = None) -> None:
        """Start a round with these tasks, all from the model `start` (d,)."""
        self._round = round
        if self.losses is not None and start is not None:
            self.losses.start = start
        self._gains: list[float] = []
        self._coefficients = {task.client: task.coefficient for task in tasks}
        self._norms: list[float] = []
        self.norms = {}
        self._factors: list[float] = []
        self.clipped = 0

    def __call__(self, client: int, update: Tensor) -> Tensor:
        """Observe one client's Δ (d,); return the Δ that the server receives, clipped if needed, in place."""
        if self.losses is not None:
            self._gains.append(self.losses.gain(client, update, self._round))
        if self.attacks is not None:
            update = self.attacks.send(self._round, client, update)
        if self.transport is not None:
            update = self.transport.send(self._round, client, update)
        if self.clip_norm is not None:
            update, clipped = clip(update, self.clip_norm)
            self.clipped += clipped
        norm = float(torch.linalg.vector_norm(update, dtype=torch.float64)) if self.measures or self.keeps_norms else 0
        if self.keeps_norms:
            self.norms[client] = norm
        if self.measures:
            self._norms.append(norm)
            self._factors.append(self._coefficients[client])
        return update

    def moments(self) -> UpdateMoments:
        """Return the sums of the round so far over this rank's clients."""
        gains = np.array(self._gains) if self.losses is not None else None
        return update_moments(np.array(self._norms), np.array(self._factors), gains)
