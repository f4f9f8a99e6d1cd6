"""First layers whose products are made for several steps at once: the values that steps one by one end at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fedmpi.local.batched.apart import KeptApart
from fedmpi.models.stacked import ahead
from fedmpi.models.stacked.ahead import ProductsAhead, steps_at_once
from fedmpi.models.stacked.base import Slot
from fedmpi.models.stacked.dense import Linear
from fedmpi.models.stacked.net import translate
from torch import nn

from fedmpi import ClientFailure
from fedmpi.local.batched import engine as batched
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.failures import OnDivergence
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.stacks import CLASSES, IMAGES, Source, flat_model, ragged_sizes, relative_difference, tasks_for, train
from tests.local.test_algorithms import STREAMS
from tests.local.test_apart import EPOCHS, three_rounds

SIZES = ragged_sizes(50, 60)
WIDE = {"hidden": [400, 6]}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Clients and steps at once of each chunk whose products were made ahead."""
    found: list[tuple[int, int]] = []
    settle = ProductsAhead.settle

    def watched(products: ProductsAhead) -> None:
        found.append((len(products._weights), products._steps))
        settle(products)

    monkeypatch.setattr(ProductsAhead, "settle", watched)
    return found


def model_of(dtype: torch.dtype = torch.float64, **options: object) -> FlatModel:
    return flat_model("mlp", IMAGES, dtype, **(WIDE | options))


