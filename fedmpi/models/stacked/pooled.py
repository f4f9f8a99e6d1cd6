"""A convolution and the pooling of 2 × 2 values behind it as one layer, on columns (k, values, b).

The two neighbouring outputs in a row of a pooling window read almost the same values. So each filter is written twice
into a kernel that is wider by one stride, once at its left and once at its right end, with zeros for the rest: patches
are half as many, the matrix product has twice as many rows, outputs that no window reads are not computed, and pooling
is a few operations on contiguous memory. With MANY_FILTERS the products are large enough, and multiplying zeros would
cost more than fewer patches save: filters are used as they are, all left outputs before all right ones. ReLU and bias
do not change which value is the largest, and are applied after the maximum, to a quarter of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedmpi.models.stacked.base import Layer, Op, Place, Slot
from fedmpi.models.stacked.dense import ReLU, Squash
from fedmpi.models.stacked.image import Convolution, Geometry, Maps, MaxPool, MeanPool, Patches, runs_of, sum_rows

PAIR = (2, 2)
MANY_FILTERS = 64
"""Filters from which on each is used as it is, and not written twice."""


@dataclass(frozen=True)
class EvenColumnsFirst(Geometry):
    """The outputs of a convolution in columns of even number, then those in columns of odd number."""

    @cached_property
    def output(self) -> tuple[int, int]:
        """Height and width, which is even."""
        return self.height or self._along(0), self._along(1) // 2 * 2

    @cached_property
    def run(self) -> int:
        return 1

    def unfold_index(self) -> Tensor:
        height, width = self.output
        index = super().unfold_index().view(self.patch, height, -1)[..., :width]
        return index.reshape(self.patch, height, width // 2, 2).permute(0, 3, 1, 2).reshape(-1)


@dataclass(frozen=True)
class PooledConvolution:
    """nn.Conv2d and nn.MaxPool2d(2), or nn.AvgPool2d(2) with ReLU between the two or not.

    Parameters
    ----------
    geometry : Geometry
        Of the convolution alone.
    filters : int
    weight, bias : Slot
    largest : bool
        Whether the largest value of four is taken, else their mean.
    cut : bool
        Whether ReLU goes before the mean.
    reads, writes : int
        In how many parts the rows of the input and of the pooled output lie (`ColumnOrder`).
    """

    trained: ClassVar[bool] = True

    geometry: Geometry
    filters: int
    weight: Slot
    bias: Slot | None
    largest: bool
    cut: bool = False
    reads: int = 1
    writes: int = 1

    @property
    def doubled(self) -> bool:
        """Whether each filter is written twice, for the left and for the right column of a window."""
        return self.filters < MANY_FILTERS

    @cached_property
    def pairs(self) -> Geometry:
        """The patches: what two neighbouring outputs read where filters are doubled, else what each output reads."""
        one = self.geometry
        if not self.doubled:
            return EvenColumnsFirst(one.image, one.kernel, one.stride, one.padding, one.output[0] // 2 * 2)
        kernel, stride = (one.kernel[0], one.kernel[1] + one.stride[1]), (one.stride[0], 2 * one.stride[1])
        return Geometry(one.image, kernel, stride, one.padding, one.output[0] // 2 * 2, self.reads, self.writes)

    @cached_property
    def maps(self) -> Maps:
        return Maps(self.pairs)

    @property
    def values(self) -> int:
        patches, size = 2 * self.pairs.patch, math.prod(self.pairs.output)
        made = 7 * self.filters if self.doubled else 4 * self.filters
        return self.geometry.units + (patches + (made + 1) // 2) * size

    def bind(self, place: Place, x: Tensor) -> Op:
        return _PooledOp(self, place, x)


class _PooledOp:
    def __init__(self, layer: PooledConvolution, place: Place, x: Tensor):
        pairs, parameters, clients, rows = layer.pairs, place.parameters, place.clients, place.rows
        (height, width), filters, run = pairs.output, layer.filters, math.prod(pairs.output) * rows
        self.step, self.first, self.largest, self.cut = parameters.step, place.first, layer.largest, layer.cut
        self.bias = self.bias_target = None
        if layer.bias is not None:
            self.bias = parameters.value(layer.bias, filters, 1)
            self.bias_target = parameters.target(layer.bias, filters, 1)

        self.gather, self.members, self.offsets = layer.maps.of(clients, place.workspace.device)
        self.runs = runs_of(x, pairs)
        self.zero_row = self.runs[0] if any(pairs.padding) else None
        patches = Patches(pairs, place)
        self.patch_runs, self.patches = patches.runs, patches.each
        self.input_shape = (clients, pairs.units, rows)
        if not place.first:
            self.patch_gradient = place.scratch(clients, pairs.patch, run)
            self.patch_gradient_rows = self.patch_gradient.view(-1, rows)

        self.filters: _ColumnPairFilters | _PlainFilters
        if layer.doubled:
            self.filters = _ColumnPairFilters(layer, place, patches.filled.transpose(1, 2))
            self.product = place.take("product", clients, 2 * filters, run)
            self.by_filter = self.product.view(clients, 2, filters, run)
            width *= 2
        else:
            self.filters = _PlainFilters(layer, place, self.patches.transpose(1, 2))
            self.product = place.take("product", clients, filters, run)
            self.by_filter = self.product.view(clients, filters, 2, run // 2).transpose(1, 2)
        sides = torch.unflatten(self.by_filter, 3, (height // 2, 2, width // 2 * rows))
        self.sides, self.left, self.right = sides, sides[:, 0], sides[:, 1]
        self.row = place.take("row", *self.left.shape)
        self.upper, self.lower = self.row[:, :, :, 0], self.row[:, :, :, 1]
        self.output = place.take("output", clients, filters * (height // 2) * (width // 2), rows, guard=rows)
        self.pooled, self.pooled_shape = self.output.view(self.upper.shape), self.upper.shape
        self.pooled_filters = self.output.view(clients, filters, -1)

    def forward(self) -> None:
        if self.zero_row is not None:
            self.zero_row.zero_()
        torch.index_select(self.runs, 0, self.gather, out=self.patch_runs)
        torch.bmm(self.filters.arranged(), self.patches, out=self.product)
        if self.largest:
            torch.maximum(self.left, self.right, out=self.row)
            torch.maximum(self.upper, self.lower, out=self.pooled)
            if self.bias is not None:
                self.pooled_filters.add_(self.bias)
            return
        if self.bias is not None:
            self.by_filter.add_(self.bias.unsqueeze(1))
        if self.cut:
            self.product.relu_()
        torch.add(self.left, self.right, out=self.row)
        torch.add(self.upper, self.lower, out=self.pooled).mul_(0.25)

    def backward(self, gradient: Tensor) -> Tensor:
        of_pooled = gradient.view(self.pooled_shape)
        of_bias = self._of_largest(of_pooled) if self.largest else self._of_mean(of_pooled)
        folded = gradient
        if not self.first:
            torch.bmm(self.filters.transposed, self.product, out=self.patch_gradient)
            folded = sum_rows(self.patch_gradient_rows, self.members, self.offsets).view(self.input_shape)
        self.filters.learn(self.product)
        if self.bias_target is not None:
            self.step.plain(self.bias_target, of_bias)
        return folded

    def _of_largest(self, gradient: Tensor) -> Tensor:
        """Turn `product` into its gradient: that of a window goes to the first of its largest values, row by row."""
        to_the_larger(gradient, self.upper, self.lower)
        to_the_larger(self.row, self.left, self.right)
        return gradient.flatten(2).sum(2, keepdim=True)

    def _of_mean(self, gradient: Tensor) -> Tensor:
        of_each = gradient.mul_(0.25).unsqueeze(3).unsqueeze(1)
        if self.cut:
            torch.ops.aten.threshold_backward.grad_input(of_each, self.sides, 0, grad_input=self.sides)
        else:
            self.sides.copy_(of_each.expand_as(self.sides))
        return self.by_filter.sum((1, 3)).unsqueeze(2)


class _ColumnPairFilters:
    """Each filter written twice, for the left and the right column of a window, into kernels on patches of both."""

    def __init__(self, layer: PooledConvolution, place: Place, patches: Tensor):
        pairs, filters, clients, parameters = layer.pairs, layer.filters, place.clients, place.parameters
        (channels, *_), (down, right), across = pairs.image, layer.geometry.kernel, layer.geometry.stride[1]
        shape = filters, channels, down, right
        self.step, self.patches = parameters.step, patches
        self.weight, self.target = parameters.value(layer.weight, *shape), parameters.target(layer.weight, *shape)
        doubled = place.take(
            "doubled", clients, 2, filters, channels, down, right + across
        )  # zero where none is written
        self.both = doubled.view(clients, 2 * filters, pairs.patch)
        self.transposed = self.both.transpose(1, 2)
        self.of_both = place.take("of_doubled", clients, 2 * filters, patches.shape[2])
        spread = self.of_both.view(clients, 2, filters, -1)[..., : pairs.patch]
        spread = torch.unflatten(spread, 3, doubled.shape[3:])
        self.parts = [doubled[:, side, ..., side * across : side * across + right] for side in (0, 1)]
        self.of_parts = [spread[:, side, ..., side * across : side * across + right] for side in (0, 1)]

    def arranged(self) -> Tensor:
        """The kernels with the current weights: (k, 2 F, patch)."""
        for part in self.parts:
            part.copy_(self.weight)
        return self.both

    def learn(self, gradient: Tensor) -> None:
        """Update the weights, given the gradient (k, 2 F, ·) of the products with the patches."""
        torch.bmm(gradient, self.patches, out=self.of_both)
        torch.add(*self.of_parts, out=self.of_parts[0])
        self.step.plain(self.target, self.of_parts[0])


class _PlainFilters:
    """Filters as they lie in the stack, on patches of one output each."""

    def __init__(self, layer: PooledConvolution, place: Place, patches: Tensor):
        shape = layer.filters, layer.geometry.patch
        self.step, self.patches = place.parameters.step, patches
        self.weight = place.parameters.value(layer.weight, *shape)
        self.target = place.parameters.target(layer.weight, *shape)
        self.transposed = self.weight.transpose(1, 2)

    def arranged(self) -> Tensor:
        """The current weights: (k, F, patch)."""
        return self.weight

    def learn(self, gradient: Tensor) -> None:
        """Update the weights, given the gradient (k, F, ·) of the products with the patches."""
        self.step.product(self.target, gradient, self.patches)


def to_the_larger(gradient: Tensor, first: Tensor, second: Tensor) -> None:
    """Put the gradient of the larger of two values in that one's place, 0 in the other's; the first one's where they
    are equal."""
    torch.sub(second, first, out=second)
    torch.ops.aten.threshold_backward.grad_input(gradient, second, 0, grad_input=second)
    torch.sub(gradient, second, out=first)


def with_pools(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """The layers with every convolution and the pooling behind it as one, where there is a form of both.

    ReLU after a pooling keeps its outputs to know where it cut them, and a logistic layer writes over them: models
    with one stay as they are.
    """
    given = list(layers)
    if any(isinstance(layer, Squash) and layer.kind == "sigmoid" for layer in given):
        return tuple(given)
    joined: list[Layer] = []
    while given:
        layer = given.pop(0)
        between = given[:1] if given and isinstance(given[0], ReLU) else []
        pool = given[len(between)] if len(given) > len(between) else None
        if not isinstance(layer, Convolution) or not isinstance(pool, MaxPool | MeanPool) or not _of_four(pool):
            joined.append(layer)
            continue
        del given[: len(between) + 1]
        shape = layer.geometry, layer.filters, layer.weight, layer.bias
        if isinstance(pool, MaxPool):
            joined += [PooledConvolution(*shape, largest=True), *between]
        else:
            joined.append(PooledConvolution(*shape, largest=False, cut=bool(between)))
    return tuple(joined)


def _of_four(pool: MaxPool | MeanPool) -> bool:
    """Whether windows have 2 × 2 values, no two of them the same and no zeros around the image."""
    return pool.kernel == pool.stride == PAIR and pool.padding == (0, 0)
