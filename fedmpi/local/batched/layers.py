"""Batched layers with hand-written backward passes: what all share, and dense layers, ReLU, dropout.

The values of K clients form a stack (K, ·). A layer is bound to the first k of them and to b rows each, which fixes
every buffer and view, so that a step is pure arithmetic. Activations are rows (k, b, values) or, inside convolutions,
columns (k, values, b), in which the b samples of one value are adjacent. Plain SGD never computes a weight's gradient:
the update is fused into its matrix product (`Step`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmpi.common.types import AnyArray
from fedmpi.models.layers import draw_kept, draw_mask

_threshold_backward = torch.ops.aten.threshold_backward.grad_input

ALIGNMENT = 16
"""Alignment in values: parameters and buffers start at multiples of 64 bytes (float32); else products lose 10 %."""


class NotStackable(Exception):
    """Error for a model without a batched form; the message names the part without one."""


@dataclass(frozen=True)
class Slot:
    """Position of one parameter in the flat vector and in a client's row of the stack."""

    offset: int  # index of the first value in the flat vector
    shape: tuple[int, ...]  # shape of the parameter
    start: int  # index of the first value in the stack's row
    axes: tuple[int, ...] | None = None  # axes of the parameter in the order of the stack; None = unchanged

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def aligned_size(self) -> int:
        """Return the number of values in the stack's row up to the next parameter."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT

    @property
    def arranged(self) -> tuple[int, ...]:
        """Return the parameter's shape in the order of the stack."""
        return self.shape if self.axes is None else tuple(self.shape[axis] for axis in self.axes)

    def from_flat(self, flat: Tensor) -> Tensor:
        """Return the parameter's values in the order of the stack: a view of flat (d,)."""
        value = flat[self.offset : self.offset + self.size].view(self.shape)
        return value if self.axes is None else value.permute(self.axes)

    def of_stack(self, stack: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the parameter of every client: a view (k, \\*shape) of stack (k, d')."""
        return stack[:, self.start : self.start + self.size].view(len(stack), *shape)


class Step:
    """Effect of a gradient on its target: target = keep · target + rate · gradient.

    In plain SGD the values are the target, keep = 1 and rate = −lr. Other rules collect the gradient first: the target
    is a second stack, keep = 0, rate = 1.
    """

    def __init__(self, keep: float, rate: float):
        self.keep = keep
        self.rate = rate

    def product(self, target: Tensor, left: Tensor, right: Tensor) -> None:
        """Apply a gradient that is the batched product left @ right, (k, m, n)."""
        target.baddbmm_(left, right, beta=self.keep, alpha=self.rate)

    def plain(self, target: Tensor, gradient: Tensor) -> None:
        """Apply a gradient given as a tensor."""
        if self.keep == 0:
            torch.mul(gradient, self.rate, out=target)
            return
        if self.keep != 1:
            target.mul_(self.keep)
        target.add_(gradient, alpha=self.rate)


class Workspace:
    """Named buffers, allocated once and grown for larger shapes. New memory is zero."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self._storage: dict[Hashable, Tensor] = {}

    def take(self, name: Hashable, *shape: int, guard: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """Return a contiguous tensor of the given shape; `guard` values before it belong to the buffer, too."""
        guard = -(-guard // ALIGNMENT) * ALIGNMENT
        count = math.prod(shape)
        held = self._storage.get(name)
        if held is None or held.numel() < guard + count:
            held = torch.zeros(guard + count, dtype=dtype or self.dtype, device=self.device)
            self._storage[name] = held
        return held[guard : guard + count].view(shape)


def by_numpy(x: Tensor) -> bool:
    """Check whether NumPy can write to the tensor."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class Place:
    """Context that a layer is bound to: the clients' parameters, their batches, and buffers."""

    values: Tensor  # (k, d'), the first k rows of the stack
    targets: Tensor  # (k, d'): gradients are applied to it; see `Step`
    step: Step
    rows: int  # b
    workspace: Workspace
    number: Hashable = 0  # number of the layer, which names its buffers
    first: bool = False  # True if no earlier layer has parameters: no gradient of the input is needed

    @property
    def clients(self) -> int:
        return len(self.values)

    def take(self, name: str, *shape: int, guard: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        return self.workspace.take((self.number, name), *shape, guard=guard, dtype=dtype)

    def scratch(self, *shape: int) -> Tensor:
        """Return a buffer that all layers share, valid until the next layer runs."""
        return self.workspace.take("scratch", *shape)

    def parameter(self, slot: Slot, *shape: int) -> tuple[Tensor, Tensor]:
        """Return a parameter of the bound clients and the target of its gradient, (k, \\*shape)."""
        return slot.of_stack(self.values, shape), slot.of_stack(self.targets, shape)


class Layer:
    """Layer of a batched network. `bind` returns a copy of it that is bound to k clients of b rows."""

    trained: ClassVar[bool] = False  # True if the layer has parameters
    values = 0  # floats per row in buffers, for the choice of the chunk
    output: Tensor  # the output of `forward`; always the same tensor

    def bind(self, place: Place, x: Tensor) -> Self:
        """Return the layer on the given input buffer."""
        bound = copy.copy(self)
        bound.attach(place, x)
        return bound

    def attach(self, place: Place, x: Tensor) -> None:
        """Take all buffers and views that steps of the bound layer need."""
        raise NotImplementedError

    def forward(self) -> None:
        """Compute `output` from the bound input."""

    def backward(self, gradient: Tensor) -> Tensor:
        """Update the parameters; return the gradient of the input from that of the output, which is overwritten."""
        return gradient


class Biased(Layer):
    """Layer with a weight and an optional bias."""

    trained: ClassVar[bool] = True
    bias: Tensor | None

    def attach_bias(self, place: Place, slot: Slot | None, *shape: int) -> None:
        """Take the bias of the bound clients, (k, \\*shape); None without one."""
        self.step, self.bias = place.step, None
        if slot is not None:
            self.bias, self.bias_target = place.parameter(slot, *shape)
            self.bias_gradient = place.take("bias", place.clients, *shape)
            self.fused = not by_numpy(self.bias)  # on a GPU a kernel more costs more than its work
            self._ones = place.take("ones", place.clients * self.fused, 1, place.rows).fill_(1)

    def learn_bias(self, gradient: Tensor, axis: int) -> None:
        """Update the bias by the sum of a gradient over an axis."""
        if self.bias is None:
            return
        if self.fused and axis == 1:
            self.step.product(self.bias_target, self._ones, gradient)
        else:
            self.step.plain(self.bias_target, torch.sum(gradient, axis, keepdim=True, out=self.bias_gradient))


class Linear(Biased):
    """y = x Wᵀ + c on rows; `x` may be a transposed view."""

    def __init__(self, inputs: int, outputs: int, weight: Slot, bias: Slot | None):
        self.inputs, self.outputs, self.slots = inputs, outputs, (weight, bias)
        self.values = inputs + outputs

    def attach(self, place: Place, x: Tensor) -> None:
        self.x = x
        self.weight, self.target = place.parameter(self.slots[0], self.outputs, self.inputs)
        self.transposed = self.weight.transpose(1, 2)
        self.attach_bias(place, self.slots[1], 1, self.outputs)
        self.output = place.take("output", place.clients, place.rows, self.outputs)
        self.first = place.first
        self.input_gradient = place.take("gradient", 0 if place.first else place.clients, place.rows, self.inputs)

    def forward(self) -> None:
        if not self.multiply() and self.bias is not None:
            self.output.add_(self.bias)

    def backward(self, gradient: Tensor) -> Tensor:
        if not self.first:
            torch.bmm(gradient, self.weight, out=self.input_gradient)
        self.learn(gradient)
        self.learn_bias(gradient, 1)
        return self.input_gradient

    def multiply(self) -> bool:
        """Write x Wᵀ to the output; return True if the bias is added as well."""
        if self.bias is not None and self.fused:
            torch.baddbmm(self.bias, self.x, self.transposed, out=self.output)
            return True
        torch.bmm(self.x, self.transposed, out=self.output)
        return False

    def learn(self, gradient: Tensor) -> None:
        """Apply the weights' gradient, the product of the output's gradient and x."""
        self.step.product(self.target, gradient.transpose(1, 2), self.x)


class ReLU(Layer):
    """max(x, 0), in place."""

    def attach(self, place: Place, x: Tensor) -> None:
        self.output = x

    def forward(self) -> None:
        self.output.relu_()

    def backward(self, gradient: Tensor) -> Tensor:
        _threshold_backward(gradient, self.output, 0, grad_input=gradient)
        return gradient


class Squash(Layer):
    """tanh or logistic function with a copy of its outputs, since a later layer may change them."""

    def __init__(self, kind: str, values: int):
        self.kind, self.values = kind, values

    def attach(self, place: Place, x: Tensor) -> None:
        self.x, self.kept = x, place.take("squashed", *x.shape)
        self.output = place.take("output", *x.shape, guard=place.rows)
        self.derive = getattr(torch.ops.aten, f"{self.kind}_backward").grad_input

    def forward(self) -> None:
        getattr(torch, self.kind)(self.x, out=self.kept)
        self.output.copy_(self.kept)

    def backward(self, gradient: Tensor) -> Tensor:
        self.derive(gradient, self.kept, grad_input=gradient)
        return gradient


class StackedDropout(Layer):
    """Multiplication by masks from each client's own stream (`models.layers.draw_mask`), in place.

    Every forward pass needs new masks (`draw`, then `send`) or `keep_all` before it. On a CPU a mask is drawn in place.
    With columns or in double precision, it is drawn into a page that all clients share and copied while the page is in
    the cache. Other devices receive the kept units as bytes before the step.
    """

    def __init__(self, units: int, p: float, columns: bool = False):
        self.units, self.p, self.columns = units, p, columns  # values of a row; probability of a zero
        self.values = units * (2 if columns else 1)

    def attach(self, place: Place, x: Tensor) -> None:
        self.output, page = x, (place.rows, self.units)
        self.mask = place.take("mask", place.clients, *(page[::-1] if self.columns else page))
        self._arranged = self.mask.transpose(1, 2) if self.columns else self.mask
        self._page: NDArray[np.float32] | None = None
        self._kept: Tensor | None = None  # of other devices than the CPU
        if by_numpy(self.mask):
            self._masks: AnyArray = self._arranged.numpy()
            if self.columns or self.mask.dtype != torch.float32:
                self._page = place.workspace.take("page", *page, dtype=torch.float32).numpy()
        else:
            self._kept = torch.ones_like(self._arranged, dtype=torch.bool)
            self._sent = self._fresh()

    def _fresh(self) -> Tensor:
        """Return memory for the next step's bytes; torch reuses pinned memory only after its copy."""
        return torch.ones(self._arranged.shape, dtype=torch.bool, pin_memory=self.mask.is_cuda)

    def keep_all(self) -> None:
        """Disable dropout."""
        if self._kept is None:
            self._masks.fill(1)
        else:
            self._scale = 1.0
            self._kept.fill_(True)

    def draw(self, client: int, count: int, generator: np.random.Generator) -> None:
        """Draw the next mask of a client's stream, for `count` rows."""
        if self._kept is not None:
            self._scale = 1 / (1 - self.p)
            self._sent.numpy()[client, :count] = draw_kept(generator, count, self.units, self.p)
            return
        mask = self._masks[client, :count]
        page = mask.reshape(count, self.units) if self._page is None else self._page[:count]
        drawn = draw_mask(generator, count, self.units, self.p, page)
        if self._page is not None:
            mask[:] = drawn.reshape(mask.shape)

    def send(self) -> None:
        """Send the masks that were drawn to the device, while it still computes."""
        if self._kept is not None:
            self._kept.copy_(self._sent, non_blocking=True)
            self._sent = self._fresh()

    def arrange(self) -> None:
        """Compute `mask` from the bytes on the device."""
        if self._kept is not None:
            torch.mul(self._kept, self._scale, out=self._arranged)

    def forward(self) -> None:
        self.arrange()
        self.output.mul_(self.mask)

    def backward(self, gradient: Tensor) -> Tensor:
        return gradient.mul_(self.mask)


class Flatten(Layer):
    """Conversion of columns to rows: a view in the forward pass, one copy in the backward pass."""

    def __init__(self, units: int):
        self.values = units

    def attach(self, place: Place, x: Tensor) -> None:
        self.output = x.transpose(1, 2)
        self._columns = place.take("gradient", place.clients, self.values, place.rows)

    def backward(self, gradient: Tensor) -> Tensor:
        self._columns.transpose(1, 2).copy_(gradient)
        return self._columns
