"""Memory does not grow with the rounds, and little with the clients."""

import gc
import tracemalloc
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import fedmpi
from benchmarks.scale import vectors
from benchmarks.soak import SAMPLES, growth, medians
from data_prep.partitions import Partition
from data_prep.writer import write_shards
from fedmpi.config import load_config
from tests.mpi.launch import run_mpi

ROUNDS = 160
MARGIN_MB = 8
"""Resident sets wander by a few megabytes; a leak of one model (0.2 MB here) a round would be 29 MB."""
MODEL = "model.hidden=[400,50]"


def test_the_resident_set_of_server_and_workers_does_not_grow(tmp_path: Path):
    arguments = ["-m", "benchmarks.soak", "--rounds", str(ROUNDS), "--margin", str(MARGIN_MB), "--set", MODEL]
    result = run_mpi(3, arguments, timeout=170)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(3):
        assert f"rank {rank}: " in result.stdout


def test_what_python_and_numpy_hold_does_not_grow(tmp_path: Path):
    """40 further rounds leave less than 1,000 bytes a round behind: no plan, no record, no array of the model."""
    held: list[int] = []
    rounds = count(1)

    def watch() -> bool:
        if next(rounds) in (40, 80):
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
        return False

    config = {"preset": "fedavg", "rounds": 81, "model.hidden": [400, 50], "logging.tensorboard": False}
    tracemalloc.start()
    try:
        fedmpi.run(config, out=tmp_path / "run", stop=watch)
    finally:
        tracemalloc.stop()
    assert held[1] - held[0] < 40 * 1000


@pytest.mark.parametrize("leak", [0, 1000])
def test_growth_is_counted_from_the_first_tenth_on(leak: int):
    resident = 10**8 + leak * np.arange(SAMPLES) + np.where(np.arange(SAMPLES) < SAMPLES // 10, 0, 5 * 10**6)
    assert growth(resident) == pytest.approx(leak * (SAMPLES - 1 - SAMPLES // 10) / 1e6)


def test_the_time_of_a_round_is_the_median_of_each_fifth():
    seconds = np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], 20)
    seconds[::20] = 100.0  # a pause, which a mean would show
    clocks = np.concatenate([[0.0], np.cumsum(seconds)])
    found = medians(np.stack([clocks, 2 * clocks], 1)).T
    assert found == pytest.approx(np.outer([1e3, 2e3], [1, 2, 3, 4, 5]))


@pytest.mark.parametrize(
    "settings",
    [["preset=fedavg", "clients.count=50"], ["preset=fedsampling", "samples.budget=500"]],
    ids=["fedavg", "fedsampling"],
)
def test_a_million_clients_cost_a_rank_less_than_200_megabytes(settings: list[str], tmp_path: Path):
    """Sizes, offsets, answers, ledger and the plan of a round; what Python and NumPy hold at most meanwhile."""
    clients = 10**6
    x, y = np.zeros((clients, 2), np.float32), np.arange(clients) % 2
    everybody = Partition(np.arange(clients), np.arange(clients + 1), "contiguous", {})
    write_shards(vectors(x, y, 2), everybody, tmp_path / "shards", 4, 0, "pytest")
    shards = [f"data.source={tmp_path / 'shards'}", "rounds=2", "evaluation.every=2", "model.hidden=[4]"]
    tracemalloc.start()
    try:
        fedmpi.run(load_config(None, [*settings, *shards]))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 8 * clients < most < 200e6
