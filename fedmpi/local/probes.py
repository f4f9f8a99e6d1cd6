"""Gradients of clients at a given model, for stratification and importance sampling.

FedSTS and FedSTaS use the full local gradient, FedSSO the change of one local step, which is −η times a gradient.
Dropout is off; batch norm uses the statistics of the probe's own batch, as in a local step. In FedSSO's initial round
the probe uses the samples of the initial probing step, which has no dropout either: strata and step use the same w_1^k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

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
from fedmpi.local.isolation import begin_training, seeded
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import rows_of_a_pass
from fedmpi.models.flat import FlatModel, add_gradients

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

    def probe(t: int, w: Tensor, clients: Ints) -> Iterator[tuple[Ints, Tensor]]:
        purpose = Purpose.BATCH_ORDER if opens_with_a_step(config, t) else Purpose.PROBE
        return gradient_blocks(
            data, model, clients, w, probe_of(config), streams, t, rows, rank, batched=batched, purpose=purpose
        )

    return probe


def client_gradients(
    source: DataSource,
    model: FlatModel,
    clients: Iterable[int] | Ints,
    w: Tensor,
    probe: Probe,
    streams: Streams,
    round: int,
    batch_rows: int | None = None,
    rank: int = 0,
    purpose: Purpose = Purpose.PROBE,
) -> Iterator[tuple[int, Tensor]]:
    """Yield each client's mean gradient at `w`."""
    point, gradient = torch.empty_like(w), torch.zeros_like(w[: model.trainable])
    at_once = rows_of_a_pass(model, source.description, PROBE_ROWS, training=True)
    for client in clients:
        client = int(client)
        with named_client(client, rank):
            rows = _probed_rows(int(source.sizes[client]), probe, batch_rows, streams, round, client, purpose)
            x, y = source.load(client, rows)
            begin_training(model, point.copy_(w), streams, round, client, dropout=False)
            with seeded(model, streams, round, client):
                _mean_gradient(model, x, y, gradient, at_once)
            if not bool(torch.isfinite(gradient.sum())):
                raise FloatingPointError("its gradient is not finite: training diverged; lower local.lr")
        yield client, gradient


def gradient_blocks(
    source: DataSource,
    model: FlatModel,
    clients: Iterable[int] | Ints,
    w: Tensor,
    probe: Probe,
    streams: Streams,
    round: int,
    batch_rows: int | None = None,
    rank: int = 0,
    block_bytes: int = BLOCK_BYTES,
    batched: Any = None,
    purpose: Purpose = Purpose.PROBE,
) -> Iterator[tuple[Ints, Tensor]]:
    """Yield the gradients of `client_gradients` in blocks of bounded memory."""
    height = max(1, block_bytes // (model.trainable * w.element_size()))
    if batched is not None:
        probed = np.fromiter(clients, np.int64)
        counts = np.array([_probed_count(int(n), probe, batch_rows) for n in source.sizes[probed]], np.int64)
        small = (counts >= model.least) & (counts <= SMALL)
        rows = [
            _probed_rows(int(source.sizes[k]), probe, batch_rows, streams, round, int(k), purpose)
            for k in probed[small]
        ]
        for members, block in batched.gradients(probed[small], rows, counts[small], w, height):
            if not bool(torch.isfinite(block.sum())):
                clients = members  # one at a time, the failing one is named
                break
            yield members, block
        else:
            clients = probed[~small]
    stream = client_gradients(source, model, clients, w, probe, streams, round, batch_rows, rank, purpose)
    while True:
        found: list[int] = []
        block = torch.empty(height, model.trainable, dtype=w.dtype)
        for place, (client, gradient) in enumerate(islice(stream, height)):
            found.append(client)
            block[place] = gradient
        if not found:
            return
        yield np.array(found, np.int64), block[: len(found)]


def _probed_rows(
    n: int, probe: Probe, batch_rows: int | None, streams: Streams, round: int, client: int, purpose: Purpose
) -> Ints | None:
    count = _probed_count(n, probe, batch_rows)
    if count >= n:
        return None
    return streams.generator(purpose, round, client).choice(n, count, replace=False, shuffle=False)


def _probed_count(n: int, probe: Probe, batch_rows: int | None) -> int:
    return min(n, {"full": n, "batch": n if batch_rows is None else batch_rows, "sample": 1}[probe])


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
