"""The stack: the values of the batched clients, and the network bound to the first k of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedmpi.local.batched.apart import KeptApart
from fedmpi.local.batched.update import Block, StackOptimizer, StackSGD
from fedmpi.local.failures import check_update
from fedmpi.models.stacked.ahead import ProductsAhead
from fedmpi.models.stacked.base import Ahead, Drift, Op, Place, Slot, Step, Workspace
from fedmpi.models.stacked.graph import GraphLayer, GraphOp, dropouts_of
from fedmpi.models.stacked.image import ColumnsOp, ImageColumns
from fedmpi.models.stacked.losses import stacked_loss
from fedmpi.models.stacked.net import StackedNet
from fedmpi.models.stacked.text import EmbeddingOp, Tables
from fedmpi.tasks.losses import CROSS_ENTROPY, Loss

MOST_BINDINGS = 64
JOIN_BELOW = 1024
"""Bytes of a sample below which one call per step gathers the joined samples of all clients. Larger samples are
gathered client by client, which saves the copy that joins them."""


def client_by_client(samples: Tensor) -> bool:
    """Check whether a step gathers each client's samples (n, values) separately."""
    return samples.device.type == "cpu" and samples.shape[-1] * samples.element_size() >= JOIN_BELOW


class Stack:
    """Values (K, d') of up to K clients and all memory that their steps need, reused in every round."""

    def __init__(
        self,
        net: StackedNet,
        capacity: int,
        rows: int,
        fused: bool,
        dtype: torch.dtype,
        device: torch.device,
        loss: Loss = CROSS_ENTROPY,
    ):
        self.net, self.capacity, self.rows, self.fused = net, capacity, rows, fused
        self.dtype, self.device, self.loss = dtype, device, loss
        self.values = torch.zeros(capacity, net.stack_size, dtype=dtype, device=device)
        self.gradients = self.values if fused else torch.zeros_like(self.values)
        self.start = torch.zeros(1, net.stack_size, dtype=dtype, device=device)
        self.losses = torch.zeros(capacity * rows, dtype=dtype, device=device)
        self.workspace = Workspace(dtype, device)
        self.step, self.drift = Step(1, 0), Drift()
        self.ahead = ProductsAhead(self.step, self.drift, self.workspace)
        self.clients, self.size = 0, net.size
        self.tables: Tables | None = None
        self.apart: KeptApart | None = None
        self._block = Block.of(self.values, self.gradients, self.start, memory=not fused)
        self._table_block: Block | None = None
        self._corrected = self._block
        self._corrections: Tensor | None = None
        self._blocks: dict[int, list[Block]] = {}
        self._parts = [(slot, slot.size, self._parameter_in(self.start[0], slot)) for slot in net.slots]
        self._bound: dict[tuple[int, int], BoundNet] = {}

    def begin(self, start: Tensor) -> None:
        """Copy the server's values (d,) of this round."""
        self.size = start.numel()
        for layer in self.net.layers:
            if isinstance(layer, GraphLayer):
                layer.read_buffers(start)
        for slot in self.net.slots:
            slot.of_stack(self.start, slot.arranged)[0].copy_(slot.from_flat(start))

    def open(
        self,
        features: Sequence[Tensor],
        start: Tensor,
        optimizer: StackOptimizer,
        corrections: Iterable[Tensor | None] | None = None,
        apart: bool = False,
    ) -> list[Tensor]:
        """Start the work of some clients at the server's values."""
        self.clients = len(features)
        self.losses.zero_()
        self.values[: self.clients].copy_(self.start.expand(self.clients, -1))
        self.step.keep, self.step.rate = optimizer.step.keep, optimizer.step.rate
        if not self.fused:
            self._block.reset()
        self.drift.on, self.apart, self._corrected = False, None, self._block
        self.ahead.on = False
        self._blocks.clear()
        embedding = self.net.embedding
        if embedding is None:
            dtype = torch.int64 if self.net.reads_words else self.dtype
            samples = [x.reshape(len(x), -1).to(dtype) for x in features]
            if corrections is not None:
                if apart and self.net.head is not None and isinstance(optimizer, StackSGD):
                    self.apart = KeptApart(self.net.head, optimizer, self.drift, samples, self.workspace)
                self._correct(corrections, optimizer)
            return samples
        if corrections is not None:
            corrections = list(corrections)  # the parts of the words are read after all others
            self._correct(corrections, optimizer)
        self.tables = Tables(features, embedding.weight.from_flat(start))
        gradient = self.tables.values if self.fused else self.tables.gradient
        corrected = self._of_words(corrections)
        self._table_block = Block.of(self.tables.values, gradient, self.tables.start, not self.fused, corrected)
        if corrected is not None:
            optimizer.prepare(corrected, self.tables.start, corrected)
        return self.tables.ids

    def look_ahead(self, samples: Sequence[Tensor], order: Sequence[Tensor], rows: int, steps: int) -> None:
        """Compute the first layer's products with the open clients' samples for so many steps at once."""
        head = self.net.head
        assert head is not None
        weights = head.weight.of_stack(self.values[: self.clients], (head.outputs, head.inputs))
        self.ahead.open(weights, samples, order, rows, steps)

    def begin_step(self, number: int) -> None:
        """Prepare step `number` (from 0)."""
        if self.ahead.on:
            self.ahead.begin_step(number)
        if self.apart is not None:
            self.apart.begin_step(number)

    def settle(self, steps: Sequence[int]) -> None:
        """Complete the values that `ahead` and `apart` keep in parts, after the last step."""
        if self.ahead.on:
            self.ahead.settle()
        if self.apart is not None:
            self.apart.settle(steps)

    def _correct(self, corrections: Iterable[Tensor | None], optimizer: StackOptimizer) -> None:
        """Write the open clients' corrections in the order of the values, in the form that the optimizer needs."""
        if self._corrections is None:
            self._corrections = torch.zeros_like(self.values)
        for number, correction in enumerate(corrections):
            given = self.values.new_zeros(self.net.size) if correction is None else correction
            parts = self._parameter_views(self._corrections[number], given)
            if self.apart is not None:
                moves, start, part = next(parts)
                self.apart.add(self._parameter_in(self.values[number], self.net.slots[0]), part, start, moves)
            for own, start, part in parts:
                optimizer.prepare(part, start, own)
        self._corrected = replace(self._block, correction=self._corrections)
        if self.apart is not None:
            self._corrected = self._corrected.columns_from(self.net.slots[0].size)

    def _of_words(self, corrections: Iterable[Tensor | None] | None) -> Tensor | None:
        """Return the corrections of the word vectors in the open clients' texts, concatenated client after client."""
        if corrections is None or self.tables is None:
            return None
        corrected = torch.zeros_like(self.tables.values)
        for number, correction in enumerate(corrections):
            if correction is not None:
                own = slice(self.tables.bounds[number], self.tables.bounds[number + 1])
                torch.index_select(self._table(correction), 0, self.tables.rows[own], out=corrected[own])
        return corrected

    def bound(self, clients: int, rows: int) -> BoundNet:
        """Return the network on the first `clients` clients and batches of `rows` samples."""
        key = (clients, rows)
        if key not in self._bound:
            if len(self._bound) >= MOST_BINDINGS:
                self._bound.clear()
            self._bound[key] = BoundNet(self, clients, rows)
        found = self._bound[key]
        found.attach(self.tables, self.fused)
        return found

    def blocks(self, clients: int) -> list[Block]:
        """Return the blocks that the optimizer changes for the first `clients` clients."""
        if clients not in self._blocks:
            self._blocks[clients] = blocks = [self._corrected.prefix(clients)]
            if self.tables is not None and self._table_block is not None:
                blocks.append(self._table_block.prefix(self.tables.bounds[clients]))
        return self._blocks[clients]

    def add_changes(self, coefficients: Tensor, total: Tensor) -> Tensor:
        """Compute total += Σ coefficient · (value − start) over the open clients.

        Parameters
        ----------
        coefficients : Tensor (k,)
        total : Tensor (d,)

        Returns
        -------
        Tensor ()
            Squared norm of the added sum; not finite if a client's training diverged.
        """
        change = torch.mv(self.values[: self.clients].t(), coefficients)
        change.sub_(self.start[0] * coefficients.sum())
        for slot in self.net.slots:
            slot.from_flat(total).add_(slot.of_stack(change.unsqueeze(0), slot.arranged)[0])
        length = change.dot(change)
        if self.tables is not None:
            length = length + self.tables.add_changes(coefficients, self._table(total))
        return length

    def check_changes(self, lr: float) -> None:
        """Reject updates of the open clients that are not finite; see `check_update`."""
        for client in range(self.clients):
            check_update(self.values[client] - self.start[0], lr)
        if self.tables is not None:
            check_update((self.tables.values - self.tables.start).flatten(), lr)

    def change_of(self, client: int, drift: Tensor | None = None) -> Tensor:
        """Return the update Δ of one of the open clients as a flat vector (d,); zero for buffers, which come last."""
        whole = self.net.stack_size == self.size  # the slots fill the whole stack
        delta = (torch.empty if whole else torch.zeros)(self.size, dtype=self.dtype, device=self.device)
        if drift is not None and self.tables is not None:
            self._table(delta).copy_(self._table(drift))
        for own, start, change in self._parameter_views(self.values[client], delta):
            torch.sub(own, start, out=change)
        if self.tables is not None:
            words = slice(self.tables.bounds[client], self.tables.bounds[client + 1])
            self._table(delta)[self.tables.rows[words]] = self.tables.values[words] - self.tables.start[words]
        return delta

    def _parameter_views(self, row: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each parameter three views of one shape: of a stack's row (d',), the start, a flat vector (d,)."""
        for slot, size, start in self._parts:
            own = self._parameter_in(row, slot)
            yield own, start, flat.narrow(0, slot.offset, size) if slot.axes is None else slot.from_flat(flat)

    @staticmethod
    def _parameter_in(row: Tensor, slot: Slot) -> Tensor:
        """Return a view of one parameter in a row (d',), flat if the slot has no order of axes."""
        own = row.narrow(0, slot.start, slot.size)
        return own if slot.axes is None else own.view(slot.arranged)

    def _table(self, flat: Tensor) -> Tensor:
        embedding = self.net.embedding
        assert embedding is not None
        return embedding.weight.from_flat(flat)


class _Parameters:
    """A layer's access to the parameters of the first k clients of a stack (`base.Parameters`)."""

    def __init__(self, stack: Stack, clients: int):
        self.step, self.drift = stack.step, stack.drift
        self.ahead: Ahead | None = stack.ahead
        self._values, self._targets = stack.values[:clients], stack.gradients[:clients]

    def value(self, slot: Slot, *shape: int) -> Tensor:
        return slot.of_stack(self._values, shape)

    def target(self, slot: Slot, *shape: int) -> Tensor:
        return slot.of_stack(self._targets, shape)


class BoundNet:
    """Network on k clients and batches of b samples: call `read` or `read_all`, fill labels and masks, take a step."""

    def __init__(self, stack: Stack, clients: int, rows: int):
        net, take = stack.net, stack.workspace.take
        self.clients, self.rows = clients, rows
        dtype = torch.int64 if net.reads_words else stack.dtype
        values = math.prod(net.feature_shape)
        turned = isinstance(net.layers[0], ImageColumns) and client_by_client(stack.values.new_empty(0, values))
        self.x = take("x", 1 if turned else clients, rows, values, dtype=dtype).expand(clients, -1, -1)
        parameters = _Parameters(stack, clients)
        self.ops: list[Op] = []
        current = self.x
        for number, layer in enumerate(net.layers):
            first = number <= net.first_trained
            op = layer.bind(Place(clients, rows, stack.workspace, parameters, number, first), current)
            self.ops.append(op)
            current = op.output
        self.dropouts = [dropout for op in self.ops for dropout in dropouts_of(op)]
        self.own_padding = any(isinstance(op, GraphOp) for op in self.ops)
        place = Place(clients, rows, stack.workspace, parameters, len(self.ops))
        self.loss = stacked_loss(stack.loss, place, current, net.description)
        self._sums = stack.losses[: clients * rows].view(clients, rows, 1)
        self._clients_x = list(self.x.unbind(0))
        self.flat_labels = self.loss.labels.flatten(0, 1)
        self.first_output = None if net.head is None else self.ops[0].output.flatten(0, 1)
        self._columns = self.ops[0] if turned and isinstance(self.ops[0], ColumnsOp) else None
        self._forward = self.ops[1:] if turned else self.ops
        self._backward = list(reversed(self.ops[net.first_trained :]))

    def read_all(self, samples: Tensor, index: Tensor) -> None:
        """Read the batches of all clients: k · b of their samples (n, values), which are in one tensor."""
        torch.index_select(samples, 0, index, out=self.x.view(self.clients * self.rows, -1))

    def read(self, client: int, samples: Tensor, index: Tensor) -> None:
        """Read a client's batch: some of its samples (n, values), filled up if there are fewer than b."""
        into, count = self._clients_x[client], len(index)
        if count < self.rows:
            into[count:] = samples[0] if self.own_padding else 0
            into = into[:count]
        torch.index_select(samples, 0, index, out=into)
        if self._columns is not None:
            self._columns.turn(client)

    def attach(self, tables: Tables | None, fused: bool) -> None:
        """Set the word tables of the clients that are trained now."""
        op = self.ops[0]
        if isinstance(op, EmbeddingOp) and tables is not None:
            count = tables.bounds[self.clients]
            op.table, op.words = tables.values[:count], tables.rows
            op.target = op.table if fused else tables.gradient[:count]
            if isinstance(self.ops[1], GraphOp):
                self.ops[1].tokens = self.x, tables.rows

    def step(self, weights: Tensor | float, counted: Tensor | None) -> None:
        """Run the forward pass, the loss and the backward pass with the layers' part of the update."""
        for op in self._forward:
            op.forward()
        gradient = self.loss.gradient(weights, counted, self._sums)
        for op in self._backward:
            gradient = op.backward(gradient)
