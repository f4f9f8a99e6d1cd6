"""Batched text layers: word vectors, convolutions over words, and the maximum over time (Kim 2014).

A client's copy of the word vectors contains only the words in its texts; all other rows stay unchanged. For every
filter and text, only the position of the maximum has a gradient. The filters' gradient is the sum of the patches (w
words of E values) at these positions. For the gradient of the word vectors, the gradients of the maxima are scattered
into a matrix, words of the texts × words of the filters, whose product with the filters is the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.arithmetic import add_rows
from fedmpi.local.batched.forms import ARRANGED, Weight, built_in, product
from fedmpi.local.batched.layers import Layer, NotStackable, Place, Slot
from fedmpi.models.layers import WordConvolution
from fedmpi.models.text_models import MaxOverTime

BLOCK = 256
"""Number of words whose changes are summed at a time."""
SPREAD_VALUES = 1 << 18
"""Spread gradients of as many clients as are made at once on a CPU: few enough to stay in the cache."""


class Tables:
    """Word vectors of the clients of one chunk, concatenated client after client.

    They are those of a client's words or, for `whole` clients, all words: such tables are reused, as graphs need them.
    """

    def __init__(self, texts: Sequence[Tensor], table: Tensor, fused: bool = True, whole: int = 0):
        words, self.ids, self.bounds, self.whole = [], [], [0], whole
        for text in () if whole else texts:
            present, local = torch.unique(text, return_inverse=True)
            words.append(present)
            self.ids.append(local + self.bounds[-1])
            self.bounds.append(self.bounds[-1] + len(present))
        if whole:
            self.bounds = [client * len(table) for client in range(whole + 1)]
            words = [torch.arange(len(table), device=table.device)] * whole
        self.rows = torch.cat(words).long()
        self.start = table.index_select(0, self.rows)
        self.values = self.start.clone()
        self.of_clients = [slice(*pair) for pair in zip(self.bounds, self.bounds[1:], strict=False)]
        self.gradient = self.values if fused else torch.zeros_like(self.start)
        if whole:
            self.reopen(texts, table)

    def reopen(self, texts: Sequence[Tensor], table: Tensor) -> None:
        """Start with other clients in tables of all words."""
        self.ids = [text.long() + first for text, first in zip(texts, self.bounds, strict=False)]
        self.values.copy_(torch.index_select(table, 0, self.rows, out=self.start))

    def add_changes(self, coefficients: Tensor, total: Tensor) -> Tensor:
        """Compute total (V, E) += Σ coefficient · (value − start) in blocks of words whose changes stay in the cache;
        return the squared norm of the added sum."""
        if self.whole:
            values = self.values.view(self.whole, -1)[: len(coefficients)]
            change = torch.mv(values.t(), coefficients).sub_(self.start[: len(total)].view(-1) * coefficients.sum())
            total.add_(change.view(total.shape))
            return change.dot(change)
        length = total.new_zeros(())
        scratch = total.new_empty(min(BLOCK, len(self.rows)), total.shape[1])
        for client, coefficient in enumerate(coefficients):
            own = slice(self.bounds[client], self.bounds[client + 1])
            parts = (torch.split(every[own], BLOCK) for every in (self.rows, self.values, self.start))
            for rows, values, start in zip(*parts, strict=True):
                change = torch.sub(values, start, out=scratch[: len(rows)]).mul_(coefficient)
                total.index_add_(0, rows, change)
                length += change.flatten().dot(change.flatten())
        return length


class Embedding(Layer):
    """Look-up of the words of a text: nn.Embedding. Each chunk sets `table`; its gradient is added to `target`."""

    trained: ClassVar[bool] = True

    def __init__(self, length: int, weight: Slot, padding: int | None):
        self.length, self.dimension = length, weight.shape[1]
        self.weight = weight  # slot of the table in the flat vector
        self.padding = padding  # word whose vector is never trained (padding_idx of nn.Embedding)
        self.values = 2 * length * self.dimension

    def attach(self, place: Place, x: Tensor) -> None:
        self.ids = x.view(-1)
        self.step = place.step
        self.words: Tensor | None = None  # words of the rows of the table
        self.output = place.take("output", place.clients, place.rows, self.length, self.dimension)
        self._rows = self.output.view(-1, self.dimension)
        self.table = self.target = self._rows

    def forward(self) -> None:
        torch.index_select(self.table, 0, self.ids, out=self._rows)

    def backward(self, gradient: Tensor) -> Tensor:
        if self.step.keep != 1:
            self.target.mul_(self.step.keep)
        if self.padding is not None and self.words is not None:
            gradient.view(self._rows.shape).masked_fill_((self.words[self.ids] == self.padding).unsqueeze(1), 0)
        add_rows(self.target, self.ids, gradient.view(self._rows.shape), self.step.rate)
        return gradient


class Peaks:
    """Gradients of filters and words, for k clients of b texts each and filters over windows of `width` words."""

    def __init__(self, clients: int, rows: int, length: int, width: int, filters: int, device: torch.device):
        self.clients, self.rows, self.length, self.filters, self.width = clients, rows, length, filters, width
        self.positions = length - width + 1
        text = torch.arange(clients * rows, device=device).view(clients, rows, 1)
        self._first = text * self.positions
        self._bags = torch.arange(0, clients * filters * rows + 1, rows, device=device)
        taps = torch.arange(filters * width, device=device)
        self._taps = taps + taps % width * (filters * width)

    def of_filters(self, patches: Tensor, where: Tensor, gradient: Tensor) -> Tensor:
        """Return Σ over a client's texts of gradient (k, b, F) · patch at `where` (k, b, F): (k, F, w · E)."""
        members = (where + self._first).transpose(1, 2).reshape(-1)
        shares = gradient.transpose(1, 2).reshape(-1)
        summed = functional.embedding_bag(
            members, patches, self._bags, mode="sum", per_sample_weights=shares, include_last_offset=True
        )
        return summed.view(self.clients, self.filters, -1)

    def of_words(self, where: Tensor, gradient: Tensor, filters: Tensor) -> Tensor:
        """Return the gradient of the words, (k, b, L, E); the spread gradients of a few clients stay in the cache."""
        count = self.filters * self.width
        index = (where * count).repeat_interleave(self.width, 2).add_(self._taps)
        shares, taps = gradient.repeat_interleave(self.width, 2), filters.reshape(self.clients, count, -1)
        found = gradient.new_empty(self.clients, self.rows * self.length, taps.shape[2])
        on_cpu = gradient.device.type == "cpu"
        together = max(1, SPREAD_VALUES // (self.rows * self.length * count)) if on_cpu else self.clients
        spread = gradient.new_empty(min(together, self.clients), self.rows, self.length * count)
        parts = (torch.split(whole, together) for whole in (index, shares, taps, found))
        for places, values, own, target in zip(*parts, strict=True):
            some = spread[: len(own)].zero_().scatter_(2, places, values)
            torch.bmm(some.view(len(own), -1, count), own, out=target)
        return found.view(self.clients, self.rows, self.length, -1)


class Highest(torch.autograd.Function):
    """Filters (k, F, w · E) over texts (k, b, L, E), the maximum of each over all positions, and ReLU: (k, b, F)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, bias: Tensor, weight: Weight, bias_weight: Weight) -> Tensor:
        clients, rows, length, dimension = x.shape
        width, filters = value.shape[2] // dimension, value.shape[1]
        kept = weight.owner.kept  # as long as the bound network and its graph
        if length not in kept:
            kept[length] = Peaks(clients, rows, length, width, filters, x.device)
        ctx.at = at = kept[length]
        patches = x.contiguous().unfold(2, width, 1).transpose(3, 4).reshape(clients, rows * at.positions, -1)
        scores = torch.bmm(patches, value.transpose(1, 2)).view(clients, rows, at.positions, filters)
        highest, where = scores.max(2)
        highest.add_(bias.unsqueeze(1)).relu_()
        # not the maxima themselves: later layers may change them in place
        ctx.save_for_backward(patches, where, highest <= 0)
        ctx.value, ctx.weight, ctx.bias_weight = value.detach(), weight, bias_weight
        return highest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        patches, where, none = ctx.saved_tensors
        gradient = gradient.masked_fill(none, 0)
        before = ctx.at.of_words(where, gradient, ctx.value) if ctx.needs_input_grad[0] else None
        of_weight = ctx.weight.plain(ctx.at.of_filters(patches.flatten(0, 1), where, gradient))
        return before, of_weight, ctx.bias_weight.plain(gradient.sum(1)), None, None


@built_in(MaxOverTime)
def max_over_time(layer: MaxOverTime, weights: Mapping[str, Weight], words: Tensor) -> Tensor:
    found = []
    for number in range(len(layer.convolutions)):
        filters, bias = (weights[f"convolutions.{number}.{name}"] for name in ("weight", "bias"))
        filters = filters.seen_as(lambda tensor: tensor.flatten(2))
        found.append(Highest.apply(words, filters.value, bias.value, filters, bias))  # type: ignore[no-untyped-call]
    return torch.cat(found, 2)


@built_in(nn.Conv1d, WordConvolution)
def text_convolution(layer: nn.Conv1d, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    """Unfold texts (k, b, E, L) and apply one matrix product per client."""
    (width,), (stride,), (dilation,) = layer.kernel_size, layer.stride, layer.dilation
    if layer.groups > 1 or dilation > 1 or layer.padding_mode != "zeros":
        raise NotStackable("Conv1d with groups, dilation, or padding other than zeros")
    both = width - 1 if layer.padding == "same" else 0
    before, after = (both // 2, both - both // 2) if isinstance(layer.padding, str) else layer.padding * 2
    words = functional.pad(x.transpose(2, 3), (0, 0, before, after))
    patches = words.unfold(2, width, stride).transpose(3, 4).flatten(3)
    filters = weights["weight"].seen_as(lambda tensor: tensor.flatten(2))
    return product(patches, filters, weights.get("bias")).transpose(2, 3)


ARRANGED[nn.Conv1d] = ARRANGED[WordConvolution] = {"weight": (0, 2, 1)}
