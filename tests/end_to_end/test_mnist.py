"""The main job on the real MNIST: FedAvg reaches what it must, on identically and on unevenly distributed labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import run as prepare
from tests.mpi.launch import run_mpi

CONFIG = Path(__file__).parents[2] / "jobs" / "experiments" / "mnist_fedavg.toml"


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds, on a very busy machine
@pytest.mark.parametrize(
    ("partition", "least"),
    [(["iid"], 0.95), (["dirichlet", "--alpha", "0.1"], 0.80)],
    ids=["iid", "dirichlet"],
)
def test_fedavg_on_mnist_with_a_server_and_two_workers(
    partition: list[str], least: float, data_folder: Path, tmp_path: Path
):
    """100 clients, 10 a round, MLP 784-200-200-10, B = 10, E = 1, learning rate 0.05, 50 rounds."""
    shards, run = tmp_path / "shards", tmp_path / "run"
    raw = ["mnist", "--raw", str(data_folder / "mnist"), "--clients", "100", "--shards", "10"]
    assert prepare([*raw, "--partition", *partition, "--out", str(shards)]) == 0
    settings = ["--set", f"data.source={shards}", "--set", "evaluation.every=10", "--set", "logging.tensorboard=false"]
    result = run_mpi(3, ["-m", "fedmpi", "train", CONFIG, *settings, "--out", run], timeout=800)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == list(range(50))
    assert records[-1]["test_accuracy"] >= least
    assert np.isfinite([record["train_loss"] for record in records]).all()
    assert records[-1]["train_loss"] < 0.3 * records[0]["train_loss"]
    assert {record["participants"] for record in records} == {10}
