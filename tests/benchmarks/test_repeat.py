"""Tables of runs over seeds: what is averaged, which runs are trained."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import benchmarks
from benchmarks.repeat import Outcome, averaged, finished, read, run_folder, table_of


def outcome(every: int, rounds: int, level: float) -> Outcome:
    """A curve that is `level` up to ten rounds before the end and level + 0.1 from there on."""
    measured = np.arange(every, rounds + 1, every)
    return Outcome(measured, np.where(measured > rounds - 10, level + 0.1, level))


def test_the_table_says_how_many_evaluations_its_last_rounds_are() -> None:
    every, third = outcome(1, 99, 0.5), outcome(3, 99, 0.5)
    assert every.late == pytest.approx([0.6] * 10) and third.late == pytest.approx([0.6] * 4)
    assert averaged({"a": {0: every}, "b": {0: every}}) == "10"
    assert averaged({"a": {0: every}, "b": {0: third}}) == "4 to 10"
    assert "mean of 4 evaluations in the last 10 rounds" in table_of({"a": {0: third}}, None).splitlines()[0]


def test_systems_are_compared_seed_by_seed_over_the_seeds_that_both_have() -> None:
    reference = {seed: outcome(1, 20, level) for seed, level in enumerate((0.1, 0.3, 0.5, 0.7))}
    better = {seed: outcome(1, 20, level) for seed, level in ((3, 0.73), (1, 0.32), (0, 0.11), (9, 0.2))}
    lines = table_of({"a": reference, "b": better}, "a").splitlines()
    assert lines[2].startswith("| a | 4 |") and lines[2].endswith("|  |  |")
    assert lines[3].startswith("| b | 4 | 44.00 ± 27.39 |") and "| +2.00 [-0.48, +4.48] |" in lines[3]
    assert "1 shared seeds" in table_of({"a": {0: reference[0]}, "b": better}, "a")


def test_a_table_of_runs_is_trained_once_and_tabulated(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    common = ["rounds=3", "data.shards=digits:clients=10", "model.name=mlp", "checkpoint.every=0"]
    runs = {"One": ["participation.count=2"], "Two, E = 2": ["participation.count=2", "local.epochs=2"]}
    lines = [f"seeds = [0, 1]\ncommon = {json.dumps([*common, 'logging.tensorboard=false'])}\n[runs]"]
    table.write_text("\n".join([*lines, *(f"{json.dumps(name)} = {json.dumps(keys)}" for name, keys in runs.items())]))
    out = tmp_path / "runs"
    command = [sys.executable, "-m", "benchmarks.repeat", str(table), "--out", str(out), "--reference", "One"]
    nothing = subprocess.run([*command, "--finished"], capture_output=True, text=True)
    assert nothing.returncode == 2 and "holds no finished run" in nothing.stderr
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    folders = [run_folder(out, name, seed) for name in runs for seed in (0, 1)]
    assert all(map(finished, folders)) and len(read(folders[0]).accuracy) == 3
    written = [(folder / "summary.json").stat().st_mtime_ns for folder in folders]
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert again == first and written == [(folder / "summary.json").stat().st_mtime_ns for folder in folders]
    assert [line.split("|")[1].strip() for line in first.splitlines()[2:]] == list(runs)
    assert "mean of 3 evaluations" in first and "[" in first.splitlines()[3]


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(str(benchmarks.__file__)).parent.glob("*.py")))
def test_every_benchmark_finds_what_it_imports(name: str) -> None:
    importlib.import_module("benchmarks" if name == "__init__" else f"benchmarks.{name}")
