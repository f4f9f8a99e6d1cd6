"""Numbers about single clients at a given model, for samplers and records: mean loss and accuracy on the client's
samples, norm of its gradient, norm of the update that it would make.

The module is a separate copy, so measuring never changes anything that an engine has bound. A client's numbers depend
only on the model and its own samples, not on the rank or the clients measured with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import ClientFailure
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.local.failures import check_update, named_client
from fedmpi.local.isolation import evaluating
from fedmpi.local.probes import client_gradients
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import rows_of_a_pass
from fedmpi.local.work import ClientTask, DataSource, LocalRule
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

    def __call__(self, round: int, w: Tensor, clients: Ints, names: Sequence[str]) -> Floats:
        """Return the clients' numbers at the model w (d,), float64 (k, names); NaN for clients without samples."""
        columns = {name: np.full(len(clients), np.nan) for name in names}
        held = np.flatnonzero(self.data.sizes[clients] > 0)
        if "loss" in columns or "accuracy" in columns:
            for place in held.tolist():
                loss, accuracy = self._evaluated(round, w, int(clients[place]), "accuracy" in columns)
                for name, value in (("loss", loss), ("accuracy", accuracy)):
                    if name in columns:
                        columns[name][place] = value
        if "gradient_norm" in columns:
            gradients = client_gradients(
                self.data, self.model, clients[held], w, "full", self.streams, round, rank=self.rank
            )
            for place, (_, gradient) in zip(held.tolist(), gradients, strict=True):
                columns["gradient_norm"][place] = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        return np.stack([columns[name] for name in names], axis=1) if names else np.empty((len(clients), 0))

    def _evaluated(self, round: int, w: Tensor, client: int, judged: bool) -> tuple[float, float]:
        """Return a client's mean loss over all its samples in evaluation mode, and its accuracy.

        The accuracy is NaN if the task has none, no position counts, or it is not requested.
        """
        loss, evaluated = (
            self.model.loss,
            evaluating(self.model, w, self.streams, Purpose.CLIENT_EVALUATION, round, client),
        )
        with named_client(client, self.rank), evaluated as module:
            x, y = self.data.load(client)
            total, tally = 0.0, MetricTally(self._metrics if judged else (), loss.kind)
            with torch.no_grad():
                for first in range(0, len(y), self._rows):
                    part = slice(first, first + self._rows)
                    outputs = module(x[part]).detach()
                    total += float(loss.per_sample(outputs, y[part]).sum(dtype=torch.float64))
                    tally.add(outputs, y[part])
            if not np.isfinite(total):
                raise FloatingPointError("its loss is not finite: training diverged; lower local.lr")
        return total / len(y), tally.numbers().get("accuracy", math.nan)


def update_norms(engine: SequentialEngine, clients: Ints, start: Tensor, rule: LocalRule, round: int) -> Floats:
    """Return ‖w_k − w‖ of clients (k,) that train from w = `start` (d,) on all their samples, float64 (k,).

    Batches and dropout masks are those of the round: a selected client makes exactly this update before compression,
    clipping or attacks. NaN for clients with too few samples to train on, and for diverged clients if rounds leave
    these out.
    """
    norms, w = np.full(len(clients), np.nan), torch.empty_like(start)
    for place in np.flatnonzero(engine.source.sizes[clients] >= engine.model.least).tolist():
        task = ClientTask(int(clients[place]), None, 1.0)
        try:
            engine.advance(w.copy_(start), task, rule, round, hooks=engine.hooks_of(task))
            with named_client(task.client, engine.rank):
                check_update(w.sub_(start), rule.lr)
            norms[place] = float(torch.linalg.vector_norm(w, dtype=torch.float64))
        except ClientFailure as failure:
            engine.on_divergence.leave_out(failure, round)
    return norms
