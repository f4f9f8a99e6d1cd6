"""A run that is stopped continues where it was and draws the curve of an undisturbed one.

tests/process sends every signal, tests/faults kills ranks, and tests/records damages what a killed run leaves.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

import fedmpi
from tests.end_to_end.runs import (
    RICH,
    ROUNDS,
    SECONDS,
    TRAIN,
    Done,
    assert_same_curve_to_rounding,
    curve,
    records,
    staying,
    wait_for_rounds,
)
from tests.mpi.launch import finish_job, run_mpi, start_mpi_job

pytestmark = pytest.mark.timeout(600)  # seconds, with its fixtures, on a busy machine
STOPPED = 75


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three ranks that mpiexec was asked to stop after some rounds."""
    run = tmp_path_factory.mktemp("stopped") / "RUN"
    job = start_mpi_job(3, [*TRAIN, RICH, "--out", run], env=staying(run, 3))
    wait_for_rounds(job, run, 3)
    job.send_signal(signal.SIGTERM)
    ended = finish_job(job, SECONDS)
    assert ended.returncode == STOPPED and "Traceback" not in ended.stderr, ended.stderr
    assert f"continue with --resume --out {run}" in ended.stdout
    return run


def test_a_stopped_run_has_saved_and_is_not_finished(stopped: Path):
    recorded = len(records(stopped))
    assert 3 <= recorded < ROUNDS
    assert not (stopped / "summary.json").exists() and not (stopped / "model.safetensors").exists()
    newest = max((stopped / "checkpoints").iterdir()).name
    assert newest == f"round-{recorded + 1:08d}.safetensors"  # the last round waits for its evaluation


def test_a_resumed_run_repeats_the_undisturbed_one_bit_for_bit(stopped: Path, undisturbed: Done, tmp_path: Path):
    run, whole = tmp_path / "RUN", curve(undisturbed.folder)
    shutil.copytree(stopped, run)
    ended = run_mpi(3, [*TRAIN, RICH, "--out", run, "--resume"], timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert curve(run) == whole
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_test_accuracy"] == max(record["test_accuracy"] for record in whole)
    assert summary["bytes_total"] == sum(r["bytes_client_up"] + r["bytes_client_down"] for r in whole)


def test_a_resumed_run_on_other_ranks_repeats_it_to_rounding(stopped: Path, undisturbed: Done, tmp_path: Path):
    run = tmp_path / "RUN"
    shutil.copytree(stopped, run)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"round": 99, "test_lo')  # as after a kill in the middle of a write
    assert fedmpi.run(RICH, out=run, resume=True).ending == "finished"
    assert_same_curve_to_rounding(curve(run), curve(undisturbed.folder))
