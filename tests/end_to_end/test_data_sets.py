"""Every real data set, from its official files to a trained model: prepared, inspected, five rounds of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import run as prepare
from fedmpi.data.opening import open_store
from fedmpi.describe.data import store_facts
from tests.end_to_end.in_process import run

ROUNDS = 5
COMMON = ("preset=fedavg", f"rounds={ROUNDS}", f"evaluation.every={ROUNDS}", "local.epochs=1", "local.batch_size=16")
IMAGES, TEXTS = "local.lr=0.1 clients.fraction=0.2", "model.dimension=32 local.lr=0.3 clients.count=20"
ADAM = "local.optimizer=adam local.lr=0.002 clients.fraction=1"
AMAZON_TOYS = "--partition sizes --law zipf --shape 1 --clients 500"
VECTORS = "--partition label-sorted --size 40 --vectors {glove}"
CASES: dict[str, tuple[str, str, str]] = {
    "mnist": ("mnist", "--partition dirichlet --alpha 0.3 --clients 600", f"{IMAGES} model.name=mlp"),
    "emnist-letters": (
        "emnist",
        "--partition dirichlet --alpha 1 --clients 30",
        f"{IMAGES} model.name=image-cnn model.hidden=[64] model.filters=[8,16]",
    ),
    "cifar10": ("cifar10", "--partition lognormal --mean 16 --clients 6", f"model.name=cifar-cnn {ADAM}"),
    "sentiment140": ("sentiment140", "--partition user --min-samples 3", f"{TEXTS} model.name=lstm model.units=32"),
    "mind": ("mind/MINDsmall_train", "--partition lognormal --clients 2000", f"{TEXTS} model.name=text-cnn"),
    "mind ": (
        "mind/MINDsmall_train_sample2000",
        VECTORS,
        "model.name=fedsampling-text-cnn model.filters=64 model.vectors={shards}/vectors.npy model.frozen=true "
        + f"{TEXTS}",
    ),
    "amazon ": (
        "amazon_toys/Toys_and_Games_2023.subset.json.gz",
        AMAZON_TOYS,
        f"{TEXTS} model.name=lstm model.units=16",
    ),
}
"""Folder of the files, words of the preparation and settings by data set; a second case of one ends in a blank."""
LONG = ("cifar10", "mind", "sentiment140", "amazon ")


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES])
def test_a_data_set_is_prepared_inspected_and_trained(case: str, data_folder: Path, tmp_path: Path) -> None:
    """The loss of training is lower at the end than in the first round; every round counts its steps."""
    folder, partition, settings = CASES[case]
    raw, shards, glove = data_folder / folder, tmp_path / "shards", tmp_path / "glove.txt"
    if not raw.exists():
        pytest.skip(f"no real data at {raw}")
    words = [word.format(glove=write_glove(glove)) for word in partition.split()]
    assert prepare([case.strip(), "--raw", str(raw), *words, "--shards", "3", "--out", str(shards)]) == 0
    store = open_store(shards, verify=True)
    assert dict(store_facts(store))["samples"].startswith(f"{store.samples:,} train")
    own = [setting.format(shards=shards) for setting in settings.split()]
    records = run(*COMMON, f"data.source={shards}", *own, evaluate=False).records
    assert [record["round"] for record in records] == list(range(ROUNDS))
    assert all(record["steps"] >= record["participants"] > 0 for record in records)
    assert all(record["samples"] >= record["participants"] for record in records)
    losses = [record["train_loss"] for record in records]
    assert np.isfinite(losses).all() and np.isfinite(records[-1]["test_loss"])
    assert np.mean(losses[-2:]) < losses[0]


def write_glove(path: Path) -> Path:
    """Vectors of 32 values for some frequent words, in GloVe's format; no real ones are at hand."""
    generator = np.random.default_rng(0)
    words = ("the", "to", "in", "of", "for", "a", "and", "on", "is", "with", "trump", "nfl", "game")
    lines = (f"{word} {' '.join(f'{value:.3f}' for value in generator.normal(0, 0.3, 32))}" for word in words)
    path.write_text("\n".join(lines) + "\n")
    return path
