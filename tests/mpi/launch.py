"""Start real MPI jobs from tests: this environment's mpiexec, a time limit, and no process left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from fedmpi.process.children import mpiexec

Job = subprocess.Popen[str]
Env = Mapping[str, str] | None
LIMIT = float(os.environ.get("FEDMPI_TEST_SECONDS", "170"))
"""Seconds after which a job is taken to hang: many times what it needs, for busy machines; the environment says more.
"""
SHARED_MEMORY = Path("/dev/shm")
REPOSITORY = Path(__file__).resolve().parents[2]
NEVER_BEGAN = "The PMIx server's listener thread failed to start"
"""Open MPI's launcher on a busy machine, now and then: it has started no rank, so the job may be started again."""
LAUNCHES = 3
LATE_ANSWER = re.compile(r"^\[\S+:\d+\] PMIX ERROR: PMIX_ERR_UNREACH in file \S+/pmix_server\.c at line \d+\n?", re.M)
"""Message of Open MPI's launcher when a rank ends before it is allowed to: nothing is wrong with the job."""


def find_mpiexec() -> str:
    """The mpiexec beside this Python, else the one of the PATH; skips the test when there is none."""
    return mpiexec() or pytest.skip("no mpiexec: pip install 'fedmpi[mpi]'")


def start_mpi_job(n: int, args: Sequence[str | Path], env: Env = None, cwd: Path | None = None) -> Job:
    """Start `mpiexec -n N python ARGS` in a new process group and return the Popen object; see `end_job`."""
    return start_job([find_mpiexec(), "-n", str(n), sys.executable, *map(str, args)], env, cwd)


def start_job(command: Sequence[str], env: Env = None, cwd: Path | None = None) -> Job:
    """Start any command in a new process group; the repository is importable and each process has one thread."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {})},
        process_group=0,
    )


def end_job(job: Job) -> None:
    """Kill what is left of the job, launcher and ranks, each by its id."""
    try:
        processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)


def sweep_shared_memory(started: float) -> None:
    """Remove the few megabytes that an aborted MPICH job leaves behind: its files, if no process maps them any more."""
    left = [file for file in SHARED_MEMORY.glob("mpich_shm_*") if file.stat().st_mtime >= started]
    if not left:
        return
    mapped: set[str] = set()
    for pid in psutil.pids():
        try:
            mapped |= set(re.findall(r"mpich_shm_\S+", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            continue  # it has ended, or belongs to another user
    for file in left:
        if file.name not in mapped:
            file.unlink(missing_ok=True)


def finish_job(job: Job, timeout: float = LIMIT) -> subprocess.CompletedProcess[str]:
    """Wait for the job; fails the test, with what was printed, when it passes its time limit (`LIMIT` at least)."""
    timeout = max(timeout, LIMIT)
    try:
        out, err = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_job(job)
        out, err = job.communicate()
        pytest.fail(f"the job did not end within {timeout} s\nstdout:\n{out}\nstderr:\n{err}")
    finally:
        end_job(job)
    if job.returncode:
        sweep_shared_memory(psutil.Process().create_time())
    return subprocess.CompletedProcess(job.args, job.returncode, out, LATE_ANSWER.sub("", err))


def run_mpi(
    n: int, args: Sequence[str | Path], timeout: float = LIMIT, env: Env = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `mpiexec -n N python ARGS` to its end."""
    done = finish_job(start_mpi_job(n, args, env, cwd), timeout)
    for _ in range(LAUNCHES - 1):
        if not done.returncode or NEVER_BEGAN not in done.stderr:
            break
        done = finish_job(start_mpi_job(n, args, env, cwd), timeout)
    return done


def run_alone(
    args: Sequence[str | Path], timeout: float = LIMIT, env: Env = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` without a launcher, otherwise like `run_mpi`."""
    return finish_job(start_job([sys.executable, *map(str, args)], env, cwd), timeout)
