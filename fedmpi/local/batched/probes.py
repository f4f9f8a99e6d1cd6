"""Gradients of many small clients from one pass of the batched layers, which all start at the same values.

A step with target = 0 · target + 1 · gradient replaces each client's values by its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.types import Ints
from fedmpi.data.source import DataSource
from fedmpi.local.batched.engine import chunk_size
from fedmpi.local.batched.feed import Feed, Timetable
from fedmpi.local.batched.stack import Stack
from fedmpi.local.batched.translation import translate
from fedmpi.local.batched.update import StackOptimizer
from fedmpi.local.failures import named_client
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel

SMALL = 64
"""Most samples of a client that is probed in a batch with others; a larger client fills the device alone."""


class BatchedProbe:
    """Probe of the mean gradients of batched clients."""

    largest = SMALL

    def __init__(self, model: FlatModel, source: DataSource, rank: int = 0):
        self.model, self.source, self.rank = model, source, rank
        self.net, self.loss = translate(model.module, source.description, model.stacked_forms), model.loss
        self._stack: Stack | None = None

    def gradients(
        self, clients: Ints, rows_of: Sequence[Ints | None], sizes: Ints, w: Tensor, most: int
    ) -> Iterator[tuple[Ints, Tensor]]:
        """Yield every client's gradient of its mean loss at `w`."""
        if not len(clients):
            return
        order, largest = np.argsort(-sizes, kind="stable"), int(sizes.max())
        chunk = min(chunk_size(self.net, largest, LocalRule(), w), len(order), most)
        stack = self._prepare(chunk, largest, w)
        for first in range(0, len(order), chunk):
            places = order[first : first + chunk]
            with torch.no_grad():
                gradients = self._chunk(stack, clients[places].tolist(), [rows_of[place] for place in places], w)
            yield clients[places], gradients

    def _prepare(self, capacity: int, rows: int, w: Tensor) -> Stack:
        kept = self._stack
        if kept is None or kept.capacity < capacity or kept.rows < rows:
            self._stack = kept = Stack(self.net, capacity, rows, True, w.dtype, w.device, self.loss)
        kept.begin(w)
        return kept

    def _chunk(self, stack: Stack, clients: list[int], rows_of: list[Ints | None], w: Tensor) -> Tensor:
        features, labels = [], []
        for client, rows in zip(clients, rows_of, strict=True):
            with named_client(client, self.rank):
                x, y = self.source.load(client, rows)
                features.append(x)
                labels.append(y)
        timetable = Timetable([[None]] * len(clients), [len(y) for y in labels])
        feed = Feed(timetable, stack.open(features, w, StackOptimizer()), labels, stack.dtype)
        net = stack.bound(timetable.active[0], timetable.most[0])
        feed.fill(net, 0)
        net.step(*feed.weights(net, 0))
        gradients = stack.flat_gradients()
        if not bool(torch.isfinite(gradients.sum())):
            self._name_the_diverged(clients, gradients)
        return gradients

    def _name_the_diverged(self, clients: list[int], gradients: Tensor) -> None:
        for client, gradient in zip(clients, gradients, strict=True):
            with named_client(client, self.rank):
                if not bool(torch.isfinite(gradient).all()):
                    raise FloatingPointError("its gradient is not finite: training diverged; lower local.lr")
