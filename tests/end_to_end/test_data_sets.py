"""Every real data set, from its official files to a trained model: prepared, inspected, five rounds of training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import run as prepare
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.describe.data import inspect_folder
from fedmpi.records.recorder import open_recorder

ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """A data set: the folder of its files, the words of its preparation, the settings of its training."""

    name: str
    raw: str
    partition: str
    settings: str


def write_glove(path: Path) -> Path:
    """Vectors of 32 values for some frequent words, in GloVe's format; no real ones are at hand."""
    generator = np.random.default_rng(0)
    lines = (f"{word} {' '.join(f'{value:.3f}' for value in generator.normal(0, 0.3, 32))}" for word in FREQUENT)
    path.write_text("\n".join(lines) + "\n")
    return path


FREQUENT = ("the", "to", "in", "of", "for", "a", "and", "on", "is", "with", "trump", "nfl", "game")
IMAGES = ("local.lr=0.1",)
ADAM = "local.optimizer=adam local.lr=0.002 clients.fraction=1"
TEXTS = ("model.dimension=32", "local.lr=0.3")
CASES = {
    "mnist": Case(
        "mnist", "mnist", "--partition dirichlet --alpha 0.3 --clients 600", "model.name=mlp clients.count=10"
    ),
    "emnist balanced": Case("emnist-balanced", "emnist", "--partition user", "model.name=mlp"),
    "emnist letters": Case(
        "emnist-letters",
        "emnist",
        "--partition dirichlet --alpha 1 --clients 30",
        "model.name=image-cnn model.hidden=[64] model.filters=[8,16]",
    ),
    "cifar10": Case(
        "cifar10", "cifar10", "--partition lognormal --mean 16 --clients 6", f"model.name=cifar-cnn {ADAM}"
    ),
    "cifar100": Case(
        "cifar100",
        "cifar100",
        "--partition sizes --law even --mean 16 --clients 6",
        f"model.name=resnet18 model.width=4 model.groups=2 {ADAM}",
    ),
    "sentiment140": Case(
        "sentiment140", "sentiment140", "--partition user --min-samples 3", "model.name=lstm model.units=32"
    ),
    "mind": Case("mind", "mind/MINDsmall_train", "--partition lognormal --clients 2000", "model.name=text-cnn"),
    "mind, all columns": Case(
        "mind",
        "mind/MINDsmall_train_sample2000",
        "--partition label-sorted --size 40 --vectors {glove}",
        "model.name=fedsampling-text-cnn model.filters=64 model.vectors={shards}/vectors.npy model.frozen=true",
    ),
    "amazon beauty": Case("amazon", "amazon_beauty", "--partition user", "model.name=transformer"),
    "amazon toys": Case(
        "amazon",
        "amazon_toys/Toys_and_Games_2023.subset.json.gz",
        "--partition sizes --law zipf --shape 1 --clients 500",
        "model.name=bilstm model.units=16",
    ),
}


LONG = ("cifar10", "cifar100", "mind", "sentiment140", "amazon toys")


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES])
def test_a_data_set_is_prepared_inspected_and_trained(case: str, data_folder: Path, tmp_path: Path) -> None:
    """The loss of training is lower at the end than in the first round; every round counts its steps."""
    chosen = CASES[case]
    shards = tmp_path / "shards"
    raw = data_folder / chosen.raw
    if not raw.exists():
        pytest.skip(f"no real data at {raw}")
    places = {"shards": shards, "glove": write_glove(tmp_path / "glove.txt")}
    partition, settings = (text.format(**places).split() for text in (chosen.partition, chosen.settings))
    assert prepare([chosen.name, "--raw", str(raw), *partition, "--shards", "3", "--out", str(shards)]) == 0
    inspection = inspect_folder(shards, verify=True)
    assert dict(inspection.lines())["samples"].startswith(f"{inspection.measures.samples:,} train")
    task = inspection.store.description.task
    usual, selected = (TEXTS, "clients.count=20") if task == "text" else (IMAGES, "clients.fraction=0.2")
    if not any(setting.startswith("clients.") for setting in settings):
        usual = (*usual, selected)
    records = train(shards, tmp_path / "run", [*usual, *settings])
    assert [record["round"] for record in records] == list(range(ROUNDS))
    assert all(record["steps"] >= record["participants"] > 0 for record in records)
    assert all(record["samples"] >= record["participants"] for record in records)
    losses = [record["train_loss"] for record in records]
    assert np.isfinite(losses).all() and np.isfinite(records[-1]["test_loss"])
    assert np.mean(losses[-2:]) < losses[0]


def train(shards: Path, folder: Path, settings: list[str]) -> list[dict[str, float]]:
    """The records of five rounds of FedAvg in this process."""
    common = ["preset=fedavg", f"data.source={shards}", f"rounds={ROUNDS}", f"evaluation.every={ROUNDS}"]
    common += ["logging.tensorboard=false", "checkpoint.every=0", "local.epochs=1", "local.batch_size=16"]
    experiment = Experiment.connect(load_config(None, [*common, *settings]))
    recorder = open_recorder(experiment.cluster, folder, experiment.config, False)
    assert Simulation(experiment, recorder).run() == "finished"
    experiment.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
