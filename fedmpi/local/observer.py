"""Observation of every client's update before it is summed: attacks, transmission, clipping, diagnostics.

Diagnostics measure how far clients drift apart and how heterogeneous they are. All follow from sums over the selected
clients, so no list of client models is ever kept.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedmpi.clients.sampler import SKETCH_SIZE
from fedmpi.common.decorators import UPDATES
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.config import Config
from fedmpi.local.measures import ClientMeasures
from fedmpi.local.work import ClientTask
from fedmpi.models.flat import FlatModel
from fedmpi.privacy.updates import Clipping, clip
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


class UpdateNumbers:
    """Numbers and vectors of single updates that a client sampler needs: norm, sketch, the update of some layers.

    They describe the trainable parameters: running statistics of batch norm would hide them. A sketch adds up the
    values of an update with random signs in k groups, which a random permutation forms (count sketch; Charikar et al.
    2002). Inner products of sketches are unbiased estimates of those of the updates.
    """

    def __init__(self, sampler: Component, model: FlatModel, streams: Streams):
        self.model, self.streams = model, streams
        names = [sampler.marks.get(mark, ()) for mark in ("needs", "measures")]
        self.needs, self.measures = (tuple(name for name in part if name in UPDATES) for part in names)
        self.size: int = sampler.options.get("sketch_size", SKETCH_SIZE)
        self.layers: Sequence[str] | None = sampler.options.get("layers")
        self.widths: dict[str, int] = {}
        if "update_sketch" in {*self.needs, *self.measures}:
            self.widths["update_sketch"] = self.size
        if "head_update" in {*self.needs, *self.measures}:
            self.widths["head_update"] = sum(place.stop - place.start for place in self._head)

    def memory(self, clients: int) -> tuple[int, str]:
        """Return the bytes of the vectors of all clients on rank 0, and a list of these vectors."""
        kept = [name for name in (*self.needs, *self.measures) if name in self.widths]
        listed = ", ".join(f"{name} ({self.widths[name]:,} values)" for name in kept)
        return sum(4 * clients * self.widths[name] for name in kept), f"{listed} of {clients:,} clients"

    def of(self, name: str, update: Tensor) -> AnyArray:
        """Return a number (), float64, or a vector (k,), float32, of an update (d,)."""
        update = update[: self.model.trainable]
        if name == "update_norm":
            return np.array(float(torch.linalg.vector_norm(update, dtype=torch.float64)))
        if name == "head_update":
            return torch.cat([update[place] for place in self._head]).float().numpy(force=True)
        order, signs = self._groups
        groups = update.index_select(0, order).mul_(signs).view(self.size, -1)
        return groups.sum(1, dtype=torch.float64).float().numpy(force=True)

    @cached_property
    def _head(self) -> list[slice]:
        """Positions of the parameters that match `layers`, by default those of the last module that has any."""
        layout = {name: at for name, at in self.model.layout.items() if at.stop <= self.model.trainable}
        output = [*layout][-1].rpartition(".")[0]
        if self.layers is None:
            return [place for name, place in layout.items() if name.rpartition(".")[0] == output]
        for pattern in self.layers:
            if not fnmatch.filter(layout, pattern):
                raise UserError(
                    f"clients.sampler.layers = {pattern!r} matches no trainable parameter of the model. Choose from "
                    f"{', '.join(layout)}"
                )
        return [place for name, place in layout.items() if any(fnmatch.fnmatchcase(name, one) for one in self.layers)]

    @cached_property
    def _groups(self) -> tuple[Tensor, Tensor]:
        """Positions of the values of all groups, group by group, and their signs; 0 if a group has one value less."""
        d, generator = self.model.trainable, self.streams.generator(Purpose.SKETCH)
        order = generator.permutation(-(-d // self.size) * self.size)
        signs = np.where(order < d, generator.choice([-1.0, 1.0], len(order)), 0.0)
        places = torch.from_numpy(np.where(order < d, order, 0)).to(self.model.device)
        return places, torch.from_numpy(signs).to(self.model.device, self.model.dtype)


class UpdateObserver:
    """Observer of the updates of one rank's clients, round after round."""

    def __init__(
        self,
        clipping: Clipping | None,
        measures: bool,
        transport: Transport | None,
        attacks: AttackedUpdates | None,
        numbers: UpdateNumbers,
    ):
        self.clipping, self.measures, self.numbers = clipping, measures, numbers
        self.transport, self.attacks = transport, attacks
        self.losses: ClientMeasures | None = None
        self.begin([], 0)

    @classmethod
    def wanted_by(
        cls,
        config: Config,
        streams: Streams,
        model: FlatModel,
        attacks: AttackedUpdates | None = None,
        clipping: Clipping | None = None,
    ) -> UpdateObserver | None:
        """Return the observer of a configuration, or None if nothing needs single updates (they may then be merged)."""
        measures, chosen = config.logging.diagnostics, config.compression
        numbers = UpdateNumbers(config.clients.sampler, model, streams)
        if chosen.name == "none":
            seen = numbers.needs or numbers.measures
            wanted = measures or seen or clipping is not None or attacks is not None
            return cls(clipping, measures, None, attacks, numbers) if wanted else None
        return cls(clipping, measures, Transport(chosen, streams), attacks, numbers)

    def begin(self, tasks: Sequence[ClientTask], round: int, start: Tensor | None = None, trial: bool = False) -> None:
        """Start a round with these tasks, all from the model `start` (d,), or the trial of a sampler's candidates."""
        self._round = round
        if self.losses is not None and start is not None:
            self.losses.start = start
        self._gains: list[float] = []
        self._coefficients = {task.client: task.coefficient for task in tasks}
        self._norms: list[float] = []
        self._clients: list[int] = []
        names = self.numbers.measures if trial else self.numbers.needs
        self._read: dict[str, list[AnyArray]] = {name: [] for name in names}
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
        if self.clipping is not None:
            update, clipped = clip(update, self.clipping.norm)
            self.clipped += clipped
        if self._read:
            self._clients.append(client)
            for name, values in self._read.items():
                values.append(self.numbers.of(name, update))
        if self.measures:
            self._norms.append(float(torch.linalg.vector_norm(update, dtype=torch.float64)))
            self._factors.append(self._coefficients[client])
        return update

    def read(self) -> tuple[Ints, dict[str, AnyArray]]:
        """Return this rank's clients (m,) so far, and each number (m,) or vector (m, k) of their updates."""
        shapes = {name: (-1, width) for name, width in self.numbers.widths.items()}
        columns = {name: np.array(values).reshape(shapes.get(name, -1)) for name, values in self._read.items()}
        return np.array(self._clients, np.int64), columns

    def moments(self) -> UpdateMoments:
        """Return the sums of the round so far over this rank's clients."""
        gains = np.array(self._gains) if self.losses is not None else None
        return update_moments(np.array(self._norms), np.array(self._factors), gains)
