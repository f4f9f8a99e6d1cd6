"""Algorithms with state on several ranks: the same models, to 1e-10 of a plain loop in float64, also after a resume."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mpi.algorithm_runs import run
from tests.mpi.launch import run_mpi

PROGRAM = Path(__file__).parent / "algorithm_runs.py"
QUIET = ["logging.tensorboard=false", "cluster.threads=1", "evaluation.every=9"]
COMMON = [*QUIET, "rounds=4", "clients.count=6", "local.epochs=2", "local.lr=0.03"]
DOUBLE = [
    *COMMON,
    "data.source=digits:clients=14,alpha=0.2",
    "data.normalize=false",
    "model.name=tests.reference.networks:double_perceptron",
]
EXACT = [*COMMON, "data.source=digits:clients=14,alpha=0.2", "model.hidden=[10]", "server.exact=true"]
SCAFFOLD, FEDDYN, FEDNOVA = (
    ["local.algorithm=scaffold", "server.weights=uniform"],
    ["local.algorithm=feddyn", "server.weights=uniform"],
    ["local.algorithm=fednova"],
)
OWN_SCAFFOLD = ["local.algorithm=tests.local.own_algorithms:Scaffold", "server.weights=uniform"]
OWN_FEDDYN = [
    "local.algorithm=tests.local.own_algorithms:FedDyn",
    "server.weights=uniform",
    "local.proximal_mu=0.1",
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)


def job(settings: list[str], folder: Path, **others: Any) -> dict[str, Any]:
    return {"settings": settings, "folder": str(folder), **others}


def on_ranks(ranks: int, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the result of `run` for each of the jobs."""
    if ranks == 1:
        return [run(**one) for one in jobs]
    out, listed = folder / f"out{ranks}.npz", folder / f"jobs{ranks}.json"
    listed.write_text(json.dumps(jobs))
    result = run_mpi(ranks, [PROGRAM, out, listed], timeout=400)
    assert result.returncode == 0, result.stderr
    held = np.load(out)
    return [{key: held[f"{key}{number}"] for key in ("model", "kept", "moved")} for number in range(len(jobs))]


RESUMED = [
    [*EXACT, *SCAFFOLD, "cluster.server_trains=never"],
    [*EXACT, *FEDDYN, "cluster.state_memory=0.000003"],
    [*EXACT, *FEDNOVA],
]
"""The first one leaves rank 0 without clients; the second keeps the vectors of one client in each rank's memory."""


def test_a_resumed_run_repeats_the_bits_and_vectors_in_a_file_those_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedmpi")
    for number, settings in enumerate(RESUMED):
        name = str(tmp_path / f"{number}")
        whole = run(settings, f"{name}-whole")
        run(settings, f"{name}-parts", stop_after=2)
        parts = run(settings, f"{name}-parts", resume=True)
        assert np.array_equal(whole["model"], parts["model"])
        assert np.array_equal(whole["kept"], parts["kept"])
        if number == 1:
            assert whole["kept"][0, 1] > 4
            for folder in (f"{name}-whole", f"{name}-parts"):
                assert f"goes to a temporary file in {Path(folder).resolve()}\n" in caplog.text
            roomy = run([*EXACT, *FEDDYN], f"{name}-roomy")
            assert roomy["kept"][0, 1] == 0
            assert np.array_equal(roomy["model"], whole["model"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_continues_with_another_number_of_ranks_bit_for_bit(tmp_path: Path) -> None:
    started = [job(s, tmp_path / f"from3-{i}", stop_after=2) for i, s in enumerate(RESUMED)]
    wholes = [job(s, tmp_path / f"whole3-{i}") for i, s in enumerate(RESUMED)]
    of_three = on_ranks(3, [*started, *wholes], tmp_path)[len(RESUMED) :]
    assert of_three[0]["moved"] > 0 and of_three[1]["moved"] > 0
    assert of_three[1]["kept"][:, 1].max() > 0
    for i, settings in enumerate(RESUMED):
        alone = run(settings, str(tmp_path / f"from3-{i}"), resume=True)
        assert np.array_equal(alone["model"], of_three[i]["model"]), settings
        run(settings, str(tmp_path / f"from1-{i}"), stop_after=2)
    on_two = on_ranks(2, [job(s, tmp_path / f"from1-{i}", resume=True) for i, s in enumerate(RESUMED)], tmp_path)
    for i, one in enumerate(on_two):
        assert np.array_equal(one["model"], of_three[i]["model"]), RESUMED[i]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_foreign_files_do_on_three_ranks_what_the_built_in_ones_do(tmp_path: Path) -> None:
    pairs = [(SCAFFOLD, OWN_SCAFFOLD), (FEDDYN, OWN_FEDDYN)]
    jobs = [job([*DOUBLE, *s], tmp_path / f"{i}{j}") for i, pair in enumerate(pairs) for j, s in enumerate(pair)]
    models = [found["model"] for found in on_ranks(3, jobs, tmp_path)]
    for built_in, own in (models[:2], models[2:]):
        assert np.linalg.norm(built_in - own) < 1e-12 * np.linalg.norm(own)
