"""Batched text layers: word vectors, convolutions over words, and the maximum over time (Kim 2014).

A client's copy of the word vectors contains only the words in its texts; all other rows stay unchanged. For every
filter and text, only the position of the maximum has a gradient. The filters' gradient is the sum of the patches (w
words of E values) at these positions. The gradient of the word vectors is computed in one of two ways. With few
filters, the gradients are scattered into a matrix, words of the texts × words of the filters, whose product with the
filters is the result. With many filters and short vectors, that matrix would be larger than all patches. The gradients
of the patches are then computed and added to their words, as in the backward pass of any convolution.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.functional import embedding_bag

from fedmpi.models.stacked.base import Place, Slot
from fedmpi.models.stacked.forms import ARRANGED, Weight, built_in, of_one, product
from fedmpi.models.stacked.trace import Traced
from fedmpi.models.text_layers import MaxOverTime
from fedmpi.models.word_convolution import WordConvolution

BLOCK = 256
"""Number of words whose changes are summed at a time."""


class Tables:
    """Word vectors of the clients of one chunk, concatenated client after client."""

    def __init__(self, texts: Sequence[Tensor], table: Tensor):
        words, self.ids, self.bounds = [], [], [0]
        for text in texts:
            present, local = torch.unique(text, return_inverse=True)
            words.append(present)
            self.ids.append(local + self.bounds[-1])
            self.bounds.append(self.bounds[-1] + len(present))
        self.rows = torch.cat(words).long()
        self.start = table.index_select(0, self.rows)
        self.values = self.start.clone()
        self.of_clients = [slice(*pair) for pair in zip(self.bounds, self.bounds[1:], strict=False)]
        self._gradient: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        """Return the gradient, zeros at the first access: plain SGD never uses it."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.start)
        return self._gradient

    def add_changes(self, coefficients: Tensor, total: Tensor) -> Tensor:
        """Compute total += Σ coefficient · (value − start) in blocks of words whose changes stay in the cache.

        Parameters
        ----------
        coefficients : Tensor (K,)
        total : Tensor (V, E)

        Returns
        -------
        Tensor ()
            Squared norm of the added sum.
        """
        length = total.new_zeros(())
        block = BLOCK if total.device.type == "cpu" else len(self.rows)
        scratch = total.new_empty(min(block, len(self.rows)), total.shape[1])
        for client, coefficient in enumerate(coefficients):
            own = slice(self.bounds[client], self.bounds[client + 1])
            parts = (torch.split(whole[own], block) for whole in (self.rows, self.values, self.start))
            for rows, values, start in zip(*parts, strict=True):
                change = torch.sub(values, start, out=scratch[: len(rows)]).mul_(coefficient)
                total.index_add_(0, rows, change)
                length += change.flatten().dot(change.flatten())
        return length


@dataclass(frozen=True)
class Embedding:
    """Look-up of the words of a text: nn.Embedding."""

    trained: ClassVar[bool] = True

    length: int  # L and E
    dimension: int
    weight: Slot  # slot of the table in the flat vector
    padding: int | None = None  # word whose vector is never trained (padding_idx of nn.Embedding)

    @property
    def values(self) -> int:
        return 2 * self.length * self.dimension

    def bind(self, place: Place, x: Tensor) -> EmbeddingOp:
        return EmbeddingOp(self, place, x)


class EmbeddingOp:
    """Look-up bound to k clients. Each chunk sets `table`; its gradient is added to `target`; `words` are the words of
    its rows."""

    def __init__(self, layer: Embedding, place: Place, x: Tensor):
        self.ids = x.view(-1)
        self.step = place.parameters.step
        self.padding = layer.padding
        self.words: Tensor | None = None
        self.output = place.take("output", place.clients, place.rows, layer.length, layer.dimension)
        self._rows = self.output.view(-1, layer.dimension)
        self.table = self.target = self._rows

    def forward(self) -> None:
        torch.index_select(self.table, 0, self.ids, out=self._rows)

    def backward(self, gradient: Tensor) -> Tensor:
        if self.step.keep != 1:
            self.target.mul_(self.step.keep)
        if self.padding is not None and self.words is not None:
            gradient.view(self._rows.shape)[self.words[self.ids] == self.padding] = 0
        self.target.index_add_(0, self.ids, gradient.view(self._rows.shape), alpha=self.step.rate)
        return gradient


