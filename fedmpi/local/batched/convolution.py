"""Batched convolution and pooling: on a CPU on columns (k, channels · height · width, b), on a GPU on images.

With the samples as the innermost axis, unfolding an image copies whole runs of values by one index, and folding the
gradient back sums runs. Both are library kernels (index_select, embedding_bag), and nothing has to be permuted.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from fedmpi.local.batched.layers import Biased, Layer, Place, Slot

BLOCK = 8
"""Multiple of values to which patches are padded in the product of the weights' gradient, which takes up to half as
long again with patches of 63 values as with 64."""
PATCH_BYTES = 32 << 20
"""Largest patches of a step, in bytes, with which a GPU computes products instead of one grouped convolution. They fit
in its second-level cache: 40 MB on an A100, 50 MB on an H100 (NVIDIA's white papers). Grouped convolutions need none,
but may be slow (PyTorch's issues 70954 and 73764). The limit has not been measured; `python -m benchmarks.gpu.rounds
--patch-bytes` measures both forms."""


class ImageColumns(Layer):
    """Conversion of rows to columns before the first convolution: of all clients at once, or client by client."""

    def __init__(self, image: tuple[int, int, int]):
        self.values = math.prod(image)  # channels · height · width

    def attach(self, place: Place, x: Tensor) -> None:
        self.output = place.take("output", place.clients, self.values, place.rows, guard=place.rows)
        self._arranged, self._rows = self.output.transpose(1, 2).numpy(), x.numpy()

    def forward(self) -> None:
        np.copyto(self._arranged, self._rows)  # two thirds of torch's time

    def turn(self, client: int) -> None:
        """Convert one client's samples, which are in its part of the input."""
        np.copyto(self._arranged[client], self._rows[client])


@dataclass(frozen=True)
class Geometry:
    """Input values of every output of a convolution."""

    image: tuple[int, int, int]  # (channels, height, width) of the input
    kernel: tuple[int, int]  # (vertical, horizontal)
    stride: tuple[int, int]
    padding: tuple[int, int]
    height: int | None = None  # height of the output, from the top; None = full height

    @cached_property
    def output(self) -> tuple[int, int]:
        """Return the height and width of the output."""
        return self.height or self._along(0), self._along(1)

    def _along(self, axis: int) -> int:
        room = self.image[1 + axis] + 2 * self.padding[axis] - self.kernel[axis]
        return room // self.stride[axis] + 1

    @property
    def patch(self) -> int:
        """Return the number of values under one filter: channels · kernel."""
        return self.image[0] * self.kernel[0] * self.kernel[1]

    @property
    def units(self) -> int:
        """Return the number of values of the input."""
        return self.image[0] * self.image[1] * self.image[2]

    def unfold_index(self) -> Tensor:
        """Return the input value that each value of the patches (patch · output) copies, −1 for padding; int64."""
        channels, height, width = self.image
        down, right = self.padding
        index = torch.arange(channels * height * width).view(channels, height, width)
        index = torch.nn.functional.pad(index, (right, right, down, down), value=-1)
        windows = index.unfold(1, self.kernel[0], self.stride[0]).unfold(2, self.kernel[1], self.stride[1])
        windows = windows[:, : self.output[0]].permute(0, 3, 4, 1, 2)
        return windows.reshape(-1)


class Maps:
    """Index vectors of a geometry for up to K clients, computed once."""

    def __init__(self, geometry: Geometry):
        self.geometry, self._clients = geometry, 0

    def of(self, clients: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return three vectors. `gather` (k · patches): the runs that index_select copies. `members` and `offsets` (k ·
        units + 1): the values of the patches that embedding_bag sums into every input value."""
        if self._clients < clients:
            self._clients, self._made = clients, self._make(clients)
        gather, members, starts = self._made
        return gather[:clients].flatten(), members[:clients].flatten(), starts[: clients * self.geometry.units + 1]

    def _make(self, clients: int) -> tuple[Tensor, Tensor, Tensor]:
        index, units = self.geometry.unfold_index(), self.geometry.units
        inside = (index >= 0).nonzero().squeeze(1)
        members = inside[torch.argsort(index[inside], stable=True)]
        counts = torch.bincount(index[inside], minlength=units)
        client = torch.arange(clients)[:, None]
        gather = torch.where(index >= 0, index + 1 + client * units, 0)
        all_members = members + client * index.numel()
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.repeat(clients).cumsum(0)])
        return gather.int(), all_members.int(), starts.int()


class Patches:
    """Unfolded images of k clients, as used by the products with filters and those of the weights' gradients."""

    def __init__(self, maps: Maps, place: Place, x: Tensor):
        at, clients, rows = maps.geometry, place.clients, place.rows
        size, positions = at.patch, math.prod(at.output) * rows
        block = -(-size // BLOCK) * BLOCK
        memory = place.take("patches", clients * size + block - size, positions)
        self.of_clients = memory[: clients * size].view(clients, size, positions)
        self.filled = memory.as_strided((clients, block, positions), (size * positions, positions, 1))
        self._gather, self._members, self._offsets = maps.of(clients)
        # the runs of the input, preceded by the run of the b values before it
        self._runs = x.as_strided((1 + clients * at.units, rows), (rows, 1), x.storage_offset() - rows)
        self._copied = self.of_clients.view(-1, rows)
        self._zeros = self._runs[0] if any(at.padding) else None
        self._folded_shape = clients, at.units, rows
        if not place.first:
            self.gradient = place.scratch(*self.of_clients.shape)
            self._gradient_rows = self.gradient.view(-1, rows)

    def unfold(self) -> None:
        """Fill the patches from the images."""
        if self._zeros is not None:
            self._zeros.zero_()
        torch.index_select(self._runs, 0, self._gather, out=self._copied)

    def fold(self) -> Tensor:
        """Return the gradient of the images, (k, units, b), from that of the patches."""
        folded = embedding_bag(self._members, self._gradient_rows, self._offsets, mode="sum", include_last_offset=True)
        return folded.view(self._folded_shape)


class Convolution(Biased):
    """Unfolding, one matrix product per client, bias (nn.Conv2d without groups or dilation)."""

    def __init__(self, geometry: Geometry, filters: int, weight: Slot, bias: Slot | None):
        self.geometry, self.filters, self.slots = geometry, filters, (weight, bias)
        self.maps = Maps(geometry)
        self.values = geometry.units + (2 * geometry.patch + 2 * filters) * math.prod(geometry.output)

    def attach(self, place: Place, x: Tensor) -> None:
        clients, rows, patch, filters = place.clients, place.rows, self.geometry.patch, self.filters
        positions = math.prod(self.geometry.output) * rows
        self.first = place.first
        self.weight, self.target = place.parameter(self.slots[0], filters, patch)
        self.transposed = self.weight.transpose(1, 2)
        self.attach_bias(place, self.slots[1], filters, 1)
        self.patches = Patches(self.maps, place, x)
        self.filled = self.patches.filled.transpose(1, 2)
        self.of_filled = place.take("of_filled", clients, filters, self.filled.shape[2])
        self.of_weight = self.of_filled[..., :patch]
        self.output = place.take("output", clients, filters * positions // rows, rows, guard=rows)
        self.product = self.output.view(clients, filters, positions)

    def forward(self) -> None:
        self.patches.unfold()
        torch.bmm(self.weight, self.patches.of_clients, out=self.product)
        if self.bias is not None:
            self.product.add_(self.bias)

    def backward(self, gradient: Tensor) -> Tensor:
        gradient = gradient.view(self.product.shape)
        folded = gradient
        if not self.first:
            torch.bmm(self.transposed, gradient, out=self.patches.gradient)
            folded = self.patches.fold()
        torch.bmm(gradient, self.filled, out=self.of_filled)
        self.step.plain(self.target, self.of_weight)
        self.learn_bias(gradient, 2)
        return folded


class ImageConvolution(Convolution):
    """The same on images (b, k, channels, height, width), which other layers receive as views: rows (k, b, ·).

    It is a product with patches (k, patch, b · output), or a convolution with k groups.
    """

    def attach(self, place: Place, x: Tensor) -> None:
        self.first = place.first
        self.weight, self.target = place.parameter(self.slots[0], self.filters, self.geometry.patch)
        self.attach_bias(place, self.slots[1], self.filters, 1)
        self.images = torch.unflatten(x.transpose(0, 1), 2, self.geometry.image)
        self.made = place.take("output", place.rows, place.clients, self.filters, *self.geometry.output)
        self.output = self.made.flatten(2).transpose(0, 1)
        self.multiplies = self.geometry.patch * self.made[:, :, 0].nbytes <= PATCH_BYTES

    def forward(self) -> None:
        at, (down, right), shape = self.geometry, self.geometry.padding, self.made.shape
        if self.multiplies:
            padded = pad(self.images, (right, right, down, down)) if down or right else self.images
            windows = padded.unfold(3, at.kernel[0], at.stride[0]).unfold(4, at.kernel[1], at.stride[1])
            self.read = windows.permute(1, 2, 5, 6, 0, 3, 4).reshape(len(self.weight), at.patch, -1)
            found = torch.unflatten(torch.bmm(self.weight, self.read), 2, (-1, *at.output)).permute(2, 0, 1, 3, 4)
        else:
            self.read, self.kernels = self.images.flatten(1, 2), self.weight.reshape(-1, at.image[0], *at.kernel)
            found = torch.conv2d(self.read, self.kernels, None, at.stride, at.padding, 1, shape[1]).view(shape)
        torch.add(found, 0 if self.bias is None else self.bias.unsqueeze(3), out=self.made)

    def backward(self, gradient: Tensor) -> Tensor:
        at, of_made, of_images = self.geometry, gradient.transpose(0, 1).reshape(self.made.shape), gradient
        if self.multiplies:
            product = of_made.permute(1, 2, 0, 3, 4).flatten(2)
            if not self.first:
                patches = torch.bmm(self.weight.transpose(1, 2), product).view(*self.read.shape[:2], len(of_made), -1)
                window = at.image[1:], at.kernel, (1, 1), at.padding, at.stride
                of_images = torch.ops.aten.col2im(patches.permute(2, 0, 1, 3).flatten(0, 1), *window)
            self.step.product(self.target, product, self.read.transpose(1, 2))
        else:
            given = of_made.flatten(1, 2), self.read, self.kernels, None, at.stride, at.padding, (1, 1), False, (0, 0)
            wanted = not self.first, True, False
            of_images, of_weight, _ = torch.ops.aten.convolution_backward(*given, len(self.weight), wanted)
            self.step.plain(self.target, of_weight.view(self.weight.shape))
            del self.kernels
        if self.bias is not None:
            self.step.plain(self.bias_target, of_made.sum((0, 3, 4)).unsqueeze(2))
        del self.read
        return gradient if self.first else of_images.reshape(*of_made.shape[:2], -1).transpose(0, 1)


CONVOLUTION = {False: Convolution, True: ImageConvolution}
"""Form of a convolution, by whether it reads images."""


class _Pool(Layer):
    """Pooling by PyTorch's own kernels, which receive the columns as channels-last images of b "channels"."""

    def __init__(self, geometry: Geometry, *more: Any):
        self.geometry, self.window = geometry, [geometry.kernel, geometry.stride, geometry.padding, *more]
        self.units = geometry.image[0] * math.prod(geometry.output)
        self.values = 3 * self.units

    def attach(self, place: Place, x: Tensor) -> None:
        channels, height, width = self.geometry.image
        planes, rows = place.clients * channels, place.rows
        self.x = x.view(planes, height, width, rows).permute(0, 3, 1, 2)
        self.output = place.take("output", place.clients, self.units, rows, guard=rows)
        self.pooled_shape = (planes, *self.geometry.output, rows)
        self.pooled = self.output.view(self.pooled_shape).permute(0, 3, 1, 2)
        self.input_shape = (place.clients, channels * height * width, rows)

    def backward(self, gradient: Tensor) -> Tensor:
        spread = self.spread(gradient.view(self.pooled_shape).permute(0, 3, 1, 2))
        return spread.permute(0, 2, 3, 1).reshape(self.input_shape)

    def spread(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the images from that of the pooled ones."""
        raise NotImplementedError


class MaxPool(_Pool):
    """Batched nn.MaxPool2d."""

    def __init__(self, geometry: Geometry):
        super().__init__(geometry, [1, 1], False)

    def attach(self, place: Place, x: Tensor) -> None:
        super().attach(place, x)
        self.where = place.take("where", *self.pooled_shape, dtype=torch.int64).permute(0, 3, 1, 2)

    def forward(self) -> None:
        torch.ops.aten.max_pool2d_with_indices.out(self.x, *self.window, out=self.pooled, indices=self.where)

    def spread(self, gradient: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(gradient, self.x, *self.window, self.where)
        return found


class MeanPool(_Pool):
    """Batched nn.AvgPool2d; `padding_counts` if the mean includes the zeros around the image."""

    def __init__(self, geometry: Geometry, padding_counts: bool = True):
        super().__init__(geometry, False, padding_counts, None)

    def forward(self) -> None:
        torch.ops.aten.avg_pool2d.out(self.x, *self.window, out=self.pooled)

    def spread(self, gradient: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.avg_pool2d_backward(gradient, self.x, *self.window)
        return found


class ImagePool(Layer):
    """A pooling, applied to images."""

    def __init__(self, pool: MaxPool | MeanPool):
        self.pool, self.values = pool, pool.values

    def attach(self, place: Place, x: Tensor) -> None:
        self.pool, self.x = copy.copy(self.pool), x
        pooled = place.take("output", place.rows, place.clients, self.pool.units)
        self.output = pooled.transpose(0, 1)
        self.pool.pooled = pooled.view(-1, self.pool.geometry.image[0], *self.pool.geometry.output)
        if isinstance(self.pool, MaxPool):
            self.pool.where = place.take("where", *self.pool.pooled.shape, dtype=torch.int64)

    def forward(self) -> None:
        self.pool.x = self.x.transpose(0, 1).reshape(-1, *self.pool.geometry.image)
        self.pool.forward()

    def backward(self, gradient: Tensor) -> Tensor:
        spread = self.pool.spread(gradient.transpose(0, 1).reshape(self.pool.pooled.shape))
        return spread.view(*self.x.shape[1::-1], -1).transpose(0, 1)
