"""The batched engine does the sequential engine's work, to rounding: same batches, same masks, same updates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi import ClientFailure
from fedmpi.aggregation.exact import FixedPointSum
from fedmpi.common.streams import Streams
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.engine import CACHE_BYTES, BatchedEngine, chunk_size
from fedmpi.local.batched.feed import Feed, Timetable
from fedmpi.local.batched.stack import Stack, client_by_client
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.stacks import (
    CLASSES,
    COLOURED,
    IMAGES,
    TEXTS,
    Source,
    flat_model,
    ragged_sizes,
    relative_difference,
    tasks_for,
    train,
)

STREAMS = Streams(7)
LARGER = DataDescription((1, 16, 16), "float32", CLASSES, "image", 0, (), ())
MODELS = {
    "mlp": (IMAGES, {"hidden": [20, 16], "dropout": 0.3}),
    "cnn": (IMAGES, {"dense": 20}),
    "image-cnn": (LARGER, {"filters": [4, 6], "hidden": [20, 16]}),
    "cifar-cnn": (COLOURED, {"hidden": 24}),
    "text-cnn": (TEXTS, {"dimension": 8, "filters": 6, "dropout": 0.5}),
}
EPOCHS = LocalRule(lr=0.05, epochs=2, batch_size=7)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def engines(name: str, dtype: torch.dtype, sizes: np.ndarray, **options: object):
    description, defaults = MODELS[name]
    model = flat_model(name, description, dtype, **(defaults | options))
    source = Source(description, sizes, dtype)
    return SequentialEngine(model, source, STREAMS), BatchedEngine(model, source, STREAMS)


def assert_same_round(name: str, dtype: torch.dtype, rule: LocalRule, sizes: np.ndarray) -> None:
    sequential, batched = engines(name, dtype, sizes)
    start, tasks = sequential.model.initial, tasks_for(sizes)
    expected, wanted = train(sequential, tasks, start, rule)
    before = start.clone()
    result, report = train(batched, tasks, start, rule)
    assert torch.equal(start, before), "the start stays as it is"
    assert relative_difference(expected, start) > 1e-4, "training must have changed the model"
    assert relative_difference(result, expected) < TOLERANCE[dtype]
    for field in ("clients", "steps", "samples", "loss_count"):
        assert getattr(report, field) == getattr(wanted, field), field
    assert report.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5 if dtype == torch.float32 else 1e-12)
    assert report.weight == pytest.approx(wanted.weight)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "cifar-cnn" else name for name in MODELS]
)
def test_fifty_ragged_clients_reach_the_weights_of_the_sequential_engine(name: str, dtype: torch.dtype):
    assert_same_round(name, dtype, EPOCHS, ragged_sizes(50, 40))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "rule",
    [
        LocalRule(lr=0.05, epochs=None, steps=3, batch_size=7, proximal_mu=0.3),
        LocalRule(lr=0.05, epochs=None, steps=3, batch_size=7, proximal_mu=14.0),
        LocalRule(optimizer="adam", lr=0.003, epochs=1, batch_size=7),
        LocalRule(optimizer="adam", lr=0.003, epochs=2, batch_size=7, proximal_mu=0.2),
        LocalRule(lr=0.05, epochs=2, batch_size=None),
    ],
    ids=["sgd-steps-proximal", "sgd-steps-strongly-proximal", "adam", "adam-proximal", "whole-sets"],
)
def test_every_rule_agrees_in_double_precision(name: str, rule: LocalRule):
    assert_same_round(name, torch.float64, rule, ragged_sizes(12, 30))


@pytest.mark.parametrize("name", ["mlp", "cnn", "text-cnn"])
def test_the_size_of_the_chunk_does_not_matter(name: str):
    sizes = ragged_sizes(11, 30)
    _, batched = engines(name, torch.float64, sizes)
    start, tasks = batched.model.initial, tasks_for(sizes)
    results = []
    for chunk in (1, 2, 4, 11):
        batched.chunk = chunk
        results.append(train(batched, tasks, start, EPOCHS)[0])
    for result in results[1:]:
        assert relative_difference(result, results[0]) < 1e-13


def test_an_engine_may_be_used_for_round_after_round_with_other_clients_and_rules():
    sizes = ragged_sizes(20, 30)
    sequential, batched = engines("cnn", torch.float64, sizes)
    w = sequential.model.initial
    rules = [EPOCHS, LocalRule(lr=0.02, epochs=1, batch_size=11), LocalRule(optimizer="adam", lr=0.003, batch_size=5)]
    for round, rule in enumerate([*rules, EPOCHS]):
        tasks = tasks_for(sizes)[round::3]
        expected, _ = train(sequential, tasks, w, rule, round)
        w, _ = train(batched, tasks, w, rule, round)
        assert relative_difference(w, expected) < 1e-12


def test_large_samples_and_small_ones_are_gathered_alike(monkeypatch: pytest.MonkeyPatch):
    sizes = ragged_sizes(9, 30)
    assert client_by_client(torch.zeros(2, 256)) and not client_by_client(torch.zeros(2, 255))
    results = []
    for limit in (0, 10**9):
        monkeypatch.setattr("fedmpi.local.batched.stack.JOIN_BELOW", limit)
        _, batched = engines("cnn", torch.float64, sizes)
        start, tasks = batched.model.initial, tasks_for(sizes)
        results.append(train(batched, tasks, start, EPOCHS)[0])
    assert torch.equal(*results)


def test_a_batch_is_not_filled_up_with_what_another_client_left():
    _, batched = engines("cnn", torch.float64, np.array([9]))
    stack = Stack(batched.net, 2, 6, True, torch.float64, torch.device("cpu"))
    net = stack.bound(2, 6)
    net.read(0, torch.full((6, 14 * 14), torch.nan, dtype=torch.float64), torch.arange(6))
    net.read(1, torch.ones(4, 14 * 14, dtype=torch.float64), torch.arange(2))
    columns = net.ops[0].output[1]
    assert bool((columns[:, :2] == 1).all()) and not columns[:, 2:].any()


def test_joined_batches_are_filled_up_with_a_sample_of_the_client():
    """Else what is no number in the first of all samples would be no number in other clients' losses."""
    timetable = Timetable([[np.array([0, 1, 2]), np.array([1])], [np.array([1])]], np.array([[3, 1], [1, 0]]))
    _, batched = engines("mlp", torch.float32, np.array([9]))
    net = Stack(batched.net, 2, 3, True, torch.float32, torch.device("cpu")).bound(2, 3)
    samples = [torch.full((3, net.x.shape[2]), torch.nan), torch.ones(2, net.x.shape[2])]
    feed = Feed(timetable, samples, [torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)])
    feed.fill(net, 0)
    assert net.x[0].isnan().all()
    assert not net.x[1].isnan().any()


