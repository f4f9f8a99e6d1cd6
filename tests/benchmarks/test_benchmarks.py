"""Benchmarks compare like with like: the naive loop computes what fedmpi computes, and one command gives the table."""

import gc
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmarks
import fedmpi
from benchmarks import __main__ as race
from benchmarks.beside import bootstrap, fast_ratio
from benchmarks.contestants import Contestant, Module, contestants, find_peers, settings
from benchmarks.measure import CPU, ContestantFailed, in_turns, run_tree, spread
from benchmarks.naive import train_round
from benchmarks.networks import parameters_of
from benchmarks.workloads import WORKLOADS, Workload, client_tensors, prepare, write
from fedmpi import UserError
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation

FOLDER = Path(str(benchmarks.__file__)).parent
# Whole local sets as batches: the order of the samples, which every contestant draws in its own way, has no effect.
IMAGES = replace(WORKLOADS["W1"], clients=6, cohort=3, batch=600, rounds=3, lr=0.1)
TEXTS = replace(WORKLOADS["W3"], clients=200, cohort=20, batch=100, rounds=3, lr=1.0)


def by_naive(workload: Workload, folder: Path, device: torch.device = CPU) -> torch.Tensor:
    clients, network = client_tensors(prepare(workload, folder)), workload.network().to(device)
    for round in range(workload.rounds):
        train_round(workload, network, [clients[client] for client in workload.participants(round).tolist()])
    return parameters_of(network).cpu()


def by_fedmpi(workload: Workload, folder: Path, module: Module) -> torch.Tensor:
    prepare(workload, folder)
    keys = settings(workload, folder, module)
    simulation = Simulation(
        Experiment.connect(load_config(None, [f"{key}={value}" for key, value in keys.items()])), None
    )
    assert simulation.run() == "finished"
    return simulation.model


