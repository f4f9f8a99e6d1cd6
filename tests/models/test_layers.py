"""Layers that replace torch's: dropout with masks of the clients, convolutions over words, the maximum over time."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from benchmarks.networks import PlainMaxOverTime
from fedmpi.common.streams import Purpose, Streams
from fedmpi.models.flat import FlatModel
from fedmpi.models.layers import (
    Dropout,
    Masks,
    SentMasks,
    WordConvolution,
    client_masks,
    draw_mask,
    install_dropout,
    joined_masks,
    remove_dropout,
)
from fedmpi.models.text_models import MaxOverTime


def stream(client: int) -> np.random.Generator:
    return Streams(5).generator(Purpose.DROPOUT, 2, client)


@pytest.mark.parametrize("p", [0.2, 0.99999, 1e-3])
def test_a_value_is_dropped_where_its_sixteen_bits_are_below_p(p: float) -> None:
    """A share p of the 65,536 values of sixteen bits is below p, up to 2**-17."""
    mask = draw_mask(stream(2), 100, 1000, p).ravel()
    words = stream(2).bit_generator.random_raw(25_000)
    bits = np.stack([words >> np.uint64(16 * place) & np.uint64(0xFFFF) for place in range(4)], 1).ravel()
    assert np.array_equal(mask == 0, bits < min(round(p * 2**16), 2**16 - 1))


def test_at_one_half_a_value_is_dropped_where_its_bit_is_zero() -> None:
    words = np.array(stream(2).bit_generator.random_raw(1), "<u8").reshape(1).view(np.uint8)
    assert np.array_equal(draw_mask(stream(2), 3, 5, 0.5).ravel(), 2 * np.unpackbits(words)[:15])


class Recomputed(nn.Module):
    """A dropout layer whose forward pass is computed again for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)
        return found


def test_masks_of_a_pass_that_is_computed_again_are_rejected() -> None:
    model = FlatModel(Recomputed())
    model.begin_training(model.initial, Streams(1), 0, 0)
    with pytest.raises(RuntimeError, match="no masks outside of an engine"):
        model.loss_gradient(torch.ones(4, 6), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("p", [0.5, 0.25, 0.2])
def test_joined_masks_are_each_clients_own_draws_in_layer_order(p: float) -> None:
    counts = [3, 1, 5]
    joined = joined_masks([stream(k) for k in range(3)], counts)
    alone = [client_masks(partial(stream, k)) for k in range(3)]
    for units in (7, 64, 1):
        expected = torch.cat([masks(rows, units, p) for masks, rows in zip(alone, counts, strict=True)])
        assert torch.equal(joined(9, units, p), expected)
    with pytest.raises(RuntimeError, match="first axis must be the samples"):
        joined(5, 3, 0.5)


def test_masks_sent_in_advance_are_those_of_the_stream_whatever_the_step_requests() -> None:
    sent, alone = SentMasks(torch.device("cpu")), client_masks(partial(stream, 0))
    sent.requests = [(3, 0.5), (5, 0.25)]
    source, foreseen = sent.open([stream(0)]), [(4, 3, 0.5), (4, 5, 0.25)]
    for requests in (foreseen, foreseen[:1], foreseen[::-1], [], [*foreseen, (1, 2, 0.2)], foreseen):
        sent.prepare([4])
        assert all(torch.equal(source(*request), alone(*request)) for request in requests)
    assert not sent._memory, "only CUDA graphs need the same memory in each step"


def test_dropout_masks_values_or_channels_in_training_mode_only() -> None:
    masks, x = Masks(), torch.ones(8, 16, 4, 4)
    layers = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5), nn.Dropout(0), nn.Dropout(1))
    install_dropout(layers, masks)
    values, channels, none, everything = layers
    with pytest.raises(RuntimeError, match="no masks outside of an engine"):
        values(x)
    masks.source = client_masks(lambda: stream(0))
    assert set(values(x).unique().tolist()) == {0.0, 2.0}
    assert none(x) is x and not everything(x).any()
    found = channels(x).flatten(2)
    assert torch.equal(found.amin(2), found.amax(2)) and set(found.unique().tolist()) == {0.0, 2.0}
    assert values.eval()(x) is x


def test_a_users_dropout_layers_are_all_of_one_source_and_can_be_restored() -> None:
    shared = nn.Dropout(0.3)
    parts = shared, nn.Sequential(nn.Dropout2d(0.4), shared), nn.AlphaDropout(0.1), nn.Linear(2, 2)
    net, masks = nn.Sequential(*parts).eval(), Masks()
    for _ in range(2):
        install_dropout(net, masks)
    assert type(net[0]) is type(net[1][0]) is Dropout and type(net[2]) is nn.AlphaDropout
    assert (net[0].p, net[0].channels, net[1][0].p, net[1][0].channels) == (0.3, False, 0.4, True)
    assert net[0].masks is net[1][0].masks is masks and not net[0].training
    remove_dropout(net)
    assert type(net[0]) is nn.Dropout and type(net[1][0]) is nn.Dropout2d and "masks" not in vars(net[0])


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "same, even": {"kernel_size": 4, "padding": "same"},
    "padded": {"padding": 2},
    "stride": {"kernel_size": 2, "stride": 3},
    "dilation": {"dilation": 2, "padding": 1},
}


class Texts(nn.Module):
    """A convolution over words."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.layer(words.transpose(1, 2))
        return found


def with_gradients(module: nn.Module, words: Tensor) -> list[Tensor]:
    """The output on words (n, L, E), and the gradients of the words and of all values."""
    words = words.clone().requires_grad_()
    output = module(words)
    towards = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * towards).sum(), [words, *module.parameters()])]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kind", KINDS)
def test_a_convolution_over_words_is_what_torch_computes(kind: str) -> None:
    torch.manual_seed(1)
    module = Texts(nn.Conv1d(6, 5, **{"kernel_size": 3, **KINDS[kind]})).double()
    words = torch.randn(4, 9, 6, dtype=torch.float64)
    before = with_gradients(module, words)
    module.layer.__class__ = WordConvolution
    for given in (words, words.transpose(1, 2).contiguous().transpose(1, 2)):  # word by word, and value by value
        for one, other in zip(with_gradients(module, given), before, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert module(words).stride(1) == 1, "the values of a word are adjacent after it, too"
    assert torch.equal(module(words[:1]), module.layer(words[:1].transpose(1, 2)))


@pytest.mark.parametrize("texts", [0, 1, 7])
def test_the_maximum_over_time_and_its_gradient(texts: int) -> None:
    """Words that are small whole numbers make many equal features: the first of them has the gradient."""
    torch.manual_seed(2)
    module = MaxOverTime(3, 4, (1, 2, 3)).double()
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randint(-1, 2, value.shape))
    words = torch.randint(-1, 2, (texts, 8, 3)).double()
    found = with_gradients(module, words)
    module.__class__ = PlainMaxOverTime
    for one, other in zip(found, with_gradients(module, words), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
