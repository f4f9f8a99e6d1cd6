"""Scaled dot products of short texts (Vaswani et al. 2017, Eq 1) as products of all texts and heads at once.

torch's own way on a processor goes through one text and head after another, which pays where their scores would leave
the cache, and takes a quarter longer where a head has a few hundred of them and there are many heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedmpi.models.stacked.forms import FUNCTIONS

MOST_SCORES, FEWEST_HEADS = 32 * 32, 64
"""Scores of one head of one text up to which they are formed, and heads of all texts from which on: with 30 words, 20
texts and 20 heads of 20 values forwards and backwards take 4.0 ms instead of 5.1, with 65 words about the same."""


class SmallAttention(torch.autograd.Function):
    """softmax(scale · Q Kᵀ) V of queries (n, L, E), keys (n, S, E) and values (n, S, D): (n, L, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        scores = query.new_empty(len(query), query.shape[1], key.shape[1])
        torch.baddbmm(scores, query, key.transpose(1, 2), beta=0, alpha=scale, out=scores)
        chances = scores.softmax(2)
        ctx.save_for_backward(query, key, value, chances)
        ctx.scale = scale
        return torch.bmm(chances, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, chances = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_value = torch.bmm(chances.transpose(1, 2), gradient)
        of_chances = torch.bmm(gradient, value.transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_chances, chances, 2, chances.dtype)
        of_query = torch.baddbmm(torch.empty_like(query), of_scores, key, beta=0, alpha=ctx.scale)
        of_key = torch.baddbmm(torch.empty_like(key), of_scores.transpose(1, 2), query, beta=0, alpha=ctx.scale)
        return of_query, of_key, of_value, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """functional.scaled_dot_product_attention: (…, L, E), (…, S, E), (…, S, D) to (…, L, D)."""
    plain = attn_mask is None and not dropout_p and not is_causal and not enable_gqa and query.device.type == "cpu"
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    small = query.shape[-2] * key.shape[-2] <= MOST_SCORES and math.prod(query.shape[:-2]) >= FEWEST_HEADS
    empty = 0 in (query.numel(), key.numel(), value.numel())
    if not (plain and alike and small) or empty:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    flat = [one.reshape(-1, *one.shape[-2:]) for one in (query, key, value)]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    attended: Tensor = SmallAttention.apply(*flat, scale)  # type: ignore[no-untyped-call]
    return attended.view(*query.shape[:-1], value.shape[-1])


FUNCTIONS[functional.scaled_dot_product_attention] = attend
