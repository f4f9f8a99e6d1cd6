"""Gradients of many small clients from one pass of the batched layers, which all start at the same values.

A step with target = 0 · target + 1 · gradient replaces each client's values by its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.types import Ints
from fedmpi.local.batched.engine import chunk_size
from fedmpi.local.batched.feed import Feed, MaskFeed, Timetable, Weights
from fedmpi.local.batched.stack import Stack
from fedmpi.local.failures import named_client
from fedmpi.local.work import DataSource, LocalRule
from fedmpi.models.flat import FlatModel
from fedmpi.models.stacked.base import Step
from fedmpi.models.stacked.net import translate

SMALL = 64
"""Most samples of a client that is probed in a batch with others; a larger client fills the device alone."""


class _Gradient:
    """Placeholder for an optimizer: layers write the gradient over the values, and nothing changes it afterwards."""

    fused, finishes = True, False
    step = Step(keep=0, rate=1)

    def prepare(self, corrections: object, start: object, into: object) -> None:
        """Do nothing: there are no corrections."""

    def finish(self, block: object, number: int) -> None:
        """Do nothing: the gradient stays."""


class BatchedProbe:
    """Probe of the mean gradients of batched clients."""

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
        timetable = Timetable.of([[None]] * len(clients), [len(y) for y in labels])
        feed = Feed(timetable, stack.open(features, w, _Gradient()), labels)
        net = stack.bound(timetable.active(0), timetable.rows(0))
        feed.fill(net, 0)
        MaskFeed(None, timetable).fill(net, 0)
        net.step(*Weights(timetable, stack.dtype, stack.device).of(0, net.clients, net.rows))
        gradients = self._flat(stack, len(clients))
        if not bool(torch.isfinite(gradients.sum())):
            self._name_the_diverged(clients, gradients)
        return gradients

    def _flat(self, stack: Stack, clients: int) -> Tensor:
        """Return the contents of the stack as flat vectors on the CPU."""
        flat = torch.empty(clients, self.net.size, dtype=stack.dtype)
        for slot in self.net.slots:
            axes = slot.axes or tuple(range(len(slot.shape)))
            into = flat[:, slot.offset : slot.offset + slot.size].view(clients, *slot.shape)
            held = slot.of_stack(stack.values[:clients], tuple(slot.shape[axis] for axis in axes))
            into.permute(0, *(axis + 1 for axis in axes)).copy_(held)
        embedding, tables = self.net.embedding, stack.tables
        if embedding is not None and tables is not None:
            for row, (begin, end) in zip(flat, zip(tables.bounds, tables.bounds[1:], strict=False), strict=True):
                embedding.weight.from_flat(row).zero_()[tables.rows[begin:end].cpu()] = tables.values[begin:end].cpu()
        return flat

    def _name_the_diverged(self, clients: list[int], gradients: Tensor) -> None:
        for client, gradient in zip(clients, gradients, strict=True):
            with named_client(client, self.rank):
                if not bool(torch.isfinite(gradient).all()):
                    raise FloatingPointError("its gradient is not finite: training diverged; lower local.lr")
