"""Components of every kind in a custom file change a run by their name alone."""

from __future__ import annotations

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from data_prep.__main__ import run as data_prep
from tests.mpi.launch import run_alone, run_mpi

ROOT = Path(__file__).parents[1]

OWN = """
import numpy as np
import torch
from fedmpi import Cohort, LocalAlgorithm, client_sampler, aggregator, data_sampler, weights


@client_sampler
def in_turn(view):
    return Cohort(np.roll(view.available, -view.round * view.count)[: view.count])


@data_sampler
def every_second(client, *, start: int = 0):
    return np.arange(start, len(client.labels), 2)


@weights(per_sample=False, normalized=True)
def root(cohort, sizes):
    return np.sqrt(sizes[cohort.clients] / sizes.sum())


@aggregator
def middle(updates, coefficients):
    return updates.median(0).values


class Halfway(LocalAlgorithm):
    client_state = ("before",)

    def finish(self, client, server, work, generator):
        client.before = work.delta

    def correction(self, client, server, generator):
        return -client.before


def squared(outputs, targets):
    return (outputs.softmax(1) - torch.nn.functional.one_hot(targets, outputs.shape[1])).square().sum(1)


def surely_right(outputs, targets):
    probability, guess = outputs.softmax(1).max(1)
    return {"surely_right": ((guess == targets) & (probability > 0.5)).sum()}


def reader(path):
    x = np.random.default_rng(5).standard_normal((90, 8)).astype(np.float32)
    return {"x": x, "y": np.arange(90) % 3}


def law(labels, clients, generator):
    return np.arange(len(labels)) % clients


def linear(description, *, bias: bool = True):
    values = int(np.prod(description.feature_shape))
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(values, description.classes, bias=bias))
"""
PRESET = """
rounds = 2
clients = {sampler = "uniform", fraction = 0.4}
local = {lr = 0.1, epochs = 2}

[about]
title = "A custom method"
paper = "Example 2026, Algorithm 1"
example = "fedmpi train --set preset=own"
"""
CHOSEN: dict[str, dict[str, Any]] = {
    "A sampler of clients": {"clients.sampler": "own:in_turn"},
    "A rule for samples": {"samples.sampler": "own:every_second", "samples.sampler.start": 1},
    "Weights": {"server.weights": "own:root"},
    "How updates become one": {"server.aggregator": "own:middle"},
    "local work with state": {"local.algorithm": "own:Halfway"},
    "a loss": {"task.loss": "own:squared"},
    "A metric": {"task.metrics": ["own:surely_right"]},
    "A model": {"model.name": "own:linear", "model.bias": False},
}
SMALL = {"rounds": 3, "clients.count": 3, "evaluation.every": 1}
DATA = "digits:clients=9,alpha=0.5"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", CHOSEN)
def test_a_custom_component_changes_a_run_by_its_name_alone(name: str, here: Path) -> None:
    own = fedmpi.run("fedavg", SMALL | CHOSEN[name], data=DATA)
    if name == "A metric":
        assert 0 < own.records[-1]["test_surely_right"] < own.records[-1]["test_accuracy"]
    else:
        assert own.records[-1]["test_loss"] != loss_of_a_plain_run()


@cache
def loss_of_a_plain_run() -> float:
    loss: float = fedmpi.run("fedavg", SMALL, data=DATA).records[-1]["test_loss"]
    return loss


def test_a_custom_data_set_and_partition_become_shards(here: Path) -> None:
    assert (
        data_prep(["own:reader", "--partition", "own:law", "--raw", str(here), "--clients", "4", "--out", "shards"])
        == 0
    )
    done = fedmpi.run("fedavg", SMALL | {"rounds": 1, "data.source": "shards"})
    assert (done.summary["clients"], done.records[0]["participants"]) == (4, 3)
    assert json.loads((here / "shards" / "manifest.json").read_text())["dataset"] == "own:reader"


def test_a_file_beside_the_presets_is_a_published_method(here: Path) -> None:
    package = here / "fedmpi"  # one of whose folders is a copy
    package.mkdir()
    for entry in (ROOT / "fedmpi").iterdir():
        if entry.name != "presets":
            (package / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "fedmpi" / "presets", package / "presets")
    (package / "presets" / "own.toml").write_text(PRESET)
    program = (
        "import fedmpi; print({p.name: p.title for p in fedmpi.presets()}['own'])\n"
        f"print([r['participants'] for r in fedmpi.run('own', {{'samples.sampler': 'all'}}, data='{DATA}').records])"
    )
    done = run_alone(["-c", program], cwd=here)
    assert done.stdout.splitlines() == ["A custom method", "[4, 4]"], done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_custom_components_run_together_as_the_guide_shows(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "own.py").write_text(OWN)
    together = [given for name, given in CHOSEN.items() if name != "How updates become one"]
    chosen = {key: value for given in together for key, value in given.items()}
    settings = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in chosen.items()]
    settings += ["clients.count=3", "logging.tensorboard=false", "rounds=3"]
    settings += ["data.source=digits:clients=9", "cluster.server_trains=always", "checkpoint.every=0"]
    command = ["-m", "fedmpi", "train", "--out", str(tmp_path / "run")]
    for setting in settings:
        command += ["--set", setting]
    done = run_mpi(ranks, command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["participants"] for record in records] == [3, 3, 3]
    assert sum(record["samples"] for record in records) == pytest.approx(1442 / 2, abs=9)
    assert "test_surely_right" in records[-1]
