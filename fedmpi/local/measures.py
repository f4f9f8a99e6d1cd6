"""Measurements of single clients at given models: gradients for stratification and importance sampling, metrics.

FedSTS and FedSTaS use the full local gradient, FedSSO the change of one local step, which is −η times a gradient.
Dropout is off; batch norm uses the statistics of the probe's own batch, as in a local step. In FedSSO's initial round
the probe uses the samples of the initial probing step, which has no dropout either: strata and step use the same w_1^k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from fedmpi.clients.stratifier import ClientProbe
from fedmpi.clients.turnout import opens_with_a_step
from fedmpi.common.decorators import HELD_OUT
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.config.tables import probe_of
from fedmpi.data.source import DataSource, Tensors
from fedmpi.local.engines import batched_engine, why_not_batched
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import rows_of_a_pass
from fedmpi.local.work import SMALL, named_client
from fedmpi.models.flat import FlatModel, add_gradients
from fedmpi.tasks.metrics import Metric, MetricTally

if TYPE_CHECKING:
    from fedmpi.local.batched.engine import BatchedEngine

Probe = Literal["full", "batch", "sample"]

PROBE_ROWS = 1024
"""Largest number of samples whose activations are in memory at once; a larger local set is passed in parts."""

PASS_ROWS = 2000
"""The same without gradients."""
BLOCK_BYTES = 1 << 26


def make_probe(config: Config, model: FlatModel, data: DataSource, streams: Streams, rank: int) -> ClientProbe:
    """Build the probe of a run: (round, model, clients) -> blocks of (clients, gradients (k, d)).

    Small clients are batched if the model has a batched form and sums need not be exact: the rounding of a stack
    depends on the clients in it.
    """
    rows = None if config.local.batch_size == "all" else config.local.batch_size
    side_by_side = config.local.engine in ("auto", "batched") and not config.server.exact
    stackable = side_by_side and why_not_batched(model, data.description) is None
    batched = batched_engine(SequentialEngine(model, data, streams, rank), config) if stackable else None
    gradients = Gradients(data, model, streams, probe_of(config), rows, rank, batched)

    def probe(t: int, w: Tensor, clients: Ints) -> Iterator[tuple[Ints, Tensor]]:
        return gradients.blocks(clients, w, t, Purpose.BATCH_ORDER if opens_with_a_step(config, t) else Purpose.PROBE)

    return probe


class Gradients:
    """Mean gradients of a rank's clients over their samples, over a batch of them, or over one."""

    def __init__(
        self,
        source: DataSource,
        model: FlatModel,
        streams: Streams,
        probe: Probe = "full",
        batch_rows: int | None = None,
        rank: int = 0,
        batched: BatchedEngine | None = None,
    ):
        self.source, self.model, self.streams, self.rank, self.batched = source, model, streams, rank, batched
        self.most = {"full": None, "batch": batch_rows, "sample": 1}[probe]

    def each(
        self, clients: Iterable[int] | Ints, w: Tensor, round: int, purpose: Purpose = Purpose.PROBE
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each client's mean gradient at `w`."""
        model = self.model
        point, gradient = torch.empty_like(w), torch.zeros_like(w[: model.trainable])
        at_once = rows_of_a_pass(model, self.source.description, PROBE_ROWS, training=True)
        for client in map(int, clients):
            with named_client(client, self.rank):
                x, y = self.source.load(client, self._rows(client, round, purpose))
                model.begin_training(point.copy_(w), self.streams, round, client, dropout=False)
                with model.seeded(self.streams, round, client):
                    _mean_gradient(model, x, y, gradient, at_once)
                if not bool(torch.isfinite(gradient.sum())):
                    raise FloatingPointError("its gradient is not finite: training diverged; lower local.lr")
            yield client, gradient

    def blocks(
        self,
        clients: Iterable[int] | Ints,
        w: Tensor,
        round: int,
        purpose: Purpose = Purpose.PROBE,
        block_bytes: int = BLOCK_BYTES,
    ) -> Iterator[tuple[Ints, Tensor]]:
        """Yield the gradients of `each` in blocks of bounded memory."""
        height = max(1, block_bytes // (self.model.trainable * w.element_size()))
        if self.batched is not None:
            probed = np.fromiter(clients, np.int64)
            counts = np.array([self._count(client) for client in probed], np.int64)
            small = (counts >= self.model.least) & (counts <= SMALL)
            rows = [self._rows(int(client), round, purpose) for client in probed[small]]
            for members, block in self.batched.gradients(probed[small], rows, counts[small], w, height):
                if not bool(torch.isfinite(block.sum())):
                    clients = members  # one at a time, the failing one is named
                    break
                yield members, block
            else:
                clients = probed[~small]
        stream = self.each(clients, w, round, purpose)
        while True:
            found: list[int] = []
            block = torch.empty(height, self.model.trainable, dtype=w.dtype)
            for place, (client, gradient) in enumerate(islice(stream, height)):
                found.append(client)
                block[place] = gradient
            if not found:
                return
            yield np.array(found, np.int64), block[: len(found)]

    def _count(self, client: int) -> int:
        n = int(self.source.sizes[client])
        return n if self.most is None else min(n, self.most)

    def _rows(self, client: int, round: int, purpose: Purpose) -> Ints | None:
        n, count = int(self.source.sizes[client]), self._count(client)
        if count >= n:
            return None
        return self.streams.generator(purpose, round, client).choice(n, count, replace=False, shuffle=False)


def _mean_gradient(model: FlatModel, x: Tensor, y: Tensor, out: Tensor, rows: int) -> None:
    """Write the gradient of the mean loss of (x, y) into `out` (t,), in passes of at most so many samples."""
    views = model.views(out.zero_())
    if len(y) < model.least:
        return
    rows -= 0 < len(y) % rows < model.least  # the last pass must not be too small
    weights = model.loss.weights(y)
    for first in range(0, len(y), rows):
        part = slice(first, first + rows)
        _, gradients = model.loss_gradient(x[part], y[part])
        add_gradients(views, gradients, float(weights[part].sum() / weights.sum()))


class ClientMeasures:
    """Metrics of single clients: losses and accuracies on their training or held-out samples, norms of gradients.

    They measure between the clients of an engine, each of which binds the module anew. A client's numbers depend only
    on the model and its own samples, not on the rank or the clients measured with it.
    """

    def __init__(
        self,
        model: FlatModel,
        data: DataSource,
        streams: Streams,
        rank: int,
        held_out: Callable[[int], Tensors | None] = lambda client: None,
    ):
        self.model, self.data, self.streams, self.rank, self.held_out = model, data, streams, rank, held_out
        measured = ("accuracy",) if "accuracy" in model.loss.kind.metrics else ()
        self._metrics = [Metric(resolve("metric", name)) for name in measured]
        self._rows = rows_of_a_pass(model, data.description, PASS_ROWS)
        self.start = model.initial  # the model of the round, set by its owner
        self._own = torch.empty_like(self.start)

    def __call__(self, round: int, w: Tensor, clients: Ints, names: Sequence[str]) -> Floats:
        """Return the clients' numbers at the model w (d,), float64 (k, names); NaN for clients without samples."""
        found = np.full((len(clients), len(names)), np.nan)
        columns = dict(zip(names, found.T, strict=True))
        held = np.flatnonzero(self.data.sizes[clients] > 0)
        if columns.keys() & {"loss", "loss_rms", "accuracy"}:
            for place in held.tolist():
                client = int(clients[place])
                scores = self._scores(round, w, client, partial(self.data.load, client), "accuracy" in columns)
                for name in columns.keys() & scores.keys():
                    columns[name][place] = scores[name]
        if columns.keys() & {*HELD_OUT}:
            for place, client in enumerate(clients.tolist()):
                scores = self._scores(round, w, client, partial(self.held_out, client), "val_accuracy" in columns)
                for name in columns.keys() & {*HELD_OUT}:
                    columns[name][place] = scores.get(name.removeprefix("val_"), math.nan)
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
        return self._scores(round, w, client, partial(self.data.load, client), False, finite=False)["loss"]

    def _scores(
        self, round: int, w: Tensor, client: int, load: Callable[[], Tensors | None], judged: bool, finite: bool = True
    ) -> dict[str, float]:
        """Return a client's mean and root mean square of its samples' losses in evaluation mode, and its accuracy.

        The accuracy is NaN if the task has none, no position counts, or it is not requested. Nothing without samples.
        """
        model, total, squares = self.model, 0.0, 0.0
        tally = MetricTally(self._metrics if judged else (), model.loss.kind)
        evaluated = model.evaluating(w, self.streams, Purpose.CLIENT_EVALUATION, round, client)
        with named_client(client, self.rank), evaluated as module, torch.no_grad():
            loaded = load()
            if loaded is None:
                return {}
            x, y = loaded
            for first in range(0, len(y), self._rows):
                part = slice(first, first + self._rows)
                outputs = module(x[part]).detach()
                losses = model.loss.per_sample(outputs, y[part])
                total += float(losses.sum(dtype=torch.float64))
                squares += float((losses.double().square() / model.loss.weights(y[part])).sum())
                tally.add(outputs, y[part])
            if finite and not math.isfinite(total):
                raise FloatingPointError("its loss is not finite: training diverged; lower local.lr")
        n = float(model.loss.weights(y).sum()) or 1.0
        accuracy = tally.numbers().get("accuracy", math.nan)
        return {"loss": total / n, "loss_rms": math.sqrt(squares / n), "accuracy": accuracy}


class SampleMeasures:
    """Numbers of single samples under the global model, in evaluation mode, for data samplers.

    Clients are measured one at a time, so that the numbers do not depend on the rank.
    """

    def __init__(self, engine: SequentialEngine):
        self.engine, self.model = engine, engine.model
        self.start = engine.model.initial  # the model of the round, set by its owner
        self._rows = rows_of_a_pass(engine.model, engine.source.description, PASS_ROWS)

    def __call__(self, round: int, client: int, names: Sequence[str]) -> dict[str, Floats]:
        """Return numbers of a client's samples by name, float64 (n,) each."""
        model, engine, by_norm = self.model, self.engine, "sample_gradient_norm" in names
        found: dict[str, list[Tensor]] = {"sample_loss": [], "sample_gradient_norm": []}
        evaluated = model.evaluating(self.start, engine.streams, Purpose.CLIENT_EVALUATION, round, client)
        with named_client(client, engine.rank), evaluated as module:
            x, y = engine.source.load(client)
            for features, targets in zip(torch.split(x, self._rows), torch.split(y, self._rows), strict=True):
                with torch.no_grad():
                    outputs = module(features).detach()
                with torch.enable_grad():
                    losses = model.loss.per_sample(outputs.requires_grad_(by_norm), targets)
                found["sample_loss"].append(losses.detach())
                if by_norm:
                    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
                    norms = torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=torch.float64)
                    found["sample_gradient_norm"].append(norms)
            numbers = {name: torch.cat(found[name]).double().numpy(force=True) for name in names}
            if not all(np.isfinite(values).all() for values in numbers.values()):
                raise FloatingPointError("losses of its samples are not finite: training diverged; lower local.lr")
        return numbers
