"""Every file of jobs/experiments describes runs that could be started, with the numbers of its paper."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.sweeps.plan import PlannedRun, plan_sweep
from fedmpi.sweeps.shards import Preparation
from jobs.experiments.fedstas_data import drawn, mixes

FOLDER = Path(__file__).parents[2] / "jobs" / "experiments"
SWEEPS = sorted(path for path in FOLDER.rglob("*.toml") if path.name != "mnist_fedavg.toml")
BY_HAND = {
    "mind": "mind/MINDsmall_train",
    "amazon_beauty": "amazon_beauty",
    "amazon_toys": "amazon_toys",
    "mnist": "mnist",
    "emnist": "emnist",
    "emnist-bymerge": "emnist",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "sentiment140": "sentiment140",
}
"""Folders below raw/, and where the real files lie."""


def test_every_sweep_could_be_started(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with the files that are fetched by hand; those of 2014 are not at hand."""
    (tmp_path / "raw").mkdir()
    for name, where in BY_HAND.items():
        (tmp_path / "raw" / name).symlink_to(data_folder / where)
    monkeypatch.chdir(tmp_path)
    shards: dict[tuple[str, ...], Preparation] = {}
    for path in SWEEPS:
        planned = [run.data for run in plan_sweep(path, settings=("seed=0",)).runs if run.data]
        assert planned, path.stem
        shards |= {data.words: data for data in planned}
    for data in shards.values():
        if "reviews_" in str(data.words):
            with pytest.raises(UserError, match=r"reviews_.* does not exist"):
                data.check()
        else:
            data.check()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "raw"], "nothing is written"


def test_every_file_states_what_it_makes_and_every_name_on_the_page_is_a_file() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert not [path.name for path in SWEEPS if not path.read_text().startswith("# ")]
    assert not [
        word
        for word in readme.split("`")
        if word.endswith(".toml") and " " not in word and not (FOLDER / word).exists()
    ]


def runs(name: str) -> tuple[PlannedRun, ...]:
    """Return the runs of one seed."""
    return plan_sweep(FOLDER / f"{name}.toml", settings=("seed=0",)).runs


def test_fedsampling_has_the_numbers_of_its_section_4() -> None:
    for name in ("table1", "table1-toys", "table1-beauty", "fig3", "fig4", "fig5"):
        for run in runs(f"fedsampling-{name}"):
            if run.labels["run"] in ("Centralization", "FedSampling"):
                assert (run.config.samples.budget, run.config.server.optimizer.options["lr"]) == (2048, 0.05)
            if run.labels["run"] == "FedSampling":
                assert (run.config.samples.size.max_size, run.config.samples.size.epsilon) == (300, 3.0)
    table = [*runs("fedsampling-table1"), *runs("fedsampling-table1-toys"), *runs("fedsampling-table1-beauty")]
    assert len(table) == 3 * 2 * 6, "data sets, networks, algorithms"
    assert {run.data.words[0] for run in table if run.data} == {"mind", "amazon"}
    [text, code] = [run.config for run in runs("fedsampling-code")]
    assert (text.server.weights.name, code.server.weights.name) == ("gradient-sum", "gradient-sum-squared")
    size = code.samples.size
    truthful = (np.exp(size.epsilon) - 1) / (np.exp(size.epsilon) + size.max_size - 2)
    assert truthful == pytest.approx(0.5, abs=1e-3), "the α of the published code, by Eq 21"


def test_fedsso_has_the_numbers_of_its_section_4() -> None:
    for run in (*runs("fedsso-fig3"), *runs("fedsso-fig5")):
        local, clients = run.config.local, run.config.clients
        assert (local.lr, local.batch_size, clients.fraction) == (0.01, 10, 0.1)
        if run.config.preset == "fedsso":
            clustering = clients.sampler.services.clustering
            assert (clustering.name, clustering.min_samples, clustering.xi) == ("optics", 2, 0.25)
        assert run.config.preset != "fedprox" or local.proximal_mu == 0.2
    assert len(runs("fedsso-fig2")) == 7 and len(runs("fedsso-fig3")) == 5 * 4


