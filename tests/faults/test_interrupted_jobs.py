"""A job that is asked to end, stalls, or loses a rank.

A second signal ends the job in any state, and so does the stall timeout. That the first one is never lost, see
tests/mpi/test_starting.py.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fedmpi.process.signals import SECONDS_OF_COPIES
from tests.end_to_end.runs import SECONDS, TRAIN, choices, curve, rank_of_job, wait_for_rounds
from tests.mpi.launch import Job, finish_job, start_mpi_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENDLESS = ("preset=fedavg", "rounds=1000000", "logging.tensorboard=false")
STATEFUL = (
    *("data.source=digits:clients=12,alpha=0.5", "model.name=tests.end_to_end.user_models:unhurried_mlp"),
    *("rounds=16", "checkpoint.every=3", "logging.tensorboard=false", "local.batch_size=40", "clients.count=4"),
    *("clients.sampler=stratified", "clients.sampler.features=full-gradient", "clients.sampler.strata=3"),
    *("clients.sampler.refresh=2", "clients.sampler.refresh_clients=selected", "server.weights=stratified"),
    *("compression=top-k", "compression.fraction=0.1", "compression.error_feedback=true", "server.optimizer=adam"),
)


def start(ranks: int, settings: tuple[str, ...], run: Path, **environment: str) -> Job:
    return start_mpi_job(ranks, [*TRAIN, *choices(*settings), "--out", run, "--resume"], env=environment)


def test_a_second_signal_ends_a_job_whose_rank_hangs_and_the_copies_of_the_first_do_not(tmp_path: Path):
    job = start(3, ENDLESS, tmp_path / "RUN")
    wait_for_rounds(job, tmp_path / "RUN", 2)
    rank_of_job(job, 2).suspend()
    for _ in range(2):  # as a launcher does that sends one signal by two ways
        job.send_signal(signal.SIGTERM)
        time.sleep(SECONDS_OF_COPIES / 10)
    time.sleep(SECONDS_OF_COPIES)
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    ended = finish_job(job, SECONDS)
    assert ended.returncode in (signal.SIGTERM, 128 + signal.SIGTERM), ended.stderr


def test_a_job_with_stopped_ranks_ends_after_the_stall_timeout_and_keeps_its_checkpoint(tmp_path: Path):
    job = start(3, (*ENDLESS, "cluster.stall_timeout=8", "checkpoint.every=2"), tmp_path / "RUN")
    wait_for_rounds(job, tmp_path / "RUN", 4)
    for rank in [rank_of_job(job, number) for number in (0, 2)]:
        rank.suspend()
    ended = finish_job(job, SECONDS)
    assert ended.returncode in (1, 9)  # that of the rank that gave up, or of a stopped one that mpiexec killed
    assert "Timeout (0:00:08)!" in ended.stderr and "core/loop.py" in ended.stderr, ended.stderr
    assert [*(tmp_path / "RUN" / "checkpoints").iterdir()]


def left_by(run: Path) -> tuple[Any, ...]:
    """Curve, model, and of the summary what does not depend on time and starts."""
    summary = json.loads((run / "summary.json").read_text())
    for name in ("wall_seconds", "mpi_bytes", "git_commit"):
        del summary[name]
    return curve(run), (run / "model.safetensors").read_bytes(), summary


def test_a_run_that_lost_a_rank_ends_and_is_the_undisturbed_one_once_it_was_resumed(tmp_path: Path):
    for rank, rounds in ((1, 4), (0, 8)):
        job = start(2, STATEFUL, tmp_path / "RUN", NAP="0.01")
        wait_for_rounds(job, tmp_path / "RUN", rounds)
        rank_of_job(job, rank).kill()
        assert finish_job(job, SECONDS).returncode
    for name in ("RUN", "WHOLE"):
        ended = finish_job(start(2, STATEFUL, tmp_path / name), SECONDS)
        assert ended.returncode == 0, ended.stderr
    assert left_by(tmp_path / "RUN") == left_by(tmp_path / "WHOLE")
