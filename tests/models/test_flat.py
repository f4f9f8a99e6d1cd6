"""A model as one flat vector."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedmpi import UserError
from fedmpi.models.flat import FlatModel, add_gradients


class Mixed(nn.Module):
    """All values that may or may not be communicated: a frozen layer, batch norm, a constant buffer, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.first = nn.Linear(4, 3, bias=False)
        self.second = nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight
        self.drop = nn.Dropout(0.5)
        self.register_buffer("constant", torch.ones(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.norm(x))
        return self.first(x) + self.second(self.drop(x))


def test_parameters_come_first_then_the_float_buffers_and_nothing_else():
    model = FlatModel(Mixed())
    assert (model.trainable, model.size) == (4 + 4 + 12, 4 + 4 + 12 + 4 + 4)
    assert model.has_buffers
    assert model.has_dropout
    net = model.module
    expected = [net.norm.weight, net.norm.bias, net.first.weight, net.norm.running_mean, net.norm.running_var]
    assert torch.equal(model.initial, torch.cat([value.detach().flatten() for value in expected]))
    values = dict(net.named_parameters()) | dict(net.named_buffers())
    assert list(model.layout) == ["norm.weight", "norm.bias", "first.weight", "norm.running_mean", "norm.running_var"]
    for name, place in model.layout.items():
        assert torch.equal(model.initial[place], values[name].detach().flatten())


def test_masks_of_minus_infinity_stay_out_of_the_vector_and_as_they_are():
    model = FlatModel(nn.TransformerEncoderLayer(4, 1, 4))
    model.module.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))
    with_mask = FlatModel(model.module)
    assert (with_mask.size, with_mask.has_buffers) == (model.size, False)
    with_mask.bind(torch.zeros(model.size))
    assert torch.equal(with_mask.module.mask, nn.Transformer.generate_square_subsequent_mask(3))


def test_a_bound_module_is_the_vector_without_a_copy():
    model = FlatModel(Mixed())
    flat = torch.arange(model.size, dtype=torch.float32)
    model.bind(flat)
    flat[8] = -5
    assert float(model.module.first.weight.detach()[0, 0]) == -5
    assert model.module.second.weight is model.module.first.weight
    model.module.norm.running_mean += 100
    assert flat[20:24].tolist() == [120, 121, 122, 123]
    model.bind(model.initial.clone())
    assert float(model.module.norm.running_mean[0]) == 0


def test_views_have_the_shapes_of_the_parameters_and_share_memory():
    model = FlatModel(Mixed())
    for flat in (torch.zeros(model.size), torch.zeros(model.trainable)):
        views = model.views(flat)
        assert [tuple(view.shape) for view in views] == [(4,), (4,), (3, 4)]
        views[2].fill_(3)
        assert float(flat[8:20].sum()) == 36


def test_loss_and_gradient_are_those_of_backward():
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)))
    x, y = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])
    loss, gradients = model.loss_gradient(x, y)
    nn.functional.cross_entropy(model.module(x), y).backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters, strict=True))
    losses, weighted = model.weighted_gradient(x, y, torch.full((5,), 0.2))
    assert torch.allclose(losses.mean(), loss)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(weighted, gradients, strict=True))


def test_sparse_gradients_are_added_to_the_rows_touched():
    model = FlatModel(nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3)))
    x, y = torch.tensor([[1, 2, 2], [49, 1, 0]]), torch.tensor([0, 2])
    _, dense = model.loss_gradient(x, y)
    with model.sparse_embeddings():
        _, sparse = model.loss_gradient(x, y)
    assert sparse[0].is_sparse
    assert not model.module[0].sparse
    totals = [torch.zeros(model.size) for _ in range(2)]
    for total, gradients in zip(totals, (dense, sparse), strict=True):
        add_gradients(model.views(total), gradients, -0.5)
    assert torch.allclose(*totals, atol=1e-7)
    assert totals[0].any()


def test_what_cannot_be_trained_is_rejected():
    with pytest.raises(UserError, match="no trainable parameters"):
        FlatModel(nn.ReLU())
    with pytest.raises(UserError, match=r"mixes float types \(torch.float32, torch.float64\)"):
        FlatModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
    with pytest.raises(UserError, match="complex64"):
        FlatModel(nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.cfloat))]))
    with pytest.raises(ValueError, match="contiguous vector of 6 values"):
        FlatModel(nn.Linear(2, 2)).bind(torch.zeros(5))
