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
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedmpi.models.dropout import Masks, dropped

Drop = Callable[[Tensor], Tensor]
"""Values with some of them zero and the others scaled, the first axis being the samples."""


class DropoutCalls(TorchFunctionMode):
    """Within: torch's functions that drop values get their masks from a source.

    Parameters
    ----------
    masks : Masks
        Of the model.

    Attributes
    ----------
    met : bool
        Whether a function has asked for a mask since this was last set to False.
    """

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
    """A call that asks for masks.

    Parameters
    ----------
    p : float
        Probability of a zero, 0 < p < 1.
    made : callable
        made(drop) -> what the function returns, where `drop` is applied to what values are dropped from.
    channels : bool
        Whether whole channels (second axis) are dropped.
    """

    def __init__(self, p: float, made: Callable[[Drop], Any], channels: bool = False):
        self.p, self.made, self.channels = p, made, channels


def _values(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> DroppingCall | None:
    if not training or not 0 < p < 1:
        return None
    return DroppingCall(p, lambda drop: input.copy_(drop(input)) if inplace else drop(input))


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
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *more: Any,
    **named: Any,
) -> DroppingCall | None:  # fmt: skip
    if not 0 < dropout_p < 1:
        return None
    return DroppingCall(dropout_p, lambda drop: attention(drop, query, key, value, attn_mask, *more, **named))


def attention(
    drop: Drop,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """functional.scaled_dot_product_attention, shares dropped: (…, L, E), (…, S, E), (…, S, D) to (…, L, D)."""
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return drop(scores.softmax(-1)) @ value
    allowed = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, -math.inf) if allowed else scores + attn_mask
    nothing = scores.isneginf().all(-1, keepdim=True)  # to attend to: such a place gets zeros, as in torch's own
    return drop(scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)) @ value


_several_heads = inspect.signature(functional.multi_head_attention_forward)


def _heads(*args: Any, **kwargs: Any) -> DroppingCall | None:
    """nn.MultiheadAttention: shares as torch forms them, then values and projection once more behind the dropout."""
    given = _several_heads.bind(*args, **kwargs)
    given.apply_defaults()
    of: dict[str, Any] = given.arguments
    if not of["training"] or not 0 < of["dropout_p"] < 1 or of["static_v"] is not None or of["static_k"] is not None:
        return None

    def made(drop: Drop) -> tuple[Tensor, Tensor | None]:
        whole = {**of, "dropout_p": 0.0, "need_weights": True, "average_attn_weights": False}
        shares = cast(Tensor, functional.multi_head_attention_forward(**whole)[1])
        alone = of["query"].dim() == 2
        shares = drop(shares.unsqueeze(0) if alone else shares)
        values = _value_heads(of, alone)
        joined = (shares @ values).permute(2, 0, 1, 3).flatten(2)
        out = functional.linear(joined, of["out_proj_weight"], of["out_proj_bias"])
        shares = shares.mean(1) if of["average_attn_weights"] else shares
        if alone:
            out, shares = out.squeeze(1), shares.squeeze(0)
        return out, shares if of["need_weights"] else None

    return DroppingCall(of["dropout_p"], made)


def _value_heads(of: dict[str, Any], alone: bool) -> Tensor:
    """The values (b, heads, S, D) of attention; a bias of values and zeros are further places, as torch adds them."""
    size, heads, bias = of["embed_dim_to_check"], of["num_heads"], of["in_proj_bias"]
    value = of["value"].unsqueeze(1) if alone else of["value"]
    weight = of["v_proj_weight"] if of["use_separate_proj_weight"] else of["in_proj_weight"][2 * size :]
    v = functional.linear(value, weight, None if bias is None else bias[2 * size :])
    if of["bias_v"] is not None:
        v = torch.cat([v, of["bias_v"].repeat(1, v.shape[1], 1)])
    v = torch.unflatten(v, 2, (heads, -1)).permute(1, 2, 0, 3)
    return functional.pad(v, (0, 0, 0, 1)) if of["add_zero_attn"] else v


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
        if not isinstance(has_biases, bool) or num_layers == 1 or not train or not 0 < dropout < 1:
            return None  # packed sequences have another argument there
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

        return DroppingCall(dropout, made)

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
