"""The start of MPI: ranks that do not come together end with a sentence; what an earlier start left is removed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedmpi import UserError
from fedmpi.common.processes import ancestors
from fedmpi.mpi import namesakes
from fedmpi.mpi.namesakes import fnv1a, remove_namesakes
from fedmpi.mpi.starting import SECONDS, limited, seconds_to_start
from tests.mpi.launch import find_mpiexec, finish_job, run_alone, run_mpi, start_job

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
    alone = "from fedmpi.mpi.starting import limited\nimport time\nwith limited(0.1, 3, 0): time.sleep(600)"
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


def test_the_hash_is_that_of_mpich() -> None:
    """The first two are of the hash's description; the last was seen: MPICH 5.0.2 under SLURM, job 7, step 0."""
    assert [fnv1a(text) for text in ("", "a", "7.0")] == [0x811C9DC5, 0xE40C292C, 0x14F46F28]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(namesakes, "SHARED_MEMORY", tmp_path)
    return tmp_path


def make(path: Path, age: float) -> Path:
    path.write_bytes(b"x")
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_only_older_memory_of_this_job_is_removed(memory: Path) -> None:
    """Without SLURM's daemon among its ancestors, a process trusts what is a minute older than itself."""
    old = [make(memory / name, 3600) for name in ("mpich_shm_14f46f28_0", "mpich_vci_14f46f28_1")]
    precious = memory / "precious"
    kept = [
        make(memory / "mpich_shm_14f46f29_0", 3600),  # another job's
        make(memory / "mpich_shm_14f46f28x_0", 3600),
        make(memory / "mpich_vci_14f46f28_0", 10 + time.time() - namesakes._started(os.getpid())),  # of this start
        make(precious, 3600),
    ]
    (memory / "mpich_shm_14f46f28_7").symlink_to(precious)
    remove_namesakes({})
    assert all(path.exists() for path in old)
    remove_namesakes({"PMI_JOBID": "7.0"})
    assert not [path for path in old if path.exists()]
    assert all(path.exists() for path in kept)


def test_what_is_older_than_the_daemon_of_the_step_is_removed(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = dict(ancestors(os.getpid()))
    assert os.getppid() in names and 1 in names
    monkeypatch.setattr(namesakes, "DAEMON", names[os.getppid()])
    begun = namesakes._started(os.getppid())
    older, newer = (memory / f"mpich_shm_{fnv1a(job):x}_0" for job in ("a", "b"))
    make(older, time.time() - begun + 0.5)
    make(newer, time.time() - begun - 0.5)
    for job in ("a", "b"):
        remove_namesakes({"PMIX_NAMESPACE": job})
    assert (older.exists(), newer.exists()) == (False, True)


def test_a_file_that_another_rank_has_replaced_meanwhile_stays(memory: Path) -> None:
    """Two ranks at once: the second waits for the first, and finds the new file behind the name."""
    path = make(memory / f"mpich_shm_{fnv1a('a'):x}_0", 3600)
    replace = f"echo held; sleep 0.5; rm {path} && echo replaced; echo new > {path}; touch -d yesterday {path}"
    with subprocess.Popen(["flock", path, "sh", "-c", replace], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline()
        remove_namesakes({"PMI_JOBID": "a"})
        assert other.stdout.read() == "replaced\n"
    assert path.read_text() == "new\n"


@pytest.mark.skipif(not namesakes.SHARED_MEMORY.is_dir(), reason="no shared memory")
def test_it_is_removed_before_mpi_starts() -> None:
    job = f"test-{os.getpid()}"
    file = make(namesakes.SHARED_MEMORY / f"mpich_shm_{fnv1a(job):x}_0", 3600)
    try:
        done = run_alone(["-c", "from fedmpi.mpi import start_mpi; start_mpi()"], env={"PMI_JOBID": job})
        assert done.returncode == 0 and not file.exists(), done.stderr
    finally:
        file.unlink(missing_ok=True)


def test_a_closed_terminal_ends_a_program_after_mpi_has_started_as_before() -> None:
    before = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from fedmpi.mpi import start_mpi"
    job = run_alone(["-c", f"{before}; start_mpi(); os.kill(os.getpid(), signal.SIGHUP)"])
    assert job.returncode == -signal.SIGHUP


def test_ranks_without_room_to_meet_end_with_a_sentence() -> None:
    within = "mount -t tmpfs -o size=64k none /dev/shm || exit 77; exec "
    ranks = [find_mpiexec(), "-n", "2", sys.executable, "-c", "from fedmpi.mpi import start_mpi; start_mpi()"]
    words = ["unshare", "--mount", "bash", "-c", within + shlex.join(ranks)]
    job = finish_job(start_job(words), 100)
    if job.returncode in (1, 77) and "error: MPI" not in job.stderr:
        pytest.skip("no mounts of our own here")
    if job.returncode == 0:
        pytest.skip("this MPI needs none")
    assert "error: MPI finds no room in /dev/shm as it starts (0.0 of 0.1 MiB are free;" in job.stderr
