"""Comparisons of whole models: clients' losses before and after their work, distance to a reference.

The module is a separate copy, so measuring never changes anything that an engine has bound.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import Config
from fedmpi.local.diagnostics import weight_divergence
from fedmpi.local.isolation import evaluating
from fedmpi.local.traits import rows_of_a_pass
from fedmpi.local.work import DataSource
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.losses import CROSS_ENTROPY, Loss

ROWS_AT_ONCE = 2000


class LocalLosses:
    """Gain of a client's own model over the global model on the client's data."""

    def __init__(
        self,
        config: Config,
        data: DataSource,
        device: torch.device,
        streams: Streams,
        loss: Loss = CROSS_ENTROPY,
    ):
        self.data, self.streams = data, streams
        name, options = config.model.choice, config.model.options
        self.model = FlatModel.built(name, options, data.description, config.seed, device, loss)
        self._rows = rows_of_a_pass(self.model, data.description, ROWS_AT_ONCE)
        self.start = self.model.initial
        self._own = torch.empty_like(self.start)

    def gain(self, client: int, update: Tensor, round: int) -> float:
        """Return F_k(w) − F_k(w + Δ_k), mean losses over a client in evaluation mode; 0 without samples."""
        x, y = self.data.load(client)
        torch.add(self.start, update, out=self._own)
        return self._loss(self.start, x, y, client, round) - self._loss(self._own, x, y, client, round)

    def before(self, client: int, start: Tensor, round: int) -> float:
        """Return F_k(w), the mean loss over all samples of the client in evaluation mode; 0 without samples."""
        x, y = self.data.load(client)
        return self._loss(start, x, y, client, round)

    def _loss(self, values: Tensor, x: Tensor, y: Tensor, client: int, round: int) -> float:
        loss, total = self.model.loss, 0.0
        evaluated = evaluating(self.model, values, self.streams, Purpose.CLIENT_EVALUATION, round, client)
        with evaluated as module, torch.no_grad():
            for first in range(0, len(y), self._rows):
                part = slice(first, first + self._rows)
                total += loss.total(module(x[part]), y[part])
        return total / max(len(y), 1)


class Reference:
    """Model that the run is compared with, e.g. that of centralised training."""

    def __init__(self, path: str, model: FlatModel):
        try:
            held = load(read_plain(Path(path)))
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(f"logging.reference = {path!r} cannot be read as safetensors: {error}") from error
        values = model.initial.clone()
        model.begin(values)
        try:
            model.module.load_state_dict(held)
        except RuntimeError as error:
            raise UserError(f"logging.reference = {path!r} is no model of this run: {error}") from error
        self.values = values[: model.trainable].cpu().numpy().astype(np.float64)

    def distance(self, w: Tensor) -> float:
        """Return ‖w − w_ref‖ / ‖w_ref‖ over the trainable values (Zhao et al. 2018, Eq 3)."""
        return weight_divergence(w[: len(self.values)].cpu().numpy(), self.values)
