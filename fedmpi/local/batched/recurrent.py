"""Batched gated recurrent units (Cho et al. 2014, in torch's layout) with a hand-written backward pass through time.

One product each computes all steps' products with the inputs and all gradients of the weights; only the dependence of a
state on the previous one is computed step by step. LSTMs and other recurrent layers use torch, client by client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.local.batched.base import NotStackable
from fedmpi.local.batched.forms import Weight, built_in

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
