"""The stack: the values of the batched clients, and the network bound to the first k of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.chain import StackedNet
from fedmpi.local.batched.convolution import ImageColumns
from fedmpi.local.batched.first_layer import Drift, FirstLinear, KeptApart, ProductsAhead
from fedmpi.local.batched.graph import GraphLayer
from fedmpi.local.batched.layers import Layer, Place, Slot, StackedDropout, Step, Workspace
from fedmpi.local.batched.text import Embedding, Tables
from fedmpi.local.batched.update import Block, StackOptimizer, StackSGD
from fedmpi.local.graphs import Graphs
from fedmpi.tasks.losses import CROSS_ENTROPY, CrossEntropyLoss, Loss, WeightedCrossEntropy

MOST_BINDINGS = 64
JOIN_BELOW = 1024
"""Bytes of a sample below which one call per step gathers the joined samples of all clients. Larger samples are
gathered client by client, which saves the copy that joins them."""
_negative_softmax = torch.ops.aten.elu_backward.grad_input
"""−weights · exp(x) of x ≤ 0 in one kernel: the gradient of an exponential linear unit with the scale −1."""


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
        self.graphs = Graphs(device, possible=not loss.part.foreign)
        self.together = 0  # on a GPU, clients of the largest step; a step computes those of half as many, and so on
        self.weight = 1.0  # factor of the samples' weights
        self.step, self.drift = Step(1, 0), Drift()
        self.ahead = ProductsAhead(self.step, self.drift, self.workspace)
        self.clients, self.size = 0, net.size
        self.tables: Tables | None = None
        self.apart: KeptApart | None = None
        self._block = Block.of(self.values, self.gradients, self.start, memory=not fused)
        self._table_block: Block | None = None
        self._corrected, self._first_column = self._block, 0
        self._corrections: Tensor | None = None
        self._blocks: dict[int, list[Block]] = {}
        self._parts = [(slot, slot.size, self._parameter_in(self.start[0], slot)) for slot in net.slots]
        self._bound: dict[tuple[int, int], BoundNet] = {}

    def begin(self, start: Tensor, together: int = 0) -> None:
        """Copy the server's values (d,) of this round, in which at most so many clients are batched, 0 = capacity."""
        self.size = start.numel()
        self.together = 0 if self.device.type == "cpu" else together or self.capacity
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
        filled = self.values[: self.together or self.clients]
        filled.copy_(self.start.expand(len(filled), -1))
        self.step.keep, self.step.rate = optimizer.step.keep, optimizer.step.rate
        if self.together:  # kernels of a graph keep their numbers: the rate becomes a factor of the samples' weights
            self.step.rate, self.weight = 1.0, -optimizer.step.rate
        if not self.fused:
            self._block.first.zero_()
            self._block.second.zero_()
        self.apart, self._corrected, self._first_column = None, self._block, 0
        self.drift.on = self.ahead.on = False
        self._blocks.clear()
        embedding = self.net.embedding
        if embedding is None:
            dtype = torch.int64 if self.net.description.task == "text" else self.dtype
            samples = [x.reshape(len(x), -1).to(dtype) for x in features]
            if corrections is not None:
                if apart and self.net.head is not None and isinstance(optimizer, StackSGD):
                    shape = self.net.head.outputs, self.net.head.inputs
                    self.apart = KeptApart(shape, optimizer, self.drift, samples, self.workspace)
                self._correct(corrections, optimizer)
            return samples
        table = embedding.weight.from_flat(start)
        if self.tables is None or not self.together:
            self.tables = Tables(features, table, self.fused, self.capacity if self.together else 0)
        else:
            self.tables.reopen(features, table)
        tables = self.tables
        self._table_block = Block.of(tables.values, tables.gradient, tables.start, not self.fused)
        return tables.ids

    def fill(self, client: int, values: Tensor) -> None:
        """Start an open client from other values (d,) than the server's."""
        for own, _, part in self._parameter_views(self.values[client], values):
            own.copy_(part)

    def look_ahead(self, samples: Sequence[Tensor], order: Sequence[Tensor], rows: int, steps: int) -> None:
        """Compute the first layer's products with the open clients' samples for so many steps at once."""
        head = self.net.head
        assert head is not None
        weights = head.slots[0].of_stack(self.values[: self.clients], (head.outputs, head.inputs))
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
        self._first_column = 0 if self.apart is None else self.net.slots[0].size

    def bound(self, clients: int, rows: int) -> BoundNet:
        """Return the network on the first `clients` clients and batches of `rows` samples."""
        key = (clients, rows)
        if key not in self._bound:
            if len(self._bound) >= MOST_BINDINGS and not self.together:  # on a GPU there are few shapes
                self._bound.clear()
            self._bound[key] = BoundNet(self, clients, rows)
        found = self._bound[key]
        found.attach(self.tables)
        return found

    def computed(self, active: int) -> int:
        """Return how many clients a step of the first `active` ones computes: on a GPU K, K/2, K/4, …, rounded up, so
        that few graphs serve all steps. The others have samples of weight 0."""
        clients = self.together if self.together and self.step.keep in (0, 1) else active
        while clients > 1 and (clients + 1) // 2 >= active:
            clients = (clients + 1) // 2
        return clients

    def blocks(self, clients: int) -> list[Block]:
        """Return the blocks that the optimizer changes for the first `clients` clients."""
        if clients not in self._blocks:
            self._blocks[clients] = blocks = [self._corrected.cut(clients, self._first_column)]
            if self.tables is not None and self._table_block is not None:
                blocks.append(self._table_block.cut(self.tables.bounds[clients]))
        return self._blocks[clients]

    def add_changes(self, coefficients: Tensor, total: Tensor) -> Tensor:
        """Compute total (d,) += Σ coefficient · (value − start) over the open clients.

        Return the squared norm of the added sum, which is not finite if a client's training diverged.
        """
        change = torch.mv(self.values[: self.clients].t(), coefficients)
        change.sub_(self.start[0] * coefficients.sum())
        for slot in self.net.slots:
            slot.from_flat(total).add_(slot.of_stack(change.unsqueeze(0), slot.arranged)[0])
        length = change.dot(change)
        if self.tables is not None:
            length = length + self.tables.add_changes(coefficients, self._table(total))
        return length

    def flat_gradients(self) -> Tensor:
        """Return the gradients of the open clients as flat vectors (k, d) on the CPU, for `Step(keep=0, rate=1)`."""
        flat = torch.zeros(self.clients, self.net.size, dtype=self.dtype)
        tables = self.tables if self.net.embedding is not None else None
        for client, own in enumerate(flat):
            for slot in self.net.slots:
                slot.from_flat(own).copy_(self._parameter_in(self.gradients[client], slot).view(slot.arranged))
            if tables is not None:
                words = tables.of_clients[client]
                self._table(own)[tables.rows[words].cpu()] = tables.gradient[words].cpu()
        return flat

    def change_of(self, client: int) -> Tensor:
        """Return the update Δ of one of the open clients as a flat vector (d,); zero for buffers, which come last."""
        whole = self.net.stack_size == self.size  # the slots fill the whole stack
        delta = (torch.empty if whole else torch.zeros)(self.size, dtype=self.dtype, device=self.device)
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


