"""Batched forms of layers with parameters; the client is the first axis of all values.

A form is called as form(layer, weights, *inputs). `weights` maps the layer's parameters to `Weight`s (k, …). Inputs and
outputs are (k, …); the remaining axes are those of a single client. Autograd differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.local.batched.base import NotStackable, Step
from fedmpi.models.lora import LoraLinear

Form = Callable[..., Any]
LAYERS: dict[type[nn.Module], Form] = {}
"""Form of each kind of layer."""
ARRANGED: dict[type[nn.Module], dict[str, tuple[int, ...]]] = {}
"""Order of the axes of a layer's parameters in the stack, for kinds of layers whose order differs."""


class Weight:
    """Parameter of the k bound clients.

    A weight that only one layer reads is updated in the backward pass of that layer, where its gradient is a matrix
    product that is never computed itself. Other weights get their gradients from autograd.
    """

    __slots__ = ("alone", "done", "owner", "step", "target", "value")

    def __init__(self, value: Tensor, target: Tensor, step: Step, alone: bool):
        self.value, self.target, self.step, self.alone = value, target, step, alone
        self.done = False
        self.owner = self

    @classmethod
    def constant(cls, value: Tensor, clients: int) -> Weight:
        """Return a parameter that is not trained, the same for all clients."""
        return cls(value.detach().expand(clients, *value.shape), value, Step(1, 0), False)

    def seen_as(self, see: Callable[[Tensor], Tensor]) -> Weight:
        """Return the same parameter with reordered or joined axes; `see` makes such a view of a tensor."""
        seen = Weight(see(self.value), see(self.target), self.step, self.alone)
        seen.owner = self.owner
        return seen

    def product(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Apply a gradient left @ right, (k, m, n): return it for autograd, or None after updating the target."""
        if not self.value.requires_grad:
            return None
        if not self.alone:
            return torch.bmm(left, right)
        self.step.product(self.target, left, right)
        self.owner.done = True
        return None

    def plain(self, gradient: Tensor) -> Tensor | None:
        """Apply a given gradient: return it for autograd, or None after updating the target."""
        if not self.value.requires_grad:
            return None
        gradient = gradient.view(self.value.shape)
        if not self.alone:
            return gradient
        self.step.plain(self.target, gradient)
        self.owner.done = True
        return None


def finish(weights: Sequence[Weight], gradients: Sequence[Tensor | None]) -> None:
    """Update the weights that no layer updated in its backward pass, with the gradients from autograd."""
    targets, given = [], []
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            targets.append(weight.target)
            given.append(gradient)
        elif not weight.done and weight.step.keep != 1:
            weight.target.mul_(weight.step.keep)
        weight.done = False
    if targets and weights[0].step.keep == 1:
        torch._foreach_add_(targets, given, alpha=weights[0].step.rate)
        return
    for target, gradient in zip(targets, given, strict=True):
        weights[0].step.plain(target, gradient)


def built_in(*kinds: type[nn.Module]) -> Callable[[Form], Form]:
    """Return a decorator that registers a form for these kinds of layers."""

    def decorate(form: Form) -> Form:
        LAYERS.update(dict.fromkeys(kinds, form))
        return form

    return decorate


class Product(torch.autograd.Function):
    """y = x Wᵀ + c of every client, (k, r, ·); the backward pass includes the update if the weights allow it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor, bias: Tensor | None, weight: Weight, bias_weight: Weight | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.value, ctx.weight, ctx.bias_weight = value.detach(), weight, bias_weight
        transposed = value.transpose(1, 2)
        return torch.bmm(x, transposed) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, transposed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        before = torch.bmm(gradient, ctx.value) if ctx.needs_input_grad[0] else None
        of_weight = ctx.weight.product(gradient.transpose(1, 2), x)
        of_bias = None if ctx.bias_weight is None else ctx.bias_weight.plain(gradient.sum(1))
        return before, of_weight, of_bias, None, None


def product(x: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
    """Map x (k, …, inputs) through a dense layer."""
    value = weight.value
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    y: Tensor = Product.apply(rows, value, None if bias is None else bias.value, weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], value.shape[1])


@built_in(nn.Linear)
def linear(layer: nn.Linear, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    return product(x, weights["weight"], weights.get("bias"))


@built_in(LoraLinear)
def lora_linear(layer: LoraLinear, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    small = product(product(x, weights["lora_a"]), weights["lora_b"])
    return functional.linear(x, layer.weight, layer.bias) + layer.scale * small


@built_in(nn.Embedding)
def embedding(layer: nn.Embedding, weights: Mapping[str, Weight], ids: Tensor) -> Tensor:
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        raise NotStackable("Embedding with max_norm or scale_grad_by_freq")
    found = _rows_of(weights["weight"].value, ids)
    if layer.padding_idx is None:
        return found
    return torch.where((ids == layer.padding_idx).unsqueeze(-1), found.detach(), found)


def _rows_of(tables: Tensor, ids: Tensor) -> Tensor:
    """Return the rows (k, …, E) of every client's table (k, V, E)."""
    return tables[torch.arange(len(ids), device=ids.device).view(-1, *[1] * (ids.dim() - 1)), ids.long()]


@built_in(nn.LSTM)
def each_lstm(layer: nn.LSTM, weights: Mapping[str, Weight], x: Tensor) -> Any:
    """Call torch's LSTM, client by client; nn.LSTM itself has side effects when its parameters are replaced."""
    if x.dim() != 4:
        raise NotStackable("LSTM of sequences without samples")
    places, rows = layer.num_layers * (1 + layer.bidirectional), x.shape[1 if layer.batch_first else 2]
    sizes = layer.proj_size or layer.hidden_size, layer.hidden_size
    first = [x.new_zeros(places, rows, size) for size in sizes]
    ways = layer.bias, layer.num_layers, 0.0, True, layer.bidirectional, layer.batch_first
    each = zip(*(weights[name].value.unbind(0) for name in layer._flat_weights_names), strict=True)
    found = [torch.lstm(given, first, list(values), *ways) for given, values in zip(x.unbind(0), each, strict=True)]
    states, last, cells = (torch.stack(parts) for parts in zip(*found, strict=True))
    return states, (last, cells)
