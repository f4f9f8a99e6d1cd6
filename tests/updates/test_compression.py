"""Compressed updates: rounded without bias, sized in bits, lost values sent later; equal for a client on any rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fedmpi import ComponentFailure, compressor
from fedmpi.common.registry import Component
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.local.observer import UpdateNumbers, UpdateObserver
from fedmpi.local.work import ClientTask
from fedmpi.mpi import Cluster
from fedmpi.privacy.updates import Clipping
from fedmpi.updates.compression import (
    BUCKET,
    LEVELS,
    MANTISSA,
    RESIDUALS,
    Transport,
    round_to_format,
    top_k_values,
    upload_bits,
)

ROUNDED: list[Any] = ["float16", "bfloat16", "int8"]
FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}

VALUES = st.floats(-6e4, 6e4, width=32).filter(lambda value: value == 0 or abs(value) > 1e-30)


def compression(kind: str, fraction: float, error_feedback: bool = False) -> Component:
    options = {} if kind == "none" else {"error_feedback": error_feedback}
    return Component("compressor", kind, {"fraction": fraction, **options} if kind == "top-k" else options)


def update(values: int = 1300, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(values).astype(np.float32)) * 1e-3


def uniform(values: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(values, np.float32))


@given(VALUES, st.floats(0, 1, exclude_max=True, width=32))
@example(-513.0, 0.75)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_rounded_value_is_one_of_its_two_neighbors_in_the_format(kind: Any, value: float, draw: float):
    found = round_to_format(torch.tensor([value]), torch.tensor([draw]), kind)
    form = FORMATS[kind]
    assert torch.equal(found.to(form).float(), found)
    nearest = torch.tensor([value]).to(form)
    size = nearest.abs().to(torch.bfloat16)
    larger = torch.nextafter(size, torch.tensor([math.inf], dtype=torch.bfloat16))
    step = float(larger.float() - size.float()) if kind == "bfloat16" else max(abs(value) * 2**-10, 2**-24)
    assert abs(float(found) - value) <= step
    if float(nearest.float()) == value:
        assert float(found) == value


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounding_is_unbiased(kind: Any):
    """Means of 4,000 roundings of 600 values within 5 % of a step: false alarms in 2.5e-6 of the seeds (Hoeffding)."""
    sent, transport = update(600), Transport(compression(kind, 1.0), Streams(5))
    arrived = torch.stack([transport.send(round, 3, sent.clone()) for round in range(4000)]).double()
    largest = torch.cat([part.abs().max().expand(len(part)) for part in sent.split(BUCKET)])
    step = largest / LEVELS if kind == "int8" else (sent.abs() * 2.0 ** -MANTISSA[kind]).clamp(min=2.0**-24)
    assert (arrived.std(0) > 0).float().mean() > 0.9
    assert ((arrived.mean(0) - sent).abs() <= 0.05 * step).all()


def largest(update: Tensor, fraction: float) -> Tensor:
    top_k_values(update, np.random.default_rng(), fraction=fraction)
    return update


def test_top_k_breaks_ties_in_favor_of_lower_positions():
    signs = torch.tensor([-1.0, 1.0]).repeat(500)
    found = largest(0.5 * signs, 0.007)
    assert found.nonzero().squeeze(1).tolist() == list(range(7)) and torch.equal(found[:7], 0.5 * signs[:7])
    larger = 0.5 * signs.clone()
    larger[[990, 20]] = 2.0
    assert largest(larger, 0.005).nonzero().squeeze(1).tolist() == [0, 1, 2, 20, 990]


def test_a_value_beyond_float16_is_rejected_and_bfloat16_takes_it():
    large = torch.tensor([1e5, 1.0])
    with pytest.raises(FloatingPointError, match="bfloat16"):
        round_to_format(large.clone(), uniform(2), "float16")
    assert round_to_format(large, uniform(2), "bfloat16")[0] == pytest.approx(1e5, rel=2**-7)


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounding_belongs_to_client_and_round(kind: Any):
    transport = Transport(compression(kind, 1.0), Streams(5))
    first, again = (transport.send(2, 7, update()) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, transport.send(2, 8, update()))
    assert not torch.equal(first, transport.send(3, 7, update()))


def test_residuals_survive_a_checkpoint_with_their_owner():
    saved, cluster = Transport(compression("top-k", 0.05, True), Streams(5)), Cluster.connect()
    for client in (3, 1, 8):
        saved.send(0, client, update(seed=client))
    state = saved.gather_state(cluster)
    assert set(state) == set(RESIDUALS)
    loaded = Transport(compression("top-k", 0.05, True), Streams(5))
    loaded.load(state, range(2, 9))
    assert sorted(loaded.residuals or {}) == [3, 8]
    assert torch.equal(loaded.send(1, 3, update()), saved.send(1, 3, update()))


@pytest.mark.parametrize(
    "kind, bits",
    [("none", 32), ("float16", 16), ("bfloat16", 16), ("int8", 8 + 3 * 32 / 1300), ("top-k", 13 * (32 + 11) / 1300)],
)
def test_bits_are_those_of_the_values_places_and_scales(kind: Any, bits: float):
    assert float(upload_bits(compression(kind, 0.01), 1300)) == pytest.approx(bits, rel=1e-12)
    if kind == "top-k":  # a place among a power of two needs its logarithm
        assert upload_bits(compression("top-k", 1.0), 1024) == 32 + 10
        assert upload_bits(compression("top-k", 0.001), 1300) * 1300 == 2 * (32 + 11)  # 1.3 values, rounded up


def test_what_is_clipped_is_what_arrived():
    """Stochastic rounding may lengthen an update; its share of the sum stays bounded all the same."""
    numbers = UpdateNumbers(Component("client sampler", "uniform"), None, Streams(5))  # type: ignore[arg-type]
    clipping = Clipping(
        load_config(None, ["clients.count=1", "privacy.clip_norm=1e-3", "server.weights=uniform"]), Streams(5), 1
    )
    observer = UpdateObserver(clipping, False, Transport(compression("int8", 1.0), Streams(5)), None, numbers)
    observer.begin([ClientTask(0, None, 1.0)], 0)
    assert float(observer(0, update()).norm()) <= 1e-3 * (1 + 1e-6)
    assert observer.clipped == 1


@compressor(bits=2)
def signs(update: Tensor, generator: np.random.Generator, *, scale: float = 1.0) -> Tensor:
    return update.sign() * scale * update.abs().mean()


def test_a_custom_compressor_is_sized_and_keeps_what_it_loses():
    sent = update()
    chosen = Component("compressor", signs, {"scale": 2, "error_feedback": True})
    transport = Transport(chosen, Streams(5))
    arrived = transport.send(0, 3, sent.clone())
    assert torch.equal(arrived, sent.sign() * 2.0 * sent.abs().mean())
    assert transport.residuals is not None and torch.allclose(transport.residuals[3] + arrived, sent)
    assert upload_bits(chosen, 1300) == 2
    halves = compressor(bits=lambda d, *, scale: 2.5 * d * scale)(lambda update, generator, *, scale=1: None)
    assert upload_bits(Component("compressor", halves, {"scale": 2}), 8) == 5
    for wrong, words in (
        (lambda update, _: update[:1], "returned a tensor"),
        (lambda update, _: update / 0, "not finite"),
    ):
        with pytest.raises(ComponentFailure, match=words):
            Transport(Component("compressor", wrong), Streams(5)).send(0, 3, sent.clone())