class BoundNet:
    """Network on k clients and batches of b samples: call `read` or `read_all`, fill labels and masks, take a step."""

    def __init__(self, stack: Stack, clients: int, rows: int):
        net, take = stack.net, stack.workspace.take
        self.clients, self.rows = clients, rows
        dtype = torch.int64 if net.description.task == "text" else stack.dtype
        values = math.prod(net.description.feature_shape)
        turned = isinstance(net.layers[0], ImageColumns) and client_by_client(stack.values.new_empty(0, values))
        self.x = take("x", 1 if turned else clients, rows, values, dtype=dtype).expand(clients, -1, -1)
        place = Place(stack.values[:clients], stack.gradients[:clients], stack.step, rows, stack.workspace)
        self.layers: list[Layer] = []
        self.output = self.x
        for number, layer in enumerate(net.layers):
            bound = layer.bind(replace(place, number=number, first=number <= net.first_trained), self.output)
            self.layers.append(bound)
            self.output = bound.output
        if isinstance(first := self.layers[0], FirstLinear):
            first.drift, first.ahead = stack.drift, stack.ahead
        graphs = [layer for layer in self.layers if isinstance(layer, GraphLayer)]
        self.dropouts = [layer for layer in self.layers if isinstance(layer, StackedDropout)]
        self.dropouts += [drop for graph in graphs for drop in graph.drops]
        self.graph = graphs[0] if graphs else None
        loss = CrossEntropy if isinstance(stack.loss, CrossEntropyLoss) else PerSampleLoss
        self.loss = loss(replace(place, number=len(self.layers)), self.output, stack.loss, net.description)
        self.given = torch.zeros(2, clients, rows, 1, dtype=stack.dtype, device=stack.device)  # weights and counts
        self._sums = stack.losses[: clients * rows].view(clients, rows, 1)
        self._clients_x = list(self.x.unbind(0))
        self.flat_labels = self.loss.labels.flatten(0, 1)
        self.first_output = None if net.head is None else self.layers[0].output.flatten(0, 1)
        self._columns = first if turned and isinstance(first, ImageColumns) else None
        self._forward = self.layers[1:] if turned else self.layers
        self._backward = list(reversed(self.layers[net.first_trained :]))

    def read_all(self, samples: Tensor, index: Tensor) -> None:
        """Read the batches of all clients: k · b of their samples (n, values), which are in one tensor."""
        torch.index_select(samples, 0, index, out=self.x.view(self.clients * self.rows, -1))

    def read(self, client: int, samples: Tensor, index: Tensor) -> None:
        """Read a client's batch: some of its samples (n, values), filled up if there are fewer than b."""
        into, count = self._clients_x[client], len(index)
        if count < self.rows:
            into[count:] = samples[0]
            into = into[:count]
        torch.index_select(samples, 0, index, out=into)
        if self._columns is not None:
            self._columns.turn(client)

    def attach(self, tables: Tables | None) -> None:
        """Set the word tables of the clients that are trained now."""
        first = self.layers[0]
        if isinstance(first, Embedding) and tables is not None:
            count = tables.bounds[self.clients]
            first.table, first.words = tables.values[:count], tables.rows
            first.target = tables.gradient[:count]
            if self.graph is not None:
                self.graph.words_of_rows = self.x, tables.rows

    def forward(self) -> None:
        """Run the forward pass."""
        for layer in self._forward:
            layer.forward()

    def backward(self, gradient: Tensor) -> None:
        """Run the backward pass from the gradient of the outputs, with the layers' part of the update."""
        for layer in self._backward:
            gradient = layer.backward(gradient)

    def step(self, weights: Tensor | float, counted: Tensor | None) -> None:
        """Run the forward pass, the loss and the backward pass; see `CrossEntropy.gradient`."""
        self.forward()
        self.backward(self.loss.gradient(weights, counted, self._sums))