def both(model: FlatModel, rule: LocalRule, sizes: np.ndarray, chunk: int | None = None) -> None:
    """The sequential engine's updates and report."""
    source, tasks = Source(IMAGES, sizes, model.dtype), tasks_for(sizes)
    expected, wanted = train(SequentialEngine(model, source, STREAMS), tasks, model.initial, rule)
    result, report = train(BatchedEngine(model, source, STREAMS, chunk=chunk), tasks, model.initial, rule)
    assert relative_difference(expected, model.initial) > 1e-4, "training must have changed the model"
    assert relative_difference(result, expected) < TOLERANCE[model.dtype]
    moved = relative_difference(result - model.initial, expected - model.initial)
    assert moved < 1e2 * TOLERANCE[model.dtype]
    assert (report.steps, report.samples, report.loss_count) == (wanted.steps, wanted.samples, wanted.loss_count)
    assert report.loss_sum == pytest.approx(wanted.loss_sum, rel=TOLERANCE[model.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("batch", "epochs", "steps"), [(1, 1, 40), (5, 1, 8), (7, 3, 5), (13, 2, 3)])
def test_ragged_clients_reach_the_weights_of_the_sequential_engine(
    batch: int, epochs: int, steps: int, dtype: torch.dtype, opened: list[tuple[int, int]]
) -> None:
    """Clients end within a block, at its end and in later ones; last batches are smaller, and so are whole clients."""
    sizes = SIZES[:10] if batch == 1 else SIZES
    both(model_of(dtype), LocalRule(lr=0.05, epochs=epochs, batch_size=batch), sizes, chunk=6)
    assert opened and {together for _, together in opened} == {steps}


MODULES = {
    "dropout": lambda: model_of(dropout=0.4),
    "no bias": lambda: of_layers(nn.Linear(196, 400, bias=False), nn.Tanh(), nn.Linear(400, CLASSES)),
    "one layer": lambda: of_layers(nn.Linear(196, CLASSES)),
}


def of_layers(*layers: nn.Module) -> FlatModel:
    return FlatModel(nn.Sequential(nn.Flatten(), *layers).double())


@pytest.mark.parametrize("chunk", [1, 4, 11])
@pytest.mark.parametrize("name", MODULES)
def test_other_models_on_rows_drawn_anew_agree(
    name: str, chunk: int, opened: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "LEAST_VALUES", 1)
    monkeypatch.setattr(ahead, "LEAST_OUTPUTS", 1)
    torch.manual_seed(1)
    both(MODULES[name](), LocalRule(lr=0.05, epochs=None, steps=11, batch_size=7), SIZES[:12], chunk)
    assert opened and max(clients for clients, _ in opened) <= chunk


def test_what_earlier_rounds_left_behind_does_not_matter(opened: list[tuple[int, int]]) -> None:
    """As after a resume: an engine that begins with a round gives the bits of one that has seen others."""
    model, source = model_of(torch.float32), Source(IMAGES, SIZES)
    rules = [
        LocalRule(lr=0.05, batch_size=13, epochs=2),
        LocalRule(lr=1e30, batch_size=5),
        LocalRule(optimizer="adam", lr=0.003, batch_size=5),
        LocalRule(lr=0.05, epochs=2, batch_size=7),
        LocalRule(lr=0.05, epochs=1, batch_size=40),
        LocalRule(lr=0.02, epochs=1, batch_size=5),
    ]
    old = BatchedEngine(model, source, STREAMS, chunk=6)
    for round, rule in enumerate(rules):
        tasks = tasks_for(SIZES)[round::3]
        if rule.lr > 1:
            with pytest.raises(ClientFailure):
                train(old, tasks, model.initial, rule, round)
            continue
        new = BatchedEngine(model, source, STREAMS, chunk=6)
        found = [train(engine, tasks, model.initial, rule, round)[0] for engine in (old, new)]
        assert torch.equal(*found), f"round {round}"
        assert bool(found[0].isfinite().all())
    assert {together for _, together in opened} == {3, 8, 5}


@pytest.mark.parametrize(("first", "second"), [(26, 20), (35, 35)])
def test_steps_of_another_length_do_not_see_those_before(
    first: int, second: int, opened: list[tuple[int, int]]
) -> None:
    """A last batch of 5 behind three of 7, then four batches of 5; and as many samples in other steps."""
    model, source = model_of(), Source(IMAGES, np.array([35, 35]), torch.float64)
    old, new = (BatchedEngine(model, source, STREAMS) for _ in range(2))
    tasks, few = ([ClientTask(client, np.arange(n), 0.5) for client in (0, 1)] for n in (first, second))
    train(old, tasks, model.initial, LocalRule(lr=0.05, batch_size=7))
    rule = LocalRule(lr=0.05, batch_size=5)
    assert torch.equal(*(train(engine, few, model.initial, rule)[0] for engine in (old, new)))
    assert opened == [(2, 5), (2, 8), (2, 8)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_samples_are_not_gathered_for_the_steps_as_well(dtype: torch.dtype, opened: list[tuple[int, int]]) -> None:
    model, sizes = model_of(dtype), SIZES[:12]
    engine = BatchedEngine(model, Source(IMAGES, sizes, dtype), STREAMS)
    train(engine, tasks_for(sizes), model.initial, LocalRule(lr=0.05, batch_size=7))
    assert engine._stack is not None and opened
    assert not any(net.x.any() for net in engine._stack._bound.values())
    assert not engine._stack.ahead._samples and not engine._stack.ahead._order, "nothing is held until the next round"


def test_clients_that_diverge_are_named_and_may_be_left_out(opened: list[tuple[int, int]]) -> None:
    sizes, rule = np.full(5, 30), LocalRule(lr=0.05, epochs=1, batch_size=5)
    model, source = model_of(torch.float32), Source(IMAGES, sizes)
    tasks = [ClientTask(client, None, 0.2) for client in range(5)]
    whole = train(BatchedEngine(model, source, STREAMS), [tasks[k] for k in (0, 1, 2, 4)], model.initial, rule)[0]
    source.x[3] = torch.full_like(source.x[3], 1e25)
    with pytest.raises(ClientFailure, match="client 3"):
        train(BatchedEngine(model, source, STREAMS), tasks, model.initial, rule)
    dropping = BatchedEngine(model, source, STREAMS, on_divergence=OnDivergence(drops=True))
    result, report = train(dropping, tasks, model.initial, rule)
    assert report.diverged == 1
    assert relative_difference(result, whole) < 1e-6
    assert opened


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("mu", [0.0, 0.9, 4.0])
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "tests.local.own_algorithms:Odd"])
def test_with_corrections_kept_apart_the_same_values_come_out(
    name: str,
    mu: float,
    dtype: torch.dtype,
    tolerance: float,
    opened: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rounds of clients that keep state; a step pulls by 0, 4.5 and 20 %."""
    monkeypatch.setattr(ahead, "LEAST_VALUES", 1)
    monkeypatch.setattr(ahead, "LEAST_OUTPUTS", 1)
    monkeypatch.setattr(ahead, "ROWS_AHEAD", 12)
    rule = LocalRule(**{**vars(EPOCHS), "proximal_mu": mu})
    settled = []
    settle = KeptApart.settle
    monkeypatch.setattr(KeptApart, "settle", lambda apart, steps: (settled.append(steps), settle(apart, steps)))
    together = three_rounds(name, dtype, rule, chunk=4)
    assert opened == [(3, 3)] * 4 and len(settled) == 6, "two chunks have not the steps for it"
    monkeypatch.setattr(batched, "pays_off", lambda *given: False)
    passes = three_rounds(name, dtype, rule, chunk=4)
    assert len(opened) == 4 and not torch.equal(together, passes)
    assert relative_difference(together, passes) < tolerance


def test_rules_that_change_every_weight_in_every_step_go_step_by_step(opened: list[tuple[int, int]]) -> None:
    sizes = SIZES[:12]
    for rule in (
        LocalRule(lr=0.05, batch_size=7, proximal_mu=0.3),
        LocalRule(optimizer="adam", lr=0.003, batch_size=7),
        LocalRule(lr=0.05, epochs=2, batch_size=None),
        LocalRule(lr=0.05, batch_size=20),
    ):
        both(model_of(), rule, sizes)
    assert not opened


def test_only_layers_that_gain_by_it_have_their_products_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(batch: int | None = 10, taken: int = 60, **options: object) -> int:
        model = model_of(torch.float32, **options)
        return steps_at_once(translate(model.module, IMAGES).head, batch, taken)

    assert (steps(), steps(1), steps(5), steps(13)) == (4, 40, 8, 3)
    assert steps(14) == 0 and steps(None) == 0, "two steps at once gain nothing"
    assert steps(taken=3) == 4 and steps(taken=2) == 0
    assert steps(hidden=[335, 6]) == 4 and steps(hidden=[334, 6]) == 0, "a small layer"
    square = [Linear(256, n, Slot(0, (n, 256), 0), None) for n in (255, 256)]
    assert [steps_at_once(layer, 10, 60) for layer in square] == [0, 4]
    cnn = flat_model("cnn", IMAGES, torch.float32, dense=20)
    assert steps_at_once(translate(cnn.module, IMAGES).head, 10, 60) == 0
    narrow = [nn.Sequential(nn.Flatten(), nn.Linear(196, n), nn.Linear(n, CLASSES)) for n in (95, 96)]
    heads = [translate(module, IMAGES).head for module in narrow]
    monkeypatch.setattr(ahead, "LEAST_VALUES", 1)
    assert [steps_at_once(head, 10, 60) for head in heads] == [0, 4]
