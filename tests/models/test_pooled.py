"""A convolution and the pooling behind it as one layer gives what the two give, to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi.common.streams import Streams
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from fedmpi.models.stacked.base import Place, Slot, Step, Workspace
from fedmpi.models.stacked.image import Convolution, Geometry, Maps, MaxPool, Patches
from fedmpi.models.stacked.net import stacked_form
from fedmpi.models.stacked.pooled import EvenColumnsFirst, PooledConvolution, to_the_larger
from tests.local.stacks import (
    CLASSES,
    Source,
    assert_trains_as_one_by_one,
    image_network,
    relative_difference,
    tasks_for,
    train,
)

IMAGES = DataDescription((2, 13, 12), "float32", CLASSES, "image", 0, (), ())


def network(*layers: nn.Module) -> nn.Sequential:
    return image_network(layers, IMAGES)


NETWORKS = {
    "a row and a column that no window reads": [nn.Conv2d(2, 3, 2), nn.ReLU(), nn.MaxPool2d(2)],
    "padding": [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
    "strides": [nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(0, 1)), nn.MaxPool2d(2), nn.ReLU()],
    "no bias": [nn.Conv2d(2, 4, 3, bias=False), nn.MaxPool2d(2), nn.Tanh()],
    "eight filters": [nn.Conv2d(2, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 9, 3), nn.ReLU(), nn.MaxPool2d(2)],
    "a mean of eight filters": [
        nn.Conv2d(2, 8, (3, 2), stride=(1, 2)), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 9, 2, padding=1),
        nn.AvgPool2d(2)
    ],
    "two in a row": [
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Conv2d(3, 5, 2), nn.ReLU(), nn.MaxPool2d(2)
    ],
    "many filters": [
        nn.Conv2d(2, 64, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 65, 2, bias=False), nn.MaxPool2d(2)
    ],
    "the mean of many filters": [
        nn.Conv2d(2, 64, (3, 2), stride=(1, 2)), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(64, 64, 2), nn.AvgPool2d(2)
    ],
    "a mean": [nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(3, 5, 2), nn.AvgPool2d(2)],
    "a mean of what ReLU leaves": [
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_ragged_clients_reach_the_weights_of_the_sequential_engine(name: str, dtype: torch.dtype, tolerance: float):
    module = network(*NETWORKS[name])
    net = stacked_form(module, IMAGES)
    assert net is not None
    assert sum(isinstance(layer, PooledConvolution) for layer in net.layers) == sum(
        isinstance(layer, nn.Conv2d) for layer in module
    )
    assert_trains_as_one_by_one(module, IMAGES, dtype, tolerance)


@pytest.mark.parametrize("filters", [3, 8, 64])
def test_the_first_of_equal_values_gets_the_gradient(filters: int):
    """All outputs of filters of zeros are the bias: which patch a filter learns from is a matter of order alone."""
    module = network(nn.Conv2d(2, filters, 3), nn.ReLU(), nn.MaxPool2d(2)).double()
    with torch.no_grad():
        module[0].weight.zero_()
        module[0].bias.fill_(0.5)
    model, sizes = FlatModel(module), np.array([6, 4])
    source, rule = Source(IMAGES, sizes, torch.float64), LocalRule(lr=0.1, epochs=1, batch_size=None)
    by_one, _ = train(SequentialEngine(model, source, Streams(5)), tasks_for(sizes), model.initial, rule)
    beside, _ = train(BatchedEngine(model, source, Streams(5)), tasks_for(sizes), model.initial, rule)
    assert relative_difference(beside, by_one) < 1e-12


def test_a_gradient_goes_to_the_larger_value():
    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 2.0, -1.0])
    to_the_larger(torch.tensor([10.0, 20.0, 30.0]), first, second)
    assert first.tolist() == [0, 20, 30]
    assert second.tolist() == [10, 0, 0]


def pooled(filters: int) -> PooledConvolution:
    """The layer for filters of 3 × 4, whose outputs are 11 × 9."""
    net = stacked_form(network(nn.Conv2d(2, filters, (3, 4)), nn.MaxPool2d(2)), IMAGES)
    assert net is not None
    return next(layer for layer in net.layers if isinstance(layer, PooledConvolution))


@pytest.mark.parametrize(
    ("filters", "copies", "output", "patch"),
    [(7, (2, 2), (5, 4), 2 * 4 * 5), (8, (1, 2), (10, 4), 2 * 3 * 5), (64, (1, 1), (10, 8), 2 * 3 * 4)],
)
def test_filters_are_written_for_the_outputs_of_a_window(
    filters: int, copies: tuple[int, int], output: tuple[int, int], patch: int
):
    """And only outputs that a window reads are made."""
    layer = pooled(filters)
    assert (layer.copies, layer.patches.output, layer.patches.patch) == (copies, output, patch)


def test_many_filters_lie_as_they_are_left_columns_before_right_ones():
    image = torch.arange(5.0).view(1, 1, 1, 5)
    split = EvenColumnsFirst((1, 1, 5), (1, 1), (1, 1), (0, 0))
    assert split.output == (1, 4)
    assert image.flatten()[split.unfold_index()].tolist() == [0, 2, 1, 3]
    for filters, patch in ((63, 2 * 3 * 4), (64, 2 * 3 * 3)):
        net = stacked_form(network(nn.Conv2d(2, filters, 3), nn.MaxPool2d(2)), IMAGES)
        assert net is not None
        assert next(one for one in net.layers if isinstance(one, PooledConvolution)).patches.patch == patch


class Stack:
    """Values of two clients."""

    step = Step(1, 0)

    def __init__(self, size: int):
        self.values = torch.zeros(2, size)

    def value(self, slot: Slot, *shape: int) -> torch.Tensor:
        return slot.of_stack(self.values, shape)

    target = value


def test_patches_are_filled_up_to_whole_blocks_by_those_of_the_next_client():
    workspace = Workspace(torch.float32, torch.device("cpu"))
    patches = Patches(
        Maps(Geometry((1, 4, 3), (3, 3), (1, 1), (0, 0))),
        Place(2, 5, workspace, Stack(0)),
        workspace.take("x", 2, 12, 5, guard=5),
    )
    patches.of_clients.copy_(torch.arange(1.0, 2 * 9 * 10 + 1).view(2, 9, 10))
    assert patches.filled.shape == (2, 16, 10)
    assert torch.equal(patches.filled[:, :9], patches.of_clients)
    assert torch.equal(patches.filled[0, 9:], patches.of_clients[1, :7])
    assert not patches.filled[1, 9:].any()
    assert workspace.take((0, "patches"), 0).untyped_storage().nbytes() == 4 * (2 * 9 + 7) * 10  # one filling for all
    assert workspace.take("scratch", 0).untyped_storage().nbytes() == 4 * patches.gradient.numel()


def test_patches_of_the_first_layer_have_no_room_for_gradients():
    workspace = Workspace(torch.float32, torch.device("cpu"))
    place = Place(2, 5, workspace, Stack(0), first=True)
    x = workspace.take("x", 2, 12, 5, guard=5)
    Patches(Maps(Geometry((1, 4, 3), (3, 3), (1, 1), (0, 0))), place, x)
    assert not workspace.take("scratch", 0).untyped_storage().nbytes()


def test_index_vectors_are_made_for_the_most_clients_and_read_in_part_for_fewer():
    maps = Maps(Geometry((2, 4, 6), (2, 3), (1, 1), (1, 0)))
    host = torch.device("cpu")
    one, three, two = maps.of(1, host), maps.of(3, host), maps.of(2, host)
    for part, first, whole in zip(two, one, three, strict=True):
        assert part.data_ptr() == whole.data_ptr()
        assert torch.equal(part, whole[: len(part)]) and torch.equal(first, part[: len(first)])
    units, patches = 48, 12 * 5 * 4
    assert [len(part) for part in two] == [2 * patches, 2 * (patches - 2 * 2 * 3 * 4), 2 * units + 1]


@pytest.mark.parametrize("filters", [7, 63, 64])
def test_a_row_takes_the_memory_that_is_said(filters: int):
    net = stacked_form(network(nn.Conv2d(2, 8, 1), nn.Conv2d(8, filters, 3), nn.MaxPool2d(2)), IMAGES)
    assert net is not None
    layer = next(layer for layer in net.layers if isinstance(layer, PooledConvolution))
    workspace, rows = Workspace(torch.float32, torch.device("cpu")), 100
    x = workspace.take("x", 2, layer.geometry.units, rows, guard=rows)
    layer.bind(Place(2, rows, workspace, Stack(net.stack_size)), x)
    taken = sum(held.numel() for held in workspace._storage.values()) / (2 * rows)
    assert 0.8 * layer.values < taken < 1.05 * layer.values  # the filters themselves are no part of it


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(3), nn.MaxPool2d(2, stride=1), nn.MaxPool2d((2, 1)), nn.MaxPool2d(2, padding=1)]
)
def test_other_windows_are_pooled_by_torch(pool: nn.Module):
    net = stacked_form(network(nn.Conv2d(2, 3, 3), nn.ReLU(), pool), IMAGES)
    assert net is not None
    assert [type(layer) for layer in net.layers if isinstance(layer, Convolution | MaxPool)] == [Convolution, MaxPool]


def test_a_logistic_layer_keeps_convolutions_and_pools_apart():
    net = stacked_form(network(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Sigmoid()), IMAGES)
    assert net is not None
    assert not any(isinstance(layer, PooledConvolution) for layer in net.layers)