class CrossEntropy:
    """Softmax cross-entropy of the logits (k, b, C), and its gradient."""

    def __init__(self, place: Place, logits: Tensor, loss: Loss, description: DataDescription):
        clients, rows = place.clients, place.rows
        self.logits, self._fused = logits, logits.device.type != "cpu"
        self.labels = place.take("labels", clients, rows, dtype=torch.int64)
        self._labels = self.labels.unsqueeze(2)
        self._log = place.take("log", *logits.shape)
        self._picked = place.take("picked", clients, rows, 1)
        self._minus_one = torch.full((1, 1, 1), -1.0, dtype=logits.dtype, device=logits.device)
        self._minus_one = self._minus_one.expand(clients, rows, 1)
        self._of_classes = loss.at(logits) if isinstance(loss, WeightedCrossEntropy) else None

    def gradient(self, weights: Tensor | float, counted: Tensor | None, sums: Tensor) -> Tensor:
        """Return ∂/∂logits of Σ weights · loss, on a GPU its negative; add the samples' losses to `sums` (k, b, 1).

        `weights` (k, b, 1) are 1 / samples of the client's batch and 0 for padding, `counted` (k, b, 1) is 1 for a
        sample and 0 for padding; None = all are samples.
        """
        if self._of_classes is not None:
            own = self._of_classes[self._labels] if counted is None else self._of_classes[self._labels] * counted
            share = own / own.sum(1, keepdim=True).clamp_min_(1e-30)
            samples = len(self.labels[0]) if counted is None else counted.sum(1, keepdim=True)
            factor = weights.sum(1, keepdim=True) if isinstance(weights, Tensor) else weights * samples
            weights, counted = share * factor, share * samples
        torch.log_softmax(self.logits, 2, out=self._log)
        torch.gather(self._log, 2, self._labels, out=self._picked)
        if counted is None:
            sums.sub_(self._picked)
        else:
            sums.addcmul_(self._picked, counted, value=-1)
        if self._fused and isinstance(weights, Tensor):
            _negative_softmax(weights, 1, -1, 1, False, self._log, grad_input=self._log)
            return self._log.scatter_add_(2, self._labels, weights)
        gradient = torch.exp(self._log, out=self._log).scatter_add_(2, self._labels, self._minus_one)
        return gradient.mul_(weights)


class PerSampleLoss:
    """Any loss per sample, computed on the clients' flattened samples; padding repeats a sample and weighs 0."""

    def __init__(self, place: Place, outputs: Tensor, loss: Loss, description: DataDescription):
        self.loss, self.outputs = loss, outputs
        self._shape = description.output_shape
        numbers = torch.int64 if description.counted else torch.float32
        self.labels = place.take("labels", place.clients, place.rows, *description.target_shape, dtype=numbers)

    def gradient(self, weights: Tensor | float, counted: Tensor | None, sums: Tensor) -> Tensor:
        """Return the gradient; see `CrossEntropy.gradient`."""
        outputs, labels = self.outputs.view(-1, *self._shape), self.labels.flatten(0, 1)
        if isinstance(weights, float):
            weights = outputs.new_full(labels.shape[:1], weights)
        with torch.enable_grad():
            tried = outputs.detach().requires_grad_()
            losses = self.loss.per_sample(tried, labels)
            (gradient,) = torch.autograd.grad(losses, tried, weights.reshape(-1))
        losses = losses.detach()
        sums.view(-1).add_(losses if counted is None else losses * counted.reshape(-1))
        gradient = gradient.reshape(self.outputs.shape)
        return gradient if gradient.device.type == "cpu" else gradient.neg()
