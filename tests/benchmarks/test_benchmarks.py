"""The benchmarks compare like with like: floors compute what fedmpi computes, and one command gives the table."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import benchmarks
from benchmarks import contestants
from benchmarks.compare import Row, race, table
from benchmarks.contestants import Module, find_peers, settings
from benchmarks.floors import Rounds
from benchmarks.measure import ContestantFailed, run_tree
from benchmarks.rooflines import Machine, Step, batches_of_a_round, count_step, line
from benchmarks.workloads import MODELS, OWN, WORKLOADS, Workload, find, prepare
from fedmpi import UserError
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from tests.local.elsewhere import elsewhere

REPOSITORY = Path(__file__).resolve().parents[2]
# Whole local sets as batches: then the order of the samples, which every contestant draws in its own way, has no part.
IMAGES = replace(WORKLOADS["W1"], clients=6, cohort=3, batch=600, rounds=3, lr=0.1)
TEXTS = replace(WORKLOADS["W3"], clients=200, cohort=20, batch=100, rounds=3, lr=1.0)


class NobodyElse:
    """The barrier of a single process."""

    def wait(self) -> None: ...


def by_floor(workload: Workload, variant: str, folder: Path) -> torch.Tensor:
    rounds = Rounds(workload, prepare(workload, folder), variant, processes=1)
    rounds.run(0, NobodyElse())  # type: ignore[arg-type]
    return rounds.model


def by_fedmpi(workload: Workload, folder: Path, module: Module) -> torch.Tensor:
    prepare(workload, folder)
    keys = settings(workload, folder, module)
    config = load_config(None, [f"{key}={value}" for key, value in keys.items()])
    experiment = Experiment.connect(config)
    simulation = Simulation(experiment, None)
    assert simulation.run() == "finished"
    return simulation.model


@pytest.mark.parametrize(
    ("workload", "variants"),
    [
        (IMAGES, ["naive", "tight", "stacked"]),
        (TEXTS, ["naive", "tight", "merged"]),
        (replace(IMAGES, epochs=3), ["naive", "tight"]),
    ],
    ids=["images", "texts", "three epochs"],
)
def test_every_floor_computes_the_rounds_that_fedmpi_computes(workload: Workload, variants: list, tmp_path: Path):
    ours = by_fedmpi(workload, tmp_path, "layers")
    start = Rounds(workload, prepare(workload, tmp_path), variants[0], 1).initial
    moved = float((ours - start).norm())
    assert moved > 1e-3
    for model in (by_fedmpi(workload, tmp_path, "one by one"), *(by_floor(workload, v, tmp_path) for v in variants)):
        assert float((model - ours).norm()) < 1e-4 * moved


def test_the_stacked_floor_takes_the_steps_of_autograd_through_convolutions(tmp_path: Path, monkeypatch):
    workload = replace(WORKLOADS["W2"], clients=4, cohort=4, batch=420, rounds=2, lr=0.1)
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    monkeypatch.setattr(torch.Tensor, "bernoulli_", lambda self, p: self.fill_(0.5))  # times 2: nothing is dropped
    tight, stacked = (by_floor(workload, variant, tmp_path) for variant in ("tight", "stacked"))
    start = Rounds(workload, prepare(workload, tmp_path), "tight", 1).initial
    assert float((tight - stacked).norm()) < 1e-4 * float((tight - start).norm())


def test_one_command_prints_the_table(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "W3", "--folder", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    for expected in ("torch ", "| naive, 1 process |", "| merged, 1 process |", "| fedmpi, 2 ranks |"):
        assert expected in result.stdout
    assert "failed" not in result.stdout


def test_a_contestant_that_fails_is_shown_as_failed_and_the_others_run_on(tmp_path: Path, monkeypatch):
    def entrants(*_: object) -> list[contestants.Contestant]:
        lame = contestants.Contestant("lame", lambda *_: [sys.executable, "-c", "raise SystemExit('no leg')"], dict)
        timed = {"seconds": [1.0, 1.0, 0.5], "samples": [4, 4, 4], "steps": [2, 2, 2], "loss": [None, 0.5]}
        quick = contestants.Contestant("quick", lambda *_: [sys.executable, "-c", ""], lambda _: timed)
        return [quick, lame]

    monkeypatch.setattr("benchmarks.compare.contestants", entrants)
    rows = race(TEXTS, tmp_path / "data", tmp_path / "work", passes=2, quick=True, pythons={})
    assert [row.failure for row in rows] == ["", "no leg"]
    assert rows[0].seconds == [0.5, 0.5]
    assert "| lame | failed: no leg" in table(TEXTS, rows)


def test_what_runs_too_long_is_ended_with_its_children(tmp_path: Path):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with pytest.raises(ContestantFailed, match="did not end within 1 s"):
        run_tree([sys.executable, "-c", code], tmp_path / "log", {}, tmp_path, seconds=1)


def test_a_step_of_a_dense_layer_counts_its_products_and_what_it_moves():
    network = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    step = count_step(network, torch.rand(5, 6), torch.zeros(5, dtype=torch.int64))
    assert step.flops == 2 * 5 * (2 * 6 * 4 + 3 * 4 * 3)  # no gradient of the samples
    parameters, outputs = 6 * 4 + 4 + 4 * 3 + 3, 5 * (4 + 3)
    assert step.bytes == 4 * (4 * parameters + 4 * outputs)
    assert step.seconds(Machine(flops=step.flops, bandwidth=2 * step.bytes)) == 1
    assert step.seconds(Machine(flops=4 * step.flops, bandwidth=step.bytes / 2)) == 2


def test_of_a_table_only_the_words_of_the_batch_count():
    network = nn.Sequential(nn.Embedding(1000, 7), nn.Flatten(), nn.Linear(14, 3))
    step = count_step(network, torch.tensor([[1, 2], [2, 3]]), torch.zeros(2, dtype=torch.int64))
    assert step.bytes == 4 * (4 * (3 * 7 + 14 * 3 + 3) + 4 * (2 * 14 + 2 * 14 + 2 * 3))


def test_a_model_beside_its_roofline_is_one_line():
    def row(seconds: float) -> Row:
        return Row("x", seconds=[seconds], ratios=[seconds / 0.6], others=[0.1])

    workload = replace(MODELS["lstm"], clients=10, cohort=10, each=50, batch=20)  # 30 steps
    batches = [(20, Step(2e6, 3e6)), (10, Step(1e6, 3e6))]
    row_text = line(workload, [row(0.6), row(0.3), row(0.24), row(0.12)], batches, Machine(1e9, 1e9), "batched")
    assert row_text == (
        "| lstm | 10 × 50, B = 20 | 20.00 | 0.50 |  | 0.40 | 0.20 | batched | 2 | 3.0 | 3 | 2.7 | 2.7 |"
    )
    batches[1] = (10, Step(1e6, 0))
    row_text = line(workload, [row(0.6), row(0.3), row(0.24), row(0.12)], batches, Machine(1e9, 1e9), "batched")
    assert row_text.endswith("| 3 | 3.4 | 3.4 |")


def test_a_round_takes_the_batches_of_its_participants():
    assert batches_of_a_round(replace(MODELS["lstm"], clients=10, cohort=10, each=50, batch=20)) == {20: 20, 10: 10}
    for workload in (WORKLOADS["W1"], WORKLOADS["W2"], OWN["odd_cnn"]):
        sizes = workload.sizes()[workload.participants(workload.rounds - 1)]
        found = batches_of_a_round(workload)
        assert sum(rows * count for rows, count in found.items()) == workload.epochs * sizes.sum()
        steps = workload.epochs * (-(-sizes // workload.batch)).sum()
        assert found.total() == steps and max(found) == workload.batch
    small = WORKLOADS["W3"]
    sizes = small.sizes()[small.participants(small.rounds - 1)]
    found = batches_of_a_round(small)
    assert max(found) == sizes[sizes <= 20].sum()
    assert sum(rows * count for rows, count in found.items()) == sizes.sum()
    assert batches_of_a_round(WORKLOADS["S4"]) == {2048: 1}


def test_the_built_in_models_are_run_as_such(tmp_path: Path):
    assert settings(MODELS["bilstm"], tmp_path)["model.name"] == "bilstm"
    assert settings(WORKLOADS["W1"], tmp_path, "own")["model.name"] == "benchmarks.networks:own_mlp"
    store = prepare(find("text-cnn", quick=True), tmp_path)
    assert store.sizes.tolist() == [60] * 4 and store.description.vocabulary == 20_002


def test_ratios_are_taken_within_a_pass():
    row = Row("x", seconds=[0.2, 0.6], ratios=[0.5, 0.5], samples=10, clients=2, others=[0.0])
    assert "| 0.50 (0.50 to 0.50) |" in table(TEXTS, [row])


FOLDER = Path(str(benchmarks.__file__)).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")) + sorted(FOLDER.glob("studies/*.py")), ids=str)
def test_every_benchmark_finds_what_it_imports(path: Path) -> None:
    module = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    importlib.import_module(module.removesuffix(".__init__"))


def test_on_a_device_all_contestants_compute_there(tmp_path: Path):
    rows = contestants.contestants(WORKLOADS["W3"], False, {"pfl": "python", "fluke": "python"}, "cuda:1")
    assert [row.name for row in rows][:4] == [
        "naive, 1 process", "tight, 1 process", "merged, 1 process", "fedmpi, 1 rank",
    ]  # fmt: skip
    *own, peer = rows
    assert peer.name == "pfl, 1 process" and "CUDA_VISIBLE_DEVICES" not in peer.environment
    for row in own:
        command = " ".join(row.command(tmp_path, tmp_path))
        assert "cluster.device=cuda:1" in command or "--device cuda:1" in command
    for row in contestants.contestants(WORKLOADS["W3"], False, {"pfl": "python"}):
        command = " ".join(row.command(tmp_path, tmp_path))
        named = "--device cpu" in command or "cluster.device=cpu" in command
        assert named or row.environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("variant", ["naive", "tight", "merged", "gradient"])
def test_floors_name_the_device_of_every_tensor(variant: str, tmp_path: Path):
    workload = replace(TEXTS, wanted=50 if variant == "gradient" else 0, rounds=1)
    store = prepare(workload, tmp_path)
    here = by_floor(workload, variant, tmp_path)
    with elsewhere() as device:
        rounds = Rounds(workload, store, variant, 1, device)
        rounds.run(0, NobodyElse())  # type: ignore[arg-type]
        assert rounds.model.device == device
        there = rounds.model.cpu().clone()
    assert float((there - here).norm()) <= 1e-6 * float(here.norm())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param([], "'cuda'", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
        (["--device", "cpu"], "add --quick"),
        (["--out"], "--out needs a value"),
        (["--fast"], "--fast is no option"),
    ],
)
def test_the_gpu_script_refuses_in_one_sentence_and_leaves_earlier_tables(given: list[str], said: str, tmp_path: Path):
    tables = tmp_path / "tables.md"
    tables.write_text("kept")
    command = [str(REPOSITORY / "benchmarks" / "gpu.sh"), "--out", str(tables), *given]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and said in result.stderr and result.stderr.count("\n") == 1
    assert tables.read_text() == "kept"


def test_the_gpu_script_names_a_python_without_torch(tmp_path: Path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    command = [str(REPOSITORY / "benchmarks" / "gpu.sh"), "--out", str(tmp_path / "tables.md")]
    environment = {**os.environ, "PYTHON": str(venv / "bin" / "python"), "PYTHONPATH": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2 and "has no torch" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ("pfl", ["NAME=PYTHON"]),
        ("pfi=python", ["NAME=PYTHON", "pfl, blazefl"]),
        ("pfl={folder}/absent/python", ["No such file"]),
        ("pfl={bare}", ["cannot be driven there", "ModuleNotFoundError"]),
    ],
    ids=["no Python", "unknown", "absent", "without what it needs"],
)
def test_peers_that_cannot_take_part_are_refused(peer: str, words: list[str], tmp_path: Path):
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    given = peer.format(folder=tmp_path, bare=bare)
    with pytest.raises(UserError) as refused:
        find_peers([given])
    text = str(refused.value)
    assert text.startswith(f"--peer {given}: ") and all(word in text for word in words)


@pytest.mark.parametrize("command", ["benchmarks", "benchmarks.rooflines"])
def test_a_peer_is_refused_before_anything_is_measured(command: str):
    asked = [sys.executable, "-m", command, "--quick", "--peer", "pfl"]
    done = subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --peer pfl: ") and len(done.stderr.splitlines()) == 1
