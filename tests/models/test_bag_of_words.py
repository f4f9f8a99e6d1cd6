"""The linear model of words' shares against the bag of words written out, and a dense layer on it."""

from __future__ import annotations

import torch
from torch.nn import functional

from fedmpi.models import build
from tests.models.real_samples import describe_texts


def test_logits_are_those_of_a_dense_layer_on_the_shares_of_known_words() -> None:
    model = build("bag-of-words", {}, describe_texts(7, 12, 3), 0).double()
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.5, -1.0, 2.0]))
    tokens = torch.randint(0, 12, (50, 7), generator=torch.Generator().manual_seed(0))
    tokens[0] = 0
    shares = (
        functional.one_hot(tokens, 12)[..., 1:].double().mean(1) * 7 / (tokens > 0).sum(1, keepdim=True).clamp(min=1)
    )
    expected = functional.linear(
        shares[:, 1:], model.weight.T, model.bias
    )  # id 1, any unknown word, counts and says nothing
    torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)
    assert model(tokens)[0].tolist() == [0.5, -1.0, 2.0]


def test_weights_begin_by_glorot_normal_and_the_bias_at_zero() -> None:
    """Standard deviation √(2 / (V + C)) of V = 600 words and C = 200 classes, 0.05."""
    model = build("bag-of-words", {}, describe_texts(7, 602, 200), 0)
    assert model.weight.shape == (600, 200) and not model.bias.any()
    assert abs(model.weight.std().item() - 0.05) < 5e-4 and abs(model.weight.mean().item()) < 1e-3
    inside = (model.weight.abs() < 0.05).double().mean().item()
    assert abs(inside - 0.6827) < 0.01  # of a normal law; 0.577 of a uniform one
