"""A job that is asked to end, or stalls.

A second signal ends the job in any state, and so does the stall timeout. That the first one is never lost, see
tests/mpi/test_starting.py.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from fedmpi.process.signals import SECONDS_OF_COPIES
from tests.end_to_end.runs import SECONDS, TRAIN, choices, rank_of_job, wait_for_rounds
from tests.mpi.launch import finish_job, start_mpi_job

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_second_signal_ends_a_job_whose_rank_hangs_and_the_copies_of_the_first_do_not(tmp_path: Path):
    asked = choices("preset=fedavg", "rounds=1000000", "logging.tensorboard=false")
    job = start_mpi_job(3, [*TRAIN, *asked, "--out", tmp_path / "RUN"])
    wait_for_rounds(job, tmp_path / "RUN", 2)
    rank_of_job(job, 2).suspend()
    for _ in range(2):  # as a launcher does that sends one signal by two ways
        job.send_signal(signal.SIGTERM)
        time.sleep(SECONDS_OF_COPIES / 10)
    time.sleep(SECONDS_OF_COPIES)
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    ended = finish_job(job, SECONDS)
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stderr.count("error: ended by a second SIGTERM: nothing was saved after the last checkpoint") == 1


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [(2,), (0,), (0, 2)])
def test_a_job_with_a_stopped_rank_ends_after_the_stall_timeout_and_keeps_its_checkpoint(
    stopped: tuple[int, ...], tmp_path: Path
):
    short = ("cluster.stall_timeout=8", "checkpoint.every=2", "rounds=1000000")
    job = start_mpi_job(
        3, [*TRAIN, *choices("preset=fedavg", "logging.tensorboard=false", *short), "--out", tmp_path / "RUN"]
    )
    wait_for_rounds(job, tmp_path / "RUN", 4)
    for rank in [rank_of_job(job, number) for number in stopped]:
        rank.suspend()
    ended = finish_job(job, SECONDS)
    assert ended.returncode in (1, 9)  # that of the rank that gave up, or of a stopped one that mpiexec killed
    assert "Timeout (0:00:08)!" in ended.stderr and "core/loop.py" in ended.stderr, ended.stderr
    assert [*(tmp_path / "RUN" / "checkpoints").iterdir()]
