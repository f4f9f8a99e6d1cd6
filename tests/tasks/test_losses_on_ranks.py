"""Cross-entropy as a loss of one's own is the built-in one to rounding: whole runs, each engine, 1 and 3 ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mpi.launch import run_mpi
from tests.tasks.loss_runs import OWN, RUNS, outcomes


def assert_same(found: dict[str, np.ndarray]) -> None:
    assert found
    for name in {run.partition("/")[0] for run in found}:
        built_in, own = found[f"{name}/cross-entropy"], found[f"{name}/{OWN}"]
        assert np.linalg.norm(own - built_in) <= 1e-5 * np.linalg.norm(built_in), name


ENGINES = ("sequential", "batched", "merged")


def test_one_rank_in_each_engine() -> None:
    assert_same(outcomes(ENGINES))


@pytest.mark.slow
def test_one_rank_beside_probes_sampled_rows_and_mediators() -> None:
    assert_same(outcomes(RUNS.keys() - ENGINES))


@pytest.mark.slow
def test_three_ranks(tmp_path: Path) -> None:
    done = run_mpi(3, ["-m", "tests.tasks.loss_runs", tmp_path / "out.npz"])
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(tmp_path / "out.npz") as held:
        assert_same({name.replace("|", "/"): held[name] for name in held})
