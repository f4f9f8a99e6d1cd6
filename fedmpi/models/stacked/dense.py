"""Batched dense layers on rows (k, b, values): products, ReLU, dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmpi.common.types import AnyArray
from fedmpi.models.dropout import draw_mask
from fedmpi.models.stacked.base import Drift, Op, Place, Slot, by_numpy

_threshold_backward = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + c on rows; `x` may be a transposed view."""

    trained: ClassVar[bool] = True

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
        self.drift = parameters.drift if place.number == 0 else Drift()
        self.ahead = parameters.ahead if place.number == 0 else None
        self.input_gradient = place.take("gradient", 0 if place.first else place.clients, place.rows, layer.inputs)

    def forward(self) -> None:
        if self.ahead is not None and self.ahead.on:
            self.ahead.forward(self.output)
        elif self.drift.on:  # the output contains the samples' products with v
            self.output.baddbmm_(self.x, self.transposed, beta=self.drift.shift, alpha=self.drift.scale)
        else:
            torch.bmm(self.x, self.transposed, out=self.output)
        if self.bias is not None:
            self.output.add_(self.bias)

    def backward(self, gradient: Tensor) -> Tensor:
        if not self.first:
            torch.bmm(gradient, self.weight, out=self.input_gradient)
        if self.ahead is not None and self.ahead.on:
            self.ahead.backward(gradient)
        elif self.drift.on:
            self.target.baddbmm_(gradient.transpose(1, 2), self.x, alpha=self.drift.rate)
        else:
            self.step.product(self.target, gradient.transpose(1, 2), self.x)
        if self.bias_target is not None:
            self.step.plain(self.bias_target, torch.sum(gradient, 1, keepdim=True, out=self.bias_gradient))
        return self.input_gradient


@dataclass(frozen=True)
class ReLU:
    """max(x, 0), in place."""

    trained: ClassVar[bool] = False

    values: int = 0

    def bind(self, place: Place, x: Tensor) -> Op:
        return _ReLUOp(x)


class _ReLUOp:
    def __init__(self, x: Tensor):
        self.output = x

    def forward(self) -> None:
        self.output.relu_()

    def backward(self, gradient: Tensor) -> Tensor:
        return cut_negative(gradient, self.output)


def cut_negative(gradient: Tensor, output: Tensor) -> Tensor:
    """Apply the backward pass of ReLU in place: the gradient is set to zero where the output is zero."""
    _threshold_backward(gradient, output, 0, grad_input=gradient)
    return gradient


@dataclass(frozen=True)
class Squash:
    """In-place tanh or logistic function with a copy of its outputs, since a later layer may change them."""

    trained: ClassVar[bool] = False

    kind: str
    values: int  # values of a row

    def bind(self, place: Place, x: Tensor) -> Op:
        return _SquashOp(self.kind, place, x)


class _SquashOp:
    def __init__(self, kind: str, place: Place, x: Tensor):
        self.output, self.kept = x, place.take("squashed", *x.shape)
        self.apply = torch.tanh_ if kind == "tanh" else torch.sigmoid_
        self.derive = getattr(torch.ops.aten, f"{kind}_backward").grad_input

    def forward(self) -> None:
        self.kept.copy_(self.apply(self.output))

    def backward(self, gradient: Tensor) -> Tensor:
        self.derive(gradient, self.kept, grad_input=gradient)
        return gradient


@dataclass(frozen=True)
class StackedDropout:
    """Multiplication by masks from each client's own stream (`models.dropout.draw_mask`), in place."""

    trained: ClassVar[bool] = False

    units: int  # values of a row, in the module's order
    p: float  # probability of a zero
    columns: bool  # True if the input is columns

    @property
    def values(self) -> int:
        return self.units * (2 if self.columns else 1)

    def bind(self, place: Place, x: Tensor) -> DropoutOp:
        return DropoutOp(self, place, x)


class DropoutOp:
    """Dropout bound to k clients. Every forward pass needs new masks (`draw`) or `keep_all` before it.

    On a CPU a mask is drawn in place. With columns or in double precision, it is drawn into a page that all clients
    share and copied while the page is in the cache.
    """

    def __init__(self, layer: StackedDropout, place: Place, x: Tensor):
        self.units, self.p, self.output = layer.units, layer.p, x
        page = place.rows, layer.units
        self.mask = place.take("mask", place.clients, *(page[::-1] if layer.columns else page))
        self._arranged = self.mask.transpose(1, 2) if layer.columns else self.mask
        here = by_numpy(self.mask)
        self._on_host = None if here else torch.ones(self._arranged.shape)
        self._masks: AnyArray = (self._arranged if self._on_host is None else self._on_host).numpy()
        self._page: NDArray[np.float32] | None = None
        if here and (layer.columns or self.mask.dtype != torch.float32):
            self._page = place.workspace.take("page", *page, dtype=torch.float32).numpy()

    def keep_all(self) -> None:
        """Disable dropout."""
        self._masks.fill(1)

    def draw(self, client: int, count: int, generator: np.random.Generator) -> None:
        """Draw the next mask of a client's stream, for `count` rows."""
        mask = self._masks[client, :count]
        page = mask.reshape(count, self.units) if self._page is None else self._page[:count]
        drawn = draw_mask(generator, count, self.units, self.p, page)
        if self._page is not None:
            mask[:] = drawn.reshape(mask.shape)

    def arrange(self) -> None:
        """Copy the drawn values into `mask`."""
        if self._on_host is not None:
            self._arranged.copy_(self._on_host)

    def forward(self) -> None:
        self.arrange()
        self.output.mul_(self.mask)

    def backward(self, gradient: Tensor) -> Tensor:
        return gradient.mul_(self.mask)


@dataclass(frozen=True)
class Flatten:
    """Conversion of columns to rows: a view in the forward pass, one copy in the backward pass."""

    trained: ClassVar[bool] = False

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