MOST_FILTERS = 2
"""Filters per value of a word vector up to which the gradient of the words is computed by the first way."""


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
        """Return Σ over a client's texts of gradient · patch: (k, F, w · E).

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
        self, where: Tensor, gradient: Tensor, filters: Tensor, into: Tensor, scratch: Callable[..., Tensor]
    ) -> None:
        """Write the gradient of the words into (k, b, L, E)."""
        if self.filters > MOST_FILTERS * into.shape[3]:
            self._add_patch_gradients(where, gradient, filters, into, scratch)
            return
        spread = self._scattered(where, gradient, scratch)
        taps = filters.reshape(self.clients, self.filters * self.width, -1)
        torch.bmm(spread, taps, out=into.view(self.clients, -1, into.shape[3]))

    def _scattered(self, where: Tensor, gradient: Tensor, scratch: Callable[..., Tensor]) -> Tensor:
        """Return the gradient of each maximum at the words under its filter, 0 elsewhere: (k, b · L, F · w)."""
        taps = self.filters * self.width
        index = (where * taps).repeat_interleave(self.width, 2).add_(self._taps)
        spread = scratch(self.clients, self.rows, self.length * taps).zero_()
        spread.scatter_(2, index, gradient.repeat_interleave(self.width, 2))
        return spread.view(self.clients, -1, taps)

    def _add_patch_gradients(
        self, where: Tensor, gradient: Tensor, filters: Tensor, into: Tensor, scratch: Callable[..., Tensor]
    ) -> None:
        """Compute the gradients of all patches, (k, b · positions, w · E), and add each to the words of its patch."""
        scores = scratch(self.clients, self.rows, self.positions, self.filters).zero_()
        scores.scatter_(2, where.unsqueeze(2), gradient.unsqueeze(2))
        patches = torch.bmm(scores.view(self.clients, -1, self.filters), filters)
        patches = patches.view(self.clients, self.rows, self.positions, self.width, -1)
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
        # not the maxima themselves: later layers may change them in place
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
    """Apply nn.Conv1d to x (k, b, E, L), then the maximum over all positions, and ReLU if `cut`: (k, b, F)."""
    filters, bias = weights["weight"].seen_as(lambda tensor: tensor.flatten(2)), weights.get("bias")
    y: Tensor = Highest.apply(  # type: ignore[no-untyped-call]
        x.transpose(2, 3), filters.value, None if bias is None else bias.value, filters, bias, cut
    )
    return y


@built_in(MaxOverTime)
def max_over_time(layer: MaxOverTime, weights: Mapping[str, Weight], words: Tensor) -> Tensor:
    x = words.transpose(2, 3)
    own = [
        {name: weights[f"convolutions.{number}.{name}"] for name in ("weight", "bias")}
        for number in range(len(layer.convolutions))
    ]
    return torch.cat([highest(one, x, cut=True) for one in own], 2)


@built_in(nn.Conv1d, WordConvolution)
def text_convolution(layer: nn.Conv1d, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    """Unfold texts (k, b, E, L) and apply one matrix product per client."""
    (width,), (stride,), (dilation,) = layer.kernel_size, layer.stride, layer.dilation
    if layer.groups > 1 or dilation > 1 or layer.padding_mode != "zeros":
        return torch.stack([one(own) for one, own in zip(of_one(layer, weights), x.unbind(0), strict=True)])
    both = width - 1 if layer.padding == "same" else 0
    before, after = (both // 2, both - both // 2) if isinstance(layer.padding, str) else layer.padding * 2
    words = functional.pad(x.transpose(2, 3), (0, 0, before, after))
    patches = words.unfold(2, width, stride).transpose(3, 4).flatten(3)
    filters = weights["weight"].seen_as(lambda tensor: tensor.flatten(2))
    return product(patches, filters, weights.get("bias")).transpose(2, 3)


ARRANGED[nn.Conv1d] = ARRANGED[WordConvolution] = {"weight": (0, 2, 1)}

RELUS = functional.relu, torch.relu, torch.relu_, "relu", "relu_"
POOLS = functional.max_pool1d, torch.max_pool1d, functional.adaptive_max_pool1d


def find_peaks(traced: Traced) -> tuple[dict[fx.Node, tuple[bool, fx.Node]], set[fx.Node]]:
    """Return the convolutions whose outputs only a maximum over the text reads, and the nodes from there to it.

    Each comes with the last of these nodes and whether ReLU is among them.
    """
    found, passed = {}, set()
    for node in traced.graph.nodes:
        part = traced.part(node) if node.op == "call_module" else None
        if type(part) in (nn.Conv1d, WordConvolution) and _plain_convolution(part) and traced.along(node).axis == 0:
            nodes, cut = _to_maximum(traced, node)
            if nodes:
                found[node] = cut, nodes[-1]
                passed.update(nodes)
    return found, passed


def _plain_convolution(part: Any) -> bool:
    window = part.stride, part.dilation, part.groups, part.padding_mode
    return window == ((1,), (1,), 1, "zeros") and part.padding in ((0,), "valid") and part.weight.requires_grad


def _to_maximum(traced: Traced, convolution: fx.Node) -> tuple[list[fx.Node], bool]:
    """Return the nodes from a convolution to the maximum, each the only reader of the one before; empty if none."""
    nodes: list[fx.Node] = []
    node, cut, length = convolution, False, traced.value(convolution).shape[2]
    while len(readers := _readers(traced, node)) == 1:
        (node,) = readers
        nodes.append(node)
        part = traced.part(node) if node.op == "call_module" else None
        if isinstance(part, nn.ReLU) or (part is None and node.target in RELUS):
            cut = True
        elif isinstance(part, nn.AdaptiveMaxPool1d | nn.MaxPool1d) or (part is None and node.target in POOLS):
            window = _window(traced, node, part)
            return (nodes, cut) if traced.value(node).shape[2:] == (1,) and window in (None, length) else ([], cut)
        elif part is None and node.target in (torch.max, "max"):
            axes = [*node.args[1:], *node.kwargs.values()]
            taking = _readers(traced, node)
            first = len(taking) == 1 and (taking[0].target, *taking[0].args[1:]) in _FIRST
            return ([*nodes, *taking], cut) if axes in ([2], [-1]) and first else ([], cut)
        else:
            break
    return [], cut


_FIRST = (operator.getitem, 0), (getattr, "values")


def _readers(traced: Traced, node: fx.Node) -> list[fx.Node]:
    """Return the readers of a node's values; other users only read its shape."""
    return [reader for reader in node.users if not _asks_for_shape(reader)]


def _asks_for_shape(node: fx.Node) -> bool:
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1] in ("shape", "ndim", "dtype"))


def _window(traced: Traced, node: fx.Node, part: nn.Module | None) -> int | None:
    """Return the number of positions that max_pool1d reads; None for adaptive pooling, which reads all."""
    if isinstance(part, nn.AdaptiveMaxPool1d) or node.target is functional.adaptive_max_pool1d:
        return None
    if isinstance(part, nn.MaxPool1d):
        kernel: Any = part.kernel_size if part.dilation == 1 else -1
    else:
        kernel = node.kwargs.get("kernel_size", node.args[1] if len(node.args) > 1 else None)
    (kernel,) = kernel if isinstance(kernel, tuple | list) else (kernel,)
    return traced.value(kernel) if isinstance(kernel, fx.Node) else kernel  # type: ignore[no-any-return]
