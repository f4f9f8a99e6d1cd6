"""Clients are trained side by side only after two of them got the sequential engine's updates, whoever chose it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedmpi
from fedmpi import ClientFailure, Config, UserError
from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.errors import Divergence
from fedmpi.local import equality
from fedmpi.local.engine_trial import EngineTrial
from fedmpi.local.engines import CompositeEngine, choose_engine
from fedmpi.local.equality import comparison_tasks
from fedmpi.local.work import ClientTask, LocalRule, WorkReport
from fedmpi.models.stacked import forms, net
from fedmpi.mpi import Cluster
from tests.local.stacks import CLASSES, TEXTS, Source
from tests.local.synthetic import SMALL_IMAGES, STREAMS, InMemorySource, flat_model, summed, tasks_of

SIZES = [3, 40, 25, 1, 37, 18]
RULE = LocalRule(lr=0.1, batch_size=10)
COMPARED = "side by side and alone differ by"


def named(
    engine: str = "batched", folder: Path | None = None, sizes: Sequence[int] = SIZES, **given: Any
) -> tuple[InMemorySource, EngineTrial]:
    source, model = InMemorySource(SMALL_IMAGES, sizes), flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=0.5)
    config = Config.model_validate({"participation": {"clients": "all"}, "local": {"engine": engine}})
    held = EngineTrial(Cluster.connect(), choose_engine(config, model, source, STREAMS, **given), max(sizes))
    held.recall(folder)
    return source, held


def resumed(folder: Path, sizes: Sequence[int] = SIZES) -> tuple[InMemorySource, EngineTrial]:
    (folder / "engine.json").write_text(json.dumps({"engine": "batched"}))
    source, held = named("auto", folder, sizes)
    assert not held.open
    return source, held


def go_on(source: InMemorySource, held: EngineTrial, tasks: list[ClientTask] | None = None, round: int = 0) -> bool:
    """What a round does about the engine; whether it was due."""
    model = held.engine.sequential.model
    total = FloatSum(np.zeros(model.size, np.float32))
    before = model.initial.clone()
    if due := held.due(RULE, total):
        held.decide(tasks_of(source) if tasks is None else tasks, model.initial, RULE, round, total)
    assert not total.tensor.any() and torch.equal(model.initial, before)
    return due


class Astray:
    """The batched engine with other updates."""

    name, observe, hooks = "batched", None, None

    def train(self, tasks: Any, start: Tensor, rule: LocalRule, round: int, total: FloatSum) -> WorkReport:
        total.add(torch.linspace(-1, 1, len(start)), sum(task.coefficient for task in tasks))
        return WorkReport()


def led_astray(held: EngineTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(held.engine), "beside", property(lambda self: Astray()))


@pytest.mark.parametrize("how", ["named", "resumed"])
def test_the_batched_engine_is_compared_once_a_process(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, held = named() if how == "named" else resumed(tmp_path)
    with caplog.at_level("INFO", "fedmpi"):
        assert [go_on(source, held, round=round) for round in range(3)] == [True, False, False]
    [line] = [record.getMessage() for record in caplog.records if COMPARED in record.getMessage()]
    assert 0 <= float(line.split("differ by ")[1].split()[0]) < 1e-5


@pytest.mark.parametrize("engine", ["sequential", "merged"])
def test_other_named_engines_are_not(engine: str) -> None:
    source, model = InMemorySource(SMALL_IMAGES, SIZES), flat_model("mlp", SMALL_IMAGES, hidden=[9])
    local = {"engine": engine, "batch_size": "all"}
    config = Config.model_validate({"participation": {"clients": "all"}, "local": local})
    held = EngineTrial(Cluster.connect(), choose_engine(config, model, source, STREAMS), max(SIZES))
    assert not go_on(source, held)


def test_a_resumed_sequential_engine_is_not(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps({"engine": "sequential"}))
    source, held = named("auto", tmp_path)
    assert not held.open and not go_on(source, held)


def test_a_trial_has_compared_already() -> None:
    source, held = named("auto")
    assert [go_on(source, held) for _ in range(2)] == [True, False]


def test_a_comparison_changes_neither_results_nor_what_observers_see() -> None:
    seen: list[int] = []
    source, held = named(observer=lambda client, _: seen.append(client))
    model = held.engine.sequential.model
    expected, _ = summed(held.engine, model, tasks_of(source), RULE)
    assert len(seen) == len(SIZES)
    assert go_on(source, held)
    assert len(seen) == len(SIZES)
    assert torch.equal(summed(held.engine, model, tasks_of(source), RULE)[0], expected)


def test_a_named_engine_that_trains_otherwise_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    source, held = named()
    led_astray(held, monkeypatch)
    with pytest.raises(UserError) as refused:
        go_on(source, held, round=4)
    message = str(refused.value)
    assert (
        'local.engine = "batched"' in message and "in round 4" in message and 'choose "auto" or "sequential"' in message
    )
    assert type(held.engine.sequential.model.module).__name__ in message


def test_a_resumed_run_goes_on_with_the_sequential_engine_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, held = resumed(tmp_path)
    led_astray(held, monkeypatch)
    assert go_on(source, held)
    assert isinstance(held.engine, CompositeEngine) and held.engine.rest is held.engine.sequential
    assert "batched differs from sequential by" in caplog.text
    assert "batched differs from sequential by" in held.engine.description
    monkeypatch.undo()
    assert not go_on(source, held)


@pytest.mark.parametrize("how", ["named", "resumed"])
def test_without_clients_it_is_compared_in_a_later_round(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, held = named() if how == "named" else resumed(tmp_path)
    with caplog.at_level("INFO", "fedmpi"):
        assert go_on(source, held, tasks=[])
        assert COMPARED not in caplog.text
        assert go_on(source, held)
    assert COMPARED in caplog.text
    assert not go_on(source, held)


def test_nothing_is_compared_while_everything_is_merged(tmp_path: Path) -> None:
    source, held = resumed(tmp_path, sizes=[3, 9, 10])
    assert not go_on(source, held)


@pytest.mark.parametrize("cause", [Divergence("too far"), ValueError("no sample")])
def test_a_client_that_diverges_is_left_to_its_round_and_other_failures_end_the_run(
    cause: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, held = named()

    def fails(*given: Any) -> None:
        raise ClientFailure(1, 0, cause) from cause

    monkeypatch.setattr(held.engine.sequential, "train", fails)
    if isinstance(cause, Divergence):
        assert [go_on(source, held) for _ in range(2)] == [True, False]
    else:
        with pytest.raises(ClientFailure):
            go_on(source, held)


def texts(*lengths: list[int]) -> Source:
    """Clients of texts that have so many words each, padded to 12."""
    source = Source(TEXTS, np.array([len(own) for own in lengths]))
    for client, own in enumerate(lengths):
        source.x[client] = torch.where(torch.arange(12) < torch.tensor(own).unsqueeze(1), 1 + source.x[client] % 50, 0)
    return source


def all_tasks(source: Source) -> list[ClientTask]:
    return [ClientTask(client, None, 1.0) for client in range(len(source.sizes))]


SINGLE = LocalRule(lr=0.1, batch_size=1)


def test_texts_with_most_padding_are_compared() -> None:
    source = texts([12, 12, 12], [12, 3, 12, 5], [12, 12], [11, 12, 2, 4, 12])
    found = comparison_tasks(all_tasks(source), source, SINGLE)
    assert [(task.client, task.rows.tolist()) for task in found] == [(3, [2, 3]), (1, [1, 3])]
    whole = comparison_tasks(all_tasks(source), source, LocalRule(lr=0.1, batch_size=None))
    assert [(task.client, len(task.rows)) for task in whole] == [(1, 4), (3, 5)]


def test_of_chosen_rows_the_padded_ones_are_compared() -> None:
    source = texts([12, 3, 12, 5, 4], [12, 12])
    tasks = [ClientTask(0, np.array([0, 2, 3, 4]), 1.0), ClientTask(1, None, 1.0)]
    found = comparison_tasks(tasks, source, SINGLE)
    assert found[0].rows.tolist() == [3, 4]


def test_empty_texts_tell_nothing() -> None:
    source = texts([0, 12, 9, 10], [12, 0, 12])
    found = comparison_tasks(all_tasks(source), source, SINGLE)
    assert found[0].client == 0 and found[0].rows.tolist() == [2, 3]


def test_without_padding_or_texts_all_clients_may_be_compared() -> None:
    source = texts([12, 12], [12])
    assert comparison_tasks(all_tasks(source), source, SINGLE) == all_tasks(source)
    images = InMemorySource(SMALL_IMAGES, [3, 4])
    images.x = images.x.clamp_min(0)
    assert comparison_tasks(tasks_of(images), images, SINGLE) == tasks_of(images)
    assert comparison_tasks([], source, SINGLE) == []


def test_no_more_than_some_texts_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "MOST_LOOKED_AT", 3)
    source, read = texts(*[[12]] * 8, [2]), []
    load = source.load
    monkeypatch.setattr(source, "load", lambda client, rows=None: read.append(client) or load(client, rows))
    assert comparison_tasks(all_tasks(source), source, SINGLE)[0].client == 8
    assert read == [0, 4, 8]


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Parameter(torch.randn(60, 8)), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(functional.embedding(tokens.long(), self.words, padding_idx=0).mean(1))


def padded_texts() -> fedmpi.ClientArrays:
    """Of ten clients one has short texts."""
    generator = np.random.default_rng(0)
    x, owner = generator.integers(1, 60, (200, 12)).astype(np.int32), np.arange(200) % 10
    x[owner == 8, 6:] = 0
    y = generator.integers(0, CLASSES, 200)
    return fedmpi.ClientArrays(x, y, owner, test=(x[:50], y[:50]), task="text")


def run(engine: str, folder: Path, rounds: int = 2, resume: bool = False) -> fedmpi.Run:
    settings = {"rounds": rounds, "participation.count": 10, "logging.tensorboard": False, "local.engine": engine}
    return fedmpi.run("fedavg", settings, data=padded_texts(), model=made, out=folder, resume=resume)


def made(description: object) -> nn.Module:
    torch.manual_seed(0)
    return Padded()


def test_a_form_that_forgets_the_padding_trains_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that made-up samples would not have found out."""
    look = forms.FUNCTIONS[functional.embedding]
    monkeypatch.setitem(forms.FUNCTIONS, functional.embedding, lambda x, w, **more: look(x, w))
    monkeypatch.setattr(net, "check_form", lambda *given: None)
    with pytest.raises(UserError, match="does not train Padded as it is trained alone"):
        run("batched", tmp_path / "named")
    assert "sequential from now on: batched differs" in run_log(run("auto", tmp_path / "auto"))


def test_a_run_with_the_engine_named_says_how_far_the_engines_lie_apart(tmp_path: Path) -> None:
    assert run_log(run("batched", tmp_path / "run")).count(COMPARED) == 1
    assert COMPARED not in run_log(run("sequential", tmp_path / "other"))


def test_a_resumed_run_compares_anew_and_ends_with_the_weights_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = run("batched", tmp_path / "whole", rounds=3)
    run("batched", tmp_path / "run", rounds=2)
    more = run("batched", tmp_path / "run", rounds=3, resume=True)
    assert run_log(more).count(COMPARED) == 2
    for mine, theirs in zip(more.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def run_log(found: fedmpi.Run) -> str:
    return (Path(found.folder) / "run.log").read_text()
