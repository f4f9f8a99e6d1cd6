"""The engine trial: it leaves no trace in the results, one decision holds for all rounds, the run folder keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmpi import Config
from fedmpi.aggregation.exact import FloatSum
from fedmpi.local import equality
from fedmpi.local import timing as trial
from fedmpi.local.engine_trial import EngineTrial
from fedmpi.local.engines import CompositeEngine, choose_engine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.timing import relative_difference, time_engines
from fedmpi.local.work import ClientTask, LocalRule, WorkReport
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster
from tests.local.synthetic import SMALL_IMAGES, STREAMS, InMemorySource, flat_model, relative_error, summed, tasks_of

SIZES = [3, 40, 25, 1, 37, 18]
RULE = LocalRule(lr=0.1, batch_size=10)


class Watch:
    """An engine that notes what it is given and takes a fixed time for it on the trial's clock."""

    observe = None
    hooks = None

    def __init__(self, name: str, clock: Clock, seconds_a_client: float):
        self.name, self.clock, self.pace = name, clock, seconds_a_client
        self.calls: list[tuple[list[ClientTask], LocalRule]] = []

    def train(
        self, tasks: Sequence[ClientTask], start: Tensor, rule: LocalRule, round: int, total: FloatSum
    ) -> WorkReport:
        self.calls.append((list(tasks), rule))
        self.clock.now += self.pace * len(tasks)
        total.add(torch.ones_like(start), 1.0)
        return WorkReport()


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(trial, "time", made)
    return made


def undecided(folder: Path | None = None, sizes: Sequence[int] = SIZES) -> tuple[InMemorySource, EngineTrial]:
    source, model = InMemorySource(SMALL_IMAGES, sizes), flat_model("mlp", SMALL_IMAGES, hidden=[9])
    config = Config.model_validate({"participation": {"clients": "all"}})
    engine = choose_engine(config, model, source, STREAMS)
    held = EngineTrial(Cluster.connect(), engine, max(sizes))
    held.recall(folder)
    return source, held


def decide(source: InMemorySource, held: EngineTrial, rule: LocalRule = RULE) -> None:
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    total = FloatSum(np.zeros(model.size, np.float32))
    if held.due(rule, total):
        held.decide(tasks_of(source), model.initial, rule, 0, total)
    assert not total.tensor.any()


def test_every_engine_is_timed_on_the_same_clients_after_a_warm_up(clock: Clock):
    source = InMemorySource(SMALL_IMAGES, range(10, 110, 5))
    slow, quick = Watch("slow", clock, 0.02), Watch("quick", clock, 0.005)
    clients, *seconds = time_engines([slow, quick], tasks_of(source), torch.zeros(4), RULE, 0, source.sizes)
    assert clients == trial.MOST_CLIENTS
    assert seconds == pytest.approx([0.02 * clients, 0.005 * clients])
    assert quick.calls[0][0] == slow.calls[-1][0]
    assert len(quick.calls) == 1 + trial.PASSES
    timed = sorted(task.client for task in quick.calls[-1][0])
    assert timed[0] == 0 and timed[-1] == 19


def test_a_trial_is_short_however_large_the_clients_are(clock: Clock):
    source = InMemorySource(SMALL_IMAGES, [1000] * 12)
    slow = Watch("slow", clock, 1.0)
    clients, _ = time_engines([slow], tasks_of(source), torch.zeros(4), LocalRule(epochs=50), 0, source.sizes)
    assert clients == 2
    [rule] = {rule for _, rule in slow.calls}
    assert rule.epochs == 1
    assert all(len(task.rows) == 10 * trial.MOST_STEPS for tasks, _ in slow.calls for task in tasks)


def test_a_rank_without_clients_times_nothing(clock: Clock):
    measured = time_engines([Watch("slow", clock, 1.0)], [], torch.zeros(4), RULE, 0, np.array([3]))
    assert measured.tolist() == [0, 0]


def test_a_trial_changes_neither_model_nor_result_nor_what_observers_see():
    source, model = InMemorySource(SMALL_IMAGES, SIZES), flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=0.5)
    config = Config.model_validate({"participation": {"clients": "all"}})
    before, seen = model.initial.clone(), []
    engine = choose_engine(config, model, source, STREAMS, observer=lambda client, _: seen.append(client))
    assert isinstance(engine, CompositeEngine)
    expected, _ = summed(engine, model, tasks_of(source), RULE)
    assert sorted(seen) == list(range(len(SIZES)))
    times = engine.time_candidates(tasks_of(source), model.initial, RULE, 0, FloatSum(np.zeros(model.size, np.float32)))
    assert times[0] == len(SIZES) and (times[1:] > 0).all()
    assert len(seen) == len(SIZES)
    assert torch.equal(model.initial, before)
    assert torch.equal(summed(engine, model, tasks_of(source), RULE)[0], expected)
    assert len(seen) == 2 * len(SIZES)


@pytest.mark.parametrize("name", ["sequential", "batched"])
def test_either_outcome_gives_the_same_update(name: str):
    source, held = undecided()
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    expected, _ = summed(held.engine, model, tasks_of(source), RULE)
    held.engine.settle(name, "told so")
    assert not held.open
    assert f"others {name} (told so)" in held.engine.description
    assert relative_error(summed(held.engine, model, tasks_of(source), RULE)[0], expected) < 1e-5


