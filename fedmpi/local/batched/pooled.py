"""A convolution and the following pooling of 2 × 2 values as one layer on a CPU, on columns (k, values, b).

The two neighboring outputs in a row of a pooling window read almost the same values. Each filter is therefore written
twice into a kernel that is wider by one stride: once at its left and once at its right end, with zeros elsewhere. This
halves the number of patches and doubles the rows of the matrix product. Outputs outside all windows are not computed,
and pooling is a few operations on contiguous memory.

Fewer than FEW_FILTERS are written four times, to include the lower row of a window: twice would still be too few for a
fast product. From MANY_FILTERS on the products are large enough, and multiplying zeros would cost more than fewer
patches save. Filters are then used unchanged, with all left outputs before all right ones. ReLU and bias do not change
which value is the largest, so they are applied after the maximum, to a quarter of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from fedmpi.local.batched.convolution import Convolution, Geometry, Maps, MaxPool, MeanPool, Patches
from fedmpi.local.batched.layers import Biased, Layer, Place, ReLU

FEW_FILTERS = 8
"""Number of filters below which each is written four times."""
MANY_FILTERS = 64
"""Number of filters from which on each is used unchanged."""


@dataclass(frozen=True)
class EvenColumnsFirst(Geometry):
    """Outputs of a convolution in even columns, followed by those in odd columns."""

    @cached_property
    def output(self) -> tuple[int, int]:
        """Return the height and the width, which is even."""
        return self.height or self._along(0), self._along(1) // 2 * 2

    def unfold_index(self) -> Tensor:
        height, width = self.output
        index = super().unfold_index().view(self.patch, height, -1)[..., :width]
        return index.reshape(self.patch, height, width // 2, 2).permute(0, 3, 1, 2).reshape(-1)


class PooledConvolution(Biased):
    """nn.Conv2d and nn.MaxPool2d(2) or nn.AvgPool2d(2), with or without ReLU between the two."""

    def __init__(self, convolution: Convolution, largest: bool, cut: bool = False):
        self.geometry, self.filters, self.slots = convolution.geometry, convolution.filters, convolution.slots
        self.largest, self.cut = largest, cut  # the largest of four values, or their mean; ReLU before the mean
        # rows and columns of a window for which each filter is written: (1, 1) = used unchanged
        few, many = self.filters < FEW_FILTERS, self.filters >= MANY_FILTERS
        self.copies = (1, 1) if many else (2, 2) if few else (1, 2)
        self.read = self._geometry_read()
        self.maps = Maps(self.read)
        copies = math.prod(self.copies)
        made = 2 * self.filters if many else -(-7 * copies * self.filters // 4)
        self.values = self.geometry.units + (2 * self.read.patch + made) * math.prod(self.read.output)

    def _geometry_read(self) -> Geometry:
        """Return the geometry read by each output, or by the adjacent outputs for which filters are written."""
        one, (lines, sides) = self.geometry, self.copies
        height = one.output[0] // 2 * 2 // lines
        if self.copies == (1, 1):
            return EvenColumnsFirst(one.image, one.kernel, one.stride, one.padding, height)
        (down, right), (below, across) = one.kernel, one.stride
        kernel = down + (lines - 1) * below, right + (sides - 1) * across
        stride = lines * below, sides * across
        return Geometry(one.image, kernel, stride, one.padding, height)

    def attach(self, place: Place, x: Tensor) -> None:
        clients, rows, height, filters = place.clients, place.rows, self.read.output[0], self.filters
        run, copies = math.prod(self.read.output) * rows, math.prod(self.copies)
        self.first = place.first
        self.attach_bias(place, self.slots[1], filters, 1)
        self.patches = Patches(self.maps, place, x)
        self.product = place.take("product", clients, copies * filters, run)
        self.kernels: _WrittenFilters | _PlainFilters
        if copies > 1:
            self.kernels = _WrittenFilters(self, place, self.patches.filled.transpose(1, 2))
            self.by_filter = self.product.view(clients, copies, filters, run)
        else:
            self.kernels = _PlainFilters(self, place, self.patches.of_clients.transpose(1, 2))
            self.by_filter = self.product.view(clients, filters, 2, run // 2).transpose(1, 2)
        if copies == 4:
            self.windows = torch.unflatten(self.by_filter, 1, (2, 2))
            self.left, self.right = self.windows.unbind(2)
            self.row = place.take("row", *self.left.shape)
            self.upper, self.lower = self.row.unbind(1)
            self.shape_of_each: tuple[int, ...] = (clients, 1, 1, filters, run)
        else:
            side = self.by_filter.shape[3] // height
            self.windows = torch.unflatten(self.by_filter, 3, (height // 2, 2, side))
            self.left, self.right = self.windows.unbind(1)
            self.row = place.take("row", *self.left.shape)
            self.upper, self.lower = self.row.unbind(3)
            self.shape_of_each = (clients, 1, filters, height // 2, 1, side)
        self.output = place.take("output", clients, self.upper[0].numel() // rows, rows, guard=rows)
        self.pooled, self.pooled_shape = self.output.view(self.upper.shape), self.upper.shape
        self.pooled_filters = self.output.view(clients, filters, -1)

    def forward(self) -> None:
        self.patches.unfold()
        torch.bmm(self.kernels.arranged(), self.patches.of_clients, out=self.product)
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
            torch.bmm(self.kernels.transposed, self.product, out=self.patches.gradient)
            folded = self.patches.fold()
        self.kernels.learn(self.product)
        if self.bias is not None:
            self.step.plain(self.bias_target, of_bias)
        return folded

    def _of_largest(self, gradient: Tensor) -> Tensor:
        """Turn `product` into its gradient: that of a window goes to the first of its largest values, in row order."""
        to_the_larger(gradient, self.upper, self.lower)
        to_the_larger(self.row, self.left, self.right)
        return gradient.flatten(2).sum(2, keepdim=True)

    def _of_mean(self, gradient: Tensor) -> Tensor:
        of_each = gradient.mul_(0.25).view(self.shape_of_each)
        if self.cut:
            torch.ops.aten.threshold_backward.grad_input(of_each, self.windows, 0, grad_input=self.windows)
        else:
            self.windows.copy_(of_each.expand_as(self.windows))
        return self.by_filter.sum((1, 3)).unsqueeze(2)


class _WrittenFilters:
    """Filters written several times, for outputs of one window, into kernels on all the values that these read."""

    def __init__(self, layer: PooledConvolution, place: Place, patches: Tensor):
        one, at, clients = layer.geometry, layer.read, place.clients
        (channels, *_), (down, right), (below, across), copies = one.image, one.kernel, one.stride, layer.copies
        shape = layer.filters, channels, down, right
        self.step, self.patches = place.step, patches
        self.weight, self.target = place.parameter(layer.slots[0], *shape)
        kernels = place.take("kernels", clients, *copies, *shape[:2], *at.kernel)  # zero where no filter is written
        self.all = kernels.view(clients, -1, at.patch)
        self.transposed = self.all.transpose(1, 2)
        self.of_all = place.take("of_kernels", *self.all.shape[:2], patches.shape[2])
        gradients = self.of_all.view(clients, *copies, layer.filters, -1)[..., : at.patch]
        gradients = torch.unflatten(gradients, 4, (channels, *at.kernel))
        self.parts, self.of_parts = [], []
        for line, side in product(*map(range, copies)):
            rows, columns = slice(line * below, line * below + down), slice(side * across, side * across + right)
            self.parts.append(kernels[:, line, side, ..., rows, columns])
            self.of_parts.append(gradients[:, line, side, ..., rows, columns])

    def arranged(self) -> Tensor:
        """Return the kernels with the current weights: (k, copies · F, patch)."""
        for part in self.parts:
            part.copy_(self.weight)
        return self.all

    def learn(self, gradient: Tensor) -> None:
        """Update the weights, given the gradient (k, copies · F, ·) of the products with the patches."""
        torch.bmm(gradient, self.patches, out=self.of_all)
        total, *others = self.of_parts
        for part in others:
            total.add_(part)
        self.step.plain(self.target, total)


class _PlainFilters:
    """Filters in the layout of the stack, on patches of one output each."""

    def __init__(self, layer: PooledConvolution, place: Place, patches: Tensor):
        self.step, self.patches = place.step, patches
        self.weight, self.target = place.parameter(layer.slots[0], layer.filters, layer.geometry.patch)
        self.transposed = self.weight.transpose(1, 2)

    def arranged(self) -> Tensor:
        """Return the current weights: (k, F, patch)."""
        return self.weight

    def learn(self, gradient: Tensor) -> None:
        """Update the weights, given the gradient (k, F, ·) of the products with the patches."""
        self.step.product(self.target, gradient, self.patches)


def to_the_larger(gradient: Tensor, first: Tensor, second: Tensor) -> None:
    """Move the gradient of the larger of two values to its position and write 0 at the other; the first one wins if
    they are equal."""
    torch.sub(second, first, out=second)
    torch.ops.aten.threshold_backward.grad_input(gradient, second, 0, grad_input=second)
    torch.sub(gradient, second, out=first)


def with_pools(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Return the layers with every convolution and the following pooling fused, where there is such a form."""
    given = list(layers)
    joined: list[Layer] = []
    while given:
        layer = given.pop(0)
        between = given[:1] if given and isinstance(given[0], ReLU) else []
        pool = given[len(between)] if len(given) > len(between) else None
        if not isinstance(layer, Convolution) or not isinstance(pool, MaxPool | MeanPool) or not _of_four(pool):
            joined.append(layer)
            continue
        del given[: len(between) + 1]
        if isinstance(pool, MaxPool):
            joined += [PooledConvolution(layer, largest=True), *between]
        else:
            joined.append(PooledConvolution(layer, largest=False, cut=bool(between)))
    return tuple(joined)


def _of_four(pool: MaxPool | MeanPool) -> bool:
    """Check whether windows have 2 × 2 values, do not overlap and have no zeros around the image."""
    at = pool.geometry
    return at.kernel == at.stride == (2, 2) and at.padding == (0, 0)