@pytest.mark.parametrize("workload", [IMAGES, TEXTS, replace(IMAGES, epochs=3)], ids=["images", "texts", "epochs"])
def test_the_naive_loop_computes_the_rounds_that_fedmpi_computes(workload: Workload, tmp_path: Path):
    ours = by_fedmpi(workload, tmp_path, "layers")
    moved = float((ours - parameters_of(workload.network())).norm())
    assert moved > 1e-3
    for model in (by_fedmpi(workload, tmp_path, "one by one"), by_naive(workload, tmp_path)):
        assert float((model - ours).norm()) < 1e-4 * moved


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["--quick", "W3"], 0, ("torch ", "| naive", "| fedmpi, 2 rank(s)")),
        (["--quick", "--peer", "pfl"], 2, ("--peer pfl: write NAME=PYTHON",)),
        (["--peer", "pfi=python"], 2, ("pfl, blazefl",)),
    ],
)
def test_one_command_prints_the_table(words: list[str], code: int, shown: tuple[str, ...]):
    command = [sys.executable, "-m", "benchmarks", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, done.stderr
    assert all(text in (done.stderr if code else done.stdout) for text in shown) and "failed" not in done.stdout


@pytest.mark.parametrize(
    ("program", "words", "shown"),
    [
        ("rounds", ["W1", "--device", "cpu", "--quick", "--passes", "1"], "| vmap(grad), one graph per round |"),
        ("correctness", ["order", "--device", "cpu"], "ok   order: server.exact = True."),
        ("counts", ["W1"], "| W1 | fedmpi, batched |"),
    ],
)
def test_programs_for_a_gpu_can_be_tried_without_one(program: str, words: list[str], shown: str):
    command = [sys.executable, "-m", f"benchmarks.gpu.{program}", *words]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout and "failed" not in done.stdout


def test_a_contestant_that_fails_is_shown_as_failed_and_the_others_run_on(tmp_path: Path):
    seconds = iter([0.5, 0.25])

    def read(_: Path) -> dict:
        return {"seconds": [1.0, 1.0, next(seconds)], "samples": [4] * 3, "steps": [2] * 3, "loss": [None, 0.5]}

    lame = Contestant("lame", lambda *_: [sys.executable, "-c", "raise SystemExit('no leg')"], dict)
    quick = Contestant("quick", lambda *_: [sys.executable, "-c", ""], read)
    table = race.race(TEXTS, [quick, lame], tmp_path / "data", tmp_path / "work", passes=2)
    assert "375.0 | 1.00 (1.00 to 1.00) | 53 | 11 |" in table and "| lame | failed: no leg" in table


def test_ways_alternate_and_ratios_have_a_range():
    order: list[str] = []
    assert in_turns([lambda: order.append("a"), lambda: order.append("b")], 2) == [[None, None]] * 2  # type: ignore[func-returns-value]
    assert order == ["a", "b", "b", "a"] and spread([0.5, 0.75, 0.5]) == "0.50 (0.50 to 0.75)"


def test_what_runs_too_long_is_ended_with_its_children(tmp_path: Path):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with pytest.raises(ContestantFailed, match="did not end within 1 s"):
        run_tree([sys.executable, "-c", code], tmp_path / "log", {}, tmp_path, seconds=1)


def test_on_a_device_all_contestants_compute_there(tmp_path: Path):
    for device in ("cuda:1", None):
        rows = contestants(WORKLOADS["W3"], False, find_peers([f"pfl={sys.executable}"]), device)
        assert [row.name for row in rows][:2] == ["naive", "fedmpi, 1 rank(s)"]
        for row in rows:
            command = " ".join(map(str, row.command(tmp_path, tmp_path)))
            peer = "CUDA_VISIBLE_DEVICES" not in row.environment if device else "peers" in command
            assert peer or f"--device {device or 'cpu'}" in command or f"cluster.device={device or 'cpu'}" in command
    with pytest.raises(UserError, match="NAME=PYTHON"):
        find_peers([f"pfl={tmp_path}/absent"])


def passes(factor: float, seed: int) -> list[list[list[float]]]:
    """Ten passes of twenty rounds, in three of which the machine is half as fast for one of the two."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(10):
        rounds = 0.1 * (1 + generator.exponential(0.05, (2, 20)))
        if number in (2, 5, 7):
            rounds[number % 2] *= 2
        found.append([rounds[0].tolist(), (factor * rounds[1]).tolist()])
    return found


def test_slow_passes_do_not_move_the_ratio_of_fast_rounds_and_its_interval_contains_it():
    for seed in range(5):
        low, high = bootstrap(passes(1.2, seed))
        assert fast_ratio(passes(1.2, seed)) == pytest.approx(1.2, rel=0.01)
        assert 1.18 < low < 1.202 and 1.198 < high < 1.22


def test_what_python_and_numpy_hold_does_not_grow(tmp_path: Path):
    """40 further rounds leave only their records behind, 1,500 bytes a round: no plan, no array of the model."""
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
    assert held[1] - held[0] < 40 * 2500


@pytest.mark.parametrize(
    "settings", [["preset=fedavg", "clients.count=50"], ["preset=fedsampling", "samples.budget=500"]]
)
def test_a_million_clients_cost_a_rank_less_than_200_megabytes(settings: list[str], tmp_path: Path):
    """Sizes, offsets, size reports, ledger and the plan of a round; the peak of Python and NumPy."""
    clients = 10**6
    train = np.zeros((clients, 2), np.float32), np.arange(clients) % 2
    test = train[0][:100], train[1][:100]
    write(tmp_path / "shards", "vector", np.ones(clients, np.int64), train, test, 2)
    shards = [f"data.source={tmp_path / 'shards'}", "rounds=2", "evaluation.every=2", "model.hidden=[4]"]
    tracemalloc.start()
    try:
        fedmpi.run(load_config(None, [*settings, *shards]))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 8 * clients < most < 200e6
