"""Any ordinary module side by side: classes as users write them, and the built-in models that are no plain sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedmpi.common.streams import Streams
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.any_modules import MODULES
from tests.local.stacks import (
    COLOURED,
    TEXTS,
    Source,
    flat_model,
    ragged_sizes,
    relative_difference,
    tasks_for,
    train,
)

STREAMS = Streams(7)
EPOCHS = LocalRule(lr=0.05, epochs=2, batch_size=7)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
BUILT_IN = {
    "resnet18": (COLOURED, {"width": 8, "groups": 4}),
    "fedsampling-text-cnn": (TEXTS, {"dimension": 8, "filters": 6, "hidden": [10, 8]}),
    "transformer": (TEXTS, {"dimension": 8, "heads": 2, "head_size": 4, "hidden": [10, 8]}),
    "lstm": (TEXTS, {"dimension": 8, "units": 7, "dropout": 0.3}),
    "bilstm": (TEXTS, {"dimension": 8, "units": 6, "hidden": [10, 8]}),
}


def the_model(name: str, dtype: torch.dtype) -> tuple[FlatModel, object]:
    if name in BUILT_IN:
        description, options = BUILT_IN[name]
        return flat_model(name, description, dtype, **options), description
    description, make = MODULES[name]
    torch.manual_seed(1)
    return FlatModel(make().to(dtype)), description


def assert_same_round(name: str, dtype: torch.dtype, rule: LocalRule, sizes: np.ndarray) -> None:
    model, description = the_model(name, dtype)
    source, tasks = Source(description, sizes, dtype), tasks_for(sizes)
    sequential, batched = SequentialEngine(model, source, STREAMS), BatchedEngine(model, source, STREAMS)
    expected, wanted = train(sequential, tasks, model.initial, rule)
    found, report = train(batched, tasks, model.initial, rule)
    assert relative_difference(expected, model.initial) > 1e-4, "training must have changed the model"
    assert relative_difference(found, expected) < TOLERANCE[dtype]
    assert report.steps == wanted.steps
    assert report.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", [*MODULES, *BUILT_IN])
def test_ragged_clients_reach_the_weights_of_the_sequential_engine(name: str, dtype: torch.dtype):
    assert_same_round(name, dtype, EPOCHS, ragged_sizes(12, 20))
