"""The batched engine does the sequential engine's work up to rounding: same batches, same masks, same updates."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi import ClientFailure
from fedmpi.aggregation.exact import FixedPointSum
from fedmpi.local.batched import engine as batched_engine
from fedmpi.local.batched import translation
from fedmpi.local.batched.engine import BatchedEngine, Feed, Timetable
from fedmpi.local.batched.first_layer import KeptApart, ProductsAhead, pays_off, steps_at_once
from fedmpi.local.batched.graph import GraphLayer
from fedmpi.local.batched.stack import Stack
from fedmpi.local.batched.translation import translate
from fedmpi.local.engines import why_not_batched
from fedmpi.local.measures import Gradients
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, RoundJob
from fedmpi.models.flat import FlatModel
from tests.local import networks
from tests.local.networks import CHAINS, GRAPHS, REFUSED
from tests.local.synthetic import (
    MIDDLE_IMAGES,
    STREAMS,
    TEXTS,
    InMemorySource,
    assert_same_work,
    flat_model,
    made,
    ragged_sizes,
    relative_error,
    summed,
    tasks_of,
)
from tests.local.test_algorithms import RULES, cohort, simulate, world

CPU = torch.device("cpu")
EPOCHS = LocalRule(lr=0.05, epochs=2, batch_size=7)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mlp": (MIDDLE_IMAGES, {"hidden": [20, 16], "dropout": 0.3}),
    "mlp, wide": (MIDDLE_IMAGES, {"hidden": [400, 6]}),
    "cnn": (MIDDLE_IMAGES, {"dense": 20}),
    "text-cnn": (TEXTS, {"dimension": 8, "filters": 6, "dropout": 0.5}),
}
RULES_OF_STEPS = {
    "steps": LocalRule(lr=0.05, epochs=None, steps=11, batch_size=7),
    "proximal": LocalRule(lr=0.05, epochs=None, steps=3, batch_size=7, proximal_mu=0.3),
    "strongly proximal": LocalRule(lr=0.05, epochs=None, steps=3, batch_size=7, proximal_mu=14.0),
    "adam": LocalRule(optimizer="adam", lr=0.003, epochs=2, batch_size=7, proximal_mu=0.2),
    "whole sets": LocalRule(lr=0.05, epochs=2, batch_size=None),
    "single samples": LocalRule(lr=0.02, epochs=1, batch_size=1),
    "short batches left out": LocalRule(lr=0.05, epochs=2, batch_size=13, drop_last=True),
}


def engines(name: str, dtype: torch.dtype, sizes: np.ndarray, **more: Any) -> tuple[SequentialEngine, BatchedEngine]:
    description, options = MODELS[name]
    model = flat_model(name.partition(",")[0], description, dtype, **options)
    batched = made(BatchedEngine, model, InMemorySource(description, sizes, dtype), **more)
    return batched.sequential, batched


def tasks_for(sizes: np.ndarray) -> list[ClientTask]:
    """Every client once, weighted by size; every fifth trains on a sample of its rows."""
    return [
        ClientTask(k, np.arange(0, n, 2) if k % 5 == 4 else None, n / float(sizes.sum())) for k, n in enumerate(sizes)
    ]


def assert_same_round(
    sequential: SequentialEngine, batched: BatchedEngine, rule: LocalRule, tolerance: float, round: int = 2
) -> None:
    ways, tasks = (batched, sequential), tasks_for(sequential.source.sizes)
    assert_same_work(*(summed(way, sequential.model, tasks, rule, round) for way in ways), tolerance)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [*CHAINS, *(f"graph {name}" for name in GRAPHS)])
def test_every_form_trains_clients_as_the_module_itself_does(name: str) -> None:
    """In chunks of two clients and of one."""
    module, description = networks.made(name)
    model, source = FlatModel(module), InMemorySource(description, np.array([3, 18, 1, 7, 11]), torch.float64)
    assert why_not_batched(model, description) is None
    batched = made(BatchedEngine, model, source, chunk=2)
    assert isinstance(batched.net.layers[-1], GraphLayer) == name.startswith("graph")
    assert_same_round(batched.sequential, batched, EPOCHS, 1e-10)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_batched_form_is_rejected(name: str) -> None:
    module, description = networks.made(name)
    assert why_not_batched(FlatModel(module), description)


@pytest.mark.parametrize("rule", RULES_OF_STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_every_rule_agrees_in_double_precision(name: str, rule: str) -> None:
    sizes = ragged_sizes(12, 30) if rule != "short batches left out" else np.full(4, 20)
    assert_same_round(*engines(name, torch.float64, sizes), RULES_OF_STEPS[rule], 1e-10)


@pytest.mark.parametrize("limit", [0, 10**9], ids=["client by client", "joined"])
def test_an_engine_serves_round_after_round_with_other_clients_and_rules(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmpi.local.batched.stack.JOIN_BELOW", limit)
    for name in ("mlp, wide", "cnn"):
        sequential, batched = engines(name, torch.float64, ragged_sizes(20, 30))
        rules = [EPOCHS, LocalRule(lr=0.02, batch_size=11), RULES_OF_STEPS["adam"], EPOCHS, LocalRule(batch_size=5)]
        for round, rule in enumerate(rules):
            assert_same_round(sequential, batched, rule, 1e-10, round)


def test_buffers_that_are_averaged_are_those_of_the_round_and_have_no_update() -> None:
    module, description = networks.made("buffer")
    model, source = FlatModel(module), InMemorySource(description, [5, 2], torch.float64)
    batched, start = made(BatchedEngine, model, source), model.initial.clone()
    start[: model.trainable] *= 3
    ways = (summed(way, model, tasks_of(source), EPOCHS, start=start) for way in (batched, batched.sequential))
    found, expected = (total for total, _ in ways)
    assert relative_error(found, expected) < 1e-12 and not found[model.trainable :].any()


@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "tests.local.own_algorithms:Odd"])
def test_weights_in_two_parts_end_where_passes_over_them_end(
    name: str, mu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = replace(RULES["epochs"], proximal_mu=mu)
    (model, source), settled = world(), []
    settle = KeptApart.settle
    monkeypatch.setattr(KeptApart, "settle", lambda apart, steps: settled.append(len(steps)) or settle(apart, steps))
    apart = list(simulate(BatchedEngine, name, model, source, rule))[-1]
    assert sum(settled) == 3 * len(cohort(0))
    monkeypatch.setattr(batched_engine, "pays_off", lambda *given: False)
    passes = list(simulate(BatchedEngine, name, model, source, rule))[-1]
    assert sum(settled) == 3 * len(cohort(0)) and not torch.equal(apart, passes)
    assert relative_error(apart, passes) < 1e-12


def test_the_ways_of_a_first_layer_are_taken_where_they_pay() -> None:
    rule = LocalRule(lr=0.05, epochs=2, batch_size=24)
    assert pays_off(196, 8, rule, 10) and not pays_off(196, 400, rule, 10)
    for change in ({"batch_size": 25}, {"batch_size": None}, {"optimizer": "adam"}, {"proximal_mu": 14.0}):
        assert not pays_off(196, 8, replace(rule, **change), 10)
    assert not pays_off(196, 8, replace(rule, proximal_mu=9.0), 10**4)  # (1 − p)^t would be too small
    assert steps_at_once(784, 200, 10, 60) == 4 and steps_at_once(784, 200, 10, 2) == 0


@pytest.mark.parametrize("changes", [{"proximal_mu": 0.5}, {"optimizer": "adam"}, {}])
def test_products_ahead_are_for_plain_steps(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    begin = ProductsAhead.open
    monkeypatch.setattr(ProductsAhead, "open", lambda *given: opened.append(given[-1]) or begin(*given))
    _, batched = engines("mlp, wide", torch.float64, np.full(3, 40))
    summed(batched, batched.model, tasks_for(np.full(3, 40)), LocalRule(lr=0.003, batch_size=10, **changes))
    assert opened == ([] if changes else [4])


@pytest.mark.parametrize("name", ["cnn", "text-cnn"])
def test_an_observer_and_an_exact_sum_get_the_update_of_every_client(name: str) -> None:
    sizes = ragged_sizes(7, 20)
    seen: list[dict[int, torch.Tensor]] = []
    results, sums = [], []
    for engine in engines(name, torch.float64, sizes):
        buffer = np.zeros(engine.model.size, np.int64)
        engine.train(tasks_for(sizes), RoundJob(engine.model.initial, EPOCHS, 2, FixedPointSum(buffer)))
        sums.append(buffer / 2.0**40)
        seen.append(notes := {})
        engine.observe = lambda k, delta, notes=notes: notes.setdefault(k, delta.clone()) * 0.5
        results.append(summed(engine, engine.model, tasks_for(sizes), EPOCHS, 2)[0])
    assert relative_error(results[1], results[0]) < 1e-12
    assert seen[0].keys() == seen[1].keys() == set(range(7))
    assert all(relative_error(seen[1][client], delta) < 1e-10 for client, delta in seen[0].items())
    np.testing.assert_allclose(sums[1], sums[0], atol=1e-7)
    np.testing.assert_allclose(sums[1], 2 * results[1].numpy(), atol=1e-7)


def test_padding_is_the_clients_own() -> None:
    """Else what is no number in another client's samples would be no number in this client's losses."""
    _, batched = engines("cnn", torch.float64, np.array([9]))
    net = Stack(batched.net, 2, 6, True, torch.float64, CPU).bound(2, 6)
    net.read(0, torch.full((6, 196), torch.nan, dtype=torch.float64), torch.arange(6))
    net.read(1, torch.ones(4, 196, dtype=torch.float64), torch.arange(2))
    columns = net.layers[0].output[1]
    assert bool((columns == 1).all())
    timetable = Timetable([[np.array([0, 1, 2]), np.array([1])], [np.array([1])]], [3, 2])
    _, batched = engines("mlp", torch.float32, np.array([9]))
    net = Stack(batched.net, 2, 3, True, torch.float32, CPU).bound(2, 3)
    samples = [torch.full((3, 196), torch.nan), torch.ones(2, 196)]
    Feed(timetable, samples, [torch.zeros(n, dtype=torch.int64) for n in (3, 2)], torch.float32).fill(net, 0)
    assert net.x[0].isnan().all() and not net.x[1].isnan().any()


def test_word_vectors_of_words_that_do_not_occur_stay_exactly_as_they_are() -> None:
    _, batched = engines("text-cnn", torch.float32, np.array([3, 4]))
    found, _ = summed(batched, batched.model, tasks_for(np.array([3, 4])), EPOCHS)
    changed = found[: TEXTS.vocabulary * 8].view(TEXTS.vocabulary, 8).any(1)
    present = torch.zeros(TEXTS.vocabulary, dtype=torch.bool)
    present[batched.source.x.flatten().long()] = True
    assert changed.any() and not (changed & ~present).any()


@pytest.mark.parametrize("name", ["mlp", "cnn", "text-cnn", "graph gru"])
def test_gradients_of_batched_clients_are_those_of_each_client(name: str) -> None:
    sizes = np.array([4, 30, 9])
    if name.startswith("graph"):
        module, description = networks.made(name)
        model = FlatModel(module)
    else:
        description = MODELS[name][0]
        model = flat_model(name, description, torch.float64, **MODELS[name][1])
    source, start = InMemorySource(description, sizes, torch.float64), model.initial * 1.5
    rows = [None, np.arange(0, 30, 2), None]
    counts = np.array([4, 15, 9])
    found = {}
    for clients, gradients in made(BatchedEngine, model, source).gradients(np.arange(3), rows, counts, start, 2):
        found |= dict(zip(clients.tolist(), gradients.clone(), strict=True))
    for client in (0, 2):
        [(_, expected)] = Gradients(source, model, STREAMS).each([client], start, 0)
        assert relative_error(found[client], expected) < 1e-10
    if description.task == "image":
        source.x[4] = torch.nan
        probe = made(BatchedEngine, model, source)
        with pytest.raises(ClientFailure, match="client 1 "):
            list(Gradients(source, model, STREAMS, batched=probe).blocks(range(3), start, 0))


@pytest.mark.parametrize("part", [0, 1], ids=["outputs", "gradients"])
def test_a_form_that_is_off_is_rejected(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = translation._batched

    def off(*given: Any) -> Any:
        pairs = found(*given)
        pairs[1][part].mul_(1.01)
        return pairs

    model = FlatModel(networks.made("dense")[0])
    monkeypatch.setattr(translation, "_batched", off)
    assert f"gives other {('outputs', 'gradients')[part]}" in str(why_not_batched(model, networks.IMAGES))


def test_a_translation_leaves_the_module_and_the_generators_as_they_were() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(330, 5)).eval()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    net = translate(module, networks.IMAGES)
    assert not module.training and module[1].p == 0.5 and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    ends = [0] + [slot.start + slot.size for slot in net.slots]
    assert all(slot.start % 16 == 0 and end <= slot.start for slot, end in zip(net.slots, ends, strict=False))
