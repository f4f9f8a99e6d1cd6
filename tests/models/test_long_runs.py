"""Columns of images in the order in which convolutions copy the longest runs: the same training, to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi.common.streams import Streams
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.batched.stack import Stack
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from fedmpi.models.stacked.column_order import ColumnOrder
from fedmpi.models.stacked.image import Convolution
from fedmpi.models.stacked.net import stacked_form
from fedmpi.models.stacked.pooled import PooledConvolution
from tests.local.stacks import (
    CLASSES,
    Source,
    assert_trains_as_one_by_one,
    image_network,
    relative_difference,
    tasks_for,
    train,
)

WIDE = DataDescription((2, 9, 28), "float32", CLASSES, "image", 0, (), ())
NETWORKS = {
    "strides, with what lies between": (
        [nn.Conv2d(2, 3, (3, 5), stride=2), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(3, 4, (2, 3), stride=(1, 2)),
         nn.Tanh(), nn.Dropout(0.3), nn.Conv2d(4, 5, 2)],
        [6, 5, 4],
    ),
    "pooled": (
        [nn.Conv2d(2, 3, 2, stride=(1, 3)), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 4, 2)],
        [1, 3],  # 28 columns do not lie in parts of six
    ),
    "pooled, the columns of windows in parts": (
        [nn.Conv2d(2, 3, (2, 5)), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, (2, 4), stride=(1, 2)), nn.ReLU()],
        [6, 5],
    ),
    "padding of the samples": (
        [nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(3, 2)), nn.Dropout(0.5), nn.Conv2d(3, 4, 3, stride=(1, 4)),
         nn.Conv2d(4, 4, 1)],
        [4, 4, 4],
    ),
    "padding of the samples, pooled": (
        [nn.Conv2d(2, 3, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)],
        [7, 6],
    ),
    "padding interrupts them": (
        [nn.Conv2d(2, 3, (3, 2), stride=2), nn.Dropout(0.5), nn.Conv2d(3, 4, 2, stride=(1, 2), padding=1), nn.ReLU(),
         nn.Conv2d(4, 3, 3, padding=1)],
        [14, 1, 1],
    ),
    "outputs that do not lie in parts": (
        [nn.Conv2d(2, 3, (3, 4)), nn.Dropout(0.5), nn.Conv2d(3, 4, 2, stride=(1, 3)), nn.Conv2d(4, 4, 2)],
        [25, 1, 7],
    ),
    "a pooling by itself finds its columns in their own order": (
        [nn.Conv2d(2, 3, 3), nn.Dropout(0.5), nn.MaxPool2d(3, stride=2), nn.Conv2d(3, 4, 2, stride=2)],
        [26, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_ragged_clients_reach_the_weights_of_the_sequential_engine(name: str, dtype: torch.dtype, tolerance: float):
    layers, runs = NETWORKS[name]
    module = image_network(layers, WIDE)
    net = stacked_form(module, WIDE)
    assert net is not None
    found = [layer.patches.run for layer in net.layers if isinstance(layer, Convolution | PooledConvolution)]
    assert found == runs
    assert_trains_as_one_by_one(module, WIDE, dtype, tolerance)


@pytest.mark.parametrize("limit", [0, 10**9])
def test_batches_of_other_sizes_leave_nothing_in_the_zeros_around_images(limit: int, monkeypatch: pytest.MonkeyPatch):
    """Whether images become columns client by client or all at once."""
    monkeypatch.setattr("fedmpi.local.batched.stack.JOIN_BELOW", limit)
    module = image_network([nn.Conv2d(2, 3, 3, padding=2), nn.ReLU(), nn.Conv2d(3, 2, 2, stride=3)], WIDE).double()
    model, sizes = FlatModel(module), np.array([20, 4, 7, 1, 18])
    source, rule = Source(WIDE, sizes, torch.float64), LocalRule(lr=0.1, epochs=2, batch_size=None)
    by_one, _ = train(SequentialEngine(model, source, Streams(5)), tasks_for(sizes), model.initial, rule)
    for chunk in (1, 2):
        engine = BatchedEngine(model, source, Streams(5), chunk=chunk)
        for _ in range(2):
            beside, _ = train(engine, tasks_for(sizes), model.initial, rule)
            assert relative_difference(beside, by_one) < 1e-12


def test_the_images_of_one_client_at_a_time_lie_among_zeros():
    net = stacked_form(image_network([nn.Conv2d(2, 3, 3, padding=(1, 2))], WIDE), WIDE)
    assert net is not None
    stack = Stack(net, 4, 10, True, torch.float32, torch.device("cpu"))
    stack.bound(4, 10)
    assert stack.workspace.take((0, "padded"), 0).untyped_storage().nbytes() == 4 * 10 * 2 * (9 + 2) * (28 + 4)


def test_columns_of_one_remainder_lie_side_by_side():
    order = ColumnOrder(6, 3)
    assert order.places().tolist() == [0, 2, 4, 1, 3, 5]
    rows = torch.arange(2 * 12).view(1, 2, 12)  # two samples of two rows of six columns
    columns = torch.zeros(1, 12, 2, dtype=torch.int64)
    order.as_they_lie(columns).copy_(order.in_order(rows))
    assert columns[0, :, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert np.array_equal(columns[0, :, 1], columns[0, :, 0] + 12)
