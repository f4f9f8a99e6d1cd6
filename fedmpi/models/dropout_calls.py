"""Dropout that a forward pass calls for instead of having a layer for it: its masks come from the client's stream, too.

Called so are `F.dropout` and its kin, the shares of attention (Vaswani et al. 2017, §5.4) in
`F.scaled_dot_product_attention` and nn.MultiheadAttention, and what nn.LSTM, nn.GRU and nn.RNN do between their layers.
While a `DropoutCalls` is entered, these functions ask the model's source of masks where they would draw from torch's
global generator. What is not among them (`F.alpha_dropout`, packed sequences) draws from that generator still.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedmpi.models.dropout import Masks, dropped

_backward: Any = torch.autograd.Variable._execution_engine


def gradients_within(
    mode: TorchFunctionMode, of: Tensor, by: Sequence[Tensor], weights: Tensor | None = None
) -> Sequence[Tensor | None]:
    """torch.autograd.grad(of, by, weights, allow_unused=True), the mode being on for what the backward pass calls.

    Within torch.autograd.grad itself, a call like any other to it, it is off.
    """
    with mode:
        weights = torch.ones_like(of) if weights is None else weights
        found: Sequence[Tensor | None] = _backward.run_backward(
            (of,), (weights,), False, False, tuple(by), allow_unreachable=True, accumulate_grad=False
        )
    return found


Drop = Callable[[Tensor], Tensor]
"""Values with some of them zero and the others scaled, the first axis being the samples."""


class DropoutCalls(TorchFunctionMode):
    """Within: torch's functions that drop values get their masks from a source."""

    def __init__(self, masks: Masks):
        super().__init__()
        self.masks = masks
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = CALLS.get(func)
        call = None if asked is None else asked(*args, **kwargs)
        if call is None:
            return func(*args, **kwargs)
        self.met = True
        return call.made(self._drop(call))

    def _drop(self, call: DroppingCall) -> Drop:
        return lambda x: dropped(x, call.p, self.masks, call.channels)


class DroppingCall:
    """A call that asks for masks."""

    def __init__(self, p: float, made: Callable[[Drop], Any], channels: bool = False):
        self.p, self.made, self.channels = p, made, channels


