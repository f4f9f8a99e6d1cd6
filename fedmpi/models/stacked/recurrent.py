"""Recurrent layers of many clients side by side: LSTM, GRU and RNN with their backward pass through time by hand.

All steps' products with the inputs, and all gradients of the weights, are one product each; only what a state needs of
the state before it is done step by step. Sources: Hochreiter & Schmidhuber 1997, Cho et al. 2014, Elman 1990, in
torch's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.models.dropout_calls import CALLS
from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.client_weights import Weight
from fedmpi.models.stacked.forms import built_in, product
from fedmpi.models.stacked.graph import Drops

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input


def _rows(x: Tensor) -> Tensor:
    """(k, L, b, ·) as (k, L · b, ·)."""
    return x.flatten(1, 2)


def _gates(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Views of the gates that lie side by side in (…, count · H), each (…, H)."""
    return torch.unflatten(x, -1, (count, -1)).unbind(-2)


class LSTM(torch.autograd.Function):
    """One layer in one direction: inputs (k, L, b, E), first states, cells (k, b, H); states (k, L, b, H), last cells.

    Gates lie as torch has them: input, forget, cell, output. With a `projection` (k, P, H) states have P values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        inner: Tensor,
        outer: Tensor,
        bias: Tensor | None,
        projection: Tensor | None,
        held: _Held,
    ) -> tuple[Tensor, Tensor]:
        clients, length, count, _ = x.shape
        size = c0.shape[2]
        transposed = inner.transpose(1, 2)
        wide = torch.bmm(_rows(x), transposed) if bias is None else torch.baddbmm(bias, _rows(x), transposed)
        gates = wide.view(clients, length, count, 4 * size)
        states = x.new_empty(clients, length + 1, count, h0.shape[2])
        cells, squashed = x.new_empty(clients, length + 1, count, size), x.new_empty(clients, length, count, size)
        states[:, 0], cells[:, 0] = h0, c0
        recurrent = outer.transpose(1, 2)
        first_two = gates[..., : 2 * size].unbind(1)
        steps = zip(gates.unbind(1), first_two, *(gate.unbind(1) for gate in _gates(gates, 4)), strict=True)
        hidden, cell, tanh = states.unbind(1), cells.unbind(1), squashed.unbind(1)
        for t, (now, sigmoids, i, f, g, o) in enumerate(steps):
            now.baddbmm_(hidden[t], recurrent)
            sigmoids.sigmoid_()
            g.tanh_()
            o.sigmoid_()
            torch.mul(f, cell[t], out=cell[t + 1]).addcmul_(i, g)
            torch.tanh(cell[t + 1], out=tanh[t])
            if projection is None:
                torch.mul(o, tanh[t], out=hidden[t + 1])
            else:
                torch.bmm(o * tanh[t], projection.transpose(1, 2), out=hidden[t + 1])
        ctx.save_for_backward(x, gates, states, cells, squashed)
        ctx.inner, ctx.outer, ctx.held = inner.detach(), outer.detach(), held
        ctx.projection = None if projection is None else projection.detach()
        return states[:, 1:].clone(), cell[length].clone()

    @staticmethod
    def backward(ctx: Any, of_states: Tensor, of_cell: Tensor) -> Any:
        x, gates, states, cells, squashed = ctx.saved_tensors
        size, projection = of_cell.shape[2], ctx.projection
        i, f, g, o = _gates(gates, 4)
        # First what the gradients of all steps' cells (input, forget, cell) and states (output) are multiplied by.
        of_gates = torch.empty_like(gates)
        of_i, of_f, of_g, of_o = _gates(of_gates, 4)
        _sigmoid_backward(g, i, grad_input=of_i)
        _sigmoid_backward(cells[:, :-1], f, grad_input=of_f)
        _tanh_backward(i, g, grad_input=of_g)
        _sigmoid_backward(squashed, o, grad_input=of_o)
        of_squashed = torch.ops.aten.tanh_backward(o, squashed)
        dh, dc = states.new_zeros(states[:, 0].shape), of_cell.clone()
        of_projected = None if projection is None else states.new_empty(of_states.shape)
        by_cell = torch.unflatten(of_gates[..., : 3 * size], 3, (3, size)).unbind(1)
        steps = zip(of_gates.unbind(1), by_cell, of_o.unbind(1), of_squashed.unbind(1), f.unbind(1), strict=True)
        wide_dc, given = dc.unsqueeze(2), of_states.unbind(1)
        for t, (of_all, of_three, of_output, of_tanh, forget) in reversed(list(enumerate(steps))):
            dh.add_(given[t])
            of_hidden = dh
            if of_projected is not None:
                of_projected[:, t] = dh
                of_hidden = torch.bmm(dh, projection)
            of_output.mul_(of_hidden)
            dc.addcmul_(of_hidden, of_tanh)
            of_three.mul_(wide_dc)
            dc.mul_(forget)
            torch.bmm(of_all, ctx.outer, out=dh)
        rows, held = _rows(of_gates), ctx.held
        before = torch.bmm(rows, ctx.inner).view(x.shape) if ctx.needs_input_grad[0] else None
        turned = rows.transpose(1, 2)
        of_inner = held.inner.product(turned, _rows(x))
        of_outer = held.outer.product(turned, _rows(states[:, :-1]))
        of_bias = rows.sum(1, keepdim=True) if ctx.needs_input_grad[5] else None
        of_projection = None
        if of_projected is not None:
            of_projection = held.projection.product(_rows(of_projected).transpose(1, 2), _rows(o * squashed))
        return before, dh, dc, of_inner, of_outer, of_bias, of_projection, None


class GRU(torch.autograd.Function):
    """One layer in one direction: inputs (k, L, b, E), first state (k, b, H); states (k, L, b, H).

    Gates lie as torch has them: reset, update, new.
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
        # First what the gradients of all steps' states are multiplied by: of the gates, with `of_own` that of the
        # state's part in the new value, which the reset gate lets through, and with `of_n` that of all of it.
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


