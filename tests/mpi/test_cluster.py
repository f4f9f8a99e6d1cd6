"""The cluster in real MPI jobs of 1 to 4 ranks, and over two emulated hosts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedmpi.mpi.window import BYTES, Semaphore, semaphores_work
from tests.mpi.hosts import NoHosts, emulated_hosts
from tests.mpi.launch import LIMIT, finish_job, run_alone, run_mpi, start_job

PROGRAMS = ("-m", "tests.mpi.programs")
SUMS = ("window", "allreduce", "device")
EVERYWHERE = ["exchanges", *(f"sum_rounds {way} 50" for way in SUMS)]
TOGETHER = {
    1: EVERYWHERE,
    2: EVERYWHERE,
    3: [
        *("exchanges 1000", "wait_politely {folder}", "sum_rounds window 50", "sum_rounds device 10 1000", "gpus"),
        *("woken", "progress", "signals", "many_meetings 400", "server_away", "large_broadcasts"),
        *(f"without {what}" for what in ("semaphores", "room", "memory", "sums-room", "sums-memory")),
    ],
    4: EVERYWHERE,
}
"""Programs by number of ranks: one job runs them sequentially, so that Python starts and torch loads once."""
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not semaphores_work(), reason="this system has no semaphores between processes"),
]


@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_programs_pass(n: int, tmp_path: Path) -> None:
    words = " + ".join(TOGETHER[n]).format(folder=tmp_path).split()
    job = run_mpi(n, [*PROGRAMS, *words])
    for program in TOGETHER[n]:
        assert job.stdout.count(f"passed: {program.format(folder=tmp_path)}\n") == n, (program, job.stderr)
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.slow
def test_programs_pass_over_two_hosts(ranks: int, two_hosts: list[str]) -> None:
    """The hierarchical sum: two and one, or two and two ranks on a host."""
    start = ["-n", str(ranks), sys.executable, *PROGRAMS, *" + ".join(EVERYWHERE).split()]
    job = finish_job(start_job([*two_hosts, *start]), timeout=LIMIT)
    assert job.returncode == 0, job.stderr
    assert all(job.stdout.count(f"passed: {program}\n") == ranks for program in EVERYWHERE)
    assert job.stdout.count("2 nodes of 2\n") == len(SUMS)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[str]]:
    """The beginning of a command that runs mpiexec on two hosts; skips where no namespaces can be made."""
    try:
        with emulated_hosts(2) as hosts:
            yield hosts.command(2)
    except NoHosts as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_a_model_leaves_for_another_host_while_its_sender_computes(two_hosts: list[str], tmp_path: Path) -> None:
    ranks = ["-n", "2", sys.executable, *PROGRAMS, "hand_over", str(tmp_path)]
    job = finish_job(start_job([*two_hosts[:-1], "1", *ranks]), timeout=100)  # one rank a host
    assert job.returncode == 0, job.stderr


@pytest.mark.slow
def test_a_fault_on_one_host_ends_the_job_on_both(two_hosts: list[str]) -> None:
    job = finish_job(start_job([*two_hosts, "-n", "4", sys.executable, *PROGRAMS, "fail", "exception", "3"]), LIMIT)
    assert job.returncode == 1 and "rank 3: ZeroDivisionError" in job.stderr


def test_a_model_leaves_while_its_sender_computes(tmp_path: Path) -> None:
    """Over TCP, as between hosts: within a host the receiver copies the model without its sender's help."""
    tcp = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}
    job = run_mpi(2, [*PROGRAMS, "hand_over", tmp_path], env=tcp)
    assert job.returncode == 0, job.stderr


def test_without_mpi4py_one_process_works_and_says_so() -> None:
    hide = "import sys; sys.modules['mpi4py'] = None; sys.argv = ['', 'exchanges']; "
    log = "import logging; logging.basicConfig(level=logging.INFO); "
    job = run_alone(["-c", hide + log + "from tests.mpi.programs import *; run_guarded(main)"])
    assert job.returncode == 0 and "one process: no MPI is installed" in job.stderr, job.stderr


def memory() -> np.ndarray:
    """Memory that parent and child share."""
    import mmap

    return np.frombuffer(mmap.mmap(-1, BYTES), np.uint8)


def seconds_of_wait(own: Semaphore, limit: float) -> float:
    started = time.monotonic()
    own.wait(limit)
    return time.monotonic() - started


def test_a_semaphore_wakes_another_process_and_counts_only_posts_since_its_reset() -> None:
    shared = memory()
    own = Semaphore(shared, made=True)
    child = os.fork()
    if not child:
        time.sleep(0.2)
        Semaphore(shared, made=False).post()
        os._exit(0)
    assert 0.1 < seconds_of_wait(own, 30) < 10
    os.waitpid(child, 0)
    assert 0.09 < seconds_of_wait(own, 0.1) < 5  # no rank posts
    own.post()
    assert seconds_of_wait(own, 30) < 10  # posted before
    own.post()
    own.post()
    own.reset()
    assert seconds_of_wait(own, 0.1) > 0.09
