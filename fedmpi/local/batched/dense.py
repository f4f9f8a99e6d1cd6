"""Batched dense layers on rows (k, b, values): products, ReLU, dropout."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmpi.common.types import AnyArray
from fedmpi.local.batched.base import Biased, Layer, Place, Slot, by_numpy
from fedmpi.local.batched.first_layer import Drift, ProductsAhead
from fedmpi.models.layers import draw_mask

_threshold_backward = torch.ops.aten.threshold_backward.grad_input


class Linear(Biased):
    """y = x Wᵀ + c on rows; `x` may be a transposed view. The first layer may compute its products in other ways."""

    def __init__(self, inputs: int, outputs: int, weight: Slot, bias: Slot | None):
        self.inputs, self.outputs, self.slots = inputs, outputs, (weight, bias)
        self.values = inputs + outputs
        self.drift = Drift()
        self.ahead: ProductsAhead | None = None

    def attach(self, place: Place, x: Tensor) -> None:
        self.x = x
        self.weight, self.target = place.parameter(self.slots[0], self.outputs, self.inputs)
        self.transposed = self.weight.transpose(1, 2)
        self.attach_bias(place, self.slots[1], 1, self.outputs)
        self.output = place.take("output", place.clients, place.rows, self.outputs)
        self.first = place.first
        self.input_gradient = place.take("gradient", 0 if place.first else place.clients, place.rows, self.inputs)

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
        self.learn_bias(gradient, 1)
        return self.input_gradient


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

    Every forward pass needs new masks (`draw`) or `keep_all` before it. On a CPU a mask is drawn in place. With columns
    or in double precision, it is drawn into a page that all clients share and copied while the page is in the cache.
    """

    def __init__(self, units: int, p: float, columns: bool = False):
        self.units, self.p, self.columns = units, p, columns  # values of a row; probability of a zero
        self.values = units * (2 if columns else 1)

    def attach(self, place: Place, x: Tensor) -> None:
        self.output, page = x, (place.rows, self.units)
        self.mask = place.take("mask", place.clients, *(page[::-1] if self.columns else page))
        self._arranged = self.mask.transpose(1, 2) if self.columns else self.mask
        here = by_numpy(self.mask)
        self._on_host = None if here else torch.ones(self._arranged.shape)
        self._masks: AnyArray = (self._arranged if self._on_host is None else self._on_host).numpy()
        self._page: NDArray[np.float32] | None = None
        if here and (self.columns or self.mask.dtype != torch.float32):
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