class RNN(torch.autograd.Function):
    """One layer in one direction: inputs (k, L, b, E), first state (k, b, H); states (k, L, b, H).

    No gates; `rectified` is whether ReLU gives the states, and not tanh.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        inner: Tensor,
        outer: Tensor,
        bias: Tensor | None,
        rectified: bool,
        held: _Held,
    ) -> Tensor:
        clients, length, count, _ = x.shape
        transposed = inner.transpose(1, 2)
        wide = torch.bmm(_rows(x), transposed) if bias is None else torch.baddbmm(bias, _rows(x), transposed)
        given = wide.view(clients, length, count, h0.shape[2])
        states = x.new_empty(clients, length + 1, count, h0.shape[2])
        states[:, 0] = h0
        recurrent = outer.transpose(1, 2)
        hidden = states.unbind(1)
        for t, one in enumerate(given.unbind(1)):
            now = torch.baddbmm(one, hidden[t], recurrent, out=hidden[t + 1])
            now.relu_() if rectified else now.tanh_()
        ctx.save_for_backward(x, states)
        ctx.inner, ctx.outer, ctx.rectified, ctx.held = inner.detach(), outer.detach(), rectified, held
        return states[:, 1:].clone()

    @staticmethod
    def backward(ctx: Any, of_states: Tensor) -> Any:
        x, states = ctx.saved_tensors
        of_given = states.new_empty(of_states.shape)
        dh = states.new_zeros(states[:, 0].shape)
        steps = zip(of_states.unbind(1), states[:, 1:].unbind(1), of_given.unbind(1), strict=True)
        for given, state, of_one in reversed(list(steps)):
            dh.add_(given)
            if ctx.rectified:
                _relu_backward(dh, state, 0, grad_input=of_one)
            else:
                _tanh_backward(dh, state, grad_input=of_one)
            torch.bmm(of_one, ctx.outer, out=dh)
        rows, held = _rows(of_given), ctx.held
        before = torch.bmm(rows, ctx.inner).view(x.shape) if ctx.needs_input_grad[0] else None
        turned = rows.transpose(1, 2)
        of_inner = held.inner.product(turned, _rows(x))
        of_outer = held.outer.product(turned, _rows(states[:, :-1]))
        of_bias = rows.sum(1, keepdim=True) if ctx.needs_input_grad[4] else None
        return before, dh, of_inner, of_outer, of_bias, None, None


_lstm: Any = LSTM.apply
_gru: Any = GRU.apply
_rnn: Any = RNN.apply


class _Held:
    """The weights of one layer in one direction."""

    def __init__(self, weights: Mapping[str, Weight], suffix: str):
        self.inner, self.outer = weights[f"weight_ih_{suffix}"], weights[f"weight_hh_{suffix}"]
        biases = [weights.get(f"bias_{name}_{suffix}") for name in ("ih", "hh")]
        self.bias, self.outer_bias = (None if one is None else one.value.unsqueeze(1) for one in biases)
        self.projection = weights.get(f"weight_hr_{suffix}")


def _need_plain(layer: nn.RNNBase, x: Tensor) -> None:
    if x.dim() != 4:
        raise NotStackable(f"{type(layer).__name__} of sequences without samples")


def _over_layers(
    layer: nn.RNNBase,
    weights: Mapping[str, Weight],
    x: Tensor,
    firsts: list[Tensor] | None,
    drop: Drops | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """States (k, L, b, H · directions) of the last layer, and the last states (k, layers, b, H); `drop` of the states
    (k, b, L, H · directions) of the other layers."""
    x = x.transpose(1, 2) if layer.batch_first else x
    directions = 2 if layer.bidirectional else 1
    lasts: list[list[Tensor]] = []
    for number in range(layer.num_layers):
        if number and drop is not None:
            x = drop(x.transpose(1, 2)).transpose(1, 2)
        made = []
        for direction in range(directions):
            held = _Held(weights, f"l{number}{'_reverse' * direction}")
            place = number * directions + direction
            if firsts is None:
                sizes = [layer.proj_size or layer.hidden_size, *[layer.hidden_size] * isinstance(layer, nn.LSTM)]
                begin = [x.new_zeros(len(x), x.shape[2], size) for size in sizes]
            else:
                begin = [first[:, place] for first in firsts]
            given = x.flip(1) if direction else x.contiguous()
            states, last = _one(layer, held, given, begin)
            lasts.append(last)
            made.append(states.flip(1) if direction else states)
        x = made[0] if directions == 1 else torch.cat(made, 3)
    return x.transpose(1, 2) if layer.batch_first else x, [torch.stack(one, 1) for one in zip(*lasts, strict=True)]


def _one(layer: nn.Module, held: _Held, x: Tensor, begin: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    inner, outer = held.inner.value, held.outer.value
    if isinstance(layer, nn.GRU):
        states = _gru(x, *begin, inner, outer, held.bias, held.outer_bias, held)
        return states, [states[:, -1]]
    bias = None if held.bias is None or held.outer_bias is None else held.bias + held.outer_bias
    if isinstance(layer, nn.RNN):
        states = _rnn(x, *begin, inner, outer, bias, layer.nonlinearity == "relu", held)
        return states, [states[:, -1]]
    projection = None if held.projection is None else held.projection.value
    states, cell = _lstm(x, *begin, inner, outer, bias, projection, held)
    return states, [states[:, -1], cell]


WIDE = 20_000
"""Multiplications that a client's states need in one step of time above which torch's own LSTM on one client after
another is quicker than a call a step of time for all of them: measured, it is from 20,000 on (20 samples, 16 units),
and is not with 16,000 (4 samples, 32 units)."""


def _fills_the_machine(layer: nn.LSTM, x: Tensor) -> bool:
    """Whether the LSTM of one client alone keeps a core busy, and torch has one for it (oneDNN's: no projections)."""
    rows = x.shape[1] if layer.batch_first else x.shape[2]
    wide = rows * layer.hidden_size * 4 * layer.hidden_size >= WIDE and not layer.proj_size
    return wide and x.dtype == torch.float32 and x.device.type == "cpu" and torch._C._has_mkldnn


def _client_by_client(
    layer: nn.LSTM,
    weights: Mapping[str, Weight],
    x: Tensor,
    firsts: list[Tensor] | None,
    drop: Drops | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """What `_over_layers` gives, by torch's own LSTM."""
    values = zip(*(weights[name].value.unbind(0) for name in layer._flat_weights_names), strict=True)
    if firsts is None:
        rows = x.shape[1] if layer.batch_first else x.shape[2]
        places = layer.num_layers * (2 if layer.bidirectional else 1)
        begin = [[x.new_zeros(places, rows, layer.hidden_size)] * 2] * len(x)
    else:
        begin = [list(pair) for pair in zip(*firsts, strict=True)]
    p = 0.0 if drop is None else layer.dropout
    ways = layer.bias, layer.num_layers, p, True, layer.bidirectional, layer.batch_first
    found = []
    for client, (one, h, own) in enumerate(zip(x.unbind(0), begin, values, strict=True)):
        given = one, h, list(own), *ways
        dropping = None if drop is None else CALLS[torch.lstm](*given)
        found.append(torch.lstm(*given) if drop is None or dropping is None else dropping.made(drop.of(client)))
    states, *lasts = (torch.stack(parts) for parts in zip(*found, strict=True))
    return states, lasts


@built_in(nn.LSTM, dropping=True)
def stacked_lstm(
    layer: nn.LSTM, weights: Mapping[str, Weight], x: Tensor, hx: Any = None, drop: Drops | None = None
) -> Any:
    _need_plain(layer, x)
    form = _client_by_client if _fills_the_machine(layer, x) else _over_layers
    states, (h, c) = form(layer, weights, x, None if hx is None else list(hx), drop)
    return states, (h, c)


@built_in(nn.GRU, nn.RNN, dropping=True)
def stacked_gru_or_rnn(
    layer: nn.GRU | nn.RNN,
    weights: Mapping[str, Weight],
    x: Tensor,
    hx: Tensor | None = None,
    drop: Drops | None = None,
) -> Any:
    _need_plain(layer, x)
    states, (h,) = _over_layers(layer, weights, x, None if hx is None else [hx], drop)
    return states, h


def _wide(weights: Mapping[str, Weight], x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What a cell makes of its input and of its state, before the gates."""
    inner = product(x, weights["weight_ih"], weights.get("bias_ih"))
    return inner, product(state, weights["weight_hh"], weights.get("bias_hh"))


@built_in(nn.LSTMCell)
def lstm_cell(layer: nn.LSTMCell, weights: Mapping[str, Weight], x: Tensor, hx: Any = None) -> Any:
    zeros = x.new_zeros(*x.shape[:-1], layer.hidden_size)
    h, c = (zeros, zeros) if hx is None else hx
    inner, outer = _wide(weights, x, h)
    i, f, g, o = (inner + outer).chunk(4, -1)
    cell = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


@built_in(nn.GRUCell)
def gru_cell(layer: nn.GRUCell, weights: Mapping[str, Weight], x: Tensor, hx: Tensor | None = None) -> Tensor:
    h = x.new_zeros(*x.shape[:-1], layer.hidden_size) if hx is None else hx
    (ir, iz, new), (hr, hz, kept) = (one.chunk(3, -1) for one in _wide(weights, x, h))
    n = torch.tanh(new + (ir + hr).sigmoid() * kept)
    return torch.lerp(n, h, (iz + hz).sigmoid())


@built_in(nn.RNNCell)
def rnn_cell(layer: nn.RNNCell, weights: Mapping[str, Weight], x: Tensor, hx: Tensor | None = None) -> Tensor:
    h = x.new_zeros(*x.shape[:-1], layer.hidden_size) if hx is None else hx
    inner, outer = _wide(weights, x, h)
    return torch.tanh(inner + outer) if layer.nonlinearity == "tanh" else torch.relu(inner + outer)
