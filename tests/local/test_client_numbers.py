"""Numbers about single clients: who is measured, which failure is named, and what models that draw are seeded by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmpi import ClientFailure
from fedmpi.config import load_config
from fedmpi.data.schema import DataDescription
from fedmpi.local.client_metrics import ClientMeasures
from fedmpi.local.sequential import SequentialEngine, update_norms
from fedmpi.local.work import LocalRule
from tests.local.synthetic import SMALL_IMAGES, STREAMS, InMemorySource, flat_model

SIZES = [5, 1, 0, 7]
EVERYBODY = np.arange(len(SIZES))


class Noisy(nn.Sequential):
    """Adds noise to its logits, in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits + torch.randn(logits.shape)


def noisy(description: DataDescription) -> nn.Module:
    return Noisy(nn.Flatten(), nn.Linear(36, description.classes))


def measures(model: str = "mlp", sizes: Sequence[int] = SIZES) -> ClientMeasures:
    config = load_config(None, ["clients.sampler=all", f"model.name={model}"])
    return ClientMeasures(config, InMemorySource(SMALL_IMAGES, sizes), STREAMS, torch.device("cpu"), rank=4)


def engine() -> SequentialEngine:
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    return SequentialEngine(model, InMemorySource(SMALL_IMAGES, SIZES), STREAMS, rank=4)


def test_a_client_of_one_sample_is_measured_and_one_of_none_is_not() -> None:
    measure = measures()
    found = measure(0, measure.model.initial, EVERYBODY, ("loss", "accuracy", "gradient_norm"))
    assert np.isfinite(found).tolist() == [[size > 0] * 3 for size in SIZES]


def test_a_client_of_one_sample_is_tried_and_one_of_none_is_not() -> None:
    trying = engine()
    norms = update_norms(trying, EVERYBODY, trying.model.initial, LocalRule(lr=0.1), 0)
    assert np.isfinite(norms).tolist() == [size > 0 for size in SIZES]
    assert (norms[norms == norms] > 0).all()


@pytest.mark.parametrize("factor", [np.inf, np.nan])
def test_a_client_whose_loss_is_not_finite_is_named(factor: float) -> None:
    measure = measures()
    with pytest.raises(ClientFailure, match="client 3 on rank 4.*its loss is not finite"):
        measure(0, measure.model.initial * factor, np.array([2, 3]), ("loss",))


def test_a_client_whose_loss_is_infinite_is_named() -> None:
    measure = measures()
    w = torch.zeros_like(measure.model.initial)
    w[-4:] = torch.tensor([3e38, 3e38, 3e38, -3e38])  # the logits' bias: no class is far from all others but the last
    with pytest.raises(ClientFailure, match="client 3 on rank 4.*its loss is not finite"):
        measure(0, w, np.array([3]), ("loss",))


def test_a_client_whose_update_on_trial_is_not_finite_is_named() -> None:
    """Model whose only step starts from a finite loss and goes so far that the update's square is not finite."""
    trying, rule = engine(), LocalRule(lr=1e30, epochs=None, steps=1)
    with pytest.raises(ClientFailure, match="client 3 on rank 4.*the update is not finite"):
        update_norms(trying, np.array([2, 3]), trying.model.initial, rule, 0)


def test_a_model_that_draws_in_evaluation_mode_is_seeded_by_round_and_client() -> None:
    measure = measures("tests.local.test_client_numbers:noisy")
    w = measure.model.initial

    def losses(round: int, clients: Sequence[int] = (0, 1, 3)) -> list[float]:
        return measure(round, w, np.array(clients), ("loss",))[:, 0].tolist()

    first = losses(1)
    assert losses(1) == first and losses(1, [3, 0]) == [first[2], first[0]]
    assert all(a != b for a, b in zip(first, losses(2), strict=True))
