"""What models and losses draw where clients' losses are measured comes from streams of its own, not from globals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedmpi
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import load_config
from fedmpi.data.schema import DataDescription
from fedmpi.local.comparisons import LocalLosses
from fedmpi.records.client_table import read_clients
from tests.local.synthetic import InMemorySource

SETTINGS = {
    "rounds": 2,
    "participation.count": 4,
    "local.lr": 0.1,
    "local.steps": 2,
    "local.batch_size": 8,
    "local.engine": "sequential",
}


DRAWN: dict[bool, list[float]] = {False: [], True: []}
"""What all copies of `Noisy` drew in training, and in evaluation."""


class Noisy(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Any:
        noise = torch.randn(len(x), 64)
        DRAWN[self.training].append(float(noise[0, 0]))
        return self.layer(x.flatten(1) + noise / 2)


class DropsAlways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(64, 10), nn.Dropout(0.5)

    def train(self, mode: bool = True) -> DropsAlways:
        super().train(mode)
        self.dropout.train()
        return self

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.dropout(x.flatten(1)))


def noised_by_numpy(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none") * float(np.random.rand())  # noqa: NPY002


def trained(seed: int, **given: Any) -> fedmpi.Run:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    model, on_round = given.pop("model", "mlp"), given.pop("on_round", None)
    settings = SETTINGS | {key.replace("__", "."): value for key, value in given.items()}
    return fedmpi.run("fedavg", settings, data="digits", model=model, on_round=on_round)


def assert_same_model(one: fedmpi.Run, other: fedmpi.Run) -> None:
    values, others = one.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(values[name], others[name]) for name in values)


@pytest.mark.parametrize("net", [Noisy, DropsAlways])
def test_gains_do_not_depend_on_the_global_generators(net: type[nn.Module]):
    one, other = (trained(seed, model=lambda _: net(), logging__diagnostics=True).records[-1] for seed in (1, 2))
    assert one["gamma"] == other["gamma"]
    assert np.isfinite(one["gamma"])


def test_losses_that_weights_ask_for_do_not_depend_on_the_global_generators():
    given = {"aggregation.weights": "q-ffl", "aggregation.q": 1.0}
    one, other = (trained(seed, model=lambda _: Noisy(), **given) for seed in (1, 2))
    assert_same_model(one, other)


def test_a_loss_that_draws_from_numpy_is_seeded():
    one, other = (trained(seed, task__loss=noised_by_numpy) for seed in (1, 2))
    assert_same_model(one, other)
    assert [record["test_loss"] for record in one.records] == [record["test_loss"] for record in other.records]


class DrawsItself(fedmpi.LocalAlgorithm):
    """An objective that draws from the global generators of numpy, random and torch."""

    def objective(self, module: nn.Module, x: Tensor, y: Tensor, client: Any, server: Any) -> Tensor:
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002
        return cross_entropy(module(x), y) * drawn


def test_an_objective_of_ones_own_that_draws_is_seeded():
    assert_same_model(*(trained(seed, local__algorithm=DrawsItself) for seed in (1, 2)))


def draws_for_many(outputs: Tensor, targets: Tensor) -> Tensor:
    drawn = float(np.random.rand()) if len(outputs) > 100 else 0.0  # noqa: NPY002
    return cross_entropy(outputs, targets, reduction="none") + drawn


def test_what_a_loss_draws_where_no_trial_saw_it_leaves_the_global_generators():
    """Of the test part, and of clients' own rows in passes of many."""
    for given in ({}, {"evaluation__clients": "all", "evaluation__clients_every": 1, "evaluation__every": 9}):
        states: list[list[int]] = []

        def note(record: dict[str, Any], states: list[list[int]] = states) -> None:
            states.append(np.random.get_state()[1].tolist())  # noqa: NPY002

        trained(1, task__loss=draws_for_many, on_round=note, **given)
        assert states[0] == states[1]


def test_every_client_is_evaluated_with_draws_of_its_own_in_every_round(tmp_path: Path):
    """All have the same rows, and nothing is learned."""
    generator = np.random.default_rng(0)
    x, y = np.tile(generator.standard_normal((5, 64), np.float32), (3, 1)), np.tile(np.arange(5), 3)
    data = fedmpi.ClientArrays(x, y, np.repeat(np.arange(3), 5), test=(x, y))
    keys = SETTINGS | {"participation.count": 3, "local.lr": 1e-30, "evaluation.clients": "all"}
    keys |= {"evaluation.clients_every": 1, "evaluation.fine_tune": 1}
    fedmpi.run("fedavg", keys, data=data, model=lambda _: Noisy(5), out=tmp_path)
    table = read_clients(tmp_path)
    assert len(set(table["loss"].tolist())) == len(table["round"]) == 6
    assert table["tuned_loss"].tolist() == table["loss"].tolist()


def noisy(_: DataDescription) -> nn.Module:
    return Noisy()


def losses_of(rows: list[int]) -> LocalLosses:
    """Of clients that all have the same samples, as far as they have so many."""
    source = InMemorySource(DataDescription((64,), "float32", 10, "image", 0, (), ()), rows)
    x, y = source.load(int(np.argmax(rows)))
    source.load = lambda client, chosen=None: (x[: rows[client]], y[: rows[client]])  # type: ignore[method-assign]
    config = load_config(None, ["participation.clients=all", f"model.name={__name__}:noisy"])
    return LocalLosses(config, source, torch.device("cpu"), Streams(7))


def test_losses_of_clients_are_measured_with_draws_of_the_round_and_the_client():
    losses = losses_of([9, 9])
    w = losses.start
    first = losses.before(0, w, 3)
    assert losses.before(0, w, 3) == first
    assert losses.before(0, w, 4) != first
    assert losses.before(1, w, 3) != first
    assert not losses.model.module.training
    x, y = losses.data.load(0)
    torch.manual_seed(Streams(7).seed64(Purpose.CLIENT_EVALUATION, 3, 0))
    assert first == pytest.approx(float(cross_entropy(losses.model.module(x), y).detach()))
    assert losses.gain(0, torch.zeros_like(w), 3) == 0


def test_a_client_without_samples_gains_nothing():
    losses = losses_of([9, 0])
    assert losses.before(1, losses.start, 0) == losses.gain(1, losses.start, 0) == 0


def test_a_client_is_evaluated_with_other_noise_than_it_is_trained_with():
    def begin_anew(record: dict[str, Any]) -> None:
        """Forget what was drawn in trials and in the first round."""
        if record["round"] == 0:
            for drawn in DRAWN.values():
                drawn.clear()

    trained(1, model=lambda _: Noisy(), evaluation__clients="all", participation__count=20, on_round=begin_anew)
    in_training, in_evaluation = (set(DRAWN[mode]) for mode in (True, False))
    assert len(in_training) >= 20 * 2  # of twenty clients and two steps
    assert in_evaluation  # several clients share a pass
    assert not in_training & in_evaluation
