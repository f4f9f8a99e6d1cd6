"""The start of MPI: ranks that do not come together end with a sentence, and no signal is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.mpi.launch import run_alone, run_mpi

LONELY = """
import os, time
from fedmpi.mpi import start_mpi
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
    time.sleep(20)  # where rank 1 ends before the launcher knows it, the launcher waits for rank 0
start_mpi()
"""
STARTING = """
import os, signal, sys, threading, time
from fedmpi.process.signals import Interrupt

second = "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK"))
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # though nohup may have started the tests
heard, ticks = [], 0

def tick():
    global ticks
    while True:
        time.sleep(0.01)
        ticks += 1

for when in ("before", "while", "after"):
    interrupt = Interrupt()
    if when == "before":  # even before anything of fedmpi's is imported
        assert not [name for name in sys.modules if name.startswith(("fedmpi.mpi", "numpy", "torch"))]
        os.kill(os.getpid(), signal.SIGUSR1)
    else:
        from fedmpi.mpi import launch, start_mpi
        if when == "while":
            with launch.kept_handlers():
                os.kill(os.getpid(), signal.SIGUSR1)
                signal.signal(signal.SIGUSR1, lambda *_: heard.append("lost"))  # as a library does that starts
        else:
            threading.Thread(target=tick, daemon=True).start()
            time.sleep(second)
            ticks = 0
            mpi = start_mpi()
            assert second or ticks > 3, "the threads of the process stood still while MPI started"
            os.kill(os.getpid(), signal.SIGHUP if second else signal.SIGUSR1)
    heard.append((when, interrupt.asked()))
    interrupt.restore()
assert heard == [("before", True), ("while", True), ("after", True)], heard
assert signal.getsignal(signal.SIGUSR1) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
assert mpi.Query_thread() == mpi.THREAD_MULTIPLE
try:
    mpi.COMM_WORLD.Send([bytearray(1), mpi.BYTE], dest=99)
except mpi.Exception:  # errors become exceptions, as after mpi4py's own start
    os.write(1, b"heard ")  # one write: print makes two of a line where PYTHONUNBUFFERED is set
"""


def test_ranks_that_wait_for_one_that_never_comes_end_with_a_sentence(tmp_path: Path) -> None:
    mark = tmp_path / "RUN" / "not-started"
    job = run_mpi(2, ["-c", LONELY], env={"FEDMPI_START_SECONDS": "1", "FEDMPI_NOT_STARTED": str(mark)})
    assert job.returncode not in (0, 1, 2) and mark.exists()
    assert "rank 1: error: MPI did not start within 1 s: not all of 2 ranks came" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize(
    ("block", "code", "kept"),
    [("time.sleep(600)", 76, True), ("os.abort()", -signal.SIGABRT, True), ("os.sync()", 0, False)],
)
def test_a_mark_lies_there_until_mpi_has_started(block: str, code: int, kept: bool, tmp_path: Path) -> None:
    mark = tmp_path / "RUNS" / "RUN" / "not-started"
    alone = f"from fedmpi.mpi.launch import *\nwith limited(0.3, 3, 0), marked(0): {block}"
    job = run_alone(["-c", alone], env={"FEDMPI_NOT_STARTED": str(mark)})
    assert (job.returncode, mark.exists()) == (code, kept), job.stderr
    assert job.stderr.count("error: MPI did not start within 0.3 s") == (code == 76)
    (tmp_path / "file").touch()  # a mark that cannot be written changes nothing
    again = run_alone(["-c", alone], env={"FEDMPI_NOT_STARTED": str(tmp_path / "file" / "mark")})
    assert (again.returncode, again.stderr.count("Traceback")) == (code, 0), again.stderr


def test_signals_are_remembered_and_threads_run_while_the_program_and_mpi_start(tmp_path: Path) -> None:
    mark = tmp_path / "RUN" / "not-started"
    job = run_mpi(2, ["-c", STARTING], env={"FEDMPI_NOT_STARTED": str(mark)})
    assert mark.parent.exists() and not mark.exists()
    assert (job.returncode, job.stdout.split()) == (0, ["heard"] * 2), job.stderr
