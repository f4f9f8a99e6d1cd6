"""Maxima over texts are found where they are, and have the values and gradients of torch's convolution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, autograd, nn
from torch.nn import functional

from fedmpi.data.schema import DataDescription
from fedmpi.models.stacked import forms, peaks
from fedmpi.models.stacked.base import Step
from fedmpi.models.stacked.client_weights import Weight
from fedmpi.models.stacked.net import why_not_stackable
from fedmpi.models.stacked.peaks import Peaks, highest
from fedmpi.models.stacked.peaks_of_graph import find_peaks
from fedmpi.models.stacked.trace import trace

TEXTS = DataDescription((12,), "int32", 3, "text", 20, (), ())


class Filters(nn.Module):
    """What a function or layer makes of one filter, or more, over two words of twelve: eleven positions."""

    def __init__(self, peak, filters: int = 1):
        super().__init__()
        self.embedding, self.conv, self.fc = nn.Embedding(20, 4), nn.Conv1d(4, filters, 2), nn.Linear(filters, 3)
        self.peak = peak

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.peak(self.conv(self.embedding(tokens).transpose(1, 2))).flatten(1))


class ReLU(nn.Module):
    """Of the name of another one."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.leaky_relu(x, 0.5)


def found(module: nn.Module) -> list[str]:
    return [str(node.target) for node in find_peaks(trace(module, TEXTS, forms.LAYERS))]


PEAKS = {
    "max": lambda y: y.max(2)[0],
    "max_pool1d": lambda y: functional.max_pool1d(y, 11),
    "MaxPool1d": nn.MaxPool1d(6, stride=20, padding=0, dilation=2),
    "whole": nn.Sequential(nn.ReLU(), nn.MaxPool1d(11)),
    "adaptive": lambda y: functional.adaptive_max_pool1d(functional.relu(y), 1),
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_maximum_over_all_positions_is_found_by_what_it_reads(name: str):
    """MaxPool1d with dilation reads every second one."""
    assert found(Filters(PEAKS[name])) == ([] if name == "MaxPool1d" else ["conv"])


@pytest.mark.parametrize("window", range(6, 11))
def test_a_pool_that_leaves_the_last_positions_out_is_none(window: int):
    """Whatever the values of the words that the graph was tried with."""
    for seed in range(8):
        torch.manual_seed(seed)
        assert found(Filters(nn.MaxPool1d(window))) == []


def test_what_has_the_name_of_a_function_of_torch_is_not_taken_for_it(monkeypatch):
    monkeypatch.setitem(forms.LAYERS, ReLU, forms.mapped_layer)
    assert found(Filters(nn.Sequential(ReLU(), nn.MaxPool1d(11)))) == []
    assert found(Filters(lambda y: torch.stack(y.max(2), 0)[0])) == []


def test_places_and_several_maxima_are_no_maximum():
    assert found(Filters(lambda y: y.max(2)[1] * 1.0)) == []
    # each of twelve windows holds the whole text
    assert found(Filters(lambda y: functional.max_pool1d(y, 24, 1, 12)[:, :, 0])) == []


@pytest.mark.parametrize("change", [torch.relu_, lambda y: y.add_(1), lambda y: functional.elu(y, inplace=True)])
@pytest.mark.parametrize("cut", [True, False])
def test_what_follows_may_change_the_maxima_in_place(change, cut: bool):
    module = Filters(lambda y: change((y.relu() if cut else y).max(2)[0]), filters=3)
    assert found(module) == ["conv"]
    assert why_not_stackable(module.double(), TEXTS) is None


@pytest.mark.parametrize(("filters", "patches"), [(8, 0), (9, 1)])
def test_many_filters_of_short_vectors_go_back_patch_by_patch(filters: int, patches: int, monkeypatch):
    """What is there is added to or replaced, the same both ways."""
    generator = torch.Generator().manual_seed(6)
    at = Peaks(clients=2, rows=3, length=5, width=2, filters=filters, device=torch.device("cpu"))
    where = torch.randint(0, 4, (2, 3, filters), generator=generator)
    gradient = torch.randn(2, 3, filters, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, filters, 2 * 4, generator=generator, dtype=torch.float64)
    calls, by_patch = [], Peaks._add_patch_gradients
    monkeypatch.setattr(Peaks, "_add_patch_gradients", lambda *given: calls.append(given) or by_patch(*given))
    expected = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    for client, row, one in np.ndindex(2, 3, filters):
        place = int(where[client, row, one])
        expected[client, row, place : place + 2] += gradient[client, row, one] * weight[client, one].view(2, 4)
    for add in (False, True):
        into = torch.ones_like(expected)
        at.of_words(where, gradient, weight, into, gradient.new_empty, add)
        assert torch.allclose(into, expected + add, rtol=1e-12)
    assert len(calls) == 2 * patches


@pytest.mark.parametrize("most", [0, 2, 99], ids=["by-patch", "as-it-is", "spread"])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("clients", "rows", "length", "dimension", "filters", "width"),
    [(2, 3, 7, 4, 5, 3), (1, 1, 1, 1, 1, 1), (3, 2, 5, 1, 6, 5), (1, 4, 6, 3, 1, 1), (2, 2, 4, 6, 2, 4)],
)
def test_maxima_and_gradients_are_those_of_torch(
    clients: int, rows: int, length: int, dimension: int, filters: int, width: int, alone: bool, most: int, monkeypatch
):
    monkeypatch.setattr(peaks, "MOST_FILTERS", most)
    generator = torch.Generator().manual_seed(length)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).double().requires_grad_()  # so that some are equal

    x, value, bias = drawn(clients, rows, dimension, length), drawn(clients, filters, width, dimension), None
    bias = drawn(clients, filters) if rows % 2 else None
    for cut in (True, False):
        scores = [
            functional.conv1d(one, own.transpose(1, 2), None if bias is None else bias[client])
            for client, (one, own) in enumerate(zip(x, value, strict=True))
        ]
        expected = torch.stack([(one.relu() if cut else one).max(2)[0] for one in scores])
        leaves = [x, value, *([] if bias is None else [bias])]
        towards = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        targets = [torch.zeros_like(one) for one in leaves]
        given = [Weight(one, to, Step(0, 1), alone) for one, to in zip(leaves, targets, strict=True)]
        weights = dict(zip(("weight", "bias"), given[1:], strict=False))
        made = highest(weights, x, cut)
        assert torch.equal(made, expected)
        wanted = autograd.grad(expected, leaves, towards)
        gradients = autograd.grad(made, leaves, towards, allow_unused=True)
        for number, (one, other) in enumerate(zip(gradients, wanted, strict=True)):
            assert (one is None) == (alone and number > 0)
            assert torch.allclose(targets[number] if one is None else one, other, rtol=1e-12, atol=1e-13)
