"""A convolution over a text and the maximum over its positions (max over time, Kim 2014) as one function of autograd.

Of every filter and text only the position of the maximum has a gradient. The filters' gradient is the sum of the
patches (w words of E values) at these positions. For that of the word vectors there are two ways. With few filters the
gradients are scattered into a matrix, words of the texts × words of the filters, whose product with the filters is the
result. With many filters and short vectors that matrix would be larger than all patches, whose gradients are then
formed and added to the words that they consist of, as in the backward pass of any convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from fedmpi.models.stacked.client_weights import Weight

MOST_FILTERS = 2
"""Filters for each value of a word vector up to which the gradient of the words is formed by the first way."""


class Peaks:
    """The gradients of filters and words, for k clients of b texts each and filters over windows of `width` words."""

    def __init__(self, clients: int, rows: int, length: int, width: int, filters: int, device: torch.device):
        self.clients, self.rows, self.length, self.filters, self.width = clients, rows, length, filters, width
        self.positions = length - width + 1
        text = torch.arange(clients * rows, device=device).view(clients, rows, 1)
        self._first = text * self.positions
        self._bags = torch.arange(0, clients * filters * rows + 1, rows, device=device)
        taps = torch.arange(filters * width, device=device)
        self._taps = taps + taps % width * (filters * width)

    def of_filters(self, patches: Tensor, where: Tensor, gradient: Tensor) -> Tensor:
        """Σ over a client's texts of gradient · patch: (k, F, w · E).

        Parameters
        ----------
        patches : Tensor (k · b · positions, w · E)
        where : int64 (k, b, F)
            The position of each maximum.
        gradient : Tensor (k, b, F)
        """
        members = (where + self._first).transpose(1, 2).reshape(-1)
        shares = gradient.transpose(1, 2).reshape(-1)
        summed = embedding_bag(
            members, patches, self._bags, mode="sum", per_sample_weights=shares, include_last_offset=True
        )
        return summed.view(self.clients, self.filters, -1)

    def of_words(
        self,
        where: Tensor,
        gradient: Tensor,
        filters: Tensor,
        into: Tensor,
        scratch: Callable[..., Tensor],
        add: bool = False,
    ) -> None:
        """The gradient of the words: replaces what is in `into` (k, b, L, E), or is added to it."""
        if self.filters > MOST_FILTERS * into.shape[3]:
            self._add_patch_gradients(where, gradient, filters, into, scratch, add)
            return
        spread = self._scattered(where, gradient, scratch)
        words = into.view(self.clients, -1, into.shape[3])
        taps = filters.reshape(self.clients, self.filters * self.width, -1)
        torch.baddbmm(words, spread, taps, beta=int(add), out=words)

    def _scattered(self, where: Tensor, gradient: Tensor, scratch: Callable[..., Tensor]) -> Tensor:
        """The gradient of each maximum at the words that its filter saw, 0 elsewhere: (k, b · L, F · w)."""
        taps = self.filters * self.width
        index = (where * taps).repeat_interleave(self.width, 2).add_(self._taps)
        spread = scratch(self.clients, self.rows, self.length * taps).zero_()
        spread.scatter_(2, index, gradient.repeat_interleave(self.width, 2))
        return spread.view(self.clients, -1, taps)

    def _add_patch_gradients(
        self,
        where: Tensor,
        gradient: Tensor,
        filters: Tensor,
        into: Tensor,
        scratch: Callable[..., Tensor],
        add: bool,
    ) -> None:
        """Form the gradients of all patches, (k, b · positions, w · E), and add each to the words of its patch."""
        scores = scratch(self.clients, self.rows, self.positions, self.filters).zero_()
        scores.scatter_(2, where.unsqueeze(2), gradient.unsqueeze(2))
        patches = torch.bmm(scores.view(self.clients, -1, self.filters), filters)
        patches = patches.view(self.clients, self.rows, self.positions, self.width, -1)
        if not add:
            into.zero_()
        for shift in range(self.width):
            into[:, :, shift : shift + self.positions] += patches[:, :, :, shift]


_peaks = lru_cache(64)(Peaks)


class Highest(torch.autograd.Function):
    """Filters (k, F, w · E) over texts (k, b, L, E), and the maximum of each over all positions: (k, b, F).

    With `cut`, ReLU follows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        bias: Tensor | None,
        weight: Weight,
        bias_weight: Weight | None,
        cut: bool,
    ) -> Tensor:
        clients, rows, length, dimension = x.shape
        width, filters = value.shape[2] // dimension, value.shape[1]
        ctx.at = at = _peaks(clients, rows, length, width, filters, x.device)
        patches = x.contiguous().unfold(2, width, 1).transpose(3, 4).reshape(clients, rows * at.positions, -1)
        scores = torch.bmm(patches, value.transpose(1, 2)).view(clients, rows, at.positions, filters)
        highest, where = scores.max(2)
        if bias is not None:
            highest.add_(bias.unsqueeze(1))
        if cut:
            highest.relu_()
        # not the maxima themselves: what follows may change them in place
        ctx.save_for_backward(patches, where, highest <= 0 if cut else None)
        ctx.value, ctx.weight, ctx.bias_weight = value.detach(), weight, bias_weight
        return highest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        patches, where, none = ctx.saved_tensors
        at: Peaks = ctx.at
        if none is not None:
            gradient = gradient.masked_fill(none, 0)
        before = None
        if ctx.needs_input_grad[0]:
            dimension = ctx.value.shape[2] // at.width
            before = gradient.new_empty(at.clients, at.rows, at.length, dimension)
            at.of_words(where, gradient, ctx.value, before, gradient.new_empty)
        of_weight = ctx.weight.plain(at.of_filters(patches.flatten(0, 1), where, gradient))
        of_bias = None if ctx.bias_weight is None else ctx.bias_weight.plain(gradient.sum(1))
        return before, of_weight, of_bias, None, None, None


def highest(weights: Mapping[str, Weight], x: Tensor, cut: bool) -> Tensor:
    """nn.Conv1d on x (k, b, E, L) and the maximum over all positions, with `cut` ReLU, too: (k, b, F)."""
    filters, bias = weights["weight"].seen_as(lambda tensor: tensor.flatten(2)), weights.get("bias")
    y: Tensor = Highest.apply(  # type: ignore[no-untyped-call]
        x.transpose(2, 3), filters.value, None if bias is None else bias.value, filters, bias, cut
    )
    return y