def test_the_quicker_engine_is_taken_and_a_resumed_run_takes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, held = undecided(tmp_path)
    monkeypatch.setattr(held.engine, "time_candidates", lambda *given: np.array([4, 0.8, 0.1]))
    decide(source, held)
    assert not held.open
    assert "trial: sequential 200, batched 25 ms a client" in held.engine.description
    kept = json.loads((tmp_path / "engine.json").read_text())
    assert kept == {
        "engine": "batched",
        "trial_clients": 4,
        "milliseconds_per_client": pytest.approx({"sequential": 200, "batched": 25}),
    }
    _, resumed = undecided(tmp_path)
    assert not resumed.open
    assert resumed.engine.rest.name == "batched"


def test_a_damaged_choice_is_made_anew(tmp_path: Path):
    (tmp_path / "engine.json").write_text('{"engine": "quantum"}')
    assert undecided(tmp_path)[1].open


def test_nothing_is_timed_while_everything_is_merged(monkeypatch: pytest.MonkeyPatch):
    source, held = undecided(sizes=[3, 9, 10])
    monkeypatch.setattr(held.engine, "time_candidates", lambda *given: pytest.fail("a trial without a need"))
    decide(source, held)
    assert held.open


def test_without_a_client_to_time_the_engine_stays_open(monkeypatch: pytest.MonkeyPatch):
    source, held = undecided()
    monkeypatch.setattr(held.engine, "time_candidates", lambda *given: np.zeros(3))
    decide(source, held)
    assert held.open


class Astray(Watch):
    """An engine whose updates are not the others'."""

    def train(self, tasks, start, rule, round, total):
        total.add(torch.linspace(-1, 1, len(start)), sum(task.coefficient for task in tasks))
        return WorkReport()


def test_an_engine_that_gives_other_updates_is_not_taken_however_quick(clock: Clock, caplog: pytest.LogCaptureFixture):
    source, held = undecided()
    held.engine.rival = Astray("batched", clock, 1e-9)
    decide(source, held)
    assert held.engine.rest.name == "sequential"
    assert "batched differs from sequential by" in held.engine.description
    assert "batched differs" in caplog.text


def test_engines_that_agree_to_rounding_are_distinguished_by_time_alone(caplog: pytest.LogCaptureFixture):
    source, held = undecided()
    with caplog.at_level("INFO", "fedmpi"):
        decide(source, held)
    [line] = [record.getMessage() for record in caplog.records if "of their length" in record.getMessage()]
    assert float(line.split("by ")[1].split()[0]) < 1e-5
    assert not held.open


class Still(Watch):
    """An engine that changes nothing."""

    def train(self, tasks, start, rule, round, total):
        return WorkReport()


def test_an_update_where_there_is_none_alone_is_no_rounding(clock: Clock):
    source, still, astray = InMemorySource(SMALL_IMAGES, SIZES), Still("a", clock, 0), Astray("b", clock, 0)
    given = tasks_of(source), torch.zeros(4), RULE, 0, source.sizes
    assert relative_difference((still, astray), *given) == np.inf
    assert relative_difference((still, still), *given) == 0


class OnTheEdge(nn.Module):
    """Half of its units stand where ReLU begins: a rounding of their weights decides whether they learn."""

    def __init__(self, wide: float):
        super().__init__()
        self.first, self.second = nn.Linear(36, 20, bias=False), nn.Linear(20, 5)
        with torch.no_grad():
            self.first.weight[:10, 18:] = -self.first.weight[:10, :18]
            self.second.weight[:, :10] *= wide

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        twice = torch.cat([x[:, :18], x[:, :18]], 1)
        return self.second(torch.relu(self.first(twice)))


class FromBeside:
    """The sequential engine from values that are off."""

    name = "batched"

    def __init__(self, engine: SequentialEngine, off: float):
        self.engine, self.off = engine, off

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def train(
        self, tasks: Sequence[ClientTask], start: Tensor, rule: LocalRule, round: int, total: FloatSum
    ) -> WorkReport:
        sign = torch.randn(start.shape, generator=torch.Generator().manual_seed(5)).sign()
        return self.engine.train(tasks, start * (1 + self.off * sign), rule, round, total)


ROUNDING = float(torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    ("wide", "off", "taken"),
    [(0.2, ROUNDING, True), (0.0, ROUNDING, True), (0.0, 1e-2, False), (30.0, ROUNDING, False)],
    ids=["jumps that rounding decides", "no jumps", "no jumps but other values", "jumps too large to tell"],
)
def test_differences_that_one_engine_alone_makes_of_a_rounding_are_no_fault(
    wide: float, off: float, taken: bool, caplog: pytest.LogCaptureFixture
):
    source = InMemorySource(SMALL_IMAGES, SIZES)
    torch.manual_seed(0)
    model = FlatModel(OnTheEdge(wide))
    engine = choose_engine(
        Config.model_validate({"participation": {"clients": "all"}, "local": {"engine": "auto"}}),
        model,
        source,
        STREAMS,
    )
    assert isinstance(engine, CompositeEngine)
    engine.rival = FromBeside(engine.sequential, off)
    before = model.initial.clone()
    given = tasks_of(source), model.initial, RULE, 0, source.sizes
    apart = relative_difference((engine.sequential, engine.rival), *given)
    assert (apart > equality.MOST_APART) == (wide > 0 or off > ROUNDING), apart
    total = FloatSum(np.zeros(model.size, np.float32))
    with caplog.at_level("INFO", "fedmpi"):
        EngineTrial(Cluster.connect(), engine, max(SIZES)).decide(tasks_of(source), model.initial, RULE, 0, total)
    assert not engine.candidates and not total.tensor.any() and torch.equal(model.initial, before)
    assert ("batched differs from sequential by" in caplog.text) is not taken
    assert ("alone from a model off by a rounding" in caplog.text) is (taken and wide > 0)
    if not taken:
        assert engine.rest is engine.sequential
