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

from fedmpi.local.batched.layers import NotStackable, Step
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

    __slots__ = ("alone", "done", "kept", "owner", "step", "target", "value")

    def __init__(self, value: Tensor, target: Tensor, step: Step, alone: bool):
        self.value, self.target, self.step, self.alone = value, target, step, alone
        self.done = False
        self.owner = self
        self.kept: dict[int, Any] = {}  # index vectors of its form

    def seen_as(self, see: Callable[[Tensor], Tensor]) -> Weight:
        """Return the same parameter with reordered or joined axes; `see` makes such a view of a tensor."""
        seen = Weight(see(self.value), see(self.target), self.step, self.alone)
        seen.owner = self.owner
        return seen

    def product(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Apply a gradient left @ right, (k, m, n): return it for autograd, or None after updating the target."""
        if not self.alone:
            return torch.bmm(left, right)
        self.step.product(self.target, left, right)
        self.owner.done = True
        return None

    def plain(self, gradient: Tensor) -> Tensor | None:
        """Apply a given gradient: return it for autograd, or None after updating the target."""
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
    tables, clients = weights["weight"].value, torch.arange(len(ids), device=ids.device)
    found = tables[clients.view(-1, *[1] * (ids.dim() - 1)), ids.long()]
    if layer.padding_idx is None:
        return found
    return torch.where((ids == layer.padding_idx).unsqueeze(-1), found.detach(), found)


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


# Gated recurrent units (Cho et al. 2014, in torch's layout) with a hand-written backward pass through time: one product
# each computes all steps' products with the inputs and all gradients of the weights; only the dependence of a state on
# the previous one is computed step by step

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


def _rows(x: Tensor) -> Tensor:
    """Return (k, L, b, ·) as (k, L · b, ·)."""
    return x.flatten(1, 2)


def _gates(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return views of the adjacent gates in (…, count · H), each (…, H)."""
    return torch.unflatten(x, -1, (count, -1)).unbind(-2)


class GRU(torch.autograd.Function):
    """One layer in one direction: inputs (k, L, b, E), first state (k, b, H); states (k, L, b, H).

    The order of the gates is that of torch: reset, update, new.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        inner: Tensor,
        outer: Tensor,
        bias: Tensor | None,
        outer_bias: Tensor | None,
        held: _Held,
    ) -> Tensor:
        clients, length, count, _ = x.shape
        size = h0.shape[2]
        transposed = inner.transpose(1, 2)
        wide = torch.bmm(_rows(x), transposed) if bias is None else torch.baddbmm(bias, _rows(x), transposed)
        gates = wide.view(clients, length, count, 3 * size)
        states = x.new_empty(clients, length + 1, count, size)
        kept = x.new_empty(clients, length, count, size)
        states[:, 0] = h0
        recurrent = outer.transpose(1, 2)
        own = x.new_empty(clients, count, 3 * size)
        own_two, own_new = own[..., : 2 * size], own[..., 2 * size :]
        first_two = gates[..., : 2 * size].unbind(1)
        steps = zip(first_two, *(gate.unbind(1) for gate in _gates(gates, 3)), kept.unbind(1), strict=True)
        hidden = states.unbind(1)
        for t, (two, r, z, n, of_state) in enumerate(steps):
            if outer_bias is None:
                torch.bmm(hidden[t], recurrent, out=own)
            else:
                torch.baddbmm(outer_bias, hidden[t], recurrent, out=own)
            two.add_(own_two).sigmoid_()
            of_state.copy_(own_new)
            n.addcmul_(r, of_state).tanh_()
            torch.lerp(n, hidden[t], z, out=hidden[t + 1])
        ctx.save_for_backward(x, gates, states, kept)
        ctx.inner, ctx.outer, ctx.held = inner.detach(), outer.detach(), held
        return states[:, 1:].clone()

    @staticmethod
    def backward(ctx: Any, of_states: Tensor) -> Any:
        x, gates, states, kept = ctx.saved_tensors
        size, held = states.shape[3], ctx.held
        r, z, n = _gates(gates, 3)
        # First the factors of the gradients of all steps' states. `of_own` is for the gates and the part of the state
        # that the reset gate lets through; `of_n` is for all of the new value.
        of_own = torch.empty_like(gates)
        of_r, of_z, of_new = _gates(of_own, 3)
        of_n = torch.ops.aten.tanh_backward(1 - z, n)
        _sigmoid_backward(of_n * kept, r, grad_input=of_r)
        _sigmoid_backward(states[:, :-1] - n, z, grad_input=of_z)
        torch.mul(of_n, r, out=of_new)
        dh = states.new_zeros(states[:, 0].shape)
        by_gate = torch.unflatten(of_own, 3, (3, size)).unbind(1)
        steps = zip(of_own.unbind(1), by_gate, of_n.unbind(1), z.unbind(1), of_states.unbind(1), strict=True)
        wide_dh = dh.unsqueeze(2)
        for of_all, of_three, of_whole, keeps, given in reversed(list(steps)):
            dh.add_(given)
            of_three.mul_(wide_dh)
            of_whole.mul_(dh)
            dh.mul_(keeps).baddbmm_(of_all, ctx.outer)
        rows = _rows(of_own)
        of_outer = held.outer.product(rows.transpose(1, 2), _rows(states[:, :-1]))
        of_outer_bias = rows.sum(1, keepdim=True) if ctx.needs_input_grad[5] else None
        of_new.copy_(of_n)
        before = torch.bmm(rows, ctx.inner).view(x.shape) if ctx.needs_input_grad[0] else None
        of_inner = held.inner.product(rows.transpose(1, 2), _rows(x))
        of_bias = rows.sum(1, keepdim=True) if ctx.needs_input_grad[4] else None
        return before, dh, of_inner, of_outer, of_bias, of_outer_bias, None


_gru: Any = GRU.apply


class _Held:
    """Weights of one layer in one direction."""

    def __init__(self, weights: Mapping[str, Weight], suffix: str):
        self.inner, self.outer = weights[f"weight_ih_{suffix}"], weights[f"weight_hh_{suffix}"]
        biases = [weights.get(f"bias_{name}_{suffix}") for name in ("ih", "hh")]
        self.bias, self.outer_bias = (None if one is None else one.value.unsqueeze(1) for one in biases)


@built_in(nn.GRU)
def stacked_gru(layer: nn.GRU, weights: Mapping[str, Weight], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return states (k, b, L, H · directions) of the last layer, or (k, L, b, …), and last states (k, layers, b, H)."""
    if x.dim() != 4:
        raise NotStackable("GRU of sequences without samples")
    x = x.transpose(1, 2) if layer.batch_first else x
    directions = 2 if layer.bidirectional else 1
    lasts: list[Tensor] = []
    for number in range(layer.num_layers):
        made = []
        for direction in range(directions):
            held = _Held(weights, f"l{number}{'_reverse' * direction}")
            first = x.new_zeros(len(x), x.shape[2], layer.hidden_size)
            given = x.flip(1) if direction else x.contiguous()
            states = _gru(given, first, held.inner.value, held.outer.value, held.bias, held.outer_bias, held)
            lasts.append(states[:, -1])
            made.append(states.flip(1) if direction else states)
        x = made[0] if directions == 1 else torch.cat(made, 3)
    return x.transpose(1, 2) if layer.batch_first else x, torch.stack(lasts, 1)
