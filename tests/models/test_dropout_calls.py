"""Dropout without a layer for it: torch's functions get their masks from the source and compute what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.models.dropout import ClientMasks, Dropout, Masks, NoMasks, draw_mask
from fedmpi.models.dropout_calls import DropoutCalls

X = torch.randn(3, 4, 5, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def stream() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(5))


def serving(source: Any) -> DropoutCalls:
    masks = Masks()
    masks.source = source
    return DropoutCalls(masks)


VALUES: dict[str, tuple[Callable[[Tensor], Tensor], float, Tensor, tuple[int, ...]]] = {
    "F.dropout": (lambda x: functional.dropout(x, 0.25, True), 0.25, X, X.shape),
    "by default": (lambda x: functional.dropout(input=x), 0.5, X, X.shape),
    "in place": (lambda x: functional.dropout(x, 0.3, inplace=True), 0.3, X, X.shape),
    "torch.dropout": (lambda x: torch.dropout(x, 0.3, True), 0.3, X[0, 0], X.shape[2:]),
    "torch.dropout by names": (lambda x: torch.dropout(input=x, p=0.3, train=True), 0.3, X, X.shape),
    "torch.dropout_": (lambda x: torch.dropout_(x, 0.3, True), 0.3, X, X.shape),
    "a number": (lambda x: functional.dropout(x, 0.5), 0.5, X[0, 0, 0, 0, 0], ()),
    "F.dropout1d": (lambda x: functional.dropout1d(x, 0.3), 0.3, X[0, 0], (5, 6, 1)),
    "F.dropout2d": (lambda x: functional.dropout2d(x, 0.3), 0.3, X[0], (4, 5, 1, 1)),
    "F.dropout2d of three axes": (lambda x: functional.dropout2d(x, 0.3), 0.3, X[0, 0], (5, 6, 1)),
    "F.dropout3d": (lambda x: functional.dropout3d(x, 0.3, inplace=True), 0.3, X, (3, 4, 1, 1, 1)),
    "torch.feature_dropout": (lambda x: torch.feature_dropout(x, 0.3, True), 0.3, X[0], (4, 5, 1, 1)),
    "torch.feature_dropout_": (lambda x: torch.feature_dropout_(x, 0.3, True), 0.3, X[0], (4, 5, 1, 1)),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_masks_are_the_sources_and_torchs_generator_is_left_alone(name: str):
    call, p, x, shape = VALUES[name]
    rows = shape[0] if shape else 1
    mask = torch.from_numpy(draw_mask(stream(), rows, int(np.prod(shape[1:])), p)).view(shape)
    given, state = x.clone(), torch.get_rng_state()
    with serving(ClientMasks(stream)) as calls:
        found = call(given)
    assert torch.equal(found, x * mask)
    assert torch.equal(given, found if name in ("in place", "torch.dropout_", "F.dropout3d") or "out_" in name else x)
    assert calls.met
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: functional.dropout(x, 0.5, training=False),
        lambda x: functional.dropout(x, 0.0),
        lambda x: torch.dropout(x, 0.5, False),
        lambda x: functional.dropout2d(x[0], 0.5, training=False),
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        lambda x: torch.relu(x),
    ],
)
def test_what_drops_nothing_asks_for_no_mask(call: Callable[[Tensor], Tensor]):
    expected = call(X)
    with serving(None) as calls:  # which would raise
        assert torch.equal(call(X), expected)
    assert not calls.met


def test_everything_may_be_dropped_without_a_mask():
    with serving(None):
        assert not functional.dropout(X, 1.0).any()


def test_an_impossible_probability_is_torchs_own_error():
    with serving(ClientMasks(stream)), pytest.raises(ValueError, match="between 0 and 1"):
        functional.dropout(X, 1.5)


def test_a_call_outside_an_engine_says_so():
    with serving(None), pytest.raises(RuntimeError, match="outside an engine"):
        functional.dropout(X, 0.5)


Q, K, V = (torch.randn(2, 4, length, 6, dtype=torch.float64) for length in (3, 5, 5))
SOME = torch.tensor([[True, False, True, True, False]] * 2 + [[False] * 5])
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.7},
    "causal": {"is_causal": True},
    "of some places, of one none": {"attn_mask": SOME},
    "with numbers": {"attn_mask": torch.randn(2, 1, 3, 5, dtype=torch.float64)},
    "with numbers that hide all": {"attn_mask": torch.where(SOME, 0.5, -torch.inf).double()},
    "in groups": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_without_masks_is_torchs(name: str):
    named = ATTENTION[name]
    q, k, v = (one.clone().requires_grad_() for one in (Q, K, V))
    few = (k[:, :2], v[:, :2]) if "enable_gqa" in named else (k, v)
    expected = functional.scaled_dot_product_attention(q, *few, **named)
    with serving(NoMasks()) as calls:
        found = functional.scaled_dot_product_attention(q, *few, dropout_p=0.3, **named)
    assert calls.met
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    towards = torch.randn_like(expected)
    for mine, own in zip(*(torch.autograd.grad(y, (q, k, v), towards) for y in (found, expected)), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-11, atol=1e-12)


def test_values_may_be_of_another_size_than_queries():
    v = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    expected = functional.scaled_dot_product_attention(Q, K, v)
    with serving(NoMasks()):
        torch.testing.assert_close(functional.scaled_dot_product_attention(Q, K, v, dropout_p=0.3), expected)


def test_heads_whose_keys_are_given_are_left_to_torch():
    x, weight, bias = torch.randn(3, 2, 4), torch.randn(12, 4), torch.zeros(12)
    keys = torch.randn(4, 5, 2)  # samples · heads, places, size of a head
    with serving(NoMasks()) as calls:
        out, _ = functional.multi_head_attention_forward(
            *(x, x, x, 4, 2, weight, bias, None, None, False, 0.3, torch.eye(4), None), static_k=keys, static_v=keys
        )
    assert out.shape == x.shape and not calls.met


def test_shares_of_attention_are_dropped_behind_the_softmax():
    mask = torch.from_numpy(draw_mask(stream(), 2, 4 * 3 * 5, 0.3)).view(2, 4, 3, 5)
    expected = ((Q @ K.transpose(2, 3) / 6**0.5).softmax(3) * mask) @ V
    with serving(ClientMasks(stream)):
        torch.testing.assert_close(functional.scaled_dot_product_attention(Q, K, V, None, 0.3), expected)


HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "samples first": ({"batch_first": True}, {"average_attn_weights": False}),
    "no weights wanted": ({}, {"need_weights": False}),
    "no bias": ({"bias": False}, {}),
    "a bias of keys and values": ({"add_bias_kv": True}, {}),
    "zeros added": ({"add_zero_attn": True, "add_bias_kv": True}, {}),
    "masks": ({}, {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1), "key_padding_mask": torch.eye(3, 4) > 2}),
    "further places beside masks": (
        {"add_zero_attn": True, "add_bias_kv": True},
        {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1), "key_padding_mask": torch.eye(3, 4) > 0},
    ),
    "causal": ({}, {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1), "is_causal": True}),
}


@pytest.mark.parametrize("alone", [False, True], ids=["samples", "one alone"])
@pytest.mark.parametrize("name", HEADS)
def test_several_heads_without_masks_are_torchs(name: str, alone: bool):
    ways, named = HEADS[name]
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(6, 2, dropout=0.4, **ways).double()
    plain = copy.deepcopy(layer)
    plain.dropout = 0.0
    x = torch.randn(4, 6) if alone else torch.randn(*((3, 4) if layer.batch_first else (4, 3)), 6)
    x = x.double().requires_grad_()
    named = {**named, "key_padding_mask": None} if alone else named
    expected = plain(x, x, x, **named)
    with serving(NoMasks()) as calls:
        found = layer(x, x, x, **named)
    assert calls.met
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    towards = torch.randn_like(expected[0])
    of_layer = torch.autograd.grad(found[0], (x, *layer.parameters()), towards)
    of_plain = torch.autograd.grad(expected[0], (x, *plain.parameters()), towards)
    for mine, own in zip(of_layer, of_plain, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-11, atol=1e-12)


def test_the_shares_that_several_heads_return_are_those_behind_the_dropout():
    layer, x = nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True), torch.randn(3, 4, 6)
    mask = torch.from_numpy(draw_mask(stream(), 3, 2 * 4 * 4, 0.4)).view(3, 2, 4, 4)
    with serving(NoMasks()):
        whole = layer(x, x, x, average_attn_weights=False)[1]
    with serving(ClientMasks(stream)):
        shares = layer(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(shares, whole * mask)
    with serving(ClientMasks(stream)):
        torch.testing.assert_close(layer(x, x, x)[1], (whole * mask).mean(1))


RECURRENT = {
    "lstm": (nn.LSTM, {}),
    "lstm both ways": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "lstm without bias": (nn.LSTM, {"bias": False}),
    "lstm projected": (nn.LSTM, {"proj_size": 3, "bidirectional": True}),
    "gru": (nn.GRU, {"batch_first": True}),
    "gru both ways": (nn.GRU, {"bidirectional": True, "bias": False}),
    "rnn": (nn.RNN, {}),
    "rnn of relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_without_masks_are_torchs(name: str):
    kind, ways = RECURRENT[name]
    torch.manual_seed(3)
    layer = kind(4, 5, num_layers=3, dropout=0.4, **ways).double()
    plain = copy.deepcopy(layer)
    plain.dropout = 0.0
    x = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    with serving(NoMasks()) as calls:
        found = layer(x)
    assert calls.met
    torch.testing.assert_close(found, plain(x), rtol=1e-12, atol=1e-13)
    towards = torch.randn_like(found[0])
    of_layer = torch.autograd.grad(found[0], (x, *layer.parameters()), towards)
    for mine, own in zip(of_layer, torch.autograd.grad(plain(x)[0], (x, *plain.parameters()), towards), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("batch_first", [False, True])
def test_what_every_recurrent_layer_but_the_last_gives_is_dropped(batch_first: bool):
    layer = nn.LSTM(4, 5, num_layers=2, dropout=0.4, batch_first=batch_first)
    first, second = nn.LSTM(4, 5, batch_first=batch_first), nn.LSTM(5, 5, batch_first=batch_first)
    for name, value in layer.named_parameters():
        own = second if name.endswith("1") else first
        getattr(own, name[:-1] + "0").data = value.data
    x = torch.randn(3, 6, 4)
    mask = torch.from_numpy(draw_mask(stream(), 3, 6 * 5, 0.4)).view(3, 6, 5)
    given = x if batch_first else x.transpose(0, 1)
    with serving(ClientMasks(stream)):
        found = layer(given)[0]
    expected = second(first(given)[0] * (mask if batch_first else mask.transpose(0, 1)))[0]
    torch.testing.assert_close(found, expected)


def test_packed_sequences_draw_from_torchs_generator():
    layer, x = nn.LSTM(4, 5, num_layers=2, dropout=0.4), torch.randn(6, 3, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2]))
    state = torch.get_rng_state()
    with serving(None):
        layer(packed)
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "call",
    [
        lambda: functional.dropout1d(X[0, 0, 0], 0.5),
        lambda: functional.dropout3d(X[0], 0.5),
        lambda: functional.multi_head_attention_forward(
            *[torch.ones(4, 2, 6)] * 3, 6, 2, torch.ones(18, 6), None, None, None, False, 0.5, torch.ones(6, 6), None,
            static_k=torch.ones(4, 5, 3), static_v=torch.ones(4, 5, 3),
        ),
    ],
    ids=["one sample of lines", "one sample of volumes", "keys and values given"],
)  # fmt: skip
def test_what_has_no_axis_for_the_samples_is_left_to_torch(call: Callable[[], Any]):
    state = torch.get_rng_state()
    with serving(None):
        call()
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("layer", [nn.LSTM(6, 6, 2, dropout=0.5), nn.MultiheadAttention(6, 2, dropout=0.5)])
def test_layers_in_evaluation_mode_drop_nothing_within_a_model_that_trains(layer: nn.Module):
    x = torch.randn(4, 2, 6)
    given = (x,) if isinstance(layer, nn.LSTM) else (x, x, x)
    expected = layer.eval()(*given)[0]
    with serving(None) as calls:
        assert torch.equal(layer(*given)[0], expected)
    assert not calls.met


@pytest.mark.parametrize("channels", [False, True])
def test_what_is_left_to_torch_is_dropped_by_it(channels: bool):
    """Whole channels, or value by value, as its generator says; served by the source again where nothing is dropped."""
    masks, x = Masks(), torch.ones(4, 8, 50)
    masks.from_torch = True
    layer = Dropout(0.5, masks, channels)
    torch.manual_seed(1)
    found = layer(x)
    torch.manual_seed(1)
    assert torch.equal(found, functional.dropout1d(x, 0.5) if channels else functional.dropout(x, 0.5))
    with DropoutCalls(masks):
        torch.manual_seed(1)
        assert torch.equal(functional.dropout1d(x, 0.5) if channels else functional.dropout(x, 0.5), found)
    masks.source = NoMasks()
    assert torch.equal(layer(x), x)


def test_keys_and_values_of_other_sizes_have_weights_of_their_own():
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(6, 2, dropout=0.4, kdim=5, vdim=4).double()
    plain = copy.deepcopy(layer)
    plain.dropout = 0.0
    given = [torch.randn(length, 3, size, dtype=torch.float64) for length, size in ((2, 6), (7, 5), (7, 4))]
    with serving(NoMasks()):
        torch.testing.assert_close(layer(*given), plain(*given), rtol=1e-12, atol=1e-13)


def test_a_mask_a_head_is_torchs():
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True).double()
    plain = copy.deepcopy(layer)
    plain.dropout = 0.0
    x, mask = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(6, 4, 4, dtype=torch.float64)
    with serving(NoMasks()) as calls:
        torch.testing.assert_close(
            layer(x, x, x, attn_mask=mask), plain(x, x, x, attn_mask=mask), rtol=1e-12, atol=1e-13
        )
    assert calls.met
