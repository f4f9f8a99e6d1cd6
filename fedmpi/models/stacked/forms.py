"""Batched forms of layers with parameters; the client is the first axis of all values.

A form is called as form(layer, weights, *inputs). `weights` maps the layer's parameters to `Weight`s (k, …). Inputs and
outputs are (k, …); the remaining axes are those of a single client. Autograd differentiates it. A layer without a form
is computed client by client (`of_one`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.models.stacked.base import NotStackable, Parameters, Slot, Step

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

    __slots__ = ("alone", "axes", "done", "owner", "step", "target", "value")

    def __init__(self, value: Tensor, target: Tensor, step: Step, alone: bool, axes: tuple[int, ...] | None = None):
        self.value, self.target, self.step, self.alone, self.axes = value, target, step, alone, axes
        self.done = False
        self.owner = self

    @classmethod
    def of(cls, slot: Slot, parameters: Parameters, alone: bool) -> Weight:
        """Return the parameter in the slot, in the order of the stack."""
        value, target = parameters.value(slot, *slot.arranged), parameters.target(slot, *slot.arranged)
        return cls(value.data.requires_grad_(), target, parameters.step, alone, slot.axes)

    @classmethod
    def constant(cls, value: Tensor, clients: int) -> Weight:
        """Return a parameter that is not trained, the same for all clients."""
        return cls(value.detach().expand(clients, *value.shape), value, Step(1, 0), False)

    def seen_as(self, see: Callable[[Tensor], Tensor]) -> Weight:
        """Return the same parameter with reordered or joined axes; `see` makes such a view of a tensor."""
        seen = Weight(see(self.value), see(self.target), self.step, self.alone)
        seen.owner = self.owner
        return seen

    @property
    def natural(self) -> Weight:
        """Return the same weight with the axes in the parameter's own order."""
        if self.axes is None:
            return self
        back = [0, *(1 + self.axes.index(axis) for axis in range(len(self.axes)))]
        return self.seen_as(lambda tensor: tensor.permute(back))

    @property
    def trained(self) -> bool:
        """Check whether the weight has a gradient."""
        return self.value.requires_grad

    def product(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Apply a gradient left @ right, (k, m, n): return it for autograd, or None after updating the target."""
        if not self.trained:
            return None
        if not self.alone:
            return torch.bmm(left, right)
        self.step.product(self.target, left, right)
        self.owner.done = True
        return None

    def plain(self, gradient: Tensor) -> Tensor | None:
        """Apply a given gradient: return it for autograd, or None after updating the target."""
        if not self.trained:
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
    if not targets:
        return
    step = weights[0].step
    if step.keep == 1:
        torch._foreach_add_(targets, given, alpha=step.rate)
        return
    for target, gradient in zip(targets, given, strict=True):
        step.plain(target, gradient)


def register_layer(kind: type[nn.Module]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the batched form of layers of this class."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def form(layer: nn.Module, weights: Mapping[str, Weight], *inputs: Any, **named: Any) -> Any:
            return function(layer, {name: weight.natural.value for name, weight in weights.items()}, *inputs, **named)

        LAYERS[kind] = form
        return function

    return decorate


def built_in(*kinds: type[nn.Module]) -> Callable[[Form], Form]:
    """Return a decorator that registers a form for these kinds of layers."""

    def decorate(form: Form) -> Form:
        LAYERS.update(dict.fromkeys(kinds, form))
        return form

    return decorate


def of_one(layer: nn.Module, weights: Mapping[str, Weight]) -> Sequence[Callable[..., Any]]:
    """Return the layer of every single client, computed by torch itself."""
    values = {name: weight.natural.value.unbind(0) for name, weight in weights.items()}
    clients = len(next(iter(values.values())))
    own = [{name: parts[client] for name, parts in values.items()} for client in range(clients)]
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        conv: Any = layer._conv_forward
        return [partial(conv, weight=one["weight"], bias=one.get("bias")) for one in own]
    if isinstance(layer, nn.LSTM):
        return [partial(_lstm, layer, [one[name] for name in layer._flat_weights_names]) for one in own]
    return [lambda *args, one=one, **more: torch.func.functional_call(layer, one, args, more) for one in own]


def _lstm(layer: nn.LSTM, values: list[Tensor], x: Tensor, hx: Any = None) -> Any:
    """Call torch's LSTM without the side effects of nn.LSTM when its parameters are replaced."""
    if x.dim() != 3:
        raise NotStackable("LSTM of sequences without samples")
    if hx is None:
        places, rows = layer.num_layers * (1 + layer.bidirectional), x.shape[0 if layer.batch_first else 1]
        hx = tuple(
            x.new_zeros(places, rows, size) for size in (layer.proj_size or layer.hidden_size, layer.hidden_size)
        )
    ways = layer.bias, layer.num_layers, 0.0, True, layer.bidirectional, layer.batch_first
    states, *lasts = torch.lstm(x, list(hx), values, *ways)
    return states, tuple(lasts)


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


def product(x: Tensor, weight: Weight, bias: Weight | None) -> Tensor:
    """Map x (k, …, inputs) through a dense layer."""
    value = weight.value
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    y: Tensor = Product.apply(rows, value, None if bias is None else bias.value, weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], value.shape[1])


@built_in(nn.Linear)
def linear(layer: nn.Linear, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    return product(x, weights["weight"], weights.get("bias"))


def _scaled(x: Tensor, weights: Mapping[str, Weight], shape: tuple[int, ...]) -> Tensor:
    """Return x · weight + bias, with the parameters reshaped to `shape`."""
    weight, bias = (weights[name].value.reshape(shape) if name in weights else None for name in ("weight", "bias"))
    if weight is not None and bias is not None:
        return torch.addcmul(bias, x, weight)
    return x if weight is None else x * weight


@built_in(nn.GroupNorm)
def group_norm(layer: nn.GroupNorm, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    normed = functional.group_norm(x.flatten(0, 1), layer.num_groups, None, None, layer.eps)
    return _scaled(normed.view(x.shape), weights, (x.shape[0], 1, x.shape[2], *[1] * (x.dim() - 3)))


@built_in(nn.LayerNorm, nn.RMSNorm)
def last_norm(layer: nn.LayerNorm | nn.RMSNorm, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    if isinstance(layer, nn.LayerNorm):
        normed = functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    else:
        normed = functional.rms_norm(x, layer.normalized_shape, None, layer.eps)
    between = x.dim() - 1 - len(layer.normalized_shape)
    return _scaled(normed, weights, (x.shape[0], *[1] * between, *layer.normalized_shape))


@built_in(nn.Embedding)
def embedding(layer: nn.Embedding, weights: Mapping[str, Weight], ids: Tensor) -> Tensor:
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        raise NotStackable("Embedding with max_norm or scale_grad_by_freq")
    client = torch.arange(len(ids), device=ids.device).view(-1, *[1] * (ids.dim() - 1))
    found = weights["weight"].value[client, ids.long()]
    if layer.padding_idx is None:
        return found
    return torch.where((ids == layer.padding_idx).unsqueeze(-1), found.detach(), found)
