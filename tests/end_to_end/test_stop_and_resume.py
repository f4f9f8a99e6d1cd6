"""A run that is stopped or killed continues where it was and draws the curve of an undisturbed one."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedmpi
from tests.end_to_end.runs import (
    CHECKPOINTS_EVERY,
    RICH,
    ROUNDS,
    SECONDS,
    TRAIN,
    Done,
    assert_same_curve_to_rounding,
    curve,
    rank_of_job,
    records,
    staying,
    wait_for_rounds,
)
from tests.mpi.launch import finish_job, run_mpi, start_mpi_job

pytestmark = pytest.mark.timeout(600)  # seconds, with its fixtures, on a busy machine
STOPPED = 75


def train(folder: Path, *more: str) -> list[str | Path]:
    return [*TRAIN, RICH, "--out", folder, *more]


def resume_here(folder: Path) -> None:
    """Resume the run in this process, on one rank."""
    assert fedmpi.run(RICH, out=folder, resume=True).ending == "finished"


def stop_by(number: signal.Signals, folder: Path, after_rounds: int, *more: str) -> str:
    """Start or resume on three ranks and send mpiexec a signal once this many rounds are recorded."""
    job = start_mpi_job(3, train(folder, *more), env=staying(folder, after_rounds))
    wait_for_rounds(job, folder, after_rounds)
    job.send_signal(number)
    ended = finish_job(job, SECONDS)
    assert ended.returncode == STOPPED, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture(scope="module")
def whole(undisturbed: Done) -> list[dict]:
    """Return the curve of an undisturbed run, on three ranks."""
    return curve(undisturbed.folder)


@pytest.fixture(scope="module")
def stopped(folder: Path) -> Path:
    """A run stopped by SIGTERM after some rounds."""
    said = stop_by(signal.SIGTERM, folder / "stopped", 3)
    assert f"continue with --resume --out {folder / 'stopped'}" in said
    return folder / "stopped"


@pytest.fixture(scope="module")
def resumed(stopped: Path, folder: Path) -> Path:
    """Resume that run on as many ranks, stop it again by SIGUSR1, and resume it to its end."""
    run = folder / "resumed"
    shutil.copytree(stopped, run)
    stop_by(signal.SIGUSR1, run, len(records(run)) + 2, "--resume")
    assert len(records(run)) < ROUNDS
    ended = run_mpi(3, train(run, "--resume"), timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return run


@pytest.fixture(scope="module")
def killed(folder: Path) -> tuple[Path, int]:
    """A run whose server was killed by signal 9, and the number of rounds it had recorded."""
    run = folder / "killed"
    job = start_mpi_job(2, train(run), env=staying(run, 2 * CHECKPOINTS_EVERY + 2))
    wait_for_rounds(job, run, 2 * CHECKPOINTS_EVERY + 2)
    rank_of_job(job, 0).kill()
    assert finish_job(job, SECONDS).returncode not in (0, 1, 2, STOPPED)
    return run, len(records(run))


def test_a_stopped_run_has_saved_and_is_not_finished(stopped: Path):
    recorded = len(records(stopped))
    assert 3 <= recorded < ROUNDS
    assert not (stopped / "summary.json").exists() and not (stopped / "model.safetensors").exists()
    newest = max((stopped / "checkpoints").iterdir()).name
    assert newest == f"round-{recorded + 1:08d}.safetensors"  # the last round waits for its evaluation


def test_a_resumed_run_repeats_the_undisturbed_one_bit_for_bit(resumed: Path, whole: list[dict]):
    assert curve(resumed) == whole


def test_a_resumed_run_on_other_ranks_repeats_it_to_rounding(stopped: Path, folder: Path, whole: list[dict]):
    run = folder / "elsewhere"
    shutil.copytree(stopped, run)
    resume_here(run)
    assert_same_curve_to_rounding(curve(run), whole)


def test_the_summary_of_a_resumed_run_counts_all_its_rounds(resumed: Path, whole: list[dict]):
    summary = json.loads((resumed / "summary.json").read_text())
    assert summary["best_test_accuracy"] == max(record["test_accuracy"] for record in whole)
    assert summary["bytes_total"] == sum(r["bytes_client_up"] + r["bytes_client_down"] for r in whole)
    assert summary["wall_seconds"] >= sum(record["seconds"] for record in records(resumed)[:-1]) * 0.5


def test_a_killed_run_loses_at_most_the_rounds_since_its_last_checkpoint(killed: tuple[Path, int]):
    run, recorded = killed
    newest = int(max((run / "checkpoints").iterdir()).stem.removeprefix("round-"))
    assert newest >= 2 * CHECKPOINTS_EVERY
    assert recorded - newest < CHECKPOINTS_EVERY
    assert not list(run.glob("**/*.partial"))


def test_a_killed_run_resumes_without_doubled_or_half_lines(killed: tuple[Path, int], whole: list[dict]):
    run, _ = killed
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"round": 99, "test_lo')  # as after a kill in the middle of a write
    resume_here(run)
    assert_same_curve_to_rounding(curve(run), whole)
    steps = [event.step for event in EventAccumulator(str(run)).Reload().Scalars("test/loss")]
    assert steps == list(range(ROUNDS))