def test_fedstas_has_the_numbers_of_its_section_3() -> None:
    systems = [run for run in runs("fedstas-fig2") if run.labels["run"] in ("FedSTS", "FedSTaS", "DP-FedSTaS")]
    for run in (*systems, *runs("fedstas-fig3")):
        local, samples, strata = run.config.local, run.config.samples, run.config.clients.sampler.services
        assert (strata.strata, run.config.clients.count, strata.features.options["codebook_size"]) == (10, 10, 9)
        assert (local.steps, local.lr, local.batch_size) == (3, 0.01, 128)
        assert run.config.preset == "fedsts" or samples.budget == 2048
        assert run.config.preset != "fedstas-dp" or (samples.size.max_size, samples.size.epsilon) == (100, 3.0)
        assert run.config.rounds == (199 if "CIFAR" in str(run.labels.get("set")) else 99)


def test_astraea_has_the_numbers_of_its_section_4() -> None:
    for name in ("fig4", "fig6", "fig8", "table3"):
        for run in runs(f"astraea-{name}"):
            assert (run.config.local.optimizer.name, run.config.local.lr, run.config.local.batch_size) == (
                "adam",
                0.001,
                20,
            )
            assert run.data is not None and "230752" in run.data.words and "500" in run.data.words
    first = runs("astraea-fig1")[0].config
    assert (first.clients.count, first.local.epochs, first.local.batch_size) == (25, 10, 20)
    table = {run.labels["run"]: run.config for run in runs("astraea-table3")}
    assert [table[f"Med{e}"].topology.epochs for e in (1, 2, 3, 4)] == [1, 2, 3, 4]
    fedavg = table["FedAvg"]
    assert (fedavg.clients.count, fedavg.local.epochs, fedavg.evaluation.target_accuracy) == (10, 20, 0.75)
    assert {run.config.rebalance.alpha for run in runs("astraea-fig7")} == {0.83}


def test_clients_of_fedstas_contain_draws_from_their_mixes(data_folder: Path) -> None:
    data = mixes(data_folder / "mnist", alpha=0.01, users=30, each=200, draw=3)
    again = mixes(data_folder / "mnist", alpha=0.01, users=30, each=200, draw=3)
    assert all((data[name] == again[name]).all() for name in data)
    assert (
        data["x"].shape == data["x_test"].shape == (6000, 28, 28) and np.bincount(data["user"]).tolist() == [200] * 30
    )
    train, test = (
        np.stack([np.bincount(y, minlength=10) for y in data[name].reshape(30, 200)]) for name in ("y", "y_test")
    )
    assert (train > 0).sum(axis=1).mean() < 2.5, "α = 0.01: one or two classes each"
    assert (train.argmax(axis=1) == test.argmax(axis=1)).mean() > 0.9, "the test part follows the same mixes"
    owned = [set(data["y"][data["user"] == user].tolist()) for user in range(30)]
    assert owned == [set(np.flatnonzero(row).tolist()) for row in train], "the users' columns name the same clients"
    for image, label, whole in (("x", "y", "train"), ("x_test", "y_test", "t10k")):
        pixels = gzip.decompress((data_folder / f"mnist/{whole}-images-idx3-ubyte.gz").read_bytes())[16:]
        names = gzip.decompress((data_folder / f"mnist/{whole}-labels-idx1-ubyte.gz").read_bytes())[8:]
        known = {(pixels[i * 784 : (i + 1) * 784], name) for i, name in enumerate(names)}
        assert all((x.tobytes(), y) in known for x, y in zip(data[image], data[label], strict=True))


def test_images_are_drawn_with_replacement_from_the_classes_of_the_mix() -> None:
    labels = np.array([0, 1, 1, 2])
    rows = drawn(labels, np.array([[1.0, 0, 0], [0, 0.5, 0.5]]), 50, np.random.default_rng(0))
    assert set(rows[:50].tolist()) == {0} and set(rows[50:].tolist()) == {1, 2, 3}
