"""Layers of many clients side by side, with hand-written backward: what they share, and the dense ones.

The values of K clients form a stack (K, ·); a layer is bound to the first k of them and to b rows each, which fixes
every buffer and view, so that a step is nothing but arithmetic. Activations lie either as rows (k, b, values) or, inside
convolutions, as columns (k, values, b), where the b samples of one value are neighbours. A weight's gradient is never
formed under plain SGD: the update is fused into its matrix product (`Step`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 16
"""Values: parameters and buffers start at multiples of 64 bytes (float32); matrix products lose 10 % elsewhere."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat vector and in a client's row of the stack.

    Parameters
    ----------
    offset : int
        Of its first value in the flat vector.
    shape : tuple of int
        Of the parameter.
    start : int
        Of its first value in the stack's row.
    axes : tuple of int or None
        The parameter's axes in the order of the stack; None = as they are.
    """

    offset: int
    shape: tuple[int, ...]
    start: int
    axes: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def from_flat(self, flat: Tensor) -> Tensor:
        """The parameter's values in the order of the stack: a view of flat (d,)."""
        value = flat[self.offset : self.offset + self.size].view(self.shape)
        return value if self.axes is None else value.permute(self.axes)

    def of_stack(self, stack: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The parameter of every client: a view (k, \\*shape) of stack (k, d')."""
        return stack[:, self.start : self.start + self.size].unflatten(1, shape)


class Step:
    """How a gradient changes its target: target = keep · target + rate · gradient.

    Plain SGD has the values as target, keep = 1 and rate = −lr. Other rules collect the gradient first: the target is
    a second stack, keep = 0, rate = 1.
    """

    def __init__(self, keep: float, rate: float):
        self.keep = keep
        self.rate = rate

    def product(self, target: Tensor, left: Tensor, right: Tensor) -> None:
        """For a gradient that is the batched product left @ right, (k, m, n)."""
        target.baddbmm_(left, right, beta=self.keep, alpha=self.rate)

    def plain(self, target: Tensor, gradient: Tensor) -> None:
        """For a gradient that is at hand."""
        if self.keep == 0:
            torch.mul(gradient, self.rate, out=target)
            return
        if self.keep != 1:
            target.mul_(self.keep)
        target.add_(gradient, alpha=self.rate)


class Workspace:
    """Named buffers, allocated once and grown when a larger shape is asked for. New memory is zero."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self._storage: dict[Hashable, Tensor] = {}

    def take(self, name: Hashable, *shape: int, guard: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous tensor of the given shape; `guard` values before it belong to the buffer, too."""
        guard = -(-guard // ALIGNMENT) * ALIGNMENT
        count = math.prod(shape)
        held = self._storage.get(name)
        if held is None or held.numel() < guard + count:
            held = torch.zeros(guard + count, dtype=dtype or self.dtype, device=self.device)
            self._storage[name] = held
        return held[guard : guard + count].view(shape)


class Parameters(Protocol):
    """The stack, seen by a layer."""

    step: Step

    def value(self, slot: Slot, *shape: int) -> Tensor:
        """The parameter of the bound clients, (k, \\*shape)."""

    def target(self, slot: Slot, *shape: int) -> Tensor:
        """What its gradient changes, (k, \\*shape)."""


@dataclass(frozen=True)
class Place:
    """What a layer is bound to.

    Parameters
    ----------
    clients, rows : int
        k and b.
    workspace : Workspace
    parameters : Parameters
        The values of the k clients.
    number : int
        Of the layer: names its buffers.
    first : bool
        Whether nothing before it has parameters: no gradient of the input is needed.
    """

    clients: int
    rows: int
    workspace: Workspace
    parameters: Parameters
    number: int = 0
    first: bool = False

    def take(self, name: str, *shape: int, guard: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        return self.workspace.take((self.number, name), *shape, guard=guard, dtype=dtype)

    def scratch(self, *shape: int) -> Tensor:
        """A buffer that every layer uses, valid until the next layer's turn."""
        return self.workspace.take("scratch", *shape)


class Op(Protocol):
    """A layer bound to k clients of b rows."""

    @property
    def output(self) -> Tensor:
        """Holds the layer's output after `forward`; always the same tensor."""

    def forward(self) -> None:
        """From the input it was bound to, to `output`."""

    def backward(self, gradient: Tensor) -> Tensor:
        """Update the parameters; from the gradient of the output (overwritten) to that of the input."""


class Layer(Protocol):
    """A layer's shape and slots."""

    def bind(self, place: Place, x: Tensor) -> Op:
        """The layer on the given input buffer."""

    @property
    def values(self) -> int:
        """Floats that one row needs in buffers, for the choice of the chunk."""


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + c on rows; `x` may be a transposed view."""

    inputs: int
    outputs: int
    weight: Slot
    bias: Slot | None

    @property
    def values(self) -> int:
        return self.inputs + self.outputs

    def bind(self, place: Place, x: Tensor) -> Op:
        return _LinearOp(self, place, x)


class _LinearOp:
    def __init__(self, layer: Linear, place: Place, x: Tensor):
        parameters, shape = place.parameters, (layer.outputs, layer.inputs)
        self.step, self.x = parameters.step, x
        self.weight, self.target = parameters.value(layer.weight, *shape), parameters.target(layer.weight, *shape)
        self.transposed = self.weight.transpose(1, 2)
        self.bias = self.bias_target = None
        if layer.bias is not None:
            self.bias = parameters.value(layer.bias, 1, layer.outputs)
            self.bias_target = parameters.target(layer.bias, 1, layer.outputs)
            self.bias_gradient = place.take("bias", place.clients, 1, layer.outputs)
        self.output = place.take("output", place.clients, place.rows, layer.outputs)
        self.first = place.first
        self.input_gradient = place.take("gradient", 0 if place.first else place.clients, place.rows, layer.inputs)

    def forward(self) -> None:
        torch.bmm(self.x, self.transposed, out=self.output)
        if self.bias is not None:
            self.output.add_(self.bias)

    def backward(self, gradient: Tensor) -> Tensor:
        if not self.first:
            torch.bmm(gradient, self.weight, out=self.input_gradient)
        self.step.product(self.target, gradient.transpose(1, 2), self.x)
        if self.bias_target is not None:
            self.step.plain(self.bias_target, torch.sum(gradient, 1, keepdim=True, out=self.bias_gradient))
        return self.input_gradient


@dataclass(frozen=True)
class ReLU:
    """max(x, 0), in place."""

    values: int = 0

    def bind(self, place: Place, x: Tensor) -> Op:
        return _ReLUOp(x)


class _ReLUOp:
    def __init__(self, x: Tensor):
        self.output = x

    def forward(self) -> None:
        self.output.relu_()

    def backward(self, gradient: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward.grad_input(gradient, self.output, 0, grad_input=gradient)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Dropout:
    """Multiplies by masks that each client's own stream gives (`models.dropout.draw_mask`), in place.

    Parameters
    ----------
    units : int
        Values of a row, in the module's order.
    p : float
        Probability of a zero.
    columns : bool
        Whether the input lies as columns.
    """

    units: int
    p: float
    columns: bool

    @property
    def values(self) -> int:
        return self.units * (2 if self.columns else 1)

    def bind(self, place: Place, x: Tensor) -> DropoutOp:
        return DropoutOp(self, place, x)


class DropoutOp:
    """Dropout bound to k clients: `drawn` float32 (k, b, units) on the CPU is to be filled before every forward."""

    def __init__(self, layer: Dropout, place: Place, x: Tensor):
        self.units, self.p, self.output = layer.units, layer.p, x
        shape = (place.clients, place.rows, layer.units)
        if place.workspace.device.type == "cpu":
            self.drawn = place.take("drawn", *shape, dtype=torch.float32)
        else:
            self.drawn = torch.ones(shape, pin_memory=True)
        if layer.columns:
            self.mask = place.take("mask", place.clients, layer.units, place.rows)
            self._arranged = self.mask.transpose(1, 2)
        else:
            same = self.drawn.device == x.device and self.drawn.dtype == x.dtype
            self.mask = self._arranged = self.drawn if same else place.take("mask", *shape)

    def forward(self) -> None:
        if self.mask is not self.drawn:
            self._arranged.copy_(self.drawn, non_blocking=True)
        self.output.mul_(self.mask)

    def backward(self, gradient: Tensor) -> Tensor:
        return gradient.mul_(self.mask)


@dataclass(frozen=True)
class Flatten:
    """Columns become rows: a view forwards, one copy backwards."""

    units: int

    @property
    def values(self) -> int:
        return self.units

    def bind(self, place: Place, x: Tensor) -> Op:
        return _FlattenOp(self, place, x)


class _FlattenOp:
    def __init__(self, layer: Flatten, place: Place, x: Tensor):
        self.output = x.transpose(1, 2)
        self._columns = place.take("gradient", place.clients, layer.units, place.rows)
        self._rows = self._columns.transpose(1, 2)

    def forward(self) -> None:
        pass

    def backward(self, gradient: Tensor) -> Tensor:
        self._rows.copy_(gradient)
        return self._columns


class CrossEntropy:
    """Softmax cross-entropy of the logits (k, b, C), its gradient, and the log-probabilities of the labels.

    Attributes
    ----------
    labels : int64 (k, b)
        To be filled before every step.
    """

    def __init__(self, place: Place, logits: Tensor):
        clients, rows = place.clients, place.rows
        self.logits = logits
        self.labels = place.take("labels", clients, rows, dtype=torch.int64)
        self._labels = self.labels.unsqueeze(2)
        self._log = place.take("log", *logits.shape)
        self._picked = place.take("picked", clients, rows, 1)
        self._minus_one = torch.full((1, 1, 1), -1.0, dtype=logits.dtype, device=logits.device)
        self._minus_one = self._minus_one.expand(clients, rows, 1)

    def gradient(self, weights: Tensor | float, counted: Tensor | None, sums: Tensor) -> Tensor:
        """∂/∂logits of Σ weights · loss; the rows' log-probabilities are added to `sums`.

        Parameters
        ----------
        weights : Tensor (k, b, 1) or float
            1 / rows of the client's batch, 0 for padding.
        counted : Tensor (k, b, 1) or None
            1 for a sample, 0 for padding; None = all are samples.
        sums : Tensor (k, b, 1)
            Grows by the log-probability of each row's label.
        """
        torch._log_softmax(self.logits, 2, False, out=self._log)
        torch.gather(self._log, 2, self._labels, out=self._picked)
        if counted is None:
            sums.add_(self._picked)
        else:
            sums.addcmul_(self._picked, counted)
        gradient = torch.exp(self._log, out=self._log).scatter_add_(2, self._labels, self._minus_one)
        return gradient.mul_(weights)
