"""Convolutions of many clients in a graph: as one matrix product a client on unfolded images, or one call a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.forms import ARRANGED, built_in
from fedmpi.models.stacked.weights import Weight

Convolution = nn.Conv1d | nn.Conv2d


@dataclass(frozen=True)
class Window:
    """What a filter sees of an image (height, width).

    Parameters
    ----------
    kernel, stride, dilation : (vertical, horizontal)
    before, after : (vertical, horizontal)
        Zeros around the image.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]

    @classmethod
    def of(cls, layer: Convolution) -> Window:
        """A layer's window; texts are images of height 1."""
        one = (1,) * (2 - len(layer.kernel_size))
        kernel, dilation = _two(one + layer.kernel_size), _two(one + layer.dilation)
        spans = [d * (size - 1) for size, d in zip(kernel, dilation, strict=True)]
        if layer.padding == "same":
            before = spans[0] // 2, spans[1] // 2
            after = spans[0] - before[0], spans[1] - before[1]
        elif isinstance(layer.padding, str):
            before = after = 0, 0
        else:
            before = after = _two((0,) * len(one) + tuple(layer.padding))
        return cls(kernel, _two(one + layer.stride), dilation, before, after)

    def padded(self, axis: int, size: int) -> int:
        """Length of an axis with its zeros."""
        return size + self.before[axis] + self.after[axis]

    def outputs(self, axis: int, size: int) -> int:
        """Positions of the window along an axis of this length."""
        return (self.padded(axis, size) - self.dilation[axis] * (self.kernel[axis] - 1) - 1) // self.stride[axis] + 1

    def part(self, axis: int, shift: int, count: int) -> slice:
        """The entries that the filter's entry `shift` sees at `count` positions."""
        first = shift * self.dilation[axis]
        return slice(first, first + (count - 1) * self.stride[axis] + 1, self.stride[axis])


def _two(values: tuple[int, ...]) -> tuple[int, int]:
    return values[0], values[1]


class Unfolded(torch.autograd.Function):
    """Images (k, b, h, w, c) under filters (k, f, kh·kw·c): (k, b, h', w', f)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor, bias: Tensor | None, weight: Weight, bias_weight: Weight | None, at: Window
    ) -> Tensor:
        clients, rows, height, width, channels = x.shape
        if any(at.before + at.after):
            held = x.new_zeros(clients, rows, at.padded(0, height), at.padded(1, width), channels)
            held[:, :, at.before[0] : at.before[0] + height, at.before[1] : at.before[1] + width] = x
        else:
            held = x.contiguous()
        down, right = at.outputs(0, height), at.outputs(1, width)
        a, b, c, d, _ = held.stride()
        steps = (a, b, c * at.stride[0], d * at.stride[1], c * at.dilation[0], d * at.dilation[1], 1)
        windows = held.as_strided((clients, rows, down, right, *at.kernel, channels), steps)
        patches = windows.reshape(clients, rows * down * right, at.kernel[0] * at.kernel[1] * channels)
        ctx.save_for_backward(patches)
        ctx.value, ctx.weight, ctx.bias_weight, ctx.window = value.detach(), weight, bias_weight, at
        ctx.shape, ctx.padded = x.shape, held.shape
        transposed = value.transpose(1, 2)
        y = x.new_empty(clients, rows, down, right, value.shape[1])
        out = y.view(clients, -1, value.shape[1])
        if bias is None:
            torch.bmm(patches, transposed, out=out)
        else:
            torch.baddbmm(bias.unsqueeze(1), patches, transposed, out=out)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (patches,) = ctx.saved_tensors
        down, right = gradient.shape[2:4]
        rows = gradient.reshape(len(patches), patches.shape[1], -1)
        before = None
        if ctx.needs_input_grad[0]:
            at: Window = ctx.window
            folded = torch.bmm(rows, ctx.value).view(*gradient.shape[:4], *at.kernel, ctx.shape[4])
            spread = gradient.new_zeros(ctx.padded)
            for i in range(at.kernel[0]):
                for j in range(at.kernel[1]):
                    spread[:, :, at.part(0, i, down), at.part(1, j, right)] += folded[:, :, :, :, i, j]
            top, left = at.before
            before = spread[:, :, top : top + ctx.shape[2], left : left + ctx.shape[3]]
        of_weight = ctx.weight.product(rows.transpose(1, 2), patches)
        of_bias = None if ctx.bias_weight is None else ctx.bias_weight.plain(rows.sum(1))
        return before, of_weight, of_bias, None, None, None


class OneByOne(torch.autograd.Function):
    """Images (k, b, c, …) under filters (k, f, c, …), torch's own convolution client by client."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        bias: Tensor | None,
        weight: Weight,
        bias_weight: Weight | None,
        arguments: list[Any],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.value, ctx.weight, ctx.bias_weight, ctx.arguments = value.detach(), weight, bias_weight, arguments
        biases = [None] * len(x) if bias is None else bias
        made = [
            torch.ops.aten.convolution(one, own, c, *arguments) for one, own, c in zip(x, value, biases, strict=True)
        ]
        return torch.stack(made)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        filters = None if ctx.bias_weight is None else [gradient.shape[2]]
        wanted = [ctx.needs_input_grad[0], ctx.weight.trained, filters is not None]
        before: list[Tensor] = []
        of_weight: list[Tensor] = []
        of_bias: list[Tensor] = []
        for g, one, own in zip(gradient, x, ctx.value, strict=True):
            found = torch.ops.aten.convolution_backward(g, one, own, filters, *ctx.arguments, wanted)
            for into, part in zip((before, of_weight, of_bias), found, strict=True):
                into.append(part)
        return (
            torch.stack(before) if wanted[0] else None,
            ctx.weight.plain(torch.stack(of_weight)) if wanted[1] else None,
            ctx.bias_weight.plain(torch.stack(of_bias)) if wanted[2] else None,
            None,
            None,
            None,
        )


_unfolded: Any = Unfolded.apply
_one_by_one: Any = OneByOne.apply


@built_in(nn.Conv1d, nn.Conv2d)
def convolution(layer: Convolution, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    if layer.padding_mode != "zeros":
        raise NotStackable(f"{type(layer).__name__} with padding_mode {layer.padding_mode!r}")
    weight, bias = weights["weight"], weights.get("bias")
    bias_value = None if bias is None else bias.value
    at = Window.of(layer)
    if layer.groups == 1 and unfolding_pays(layer, x):
        filters = weight.seen_as(lambda tensor: tensor.flatten(2))
        images = x if x.dim() == 5 else x.unsqueeze(3)
        y: Tensor = _unfolded(images.movedim(2, 4), filters.value, bias_value, filters, bias, at).movedim(4, 2)
        return y if x.dim() == 5 else y.squeeze(3)
    dims = x.dim() - 3
    if isinstance(layer.padding, str):
        sides = [side for axis in reversed(range(2 - dims, 2)) for side in (at.before[axis], at.after[axis])]
        x = functional.pad(x, sides)
    padding = [0] * dims if isinstance(layer.padding, str) else list(layer.padding)
    arguments = [list(layer.stride), padding, list(layer.dilation), False, [0] * dims, layer.groups]
    natural = weight.natural
    found: Tensor = _one_by_one(x, natural.value, bias_value, natural, bias, arguments)
    return found


ARRANGED.update({nn.Conv1d: {"weight": (0, 2, 1)}, nn.Conv2d: {"weight": (0, 2, 3, 1)}})


def unfolding_pays(layer: Convolution, x: Tensor) -> bool:
    """Whether unfolded images are quicker than torch's convolution client by client."""
    return True
