"""The multilayer perceptron."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedmpi import UserError
from fedmpi.models.mlp import mlp
from tests.local.synthetic import IMAGES, SMALL_IMAGES, TEXTS


@pytest.mark.parametrize("hidden", [[200, 200], [50], []])
def test_the_layers_are_as_wide_as_asked_for(hidden: list[int]):
    widths = [784, *hidden, 47]
    model = mlp(IMAGES, hidden=hidden)
    shapes = [layer.weight.shape for layer in model if isinstance(layer, nn.Linear)]
    assert shapes == [(b, a) for a, b in zip(widths, widths[1:], strict=False)]
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 47)


def test_the_paper_size_on_mnist():
    assert sum(p.numel() for p in mlp(IMAGES).parameters()) == 784 * 200 + 200 + 200 * 200 + 200 + 200 * 47 + 47


def test_activation_and_dropout_stand_after_every_hidden_layer():
    kinds = [type(layer) for layer in mlp(SMALL_IMAGES, hidden=[3, 4], activation="tanh", dropout=0.1)]
    assert kinds == [nn.Flatten, nn.Linear, nn.Tanh, nn.Dropout, nn.Linear, nn.Tanh, nn.Dropout, nn.Linear]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"hidden": [0]}, "list of positive"),
        ({"hidden": "wide"}, "list of positive"),
        ({"activation": "step"}, "none of relu, tanh"),
        ({"dropout": 1.0}, r"must lie in \[0, 1\)"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        mlp(SMALL_IMAGES, **options)


def test_token_ids_are_refused():
    with pytest.raises(UserError, match="cannot read token ids"):
        mlp(TEXTS)
