"""Backwards through the maximum of a filter over a text: one position a filter and sample has a gradient, not all.

The filters' gradient is a sum of the patches at these positions, and the words' one product with the filters as they
lie, since what every word gets is written where it belongs before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import embedding_bag

from fedmpi.models.stacked.trace import Along, Traced
from fedmpi.models.stacked.weights import Weight


class Peaks:
    """Filters over windows of `width` words, of k clients with b texts of `length` words each.

    Parameters
    ----------
    clients, rows, length, width, filters : int
        k, b, L, w, F.
    device : torch.device
    """

    def __init__(self, clients: int, rows: int, length: int, width: int, filters: int, device: torch.device):
        self.clients, self.rows, self.length, self.filters, self.width = clients, rows, length, filters, width
        self.positions = length - width + 1
        text = torch.arange(clients * rows, device=device).view(clients, rows, 1)
        self._first = text * self.positions
        self._bags = torch.arange(0, clients * filters * rows + 1, rows, device=device)
        taps = torch.arange(filters * width, device=device)
        self._taps = taps + taps % width * (filters * width)

    @property
    def spread_shape(self) -> tuple[int, int, int]:
        """Of what `of_words` needs: k, b · L, F · w."""
        return self.clients, self.rows * self.length, self.filters * self.width

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

    def spread(self, where: Tensor, gradient: Tensor, into: Tensor) -> Tensor:
        """What each word gets from each word of each filter, (k, b · L, F · w): times the filters (k, F · w, E), the
        gradient of the words. `into` has that shape."""
        taps = self.filters * self.width
        index = (where * taps).repeat_interleave(self.width, 2).add_(self._taps)
        shares = gradient.repeat_interleave(self.width, 2)
        into.zero_().view(self.clients, self.rows, -1).scatter_(2, index, shares)
        return into


_peaks = lru_cache(64)(Peaks)


class Highest(torch.autograd.Function):
    """The maximum over all positions of texts (k, b, L, E) under filters (k, F, w · E): (k, b, F), ReLU behind it or
    not."""

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
        ctx.save_for_backward(patches, where, highest)
        ctx.value, ctx.weight, ctx.bias_weight, ctx.cut = value.detach(), weight, bias_weight, cut
        return highest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        patches, where, highest = ctx.saved_tensors
        at: Peaks = ctx.at
        if ctx.cut:
            gradient = torch.ops.aten.threshold_backward(gradient, highest, 0)
        before = None
        if ctx.needs_input_grad[0]:
            spread = at.spread(where, gradient, gradient.new_empty(at.spread_shape))
            taps = ctx.value.reshape(at.clients, at.filters * at.width, -1)
            before = torch.bmm(spread, taps).view(at.clients, at.rows, at.length, -1)
        of_weight = None
        if ctx.weight.trained:
            of_weight = ctx.weight.plain(at.of_filters(patches.flatten(0, 1), where, gradient))
        of_bias = None if ctx.bias_weight is None else ctx.bias_weight.plain(gradient.sum(1))
        return before, of_weight, of_bias, None, None, None


def highest(weights: Mapping[str, Weight], x: Tensor, cut: bool) -> Tensor:
    """nn.Conv1d on x (k, b, E, L), its maximum over all positions, and ReLU where it cuts: (k, b, F)."""
    filters, bias = weights["weight"].seen_as(lambda tensor: tensor.flatten(2)), weights.get("bias")
    y: Tensor = Highest.apply(  # type: ignore[no-untyped-call]
        x.transpose(2, 3), filters.value, None if bias is None else bias.value, filters, bias, cut
    )
    return y


def find_peaks(traced: Traced) -> dict[fx.Node, tuple[list[fx.Node], bool]]:
    """Convolutions of a graph of which only the maximum over the text is read: the nodes from there to the maximum, and
    whether ReLU is among them."""
    found = {}
    for node in traced.graph.nodes:
        part = traced.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if type(part) is nn.Conv1d and _plain(part) and traced.along(node) == Along(0, 1):
            followed = _to_maximum(traced, node)
            if followed is not None:
                found[node] = followed
    return found


def _plain(part: nn.Conv1d) -> bool:
    window = part.stride, part.dilation, part.groups, part.padding_mode
    return window == ((1,), (1,), 1, "zeros") and part.padding in ((0,), "valid") and part.weight.requires_grad


def _to_maximum(traced: Traced, convolution: fx.Node) -> tuple[list[fx.Node], bool] | None:
    """Through nodes that alone read the one before, up to that of one value a filter."""
    passed: list[fx.Node] = []
    node, cut = convolution, False
    while len(node.users) == 1:
        before, node = node, next(iter(node.users))
        value = traced.examples[before][0]
        passed.append(node)
        if isinstance(value, tuple):
            return (passed, cut) if _takes_first(node) else None
        if _is_relu(traced, node):
            cut = True
        elif not _is_maximum(traced, node):
            return None
        elif isinstance(traced.examples[node][0], Tensor):
            return passed, cut
    return None


def _name(traced: Traced, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(traced.module.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))


def _is_relu(traced: Traced, node: fx.Node) -> bool:
    return _name(traced, node) in ("ReLU", "relu", "relu_")


def _takes_first(node: fx.Node) -> bool:
    return node.op == "call_function" and node.args[1:] in ((0,), ("values",))


def _is_maximum(traced: Traced, node: fx.Node) -> bool:
    """Whether a node takes the maximum over the positions: by its name, and by what it made of the trial's values."""
    names = ("max", "max_pool1d", "MaxPool1d", "AdaptiveMaxPool1d", "adaptive_max_pool1d")
    if len(node.all_input_nodes) != 1 or _name(traced, node) not in names:
        return False
    for value, made in zip(traced.examples[node.all_input_nodes[0]], traced.examples[node], strict=True):
        one = made[0] if isinstance(made, tuple) else made
        if not isinstance(one, Tensor) or one.numel() != math.prod(value.shape[:2]):
            return False
        if one.shape[:2] != value.shape[:2] or not torch.equal(one.flatten(), value.amax(2).flatten()):
            return False
    return True
