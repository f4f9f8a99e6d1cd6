"""Scaled dot products of short texts are those of torch, forwards and backwards."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, autograd, nn
from torch.nn import functional

from fedmpi.data.schema import DataDescription
from fedmpi.models.stacked.graph import GraphLayer
from fedmpi.models.stacked.net import translate
from fedmpi.models.stacked.small_attention import attend


@pytest.mark.parametrize("shape", [(4, 16, 5, 6), (70, 3, 2), (2, 2, 5, 6), (64, 40, 4)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_dot_products_of_short_texts_are_those_of_torch(shape: tuple[int, ...], scale: float | None):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    attended, expected = attend(q, k, v, scale=scale), functional.scaled_dot_product_attention(q, k, v, scale=scale)
    assert attended.grad_fn is not None
    formed = "SmallAttention" in str(attended.grad_fn.next_functions[0][0])
    assert formed == (math.prod(shape[:-2]) >= 64 and shape[-2] <= 32)
    gradient = torch.randn(attended.shape, generator=generator, dtype=torch.float64)
    found, wanted = (autograd.grad(one, (q, k, v), gradient) for one in (attended, expected))
    for one, other in zip((attended, *found), (expected, *wanted), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


def test_masked_dot_products_are_left_to_torch():
    q = torch.randn(2, 40, 6, 4, generator=torch.Generator().manual_seed(4))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.allclose(attend(q, q, q, is_causal=True), expected, atol=1e-6)
    assert torch.allclose(attend(q, q, q, mask), expected, atol=1e-6)


@pytest.mark.parametrize(("texts", "words", "size"), [(64, 0, 3), (64, 3, 0), (2**10, 2, 0)])
def test_products_of_nothing_are_left_to_torch(texts: int, words: int, size: int):
    q, k = torch.zeros(texts, 2, size), torch.zeros(texts, words, size)
    assert attend(q, k, k).shape == (texts, 2, size)
    assert not attend(q, k, k).any()


@pytest.mark.parametrize(("queries", "keys", "heads"), [(32, 32, 64), (16, 64, 64), (33, 32, 64), (32, 32, 63)])
def test_short_texts_are_those_of_so_many_scores_and_heads(queries: int, keys: int, heads: int):
    """Queries and keys of unlike numbers and strides, values of their own size."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(heads, 2, queries, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()
    k = torch.randn(heads, keys, 4, generator=generator, dtype=torch.float64)[..., ::2].requires_grad_()
    v = torch.randn(heads, keys, 1, generator=generator, dtype=torch.float64).requires_grad_()
    attended, expected = attend(q, k, v), functional.scaled_dot_product_attention(q, k, v)
    assert attended.grad_fn is not None
    assert ("SmallAttention" in str(attended.grad_fn.next_functions)) == (queries * keys <= 1024 and heads >= 64)
    gradient = torch.ones((), dtype=torch.float64).expand(attended.shape)
    found, wanted = (autograd.grad(one, (q, k, v), gradient) for one in (attended, expected))
    for one, other in zip((attended, *found), (expected, *wanted), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


def test_values_that_many_texts_share_are_left_to_torch():
    q, v = torch.randn(2, 2, 40, 6, 4, generator=torch.Generator().manual_seed(4)).unbind(0)
    expected = functional.scaled_dot_product_attention(q, q, v[:1])
    assert torch.allclose(attend(q, q, v[:1]), expected, atol=1e-6)
    assert torch.allclose(attend(q, v[:1], v[:1]), functional.scaled_dot_product_attention(q, v[:1], v[:1]), atol=1e-6)


class Dots(nn.Module):
    """Rows of an image that ask one another."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return functional.scaled_dot_product_attention(x, x, x).mean((1, 2))


def test_a_graph_takes_them():
    [layer] = translate(Dots(), DataDescription((2, 4, 6), "float32", 3, "image", 0, (), ())).layers
    assert isinstance(layer, GraphLayer)
    assert attend in layer.run.__globals__.values()
