"""First layers kept apart from what corrections move them by: the same values as with a pass a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fedmpi.local.batched.apart import KeptApart, pays_off
from fedmpi.models.stacked.net import translate

from fedmpi.aggregation.exact import FloatSum
from fedmpi.local.batched import engine as batched
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.stacks import IMAGES, TEXTS, Source, flat_model, relative_difference
from tests.local.test_algorithms import MODELS, RULES, SIZES, STREAMS, cohort, make

EPOCHS = RULES["epochs"]
STEPS = 2 * -(-int(SIZES.max()) // 4)


def three_rounds(name: str, dtype: torch.dtype, rule: LocalRule, chunk: int | None) -> torch.Tensor:
    """The updates of three rounds, whose clients keep state, each from its own model."""
    description, given = MODELS["mlp"]
    model = flat_model("mlp", description, dtype, **given)
    hooks = make(name, model)
    rule = LocalRule(**{**vars(rule), "proximal_mu": rule.proximal_mu + hooks.proximal_mu})
    engine = BatchedEngine(model, Source(description, SIZES, dtype), STREAMS, hooks=hooks, chunk=chunk)
    kind, updates = np.float64 if dtype == torch.float64 else np.float32, []
    for t in range(3):
        total = FloatSum(np.zeros(model.size, kind))
        sums = {key: FloatSum(np.zeros(model.size, kind)) for key in hooks.sums}
        start = model.initial * (1 + 0.1 * t)
        hooks.begin(t, start, sums)
        engine.train(cohort(t), start, rule, t, total)
        updates.append(total.tensor.clone())
    return torch.cat(updates)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients each chunk had whose first layer was kept apart."""
    found: list[int] = []
    settle = KeptApart.settle

    def watched(apart: KeptApart, steps: list[int]) -> None:
        found.append(len(steps))
        settle(apart, steps)

    monkeypatch.setattr(KeptApart, "settle", watched)
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("mu", [0.0, 0.9, 4.0])
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "tests.local.own_algorithms:Odd"])
def test_values_kept_apart_end_where_passes_over_them_end(
    name: str, mu: float, dtype: torch.dtype, tolerance: float, opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of unequal numbers of steps, some without a correction; a step pulls by 0, 4.5 and 20 %."""
    rule = LocalRule(**{**vars(EPOCHS), "proximal_mu": mu})
    apart = three_rounds(name, dtype, rule, chunk=4)
    assert opened == [3] * 6
    monkeypatch.setattr(batched, "pays_off", lambda *given: False)
    passes = three_rounds(name, dtype, rule, chunk=4)
    assert opened == [3] * 6 and not torch.equal(apart, passes)
    assert relative_difference(apart, passes) < tolerance


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_the_size_of_the_chunk_does_not_matter_to_values_kept_apart(name: str, opened: list[int]) -> None:
    ends = [three_rounds(name, torch.float64, EPOCHS, chunk) for chunk in (1, 2, 6)]
    assert opened == [1] * 18 + [2] * 9 + [6] * 3
    assert max(relative_difference(end, ends[0]) for end in ends) < 1e-12


def test_corrections_that_no_step_reads_leave_room_in_the_cache(
    opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    description, given = MODELS["mlp"]
    model = flat_model("mlp", description, torch.float32, **given)
    net, rows = translate(model.module, description), 4
    values = 2 * net.stack_size - net.slots[0].size + rows * net.values_per_row
    monkeypatch.setattr(batched, "CACHE_BYTES", len(cohort(0)) * 4 * values)
    three_rounds("scaffold", torch.float32, EPOCHS, chunk=None)
    assert opened == [len(cohort(0))] * 3


def test_only_first_layers_that_gain_by_it_are_kept_apart() -> None:
    def spares(model: FlatModel, taken: int = STEPS, description: object = IMAGES, **changes: object) -> bool:
        rule = LocalRule(**{**vars(EPOCHS), **changes})
        return pays_off(translate(model.module, description), rule, taken)

    mlp = flat_model("mlp", IMAGES, torch.float32, hidden=[8])
    assert spares(mlp) and spares(mlp, batch_size=24) and spares(mlp, proximal_mu=9.0)
    assert not spares(mlp, batch_size=25), "more samples a step than their products are worth"
    assert not spares(mlp, batch_size=None) and not spares(mlp, epochs=None, steps=5)
    assert not spares(mlp, optimizer="adam")
    assert not spares(mlp, proximal_mu=14.0), "a pull by more than half"
    assert not spares(mlp, 10**4, proximal_mu=9.0), "a scale that floats end at"
    assert not spares(flat_model("mlp", IMAGES, torch.float32, hidden=[400])), "products larger than the samples"
    assert not spares(flat_model("cnn", IMAGES, torch.float32, dense=20)), "no product with the samples themselves"
    assert not spares(flat_model("text-cnn", TEXTS, torch.float32, filters=4, dimension=6), description=TEXTS)
