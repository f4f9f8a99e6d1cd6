"""nn.MultiheadAttention of many clients in a graph (Vaswani et al. 2017, §3.2), its projections stacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.models.dropout_calls import shares
from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.client_weights import Weight
from fedmpi.models.stacked.forms import built_in, dense, mapped_layer, product
from fedmpi.models.stacked.small_attention import attend


@built_in(nn.MultiheadAttention, dropping=True)
def attention(
    layer: nn.MultiheadAttention,
    weights: Mapping[str, Weight],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Inputs (k, b, L, E), or (k, L, b, E) without `batch_first`; a mask of places (k, L, S), of padding (k, b, S);
    `drop` of the shares (k, b, heads, L, S)."""
    plain = layer.in_proj_weight is not None and layer.bias_k is None and not layer.add_zero_attn
    if not plain or query.dim() != 4 or (attn_mask is not None and attn_mask.dim() != 3):
        if drop is not None:
            raise NotStackable("MultiheadAttention with dropout and a mask a head, or with further keys")
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "is_causal": is_causal}
        ways = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
        found: tuple[Tensor, Tensor | None] = mapped_layer(layer, weights, query, key, value, **masks, **ways)
        return found
    projected = _projected(weights, query, key, value)
    if not layer.batch_first:
        projected = [one.transpose(1, 2) for one in projected]
    q, k, v = (torch.unflatten(one, 3, (layer.num_heads, -1)).transpose(2, 3) for one in projected)
    mask = _mask(q, attn_mask, key_padding_mask)
    chances = None
    if need_weights or drop is not None:
        scores = q @ k.transpose(3, 4) / math.sqrt(q.shape[4])
        chances = (scores if mask is None else scores + mask).softmax(4) if drop is None else drop(shares(scores, mask))
        attended = chances @ v
    else:
        flat_q, flat_k, flat_v = (one.flatten(0, 1) for one in (q, k, v))
        flat_mask = None if mask is None else mask.flatten(0, 1)
        attended = attend(flat_q, flat_k, flat_v, flat_mask)
        attended = torch.unflatten(attended, 0, q.shape[:2])
    attended = attended.transpose(2, 3).flatten(3)
    attended = attended if layer.batch_first else attended.transpose(1, 2)
    out = product(attended, weights["out_proj.weight"], weights.get("out_proj.bias"))
    if chances is None or not need_weights:
        return out, None
    return out, chances.mean(2) if average_attn_weights else chances


def _projected(weights: Mapping[str, Weight], query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    weight, bias = weights["in_proj_weight"], weights.get("in_proj_bias")
    if query is key and key is value:
        return list(product(query, weight, bias).chunk(3, 3))
    biases: Any = (None, None, None) if bias is None else bias.value.chunk(3, 1)
    inputs = zip((query, key, value), weight.value.chunk(3, 1), biases, strict=True)
    return [dense(one, own, c) for one, own, c in inputs]


def _mask(q: Tensor, places: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """What is added to the scores (k, b, heads, L, S)."""
    masks = [] if places is None else [places[:, None, None]]
    masks += [] if padding is None else [padding[:, :, None, None]]
    added = [
        torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf) if mask.dtype == torch.bool else mask
        for mask in masks
    ]
    if not added:
        return None
    whole = added[0] if len(added) == 1 else added[0] + added[1]
    return whole.expand(*q.shape[:2], *whole.shape[2:])
