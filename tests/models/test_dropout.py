"""Dropout masks that belong to the clients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi.common.streams import Purpose, Streams
from fedmpi.models.dropout import ClientMasks, Dropout, JoinedMasks, Masks, draw_mask, install_dropout


def stream(client: int) -> np.random.Generator:
    return Streams(5).generator(Purpose.DROPOUT, 2, client)


@pytest.mark.parametrize("p", [0.5, 0.25, 0.2, 0.1, 0.9, 1e-3, 0.99999])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 64), (20, 450)])
def test_a_mask_holds_zeros_and_the_scale(p: float, shape: tuple[int, int]):
    mask = draw_mask(stream(1), *shape, p)
    assert mask.shape == shape
    assert mask.dtype == np.float32
    assert set(np.unique(mask)) <= {np.float32(0), np.float32(1 / (1 - p))}


@pytest.mark.parametrize("p", [0.5, 0.25, 0.2, 0.1, 0.9])
def test_a_value_is_dropped_with_probability_p(p: float):
    """Each of p's two-sided normal tests at 4.5 σ: false alarm rate 7e-6."""
    count = 1_000_000
    zeros = int((draw_mask(stream(1), 1000, count // 1000, p) == 0).sum())
    assert abs(zeros - p * count) < 4.5 * (p * (1 - p) * count) ** 0.5


@pytest.mark.parametrize("p", [0.2, 0.1, 0.9, 0.99999, 1e-3])
def test_a_value_is_dropped_where_its_sixteen_bits_are_below_p(p: float):
    """A share p of the 65,536 values of sixteen bits is below p, up to 2**-17."""
    mask = draw_mask(stream(2), 1000, 1000, p).ravel()
    words = stream(2).bit_generator.random_raw(250_000)
    bits = np.stack([words >> np.uint64(16 * place) & np.uint64(0xFFFF) for place in range(4)], 1).ravel()
    bound = min(round(p * 2**16), 2**16 - 1)
    assert np.array_equal(mask == 0, bits < bound)
    assert bool((bits[(bits >= bound - 64) & (bits < bound + 64)]).size), "some close to the bound"


@pytest.mark.parametrize("p", [0.5, 0.25, 0.2])
def test_neighboring_values_are_dropped_independently(p: float):
    """Correlation of a value with each of the next eight at 4.5 σ: false alarm rate 2e-4 over all."""
    dropped = (draw_mask(stream(3), 1, 500_000, p)[0] == 0) - p
    for lag in range(1, 9):
        correlation = float((dropped[lag:] * dropped[:-lag]).mean()) / (p * (1 - p))
        assert abs(correlation) < 4.5 / 500_000**0.5


@pytest.mark.parametrize("p", [0.5, 0.25, 0.2])
def test_joined_masks_are_each_clients_own_draws_in_layer_order(p: float):
    counts = [3, 1, 5]
    joined = JoinedMasks([stream(k) for k in range(3)], counts)
    alone = [ClientMasks(partial(stream, k)) for k in range(3)]
    for units in (7, 64, 1):
        expected = torch.cat([masks.mask(rows, units, p) for masks, rows in zip(alone, counts, strict=True)])
        assert torch.equal(joined.mask(9, units, p), expected)


def test_a_first_axis_that_is_not_the_samples_is_noticed():
    with pytest.raises(RuntimeError, match="first axis must be the samples"):
        JoinedMasks([stream(0)], [4]).mask(5, 3, 0.5)


def test_dropout_masks_in_training_mode_only():
    masks = Masks()
    layer, x = Dropout(0.5, masks), torch.ones(6, 2, 3)
    with pytest.raises(RuntimeError, match="it has no source"):
        layer(x)
    masks.source = ClientMasks(lambda: stream(0))
    assert set(layer(x).unique().tolist()) == {0.0, 2.0}
    assert layer.eval()(x) is x
    assert Dropout(0, masks)(x) is x
    assert not Dropout(1, masks)(x).any()


def test_whole_channels_are_dropped_where_the_model_asks_for_it():
    masks = Masks()
    masks.source = ClientMasks(lambda: stream(0))
    found = Dropout(0.5, masks, channels=True)(torch.ones(8, 16, 4, 4)).flatten(2)
    assert torch.equal(found.amin(2), found.amax(2))
    assert set(found.unique().tolist()) == {0.0, 2.0}


def test_a_users_dropout_layers_are_all_swapped_once():
    shared = nn.Dropout(0.3)
    parts = shared, nn.Sequential(nn.Dropout2d(0.4), shared), nn.AlphaDropout(0.1), shared, nn.Linear(2, 2)
    net = nn.Sequential(*parts).eval()
    masks = install_dropout(net)
    assert isinstance(net[0], Dropout)
    assert net[1][1] is net[3] is net[0]
    assert (net[0].p, net[0].channels, net[1][0].p, net[1][0].channels) == (0.3, False, 0.4, True)
    assert net[0].masks is net[1][0].masks is masks
    assert not net[0].training
    assert type(net[2]) is nn.AlphaDropout
    assert install_dropout(net) is masks
