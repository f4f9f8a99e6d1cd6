"""Whole runs of each kind of task: engines agree, numbers are those of plain loops, and wrong data are rejected."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedmpi
from fedmpi import Config, UserError
from tests.mpi.launch import run_mpi
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
    merged, one_by_one = (one_step(world, **{"local.engine": engine}) for engine in ("merged", "sequential"))
    assert np.abs(values(merged) - values(one_by_one)).max() < 1e-6
    assert merged.records[0]["train_loss"] == pytest.approx(one_by_one.records[0]["train_loss"], rel=1e-5)


def plain_tokens(module: nn.Module, x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Mean loss of a sample, perplexity and accuracy over all positions that count, one sample at a time."""
    losses, surprise, right, counted = [], 0.0, 0, 0
    with torch.no_grad():
        for tokens, wanted in zip(torch.from_numpy(x), torch.from_numpy(y), strict=True):
            logits = module(tokens[None])[0]
            own = 0.0
            there = 0
            for row, target in zip(logits.double(), wanted.tolist(), strict=True):
                if target >= 0:
                    own -= float(row.log_softmax(0)[target])
                    right += int(row.argmax() == target)
                    there += 1
            losses.append(own / there if there else 0.0)
            surprise, counted = surprise + own, counted + there
    return float(np.mean(losses)), math.exp(surprise / counted), right / counted


def test_scores_of_tokens_are_those_of_a_plain_loop_over_positions():
    done = fedmpi.run("fedavg", {**BASE, **WORLDS["tokens"]})
    loss, perplexity, accuracy = plain_tokens(done.model, *worlds.tokens().test)
    final = done.records[-1]
    assert final["test_perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert final["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert final["test_accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert "test_macro_f1" not in final


def test_a_round_of_tokens_is_that_of_a_plain_loop():
    """FedAvg by hand: each client one full-batch step of torch's SGD from the start, averaged by samples."""
    settings = {"rounds": 1, "local.lr": 0.4, "local.engine": "sequential"}
    arrays, done = worlds.tokens(), one_step("tokens", **settings)
    config = Config(preset="fedavg", **{"model": {"name": "char-lstm", "units": 12}})
    from fedmpi.models import build

    module = build("char-lstm", config.model.options, arrays.description, seed=config.seed)
    start = [value.detach().clone() for value in module.parameters()]
    mean = [torch.zeros_like(value, dtype=torch.float64) for value in start]
    for client in range(worlds.CLIENTS):
        x, y = (torch.from_numpy(np.array(part)) for part in arrays.store.client(client))
        for value, first in zip(module.parameters(), start, strict=True):
            value.data.copy_(first)
        module.zero_grad()
        total = torch.zeros(())
        for logits, wanted in zip(module(x), y, strict=True):
            if (wanted >= 0).any():
                total = total + functional.cross_entropy(logits, wanted, ignore_index=-1)
        (total / len(y)).backward()
        for value, place in zip(module.parameters(), mean, strict=True):
            assert value.grad is not None
            place += (value.data - 0.4 * value.grad).double() * len(y) / len(arrays.x)
    found = dict(done.model.named_parameters())
    for (name, _), expected in zip(module.named_parameters(), mean, strict=True):
        assert torch.allclose(found[name].double(), expected, rtol=1e-5, atol=1e-6), name


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


@pytest.mark.slow
def test_one_rank_and_three_are_bit_identical(tmp_path: Path):
    job = run_mpi(3, ["-m", "tests.tasks.kind_runs", tmp_path / "three.npz"])
    assert job.returncode == 0, job.stderr[-2000:]
    from tests.tasks.kind_runs import outcomes

    alone = outcomes()
    with np.load(tmp_path / "three.npz") as three:
        assert set(three.files) == set(alone)
        for name, found in alone.items():
            np.testing.assert_array_equal(three[name], found, err_msg=name)


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "tasks.md").read_text()


@pytest.mark.slow
def test_every_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 5
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"docs/reference/tasks.md, snippet {number + 1}", "exec"), names)
    perplexity, precision, r2, head = capsys.readouterr().out.splitlines()
    assert 1 < float(perplexity) < 26 and 0 < float(precision) <= 1 and float(r2) < 1
    assert head == "class,samples,predicted,precision,recall,f1"
