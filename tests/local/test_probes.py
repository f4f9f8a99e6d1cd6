"""Gradients of clients at a given model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi import ClientFailure
from fedmpi.local import probes
from fedmpi.local.probes import client_gradients, gradient_blocks
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import (
    SMALL_IMAGES,
    STREAMS,
    AlphaDropoutNet,
    BatchNormNet,
    InMemorySource,
    flat_model,
    relative_error,
)

SIZES = [13, 1, 40, 0, 7]
SOURCE = InMemorySource(SMALL_IMAGES, SIZES)


def probed(model: FlatModel, probe: probes.Probe, clients=range(5), **options) -> dict[int, torch.Tensor]:
    stream = client_gradients(SOURCE, model, clients, model.initial, probe, STREAMS, 2, **options)
    return {client: gradient.clone() for client, gradient in stream}


def gradient_of(model: FlatModel, client: int) -> torch.Tensor:
    model.bind(model.initial)
    model.module.eval()
    _, gradients = model.loss_gradient(*SOURCE.load(client))
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("rows", [1024, 4])
def test_the_full_probe_is_the_local_gradient_without_dropout(rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "PROBE_ROWS", rows)
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=0.5)
    found = probed(model, "full")
    assert not found[3].any()
    for client in (0, 1, 2, 4):
        assert relative_error(found[client], gradient_of(model, client)) < 1e-5


def test_batch_and_sample_probes_are_gradients_of_drawn_samples():
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    x, y = SOURCE.load(2)
    single = probed(model, "sample")[2]
    model.bind(model.initial)
    each = [torch.cat([g.flatten() for g in model.loss_gradient(x[[i]], y[[i]])[1]]) for i in range(40)]
    assert sum(relative_error(single, gradient) < 1e-5 for gradient in each) == 1
    batch = probed(model, "batch", batch_rows=8)[2]
    shares = torch.linalg.lstsq(torch.stack(each).T.double(), batch.double()).solution
    assert int((shares > 1 / 16).sum()) == 8
    assert torch.allclose(shares[shares > 1 / 16], torch.tensor(1 / 8, dtype=torch.float64), atol=1e-3)
    assert torch.equal(probed(model, "batch")[2], probed(model, "full")[2])


def test_a_probe_depends_on_round_and_client_alone():
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    assert torch.equal(probed(model, "sample")[2], probed(model, "sample", clients=[4, 2])[2])
    later = dict(client_gradients(SOURCE, model, [2], model.initial, "sample", STREAMS, 3))
    assert not torch.equal(probed(model, "sample")[2], later[2])


@pytest.mark.parametrize("net", [BatchNormNet, AlphaDropoutNet])
def test_probing_leaves_the_model_and_torchs_generator_alone(net: type[nn.Module]):
    model = FlatModel(net(36, 5))
    before, state = model.initial.clone(), torch.get_rng_state()
    first = probed(model, "full", clients=[0, 2])
    assert torch.equal(first[2], probed(model, "full", clients=[2])[2])
    assert first[2].shape == (model.trainable,)
    assert torch.equal(model.initial, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("height", [1, 2, 100])
def test_blocks_hold_all_clients_in_order(height: int):
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    expected = probed(model, "full")
    blocks = list(
        gradient_blocks(
            SOURCE, model, np.arange(5), model.initial, "full", STREAMS, 2, block_bytes=height * 4 * model.trainable
        )
    )
    assert all(len(clients) == len(gradients) <= height for clients, gradients in blocks)
    assert np.concatenate([clients for clients, _ in blocks]).tolist() == list(range(5))
    assert torch.equal(torch.cat([gradients for _, gradients in blocks]), torch.stack(list(expected.values())))


def test_a_client_whose_gradient_is_not_finite_is_named():
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    with pytest.raises(ClientFailure, match="client 0 on rank 4"):
        next(client_gradients(SOURCE, model, [0], model.initial * np.inf, "full", STREAMS, 0, rank=4))
