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
