"""A traced model for many clients side by side: their samples are one batch (k · b, …) for all that has no parameters.

What has parameters sees (k, b, …), see `forms`. The graph becomes one Python function (`writer`), which autograd
differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fedmpi.models.stacked.base import Op, Place, Slot
from fedmpi.models.stacked.client_weights import Weight, finish
from fedmpi.models.stacked.dense import DropoutOp, StackedDropout
from fedmpi.models.stacked.trace import Along

CLIENT, SHARED, NUMBER = "client", "shared", "number"
"""Kinds of values that are no batch of all clients' samples (`Along`): (k, …) with an entry for each client; the same
for all clients; a number that is computed from the number of samples."""


@dataclass(frozen=True, eq=False)
class GraphLayer:
    """A whole model, or what follows its look-up of words."""

    trained: ClassVar[bool] = True

    run: Callable[..., Tensor]  # run(bound, samples, words) -> outputs (k · b, …)
    slots: dict[int, Slot]  # Parameter (by id) -> where it lies
    alone: frozenset[int]  # Parameters (by id) that one layer alone reads
    dropouts: tuple[tuple[int, float], ...]  # (units, p): In the order in which they are met
    values: int  # Floats that one row needs
    outputs: int  # Values of one row's outputs
    token_dtype: torch.dtype | None  # Where the samples are token ids
    feature_shape: tuple[int, ...]
    words: bool  # Whether the input is the vectors of the words
    reads_tokens: bool  # Whether the token ids are read beside them

    def bind(self, place: Place, x: Tensor) -> Op:
        return GraphOp(self, place, x)


class GraphOp:
    """The graph bound to k clients of b rows."""

    def __init__(self, layer: GraphLayer, place: Place, x: Tensor):
        self.layer, self.clients, self.rows = layer, place.clients, place.rows
        self.output = place.take("output", place.clients, place.rows, layer.outputs)
        self.weights = {key: Weight.of(slot, place.parameters, key in layer.alone) for key, slot in layer.slots.items()}
        self.dropouts = [
            StackedDropout(units, p, columns=False).bind(replace(place, number=(place.number, number)), self.output)
            for number, (units, p) in enumerate(layer.dropouts)
        ]
        self.x = x.view(place.clients * place.rows, *x.shape[2:] if layer.words else layer.feature_shape)
        self.input = self.x.data.requires_grad_() if not place.first and layer.words else None
        self.tokens: tuple[Tensor, Tensor] | None = None
        self._result: Tensor | None = None
        self._ordered = list(self.weights.values())
        self._leaves = [weight.value for weight in self._ordered] + ([] if self.input is None else [self.input])

    def forward(self) -> None:
        samples, words = self.x, self.x if self.input is None else self.input
        if self.layer.words:
            samples = self._tokens()
        elif self.layer.token_dtype is not None:
            samples = samples.to(self.layer.token_dtype)
        for dropout in self.dropouts:
            dropout.arrange()
        with torch.enable_grad():
            self._result = self.layer.run(self, samples, words)
        self.output.copy_(self._result.detach().view(self.output.shape))

    def _tokens(self) -> Tensor:
        """The token ids of the words, where the graph reads them."""
        if not self.layer.reads_tokens:
            return self.x
        assert self.tokens is not None and self.layer.token_dtype is not None
        ids, words = self.tokens
        return words[ids.flatten(0, 1)].to(self.layer.token_dtype)

    def backward(self, gradient: Tensor) -> Tensor:
        result, self._result = self._result, None
        assert result is not None
        gradients = torch.autograd.grad(result, self._leaves, gradient.reshape(result.shape), allow_unused=True)
        finish(self._ordered, gradients[: len(self._ordered)])
        if self.input is None:
            return gradient
        of_words = gradients[-1]
        return torch.zeros_like(self.input) if of_words is None else of_words.contiguous()


def dropouts_of(op: Op) -> list[DropoutOp]:
    """The dropout of a bound layer, in the order in which a client's stream serves it."""
    if isinstance(op, GraphOp):
        return op.dropouts
    return [op] if isinstance(op, DropoutOp) else []


def to_clients(x: Tensor, along: Along, clients: int) -> Tensor:
    """From one batch of all clients' samples to (k, …) with what one client alone would see."""
    if along.axis == 0:
        return torch.unflatten(x, 0, (clients, -1))
    return torch.unflatten(x, along.axis, (clients, -1)).movedim(along.axis, 0)


def from_clients(y: Any, along: Any) -> Any:
    """The reverse of `to_clients`, of a tensor or a tuple of them; what does not depend on samples stays."""
    if without_samples(along):
        return y
    if isinstance(along, Along):
        return y.flatten(0, 1) if along.axis == 0 else y.movedim(0, along.axis).flatten(along.axis, along.axis + 1)
    return tuple(from_clients(part, one) for part, one in zip(y, along, strict=True))


def without_samples(along: Any) -> bool:
    """Whether a value, or every one of a tuple's, does not depend on the samples."""
    return all(map(without_samples, along)) if isinstance(along, tuple) else along is None


class Call:
    """Computes a node that reads parameters, or values made of them: with the client as first axis of everything."""

    def __init__(
        self, function: Callable[..., Any], node: fx.Node, inputs: dict[fx.Node, Any], along: Any, joined: bool = False
    ):
        self.function, self.along, self.joined = function, along, joined
        self.order, self.kinds = list(inputs), list(inputs.values())
        self.args, self.kwargs = node.args, node.kwargs
        self._direct = not node.kwargs and list(node.args) == self.order

    def __call__(self, bound: GraphOp, *values: Any) -> Any:
        if self.joined:
            return self._filled(bound, values)
        given = []
        for value, kind in zip(values, self.kinds, strict=True):
            if isinstance(kind, Along):
                value = to_clients(value, kind, bound.clients)
            elif kind == SHARED and isinstance(value, Tensor):
                value = value.expand(bound.clients, *value.shape)
            given.append(value)
        return from_clients(self._filled(bound, given), self.along)

    def _filled(self, bound: GraphOp, given: Sequence[Any]) -> Any:
        """What the function makes of the nodes' values."""
        if self._direct:
            return self.function(bound, *given)
        found = dict(zip(self.order, given, strict=True))

        def filled(entry: Any) -> Any:
            return found[entry] if isinstance(entry, fx.Node) else entry

        args, kwargs = map_aggregate(self.args, filled), map_aggregate(self.kwargs, filled)
        return self.function(bound, *args, **kwargs)


class Drops:
    """Dropout within a call: the masks of one bound graph, in the order in which the call asks for them."""

    def __init__(self, bound: GraphOp, places: Sequence[int], channels: bool = False):
        self.masks, self.channels = [bound.dropouts[place].mask for place in places], channels
        self._next = iter(self.masks)

    def __call__(self, x: Tensor) -> Tensor:
        """x (k · b, …) or (k, b, …) times the next mask."""
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channels else x.shape
        return x * next(self._next).view(shape)

    def of(self, client: int) -> Callable[[Tensor], Tensor]:
        """The same for the values (b, …) of one client alone."""
        masks = iter(self.masks)
        return lambda x: x * next(masks)[client].view(x.shape)


class Broadcast:
    """An operation on every element: the operands' axes are aligned from the last, as torch does."""

    def __init__(self, function: Callable[..., Any], rank: int):
        self.function, self.rank = function, rank

    def __call__(self, bound: GraphOp, *operands: Any, **named: Any) -> Any:
        aligned = [
            one[(slice(None), *[None] * (self.rank + 1 - one.dim()))] if isinstance(one, Tensor) else one
            for one in operands
        ]
        return self.function(*aligned, **named)
