"""Convolutions of many clients in a graph: over texts one matrix product a client, over images one call a client.

Texts lie word by word, so that what a filter sees is one run of memory. Unfolded images are as many times larger as the
filter has values, which costs more than torch's own convolution on one client's images after another's. Images and
filters lie pixel by pixel there, a pixel's channels side by side (channels last): oneDNN needs no copies then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.models.stacked.client_weights import Weight
from fedmpi.models.stacked.forms import ARRANGED, built_in, separately, stack_each
from fedmpi.models.word_convolution import WordConvolution


@dataclass(frozen=True)
class TextWindow:
    """What a filter sees of a text."""

    width: int
    stride: int
    dilation: int
    before: int  # Zeros around the text
    after: int

    def outputs(self, length: int) -> int:
        """Positions of the window on a text of this length."""
        return (length + self.before + self.after - self.dilation * (self.width - 1) - 1) // self.stride + 1

    def words(self, shift: int, count: int) -> slice:
        """What the filter's word `shift` sees at `count` positions."""
        first = shift * self.dilation
        return slice(first, first + (count - 1) * self.stride + 1, self.stride)


def sizes_around(layer: nn.Conv1d | nn.Conv2d) -> list[tuple[int, int]]:
    """Values padded before and after every axis that the filters move along."""
    if isinstance(layer.padding, str):
        spans = [d * (size - 1) for size, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        return [(span // 2, span - span // 2) if layer.padding == "same" else (0, 0) for span in spans]
    return [(size, size) for size in layer.padding]


def zeros_around(layer: nn.Conv1d | nn.Conv2d) -> list[tuple[int, int]]:
    """Zeros before and after every axis that the filters move along, around what `mirrored` gives."""
    around = sizes_around(layer)
    return around if layer.padding_mode == "zeros" else [(0, 0)] * len(around)


def mirrored(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Samples with values of their own around them, where the layer pads with these."""
    around = sizes_around(layer)
    if layer.padding_mode == "zeros" or not any(map(any, around)):
        return x
    return functional.pad(x, [side for sides in reversed(around) for side in sides], mode=layer.padding_mode)


class Unfolded(torch.autograd.Function):
    """Texts (k, b, l, c) under filters (k, f, w·c): (k, b, l', f)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        bias: Tensor | None,
        weight: Weight,
        bias_weight: Weight | None,
        at: TextWindow,
    ) -> Tensor:
        clients, rows, length, channels = x.shape
        if at.before or at.after:
            held = x.new_zeros(clients, rows, length + at.before + at.after, channels)
            held[:, :, at.before : at.before + length] = x
        else:
            held = x.contiguous()
        count = at.outputs(length)
        a, b, c, _ = held.stride()
        windows = held.as_strided(
            (clients, rows, count, at.width, channels), (a, b, c * at.stride, c * at.dilation, 1), held.storage_offset()
        )
        patches = windows.reshape(clients, rows * count, at.width * channels)
        ctx.save_for_backward(patches)
        ctx.value, ctx.weight, ctx.bias_weight, ctx.window = value.detach(), weight, bias_weight, at
        ctx.shape, ctx.held = x.shape, held.shape
        y = x.new_empty(clients, rows, count, value.shape[1])
        out, transposed = y.view(clients, -1, value.shape[1]), value.transpose(1, 2)
        if bias is None:
            torch.bmm(patches, transposed, out=out)
        else:
            torch.baddbmm(bias.unsqueeze(1), patches, transposed, out=out)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (patches,) = ctx.saved_tensors
        rows = gradient.reshape(len(patches), patches.shape[1], -1)
        before = None
        if ctx.needs_input_grad[0]:
            at: TextWindow = ctx.window
            count = gradient.shape[2]
            folded = torch.bmm(rows, ctx.value).view(*gradient.shape[:3], at.width, -1)
            spread = gradient.new_zeros(ctx.held)
            for shift in range(at.width):
                spread[:, :, at.words(shift, count)] += folded[:, :, :, shift]
            before = spread[:, :, at.before : at.before + ctx.shape[2]]
        of_weight = ctx.weight.product(rows.transpose(1, 2), patches)
        of_bias = None if ctx.bias_weight is None else ctx.bias_weight.plain(rows.sum(1))
        return before, of_weight, of_bias, None, None, None


class OneByOne(torch.autograd.Function):
    """Images (k · b, c, …) under filters (k, f, c, …), by torch's own convolution of one client after another.

    `skip` (rows, columns) stands for the stride of 1 × 1 filters: of so many rows and columns one is read.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        bias: Tensor | None,
        weight: Weight,
        bias_weight: Weight | None,
        arguments: list[Any],
        skip: tuple[int, int] | None,
    ) -> Tensor:
        ctx.whole, ctx.skip = x.shape, skip
        x = x if skip is None else x[..., :: skip[0], :: skip[1]]
        values = value.detach().unbind(0)
        if x.dim() == 4:
            order = torch.channels_last if _pixel_by_pixel(x, value, arguments) else torch.contiguous_format
            x = x.contiguous(memory_format=order)
            values = tuple(own.contiguous(memory_format=order) for own in values)
        ctx.save_for_backward(x)
        ctx.values, ctx.weight, ctx.bias_weight, ctx.arguments = values, weight, bias_weight, arguments
        biases = [None] * len(values) if bias is None else bias
        images = x.chunk(len(values))
        return torch.cat(
            [
                torch.ops.aten.convolution(one, own, c, *arguments)
                for one, own, c in zip(images, values, biases, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        clients = len(ctx.values)
        filters = None if ctx.bias_weight is None else [gradient.shape[1]]
        wanted = [ctx.needs_input_grad[0], ctx.weight.trained, filters is not None]
        found = [
            torch.ops.aten.convolution_backward(g, one, own, filters, *ctx.arguments, wanted)
            for g, one, own in zip(gradient.chunk(clients), x.chunk(clients), ctx.values, strict=True)
        ]
        before, of_weight, of_bias = zip(*found, strict=True)
        of_input = torch.cat(before) if wanted[0] else None
        if of_input is not None and ctx.skip is not None:
            rows, channels, height, width = ctx.whole
            spread = of_input.new_zeros(rows, height, width, channels).permute(0, 3, 1, 2)
            spread[..., :: ctx.skip[0], :: ctx.skip[1]] = of_input
            of_input = spread
        return (
            of_input,
            ctx.weight.plain(stack_each(of_weight)) if wanted[1] else None,
            ctx.bias_weight.plain(torch.stack(of_bias)) if wanted[2] else None,
            None,
            None,
            None,
            None,
        )


def _of_one(
    x: Tensor, value: Tensor, bias: Tensor | None, arguments: list[Any], skip: tuple[int, int] | None
) -> Tensor:
    """As `OneByOne` of a single client, differentiated by torch itself: nothing is to be concatenated."""
    own = value.squeeze(0)
    pixels = x.dim() == 4 and _pixel_by_pixel(x, value, arguments)
    if pixels:
        x = x.permute(0, 2, 3, 1)
    if skip is not None:
        x = x[:, :: skip[0], :: skip[1]] if pixels else x[..., :: skip[0], :: skip[1]]
    x = x.contiguous()
    if pixels:
        x = x.permute(0, 3, 1, 2)
    own = own.contiguous(memory_format=torch.channels_last if pixels else torch.contiguous_format)
    y: Tensor = torch.ops.aten.convolution(x, own, None if bias is None else bias.squeeze(0), *arguments)
    return y


def _pixel_by_pixel(x: Tensor, value: Tensor, arguments: list[Any]) -> bool:
    """Whether images and filters are to lie pixel by pixel: what oneDNN gains by, and no rare case, since the weights'
    gradient of 1 × 1 filters of stride 2 on 8 channels makes it write beyond its memory (torch 2.13)."""
    stride, _, dilation, *_, groups = arguments
    rare = groups > 1 or max(dilation) > 1 or (min(value.shape[3:]) == 1 and max(stride) > 1)
    return x.dtype == torch.float32 and x.device.type == "cpu" and not rare


def _one_column(x: Tensor, value: Tensor, arguments: list[Any]) -> bool:
    """Whether filters with a stride find one column of outputs on images of one channel: then oneDNN writes the first
    row of the outputs alone where it takes images or filters for such that lie pixel by pixel (torch 2.13)."""
    stride, padding, dilation, *_ = arguments
    steps = x.shape[3] + 2 * padding[1] - dilation[1] * (value.shape[4] - 1) - 1
    return x.shape[1] == 1 and stride[1] > 1 and steps < stride[1]


def _of_one_order(values: Tensor) -> Tensor:
    """The same values row by row; those of one channel lie pixel by pixel, too, but torch goes by the strides."""
    return values.flatten().view(values.shape)


_unfolded: Any = Unfolded.apply
_one_by_one: Any = OneByOne.apply
ARRANGED[nn.Conv1d] = ARRANGED[WordConvolution] = {"weight": (0, 2, 1)}
ARRANGED[nn.Conv2d] = {"weight": (0, 2, 3, 1)}


@built_in(nn.Conv1d, WordConvolution)
def of_texts(layer: nn.Conv1d, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    if layer.groups > 1:
        grouped: Tensor = separately(of_images)(layer, weights, x)
        return grouped
    if layer.padding_mode != "zeros":
        x = torch.unflatten(mirrored(layer, x.flatten(0, 1)), 0, x.shape[:2])
    weight, bias = weights["weight"], weights.get("bias")
    at = TextWindow(layer.kernel_size[0], layer.stride[0], layer.dilation[0], *zeros_around(layer)[0])
    filters = weight.seen_as(lambda tensor: tensor.flatten(2))
    bias_value = None if bias is None else bias.value
    y: Tensor = _unfolded(x.transpose(2, 3), filters.value, bias_value, filters, bias, at).transpose(2, 3)
    return y


@built_in(nn.Conv2d, joined=True)
def of_images(layer: nn.Conv1d | nn.Conv2d, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    weight, bias = weights["weight"].natural, weights.get("bias")
    bias_value = None if bias is None else bias.value
    x, around = mirrored(layer, x), zeros_around(layer)
    even = all(before == after for before, after in around)
    if not even:
        x = functional.pad(x, [side for sides in reversed(around) for side in sides])
    padding = [before for before, _ in around] if even else [0] * len(around)
    stride, skip = list(layer.stride), None
    if isinstance(layer, nn.Conv2d) and set(layer.kernel_size) == {1} and max(padding) == 0 and even:
        skip, stride = ((stride[0], stride[1]) if max(stride) > 1 else None), [1, 1]
    arguments = [stride, padding, list(layer.dilation), False, [0] * len(around), layer.groups]
    value = weight.value
    if isinstance(layer, nn.Conv2d) and _one_column(x, value, arguments):
        x, value = _of_one_order(x), _of_one_order(value)
    if len(value) == 1:
        return _of_one(x, value, bias_value, arguments, skip)
    y: Tensor = _one_by_one(x, value, bias_value, weight, bias, arguments, skip)
    return y
