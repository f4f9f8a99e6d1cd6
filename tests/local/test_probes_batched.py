"""Gradients of clients side by side are those of one client after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedmpi import ClientFailure
from fedmpi.local.batched.probes import SMALL, BatchedProbe
from fedmpi.local.probes import Probe, client_gradients, gradient_blocks
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import IMAGES, SMALL_IMAGES, STREAMS, TEXTS, InMemorySource, flat_model

SIZES = [13, 1, 40, 0, 7, SMALL + 30, 2, 2]


def side_by_side(source: InMemorySource, model: FlatModel, probe: Probe, **options) -> dict[int, torch.Tensor]:
    blocks = gradient_blocks(
        source,
        model,
        range(len(source.sizes)),
        model.initial,
        probe,
        STREAMS,
        2,
        batched=BatchedProbe(model, source),
        **options,
    )
    return {int(k): row for clients, gradients in blocks for k, row in zip(clients, gradients, strict=True)}


@pytest.mark.parametrize("probe", ["full", "batch", "sample"])
@pytest.mark.parametrize(
    ("name", "description", "options"),
    [
        ("mlp", SMALL_IMAGES, {"hidden": [9], "dropout": 0.5}),
        ("cnn", IMAGES, {}),
        ("text-cnn", TEXTS, {"dimension": 8, "filters": 6, "dropout": 0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gradients_do_not_depend_on_who_is_beside_whom(name: str, description, options: dict, probe: Probe):
    source = InMemorySource(description, SIZES, torch.float64)
    model = flat_model(name, description, torch.float64, **options)
    found = side_by_side(source, model, probe, batch_rows=5, block_bytes=3 * 8 * model.size)
    stream = client_gradients(source, model, range(len(SIZES)), model.initial, probe, STREAMS, 2, batch_rows=5)
    expected = {client: gradient.clone() for client, gradient in stream}
    assert found.keys() == expected.keys()
    for client, gradient in expected.items():
        assert (found[client] - gradient).norm() <= 1e-12 * gradient.norm().clamp(min=1.0)


def test_a_client_whose_gradient_is_not_finite_is_named():
    source, model = InMemorySource(SMALL_IMAGES, [3, 4]), flat_model("mlp", SMALL_IMAGES, hidden=[9])
    source.x[5] = np.nan
    with pytest.raises(ClientFailure, match="client 1 on rank 0"):
        side_by_side(source, model, "full")
