"""The start of MPI: ranks that do not come together end with a sentence."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from fedmpi import UserError
from fedmpi.mpi.launch import SECONDS, limited, seconds_to_start
from tests.mpi.launch import run_alone, run_mpi

LONELY = """
import os, time
from fedmpi.mpi import start_mpi
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
    time.sleep(600)
start_mpi()
"""
ALIVE = """
import os, threading, time
from fedmpi.mpi import read_launch, start_mpi

ticks = 0
def tick():
    global ticks
    while True:
        time.sleep(0.01)
        ticks += 1

threading.Thread(target=tick, daemon=True).start()
if read_launch().rank == 1:
    time.sleep(1)
ticks = 0
mpi = start_mpi()
lived = read_launch().rank == 1 or ticks > 3
try:
    mpi.COMM_WORLD.Send([bytearray(1), mpi.BYTE], dest=99)
except mpi.Exception:
    result = "whole" if lived and mpi.Query_thread() == mpi.THREAD_MULTIPLE else f"{ticks} ticks"
    os.write(1, f"{result}\\n".encode())  # one write: print makes two of a line where PYTHONUNBUFFERED is set
"""


def test_ranks_that_wait_for_one_that_never_comes_end_with_a_sentence() -> None:
    job = run_mpi(2, ["-c", LONELY], env={"FEDMPI_START_SECONDS": "1"})
    assert job.returncode not in (0, 1, 2)
    assert "rank 1: error: MPI did not start within 1 s: not all of 2 ranks came" in job.stderr
    assert "Traceback" not in job.stderr


def test_exit_code_and_mark_say_that_mpi_did_not_start(tmp_path: Path) -> None:
    mark = tmp_path / "RUN" / "not-started"
    alone = "from fedmpi.mpi.launch import limited\nimport time\nwith limited(0.1, 3, 0): time.sleep(600)"
    job = run_alone(["-c", alone], env={"FEDMPI_NOT_STARTED": str(mark)})
    assert job.returncode == 76 and job.stderr.count("\n") == 1, job.stderr
    assert mark.exists()


def test_while_mpi_starts_the_threads_of_the_process_run() -> None:
    """Signals and the limit depend on it; errors of MPI become exceptions, as after mpi4py's own start."""
    job = run_mpi(2, ["-c", ALIVE])
    assert (job.returncode, job.stdout.split()) == (0, ["whole"] * 2), job.stdout + job.stderr


def test_what_comes_in_time_is_left_alone() -> None:
    before = set(threading.enumerate())
    with limited(0, 2, 0):
        assert set(threading.enumerate()) == before
    with limited(3600, 2, 0):
        (limit,) = set(threading.enumerate()) - before
    limit.join(60)
    assert not limit.is_alive()


def test_the_environment_sets_the_limit() -> None:
    assert SECONDS + 64 <= seconds_to_start(64, {}) <= 10 * SECONDS
    assert [seconds_to_start(64, {"FEDMPI_START_SECONDS": seconds}) for seconds in ("0", "2.5")] == [0, 2.5]
    for seconds in ("soon", "-1", "nan", "inf", ""):
        with pytest.raises(UserError, match="FEDMPI_START_SECONDS="):
            seconds_to_start(64, {"FEDMPI_START_SECONDS": seconds})


def test_a_closed_terminal_ends_a_program_after_mpi_has_started_as_before() -> None:
    before = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from fedmpi.mpi import start_mpi"
    job = run_alone(["-c", f"{before}; start_mpi(); os.kill(os.getpid(), signal.SIGHUP)"])
    assert job.returncode == -signal.SIGHUP
