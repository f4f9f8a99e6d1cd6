"""Every data set, from its official files to a trained model: prepared, inspected, five rounds of federated training.

FEMNIST, CINIC-10, arrays and image folders are not among the real files: EMNIST's rows with their writers and
CIFAR-10's images stand in for them, written in those formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.__main__ import run as prepare
from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.registry import DATASETS
from fedmpi.config import load_config
from fedmpi.describe.data import inspect_folder
from fedmpi.records.recorder import open_recorder
from fedmpi.rounds.assemble import Experiment
from fedmpi.rounds.loop import Simulation

ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """A data set: the folder of its files, the words of its preparation, the settings of its training."""

    name: str
    raw: str | Callable[[Path, Path], Path]
    partition: str
    settings: str


def write_femnist(real: Path, made: Path) -> Path:
    """EMNIST's balanced rows by writer as LEAF's JSON."""
    emnist = DATASETS["emnist-balanced"].read(real / "emnist", ReadOptions(), Tally())
    assert emnist.users is not None
    rows = np.flatnonzero(emnist.users < 40)
    pixels, labels, users = emnist.read(rows).reshape(len(rows), -1) / 255, emnist.labels[rows], emnist.users[rows]
    for part, kept in (("train", np.arange(len(rows)) % 5 > 0), ("test", np.arange(len(rows)) % 5 == 0)):
        names = sorted({f"w{user}" for user in users[kept]})
        mine = {name: kept & (users == int(name[1:])) for name in names}
        data = {name: {"x": pixels[its].tolist(), "y": labels[its].tolist()} for name, its in mine.items()}
        (made / part).mkdir(parents=True)
        (made / part / "all_data_0.json").write_text(json.dumps({"users": names, "user_data": data}))
    return made


def write_folders(real: Path, made: Path) -> Path:
    """CIFAR-10 images as PNG files, CINIC-10's layout: PART/CLASS/*.png."""
    cifar = DATASETS["cifar10"].read(real / "cifar10", ReadOptions(), Tally())
    images = cifar.read(np.arange(120)).transpose(0, 2, 3, 1)
    for number, (image, label) in enumerate(zip(images, cifar.labels[:120], strict=True)):
        folder = made / ("test" if number % 5 == 0 else "train") / cifar.class_names[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    return made


def write_arrays(real: Path, made: Path) -> Path:
    """MNIST's test images as the user's own arrays."""
    mnist = DATASETS["mnist"].read(real / "mnist", ReadOptions(), Tally())
    made.mkdir()
    np.savez(made / "mine.npz", x=mnist.test_x[:2000, 0], y=mnist.test_y[:2000], user=np.arange(2000) % 37)
    return made / "mine.npz"


def write_glove(path: Path) -> Path:
    """Vectors of 32 values for some frequent words, in GloVe's format; no real ones are at hand."""
    generator = np.random.default_rng(0)
    lines = (f"{word} {' '.join(f'{value:.3f}' for value in generator.normal(0, 0.3, 32))}" for word in FREQUENT)
    path.write_text("\n".join(lines) + "\n")
    return path


FREQUENT = ("the", "to", "in", "of", "for", "a", "and", "on", "is", "with", "trump", "nfl", "game")
IMAGES = ("local.lr=0.1",)
ADAM = "local.optimizer=adam local.lr=0.002 participation.fraction=1"
TEXTS = ("model.dimension=32", "local.lr=0.3")
CASES = {
    "mnist": Case(
        "mnist", "mnist", "--partition dirichlet --alpha 0.3 --clients 600", "model.name=mlp participation.count=10"
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
        "amazon_toys",
        "--file Toys_and_Games_2023.subset.json.gz --partition sizes --law zipf --shape 1 --clients 500",
        "model.name=bilstm model.units=16",
    ),
    "amazon toys, 2018": Case(
        "amazon",
        "amazon_toys",
        "--file Toys_and_Games_5.human_subset.json.gz --partition dirichlet --alpha 1 --clients 50",
        "model.name=lstm model.units=16",
    ),
    "femnist": Case("femnist", write_femnist, "--partition user", "model.name=cnn model.dropout=0 local.lr=0.2"),
    "cinic10": Case(
        "cinic10", write_folders, "--partition iid --clients 6", f"model.name=cifar-cnn model.hidden=64 {ADAM}"
    ),
    "imagefolder": Case("imagefolder", write_folders, "--partition iid --clients 20 --image-size 16", "model.name=mlp"),
    "arrays": Case("arrays", write_arrays, "--partition user --val 0.1", "model.name=cnn model.dropout=0"),
}


LONG = ("cifar10", "cifar100", "cinic10", "mind", "sentiment140", "amazon toys", "amazon toys, 2018")


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES])
def test_a_data_set_is_prepared_inspected_and_trained(case: str, data_folder: Path, tmp_path: Path) -> None:
    """The loss of training is lower at the end than in the first round; every round counts its steps."""
    chosen = CASES[case]
    shards = tmp_path / "shards"
    raw = data_folder / chosen.raw if isinstance(chosen.raw, str) else chosen.raw(data_folder, tmp_path / "raw")
    if not raw.exists():
        pytest.skip(f"no real data at {raw}")
    places = {"shards": shards, "glove": write_glove(tmp_path / "glove.txt")}
    partition, settings = (text.format(**places).split() for text in (chosen.partition, chosen.settings))
    assert prepare([chosen.name, "--raw", str(raw), *partition, "--shards", "3", "--out", str(shards)]) == 0
    inspection = inspect_folder(shards, verify=True)
    assert dict(inspection.lines())["samples"].startswith(f"{inspection.measures.samples:,} train")
    task = inspection.store.description.task
    usual, selected = (TEXTS, "participation.count=20") if task == "text" else (IMAGES, "participation.fraction=0.2")
    if not any(setting.startswith("participation.") for setting in settings):
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
    common = ["preset=fedavg", f"data.shards={shards}", f"rounds={ROUNDS}", f"evaluation.every={ROUNDS}"]
    common += ["logging.tensorboard=false", "checkpoint.every=0", "local.epochs=1", "local.batch_size=16"]
    experiment = Experiment.connect(load_config(None, [*common, *settings]))
    recorder = open_recorder(experiment.cluster, folder, experiment.config, False)
    assert Simulation(experiment, recorder).run() == "finished"
    experiment.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
