"""Whole runs of each kind of task: engines agree, numbers are those of plain loops, and wrong data are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

import fedmpi
from fedmpi import UserError
from tests.tasks import worlds
from tests.tasks.worlds import BASE, WORLDS


def values(run: fedmpi.Run) -> np.ndarray:
    return np.concatenate([value.numpy().ravel() for value in run.model.state_dict().values()]).astype(np.float64)


def one_step(world: str, **further: Any) -> fedmpi.Run:
    settings = {**BASE, **WORLDS[world], "local.steps": 1, "local.batch_size": "all", **further}
    del settings["local.epochs"]
    return fedmpi.run("fedavg", settings)


@pytest.mark.parametrize("world", WORLDS)
def test_one_step_of_all_clients_is_one_weighted_gradient(world: str):
    merged, one_by_one = (one_step(world, **{"local.engine": engine}) for engine in ("auto", "sequential"))
    assert np.abs(values(merged) - values(one_by_one)).max() < 1e-6
    assert merged.records[0]["train_loss"] == pytest.approx(one_by_one.records[0]["train_loss"], rel=1e-5)


def test_data_of_another_kind_are_rejected():
    with pytest.raises(UserError, match='task.kind = "classification" does not go with the data .*are tokens'):
        fedmpi.run("fedavg", BASE, data=worlds.tokens())
    with pytest.raises(UserError, match='Set task.kind = "classification"'):
        fedmpi.run("fedavg", {**BASE, "task.kind": "tokens"})
    x, y = np.zeros((6, 2)), np.arange(6.0)
    with pytest.raises(UserError, match="are regression. .* or store them as whole numbers, where they are classes"):
        fedmpi.run("fedavg", BASE, data=fedmpi.ClientArrays(x, y, [0, 0, 0, 1, 1, 1], test=(x, y)))


@pytest.mark.parametrize(
    ("world", "model", "words"),
    [
        ("tokens", "text-cnn", r"of shape \(samples, 12, \d+\) on cpu for tokens"),
        ("tokens", "mlp", "mlp"),
        ("multilabel", "char-lstm", "reads texts"),
        ("regression of three", "tests.tasks.test_kinds:two_values", r"of shape \(samples, 3\) on cpu for regression"),
    ],
)
def test_models_of_another_kind_are_rejected(world: str, model: str, words: str):
    settings = {key: value for key, value in WORLDS[world].items() if not key.startswith("model.")}
    with pytest.raises(UserError, match=words):
        fedmpi.run("fedavg", {**BASE, **settings, "model.name": model})


def two_values(description: Any) -> nn.Module:
    return nn.Linear(description.feature_shape[0], 2)