def _values(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> DroppingCall | None:
    if not training or not 0 < p < 1 or not _plain(input):
        return None
    return DroppingCall(float(p), lambda drop: input.copy_(drop(input)) if inplace else drop(input))


def _plain(x: Tensor) -> bool:
    """Whether masks of the shape that a tensor shows fit it: not where it is nested, or one of many in `torch.vmap`."""
    return x.layout == torch.strided and not x.is_nested and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _channels_of(*axes: int) -> Callable[..., DroppingCall | None]:
    """Of samples with so many axes; of a single one, without an axis for the samples, torch drops by itself."""

    def channels(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> DroppingCall | None:
        call = _values(input, p, training, inplace) if input.dim() in axes else None
        return None if call is None else DroppingCall(p, call.made, channels=True)

    return channels


def _named_train(
    asked: Callable[..., DroppingCall | None], inplace: bool = False
) -> Callable[..., DroppingCall | None]:
    """For torch's own functions, beside those of torch.nn.functional."""
    return lambda input, p, train: asked(input, p, train, inplace)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> DroppingCall | None:
    floats = attn_mask is not None and attn_mask.is_floating_point()
    refused = attn_mask is not None and (is_causal or not (floats or attn_mask.dtype == torch.bool))  # by torch
    if not 0 < dropout_p < 1 or refused or not _plain(query):
        return None

    def made(drop: Drop) -> Tensor:
        keys, values, mask = key, value, attn_mask
        if enable_gqa:
            keys, values = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
        scores = query @ keys.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
        return drop(shares(scores, mask)) @ values

    return DroppingCall(float(dropout_p), made)


def shares(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax of scores (…, L, S) plus a mask; zeros where a place has nothing to attend to, as torch has them."""
    if mask is None:
        return scores.softmax(-1)
    scores = scores + mask.to(scores.dtype)
    nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


_several_heads = inspect.signature(functional.multi_head_attention_forward)


def _heads(*args: Any, **kwargs: Any) -> DroppingCall | None:
    """nn.MultiheadAttention, its shares dropped; with (L, b, E) inside, as torch calls it."""
    given = _several_heads.bind(*args, **kwargs)
    given.apply_defaults()
    of: dict[str, Any] = given.arguments
    static = of["static_k"] is not None or of["static_v"] is not None
    refused = of["is_causal"] and of["attn_mask"] is None  # by torch
    if not of["training"] or not 0 < of["dropout_p"] < 1 or static or refused or not _plain(of["query"]):
        return None

    def made(drop: Drop) -> tuple[Tensor, Tensor | None]:
        alone = of["query"].dim() == 2
        q, k, v, mask = _query_key_value(of, alone)
        chances = drop(shares(q @ k.transpose(2, 3) / math.sqrt(q.shape[3]), mask))
        joined = (chances @ v).permute(2, 0, 1, 3).flatten(2)
        out = functional.linear(joined, of["out_proj_weight"], of["out_proj_bias"])
        chances = chances.mean(1) if of["average_attn_weights"] else chances
        if alone:
            out, chances = out.squeeze(1), chances.squeeze(0)
        return out, chances if of["need_weights"] else None

    return DroppingCall(float(of["dropout_p"]), made)


def _query_key_value(of: dict[str, Any], alone: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries (b, heads, L, D), keys and values (b, heads, S, D), and what masks add to the scores.

    Biases of keys and values, and zeros, are further places behind the others, which no mask hides.
    """
    apart = of["use_separate_proj_weight"]
    names = "q_proj_weight", "k_proj_weight", "v_proj_weight"
    weights = [of[name] for name in names] if apart else of["in_proj_weight"].chunk(3)
    biases = [None] * 3 if of["in_proj_bias"] is None else of["in_proj_bias"].chunk(3)
    inputs = [of[name].unsqueeze(1) if alone else of[name] for name in ("query", "key", "value")]
    q, k, v = (functional.linear(x, w, c) for x, w, c in zip(inputs, weights, biases, strict=True))
    further = 0
    if of["bias_k"] is not None:
        k, v = (
            torch.cat([one, bias.repeat(1, one.shape[1], 1)]) for one, bias in ((k, of["bias_k"]), (v, of["bias_v"]))
        )
        further = 1
    q, k, v = (torch.unflatten(one, 2, (of["num_heads"], -1)).permute(1, 2, 0, 3) for one in (q, k, v))
    if of["add_zero_attn"]:
        k, v, further = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1)), further + 1
    masks = []
    if of["attn_mask"] is not None:
        places = of["attn_mask"]
        masks.append(places if places.dim() == 2 else places.view(len(q), -1, *places.shape[1:]))
    if of["key_padding_mask"] is not None:
        padding = of["key_padding_mask"]
        masks.append((padding.unsqueeze(0) if alone else padding)[:, None, None])
    added = [
        torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf) if mask.dtype == torch.bool else mask
        for mask in masks
    ]
    whole = sum(added[1:], added[0]) if added else None
    return q, k, v, whole if whole is None else functional.pad(whole, (0, further))


def _between_layers(function: Callable[..., Any]) -> Callable[..., DroppingCall | None]:
    def recurrent(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> DroppingCall | None:
        packed = not isinstance(has_biases, bool)  # which have another argument there
        if packed or num_layers == 1 or not train or not 0 < dropout < 1 or not _plain(input):
            return None
        places, count = 2 if bidirectional else 1, len(params) // num_layers
        firsts = [hx] if isinstance(hx, Tensor) else list(hx)

        def made(drop: Drop) -> Any:
            x, lasts = input, []
            for layer in range(num_layers):
                if layer:
                    x = drop(x) if batch_first else drop(x.transpose(0, 1)).transpose(0, 1)
                begin = [states[layer * places : (layer + 1) * places] for states in firsts]
                own = list(params[layer * count : (layer + 1) * count])
                ways = has_biases, 1, 0.0, train, bidirectional, batch_first
                x, *last = function(x, begin[0] if isinstance(hx, Tensor) else begin, own, *ways)
                lasts.append(last)
            return x, *(torch.cat(states) for states in zip(*lasts, strict=True))

        return DroppingCall(float(dropout), made)

    return recurrent


CALLS: dict[Any, Callable[..., DroppingCall | None]] = {
    functional.dropout: _values,
    functional.dropout1d: _channels_of(3),
    functional.dropout2d: _channels_of(3, 4),
    functional.dropout3d: _channels_of(5),
    torch.dropout: _named_train(_values),
    torch.dropout_: _named_train(_values, inplace=True),
    torch.feature_dropout: _named_train(_channels_of(3, 4, 5)),
    torch.feature_dropout_: _named_train(_channels_of(3, 4, 5), inplace=True),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _heads,
    torch.lstm: _between_layers(torch.lstm),
    torch.gru: _between_layers(torch.gru),
    torch.rnn_tanh: _between_layers(torch.rnn_tanh),
    torch.rnn_relu: _between_layers(torch.rnn_relu),
}
"""Function -> what it asks for, None where it drops nothing."""