def test_a_client_visited_again_in_the_round_gets_other_batches_and_masks():
    sizes = np.array([30, 30])
    sequential, batched = engines("mlp", torch.float64, sizes)
    start = sequential.model.initial
    tasks = [ClientTask(0, None, 0.5, visit=0), ClientTask(0, None, 0.5, visit=1)]
    expected, _ = train(sequential, tasks, start, EPOCHS)
    both, _ = train(batched, tasks, start, EPOCHS)
    twice_the_same, _ = train(batched, [tasks[0], tasks[0]], start, EPOCHS)
    assert relative_difference(both, expected) < 1e-13
    assert relative_difference(both, twice_the_same) > 1e-6


def test_clients_without_samples_count_but_change_nothing():
    sizes = np.array([5, 0, 9])
    _, batched = engines("mlp", torch.float64, sizes)
    start = batched.model.initial
    with_empty, report = train(batched, [ClientTask(k, None, 0.3) for k in range(3)], start, EPOCHS)
    without, _ = train(batched, [ClientTask(k, None, 0.3) for k in (0, 2)], start, EPOCHS)
    assert torch.equal(with_empty, without)
    assert (report.clients, report.samples) == (3, 14)
    nothing, report = train(batched, [ClientTask(1, None, 0.3)], start, EPOCHS)
    assert torch.equal(nothing, start)
    assert (report.steps, report.loss_count) == (0, 0)


@pytest.mark.parametrize("name", ["cnn", "text-cnn"])
def test_an_observer_sees_the_update_of_every_client_and_may_replace_it(name: str):
    sizes = ragged_sizes(7, 20)
    sequential, batched = engines(name, torch.float64, sizes)
    seen: dict[str, dict[int, torch.Tensor]] = {"sequential": {}, "batched": {}}
    results = []
    for engine in (sequential, batched):
        notes = seen[engine.name]

        def observe(client: int, delta: torch.Tensor, notes: dict[int, torch.Tensor] = notes) -> torch.Tensor:
            notes[client] = delta.clone()
            return delta * 0.5

        engine.observe = observe
        results.append(train(engine, tasks_for(sizes), engine.model.initial, EPOCHS)[0])
    assert relative_difference(results[1], results[0]) < 1e-13
    assert seen["batched"].keys() == seen["sequential"].keys() == set(range(7))
    for client, delta in seen["sequential"].items():
        assert relative_difference(seen["batched"][client], delta) < 1e-11


