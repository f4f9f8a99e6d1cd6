"""Gradients of clients at a given model, for stratification and importance sampling.

FedSTS and FedSTaS use the full local gradient, FedSSO the change of one local step, which is −η times a gradient.
Dropout is off; batch norm uses the statistics of the probe's own batch, as in a local step. In FedSSO's initial round
the probe uses the samples of the initial probing step, which has no dropout either: strata and step use the same w_1^k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from fedmpi.clients.stratifier import ClientProbe
from fedmpi.clients.turnout import opens_with_a_step
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.stratification import probe_of
from fedmpi.data.source import DataSource
from fedmpi.local.engines import batched_engine, why_not_batched
from fedmpi.local.failures import named_client
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import rows_of_a_pass
from fedmpi.models.flat import FlatModel, add_gradients

if TYPE_CHECKING:
    from fedmpi.local.batched.engine import BatchedEngine

Probe = Literal["full", "batch", "sample"]

PROBE_ROWS = 1024
"""Largest number of samples whose activations are in memory at once; a larger local set is passed in parts."""

BLOCK_BYTES = 1 << 26
SMALL = 64
"""Most samples of a client that is probed in a batch with others; a larger client fills the device alone."""


def make_probe(config: Config, model: FlatModel, data: DataSource, streams: Streams, rank: int) -> ClientProbe:
    """Build the probe of a run: (round, model, clients) -> blocks of (clients, gradients (k, d)).

    Small clients are batched if the model has a batched form and sums need not be exact: the rounding of a stack
    depends on the clients in it.
    """
    rows = None if config.local.batch_size == "all" else config.local.batch_size
    side_by_side = config.local.engine in ("auto", "batched") and not config.server.exact
    stackable = side_by_side and why_not_batched(model, data.description) is None
    batched = batched_engine(SequentialEngine(model, data, streams, rank)) if stackable else None
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
    for first in range(0, len(y), rows):
        part = slice(first, first + rows)
        _, gradients = model.loss_gradient(x[part], y[part])
        add_gradients(views, gradients, len(y[part]) / len(y))
