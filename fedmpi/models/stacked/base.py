"""Layers of many clients side by side, with hand-written backward: what they have in common.

The values of K clients form a stack (K, ·); a layer is bound to the first k of them and to b rows each, which fixes
every buffer and view, so that a step is nothing but arithmetic. Activations lie as rows (k, b, values) or, inside
convolutions, as columns (k, values, b), where the b samples of one value are neighbours. A weight's gradient is never
formed under plain SGD: the update is fused into its matrix product (`Step`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Values: parameters and buffers start at multiples of 64 bytes (float32); matrix products lose 10 % elsewhere."""


class NotStackable(Exception):
    """A model has no stacked form; the message names the part that has none."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat vector and in a client's row of the stack."""

    offset: int  # Of its first value in the flat vector
    shape: tuple[int, ...]  # Of the parameter
    start: int  # Of its first value in the stack's row
    axes: tuple[int, ...] | None = None  # The parameter's axes in the order of the stack; None = as they are

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def arranged(self) -> tuple[int, ...]:
        """The parameter's shape in the order of the stack."""
        return self.shape if self.axes is None else tuple(self.shape[axis] for axis in self.axes)

    def from_flat(self, flat: Tensor) -> Tensor:
        """The parameter's values in the order of the stack: a view of flat (d,)."""
        value = flat[self.offset : self.offset + self.size].view(self.shape)
        return value if self.axes is None else value.permute(self.axes)

    def of_stack(self, stack: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The parameter of every client: a view (k, \\*shape) of stack (k, d')."""
        return stack[:, self.start : self.start + self.size].view(len(stack), *shape)


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
        """For a gradient that is given as a tensor."""
        if self.keep == 0:
            torch.mul(gradient, self.rate, out=target)
            return
        if self.keep != 1:
            target.mul_(self.keep)
        target.add_(gradient, alpha=self.rate)


class Drift:
    """The first layer's weight as a sum of two parts, where every step adds one and the same vector v to it.

    The weight is scale · value + shift · v, and its update value += rate · gradient. What the layer makes of the
    samples is then scale · (x · value) + shift · (x · v), and the products with v, the same in every step, can be made
    for all samples before the first one: no step has to read or write the whole of weight and v.
    """

    def __init__(self) -> None:
        self.on = False
        self.scale, self.shift, self.rate = 1.0, 0.0, 0.0


class Ahead(Protocol):
    """A first layer's products with the samples, made for several steps at once."""

    on: bool
    """Off, the layer makes its products step by step."""

    def forward(self, output: Tensor) -> None:
        """Into `output`: the step's products (k, b, outputs)."""

    def backward(self, gradient: Tensor) -> None:
        """Take the gradient of the step's products."""


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


def by_numpy(x: Tensor) -> bool:
    """Whether NumPy can write to the tensor."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def copy_strided(target: Tensor, source: Tensor) -> None:
    """target = source of the same shape, for copies that turn axes.

    On a processor by NumPy, which takes two thirds of the time that torch does.
    """
    if by_numpy(target) and by_numpy(source):
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


class Parameters(Protocol):
    """A layer's access to the parameters of the bound clients."""

    step: Step
    drift: Drift
    ahead: Ahead | None

    def value(self, slot: Slot, *shape: int) -> Tensor:
        """The parameter of the bound clients, (k, \\*shape)."""

    def target(self, slot: Slot, *shape: int) -> Tensor:
        """The tensor that its gradient is added to, (k, \\*shape); see `Step`."""


@dataclass(frozen=True)
class Place:
    """What a layer is bound to: the clients, their batches, buffers and parameters."""

    clients: int  # k and b
    rows: int
    workspace: Workspace
    parameters: Parameters  # The values of the k clients
    number: Hashable = 0  # Of the layer: names its buffers
    first: bool = False  # Whether nothing before it has parameters: no gradient of the input is needed

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

    @property
    def trained(self) -> bool:
        """Whether it has parameters."""