def test_a_fixed_point_sum_gets_every_clients_update():
    sizes = ragged_sizes(7, 20)
    sequential, batched = engines("cnn", torch.float32, sizes)
    sums = []
    for engine in (sequential, batched):
        buffer = np.zeros(engine.model.size, np.int64)
        engine.train(tasks_for(sizes), engine.model.initial, EPOCHS, 1, FixedPointSum(buffer))
        sums.append(buffer / 2.0**40)
    np.testing.assert_allclose(sums[1], sums[0], atol=1e-7)


def test_a_diverging_client_is_named():
    sizes = np.array([20, 20, 20])
    description, options = MODELS["mlp"]
    model = flat_model("mlp", description, torch.float32, **options)
    source = Source(description, sizes)
    source.x[1] *= 1e30
    engine = BatchedEngine(model, source, STREAMS)
    with pytest.raises(ClientFailure, match="client 1 .*diverged.*lower local.lr"):
        train(engine, [ClientTask(k, None, 1 / 3) for k in range(3)], model.initial, EPOCHS)


def test_a_client_whose_samples_cannot_be_read_is_named():
    sizes = np.array([20, 20])
    _, batched = engines("mlp", torch.float32, sizes)
    batched.rank = 3
    del batched.source.x[1]
    with pytest.raises(ClientFailure, match="client 1 on rank 3"):
        train(batched, [ClientTask(k, None, 0.5) for k in range(2)], batched.model.initial, EPOCHS)


def test_word_vectors_of_words_that_do_not_occur_stay_exactly_as_they_are():
    _, batched = engines("text-cnn", torch.float32, np.array([3, 4]))
    start = batched.model.initial
    result, _ = train(batched, [ClientTask(0, None, 0.5), ClientTask(1, None, 0.5)], start, EPOCHS)
    vocabulary, dimension = TEXTS.vocabulary, 8
    table = slice(0, vocabulary * dimension)
    changed = (result[table] != start[table]).view(vocabulary, dimension).any(1)
    present = torch.zeros(vocabulary, dtype=torch.bool)
    present[torch.cat([x.flatten() for x in batched.source.x]).long()] = True
    assert changed.any()
    assert not (changed & ~present).any()


def test_a_chunk_fills_the_cache_and_has_two_clients_but_where_the_activations_of_one_leave_it():
    small = BatchedEngine(flat_model("mlp", IMAGES, torch.float32, hidden=[4]), Source(IMAGES, np.array([1])), STREAMS)
    big = BatchedEngine(flat_model("mlp", IMAGES, torch.float32, hidden=[9000]), small.source, STREAMS)
    sgd, adam = LocalRule(), LocalRule(optimizer="adam")
    assert chunk_size(small.net, 10, sgd, small.model.initial) > 10
    assert chunk_size(big.net, 10, sgd, big.model.initial) == 2
    within = CACHE_BYTES // (4 * small.net.values_per_row)
    assert chunk_size(small.net, within, sgd, small.model.initial) == 2
    assert chunk_size(small.net, within + 1, sgd, small.model.initial) == 1
    middle = flat_model("mlp", IMAGES, torch.float32, hidden=[600, 600])
    net = BatchedEngine(middle, small.source, STREAMS).net
    assert chunk_size(net, 10, adam, middle.initial) < chunk_size(net, 10, sgd, middle.initial)


class Dropping(nn.Module):
    """Drops channels, and values that nothing reads, between layers of a graph."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 5, 3), nn.GroupNorm(2, 4), nn.Linear(64, CLASSES)
        self.channels, self.values = nn.Dropout2d(0.3), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.channels(self.norm(self.conv(x)).relu())
        self.values(x)
        return self.fc(self.values(x.flatten(1)))


def sequence_of_layers() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, (3, 5), stride=(2, 1), padding=(0, 2), bias=False), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(4, 5, 3, padding="same"),
        nn.Identity(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(5 * 4 * 8, CLASSES, bias=False),
    )


@pytest.mark.parametrize("make", [sequence_of_layers, Dropping])
def test_modules_of_the_user_get_the_masks_of_the_sequential_engine(make: Callable[[], nn.Module]):
    model, sizes = FlatModel(make().double()), ragged_sizes(8, 25)
    source = Source(COLOURED, sizes, torch.float64)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks_for(sizes), model.initial, EPOCHS)
    result, _ = train(BatchedEngine(model, source, STREAMS), tasks_for(sizes), model.initial, EPOCHS)
    assert relative_difference(result, expected) < 1e-12
