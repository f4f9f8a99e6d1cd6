"""One client's batches, steps, gradients and numbers, beside a plain PyTorch loop."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmpi import ClientFailure
from fedmpi.common.streams import Purpose
from fedmpi.local import measures
from fedmpi.local.measures import ClientMeasures, Gradients, Probe
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule, schedule, step_count
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import (
    SMALL_IMAGES,
    STREAMS,
    AlphaDropoutNet,
    BatchNormNet,
    InMemorySource,
    flat_model,
    relative_error,
    summed,
    tasks_of,
)

SIZES = [13, 1, 40, 0, 7]
SOURCE = InMemorySource(SMALL_IMAGES, SIZES)


def small() -> FlatModel:
    return flat_model("mlp", SMALL_IMAGES, hidden=[9])


# Batches


@pytest.mark.parametrize("steps", [1, 32, 70])
def test_every_step_draws_distinct_rows(steps: int) -> None:
    rule, draw = LocalRule(epochs=None, steps=steps, batch_size=3), STREAMS.generator(Purpose.BATCH_ORDER, 1, 2)
    expected = [draw.choice(10, 3, replace=False, shuffle=False) for _ in range(steps)]
    assert np.array_equal(schedule(rule, 10, STREAMS.generator(Purpose.BATCH_ORDER, 1, 2)), expected)
    assert schedule(rule, 3, None) == [None] * steps == [None] * step_count(rule, 3) and schedule(rule, 0, None) == []


# Steps


def test_without_dropout_no_mask_of_the_round_before_is_left() -> None:
    masked = LocalRule(lr=0.1, epochs=1, batch_size=4)
    model, never = (flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=p) for p in (0.4, 0.0))
    engine, tasks = SequentialEngine(model, SOURCE, STREAMS), tasks_of(SOURCE)
    dropped, plain, again = (
        summed(engine, model, tasks, rule)[0] for rule in (masked, replace(masked, dropout=False), masked)
    )
    expected, _ = summed(SequentialEngine(never, SOURCE, STREAMS), never, tasks, masked)
    assert torch.equal(plain, expected) and torch.equal(again, dropped) and not torch.allclose(dropped, plain)


def test_rounds_leave_no_tensors_behind() -> None:
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=0.5)
    engine = SequentialEngine(model, SOURCE, STREAMS)

    def living(rounds: int) -> int:
        for t in range(rounds):
            summed(
                engine,
                model,
                tasks_of(SOURCE),
                LocalRule("adam", lr=0.01, epochs=2, batch_size=5, proximal_mu=0.7),
                round=t,
            )
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    assert living(1) >= living(5)


# Gradients at a given model


def probed(model: FlatModel, probe: Probe = "full", clients: Sequence[int] = range(5), **options):
    stream = Gradients(SOURCE, model, STREAMS, probe, **options).each(clients, model.initial, 2)
    return {client: gradient.clone() for client, gradient in stream}


@pytest.mark.parametrize("net", [BatchNormNet, AlphaDropoutNet])
def test_probing_leaves_the_model_and_torchs_generator_alone(net: type[nn.Module]) -> None:
    model, state = FlatModel(net(36, 5)), torch.get_rng_state()
    before, first = model.initial.clone(), probed(model, clients=[0, 2])
    assert torch.equal(first[2], probed(model, clients=[2])[2]) and first[2].shape == (model.trainable,)
    assert torch.equal(model.initial, before) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("height", [1, 2, 100])
def test_blocks_hold_the_gradients_of_all_clients_in_order(height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "PROBE_ROWS", 4 * height)
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=0.5)
    found = Gradients(SOURCE, model, STREAMS)
    blocks = list(found.blocks(np.arange(5), model.initial, 2, block_bytes=height * 4 * model.trainable))
    assert all(len(clients) == len(gradients) <= height for clients, gradients in blocks)
    assert np.concatenate([clients for clients, _ in blocks]).tolist() == list(range(5))
    gradients = torch.cat([gradients for _, gradients in blocks])
    model.look(model.initial)
    model.module.eval()
    for client in (0, 1, 2, 4):
        _, parts = model.loss_gradient(*SOURCE.load(client))
        assert relative_error(gradients[client], torch.cat([one.flatten() for one in parts])) < 1e-5
    assert not gradients[3].any()
    with pytest.raises(ClientFailure, match="client 0 on rank 4"):
        next(Gradients(SOURCE, model, STREAMS, rank=4).each([0], model.initial * np.inf, 0))


# Numbers of single clients


class Noisy(nn.Sequential):
    """Adds noise to its logits, in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits + torch.randn(logits.shape)


def measured(model: FlatModel | None = None) -> ClientMeasures:
    return ClientMeasures(model or small(), SOURCE, STREAMS, rank=4)


def test_clients_with_samples_are_measured() -> None:
    measure, held = measured(), [size > 0 for size in SIZES]
    found = measure(0, measure.model.initial, np.arange(5), ("loss", "accuracy", "gradient_norm"))
    assert np.isfinite(found).tolist() == [[there] * 3 for there in held]


def test_a_gain_is_the_decrease_of_the_clients_loss_by_its_update() -> None:
    measure, update = measured(), torch.zeros_like(small().initial)
    [(_, gradient)] = Gradients(SOURCE, measure.model, STREAMS).each([2], measure.start, 0)
    update[: len(gradient)] = -0.1 * gradient
    gain = measure.gain(2, update, 0)
    assert gain > 0
    assert gain == pytest.approx(measure.loss(2, measure.start, 0) - measure.loss(2, measure.start + update, 0))


@pytest.mark.parametrize("factor", [np.inf, np.nan, None])
def test_a_client_whose_numbers_are_not_finite_is_named(factor: float | None) -> None:
    measure = measured()
    w = measure.model.initial * (factor or 0)
    if factor is None:
        w[-4:] = torch.tensor([3e38, 3e38, 3e38, -3e38])  # the logits' bias: no class is far from the others but one
    with pytest.raises(ClientFailure, match="client 4 on rank 4.*its loss is not finite"):
        measure(0, w, np.array([4]), ("loss",))


def test_a_model_that_draws_in_evaluation_mode_is_seeded_by_round_and_client() -> None:
    measure = measured(FlatModel(Noisy(nn.Flatten(), nn.Linear(36, 5))))

    def losses(round: int, clients: Sequence[int] = (0, 1, 4)) -> list[float]:
        return measure(round, measure.model.initial, np.array(clients), ("loss",))[:, 0].tolist()

    first = losses(1)
    assert losses(1) == first and losses(1, [4, 0]) == [first[2], first[0]]
    assert all(a != b for a, b in zip(first, losses(2), strict=True))
