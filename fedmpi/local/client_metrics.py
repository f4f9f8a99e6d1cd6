"""Metrics of single clients at given models: loss, accuracy, norms of gradient and update; distance to a reference.

The module is a separate copy, so measuring never changes anything that an engine has bound. A client's numbers depend
only on the model and its own samples, not on the rank or the clients measured with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.data.source import DataSource
from fedmpi.local.failures import named_client
from fedmpi.local.probes import Gradients
from fedmpi.local.traits import rows_of_a_pass
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.losses import CROSS_ENTROPY, Loss
from fedmpi.tasks.metrics import Metric, MetricTally

ROWS_AT_ONCE = 2000


class ClientMeasures:
    """Measurement of single clients."""

    def __init__(
        self,
        config: Config,
        data: DataSource,
        streams: Streams,
        device: torch.device,
        rank: int,
        loss: Loss = CROSS_ENTROPY,
    ):
        self.data, self.streams, self.rank = data, streams, rank
        name, options = config.model.choice, config.model.options
        self.model = FlatModel.built(name, options, data.description, config.seed, device, loss)
        measured = ("accuracy",) if "accuracy" in loss.kind.metrics else ()
        self._metrics = [Metric(resolve("metric", name)) for name in measured]
        self._rows = rows_of_a_pass(self.model, data.description, ROWS_AT_ONCE)
        self.start = self.model.initial  # the model of the round, set by its owner
        self._own = torch.empty_like(self.start)

    def __call__(self, round: int, w: Tensor, clients: Ints, names: Sequence[str]) -> Floats:
        """Return the clients' numbers at the model w (d,), float64 (k, names); NaN for clients without samples."""
        found = np.full((len(clients), len(names)), np.nan)
        columns = dict(zip(names, found.T, strict=True))
        held = np.flatnonzero(self.data.sizes[clients] > 0)
        if "loss" in columns or "accuracy" in columns:
            for place in held.tolist():
                loss, accuracy = self._evaluated(round, w, int(clients[place]), "accuracy" in columns)
                for name, value in (("loss", loss), ("accuracy", accuracy)):
                    if name in columns:
                        columns[name][place] = value
        if "gradient_norm" in columns:
            gradients = Gradients(self.data, self.model, self.streams, rank=self.rank).each(clients[held], w, round)
            for place, (_, gradient) in zip(held.tolist(), gradients, strict=True):
                columns["gradient_norm"][place] = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        return found

    def gain(self, client: int, update: Tensor, round: int) -> float:
        """Return F_k(w) − F_k(w + Δ_k), mean losses over a client in evaluation mode; 0 without samples."""
        torch.add(self.start, update, out=self._own)
        return self.loss(client, self.start, round) - self.loss(client, self._own, round)

    def loss(self, client: int, w: Tensor, round: int) -> float:
        """Return F_k(w), the mean loss over all samples of the client in evaluation mode; 0 without samples."""
        return self._evaluated(round, w, client, False, finite=False)[0]

    def _evaluated(self, round: int, w: Tensor, client: int, judged: bool, finite: bool = True) -> tuple[float, float]:
        """Return a client's mean loss over all its samples in evaluation mode, and its accuracy.

        The accuracy is NaN if the task has none, no position counts, or it is not requested.
        """
        model, total = self.model, 0.0
        tally = MetricTally(self._metrics if judged else (), model.loss.kind)
        evaluated = model.evaluating(w, self.streams, Purpose.CLIENT_EVALUATION, round, client)
        with named_client(client, self.rank), evaluated as module, torch.no_grad():
            x, y = self.data.load(client)
            for first in range(0, len(y), self._rows):
                part = slice(first, first + self._rows)
                outputs = module(x[part]).detach()
                total += float(model.loss.per_sample(outputs, y[part]).sum(dtype=torch.float64))
                tally.add(outputs, y[part])
            if finite and not math.isfinite(total):
                raise FloatingPointError("its loss is not finite: training diverged; lower local.lr")
        return total / max(len(y), 1), tally.numbers().get("accuracy", math.nan)


class Reference:
    """Model that the run is compared with, e.g. that of centralized training."""

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
        difference = w[: len(self.values)].cpu().numpy().astype(np.float64) - self.values
        return float(np.linalg.norm(difference) / np.linalg.norm(self.values))
