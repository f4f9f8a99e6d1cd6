"""Observation of every client's update before it is summed: attacks, transmission, clipping, diagnostics.

Diagnostics measure how far clients drift apart and how heterogeneous they are. All follow from sums over the selected
clients, so no list of client models is ever kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.streams import Streams
from fedmpi.common.types import Floats
from fedmpi.config import Config
from fedmpi.local.measures import ClientMeasures
from fedmpi.local.work import ClientTask
from fedmpi.privacy.updates import clip
from fedmpi.updates.attacks import AttackedUpdates
from fedmpi.updates.compression import Transport


@dataclass(frozen=True)
class UpdateMoments:
    """Sums over the selected clients' local changes Δ_k with coefficients c_k; the sums of several ranks add up."""

    weight: float = 0.0  # Σ c_k
    weighted_squares: float = 0.0  # Σ c_k ‖Δ_k‖²
    term_squares: float = 0.0  # Σ ‖c_k Δ_k‖²
    # Σ c_k (F_k(w) − F_k(w_k)): decrease of each client's loss on its own data with its own model
    weighted_gain: float = 0.0


def update_moments(norms: Floats, coefficients: Floats, gains: Floats | None = None) -> UpdateMoments:
    """Compute the sums of `UpdateMoments` from ‖Δ_k‖, c_k and F_k(w) − F_k(w_k), all (m,)."""
    squares = norms**2
    return UpdateMoments(
        float(coefficients.sum()),
        float((coefficients * squares).sum()),
        float((coefficients**2 * squares).sum()),
        0.0 if gains is None else float((coefficients * gains).sum()),
    )


def gradient_diversity(moments: UpdateMoments, update_norm: float) -> float:
    """Return Σ‖c_k Δ_k‖² / ‖Σ c_k Δ_k‖² (Yin et al. 2018, Def. 1): 1/m for m equal changes, 1 for orthogonal ones.

    `update_norm` is ‖Σ c_k Δ_k‖. The result is infinite if the changes cancel out.
    """
    if moments.term_squares == 0:
        return 0.0
    return moments.term_squares / update_norm**2 if update_norm > 0 else float("inf")


def client_drift(moments: UpdateMoments, update_norm: float) -> float:
    """Return Σ p_k ‖w_k − w̄‖² with p_k = c_k / Σ c and w̄ = Σ p_k w_k: the mean squared distance of the local models
    from their mean (FedSSO, Lemma 3, Eq 24), as Σ p_k ‖Δ_k‖² − ‖Σ p_k Δ_k‖². `update_norm` is ‖Σ c_k Δ_k‖."""
    if moments.weight <= 0:
        return 0.0
    return max(0.0, moments.weighted_squares / moments.weight - (update_norm / moments.weight) ** 2)


def local_gain(moments: UpdateMoments) -> float:
    """Return Σ p_k (F_k(w) − F_k(w_k)) with p_k = c_k / Σ c, which replaces Γ = F* − Σ p_k F_k* of FedSSO, Lemma 4.

    It equals Γ if w is the best global model and local training ends at each client's own.
    """
    return moments.weighted_gain / moments.weight if moments.weight > 0 else 0.0


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
        self.clip_norm, self.measures, self.keeps_norms = clip_norm, measures, keeps_norms
        self.transport, self.attacks = transport, attacks
        self.losses: ClientMeasures | None = None
        self.begin([], 0)

    @classmethod
    def wanted_by(
        cls, config: Config, streams: Streams, attacks: AttackedUpdates | None = None
    ) -> UpdateObserver | None:
        """Return the observer of a configuration, or None if nothing needs single updates (they may then be merged)."""
        clip_norm, measures, chosen = config.privacy.clip_norm, config.logging.diagnostics, config.compression
        norms = "update_norm" in config.clients.sampler.marks.get("needs", ())
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
        self.norms: dict[int, float] = {}
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
