"""A model as one flat vector."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi import UserError
from fedmpi.models.flat import FlatModel, add_gradients


class Mixed(nn.Module):
    """All values that may or may not be communicated: a frozen layer, batch norm, constant buffers, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.first = nn.Linear(4, 3, bias=False)
        self.second = nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight
        self.drop = nn.Dropout(0.5)
        self.register_buffer("constant", torch.ones(5), persistent=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))


def test_the_vector_is_the_trained_parameters_then_the_float_buffers_without_a_copy() -> None:
    model = FlatModel(Mixed())
    assert (model.trainable, model.size) == (4 + 4 + 12, 4 + 4 + 12 + 4 + 4)
    assert model.has_buffers and model.has_dropout
    values = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    assert list(model.layout) == ["norm.weight", "norm.bias", "first.weight", "norm.running_mean", "norm.running_var"]
    for name, place in model.layout.items():
        assert torch.equal(model.initial[place], values[name].detach().flatten())
    flat = torch.arange(model.size, dtype=torch.float32)
    model.bind(flat)
    flat[8] = -5
    model.module.norm.running_mean += 100
    assert float(model.module.first.weight.detach()[0, 0]) == -5 and flat[20:24].tolist() == [120, 121, 122, 123]
    assert model.module.second.weight is model.module.first.weight
    assert torch.equal(model.module.mask, nn.Transformer.generate_square_subsequent_mask(3))  # of −∞: stays as it is
    model.bind(model.initial.clone())
    assert float(model.module.norm.running_mean[0]) == 0
    for whole in (torch.zeros(model.size), torch.zeros(model.trainable)):
        views = model.views(whole)
        assert [tuple(view.shape) for view in views] == [(4,), (4,), (3, 4)]
        views[2].fill_(3)
        assert float(whole[8:20].sum()) == 36


def test_the_checksum_is_that_of_values_which_are_not_sent() -> None:
    found = []
    for name in ("", "first.weight", "norm.running_mean", "frozen.weight", "constant"):
        torch.manual_seed(0)
        module = Mixed()
        with torch.no_grad():
            if name:
                module.state_dict(keep_vars=True).get(name, module.constant).add_(1)
        found.append(FlatModel(module).frozen_checksum)
    assert len(set(found[:3])) == 1 and len(set(found[2:])) == 3


def test_integer_buffers_become_the_largest_of_all_clients_and_ranks() -> None:
    model, before = FlatModel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))), {}

    def counted(state: dict[str, torch.Tensor] | None = None) -> int:
        return int(model.copy(model.initial, state)[1].num_batches_tracked)

    for clients, other, expected in (((3, 1), 0, 3), ((2,), 0, 5), ((), 0, 5), ((1, 2), 9, 9)):
        before[expected] = model.state()
        model.reset_integers()
        for passes in clients:
            model.begin(model.initial.clone())
            for _ in range(passes):
                model.module(torch.ones(4, 2))
            model.note_integers()
        model.combine_integers(lambda found, other=other: np.maximum(found, other))
        assert counted() == expected
    assert [counted(state) for state in before.values()] == [0, 5, 5] and counted() == 9
    model.load(before[9])
    assert counted() == 5


def test_loss_and_gradient_are_those_of_backward() -> None:
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)))
    x, y = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])
    loss, gradients = model.loss_gradient(x, y)
    nn.functional.cross_entropy(model.module(x), y).backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters, strict=True))
    losses, weighted = model.weighted_gradient(x, y, torch.full((5,), 0.2))
    assert torch.allclose(losses.mean(), loss)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(weighted, gradients, strict=True))


def test_sparse_gradients_are_added_to_the_rows_touched() -> None:
    model = FlatModel(nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3)))
    x, y = torch.tensor([[1, 2, 2], [49, 1, 0]]), torch.tensor([0, 2])
    totals = []
    for sparse in (False, True):
        with model.sparse_embeddings(sparse):
            _, gradients = model.loss_gradient(x, y)
        assert gradients[0].is_sparse == sparse and not model.module[0].sparse
        totals.append(torch.zeros(model.size))
        add_gradients(model.views(totals[-1]), gradients, -0.5)
    assert torch.allclose(*totals, atol=1e-7) and totals[0].any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (nn.ReLU, "no trainable parameters"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "float32 and torch.float64"),
        (lambda: nn.Linear(2, 2, dtype=torch.float16), "float16"),
    ],
)
def test_what_cannot_be_trained_is_rejected(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UserError, match=words):
        FlatModel(make())


def test_a_model_gets_its_own_layers_back() -> None:
    model = FlatModel(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2)))
    for plain in (model.copy(model.initial), model.released()):
        assert type(plain[1]) is nn.Dropout and not plain.training
