"""The cluster in real MPI jobs of 1 to 4 ranks, and over two emulated hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedmpi.mpi import board
from fedmpi.mpi.board import BYTES, Semaphore, semaphores_work
from tests.mpi.hosts import NoHosts, emulated_hosts
from tests.mpi.launch import LIMIT, find_mpiexec, finish_job, run_alone, run_mpi, start_job

PROGRAMS = ("-m", "tests.mpi.programs")
SUMS = ("window", "allreduce", "device")
EVERYWHERE = ["exchanges", *(f"sum_rounds {way} 50" for way in SUMS), "combined_updates {folder}"]
TOGETHER = {
    1: [*EVERYWHERE[:-1], "round_sums"],
    2: EVERYWHERE,
    3: [
        *("exchanges 1000", "wait_politely {folder}", "say_hello", "sum_rounds device 10 1000", "round_sums"),
        *("gpus_without_cuda_aware_mpi", "combined_updates {folder}", "woken", "progress", "signals"),
        *("many_meetings 400", "server_away", "large_broadcasts"),
        *("without semaphores", "without room", "without memory"),
    ],
    4: EVERYWHERE,
}
"""Programs by number of ranks: one job runs them sequentially, so that Python starts and torch loads once."""
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not semaphores_work(), reason="this system has no semaphores between processes"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the updates that one process combined."""
    folder = tmp_path_factory.mktemp("programs")
    assert run_mpi(1, [*PROGRAMS, "combined_updates", folder]).returncode == 0
    return folder


def same_everywhere(folder: Path, *ranks: int) -> None:
    """Robust rules combine bit-identical updates for any number of ranks."""
    found = [dict(np.load(folder / f"combined{n}.npz")) for n in ranks]
    assert len(found[0]) == 20 and all(values.any() for values in found[0].values())
    for other in found[1:]:
        assert {name: values.tobytes() for name, values in other.items()} == {
            name: values.tobytes() for name, values in found[0].items()
        }


@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_programs_pass(n: int, folder: Path) -> None:
    words = [word.format(folder=folder) for word in " + ".join(TOGETHER[n]).split()]
    job = run_mpi(n, [*PROGRAMS, *words])
    for program in TOGETHER[n]:
        assert job.stdout.count(f"passed: {program.format(folder=folder)}\n") == n, (program, job.stderr)
    assert job.returncode == 0, job.stderr
    same_everywhere(folder, 1, n)
    if n == 3:
        said = re.findall(r"rank (\d) of 3, workers 2, worker (\w+)", job.stdout)
        assert sorted(said) == [("0", "None"), ("1", "0"), ("2", "1")]
        if "cuda-aware" not in job.stdout:
            staged = "sums: device tensors staged through pinned host memory: This MPI is not CUDA-aware"
            assert job.stderr.count(staged) == 2


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.slow
def test_programs_pass_over_two_hosts(ranks: int, two_hosts: list[str], folder: Path) -> None:
    """The hierarchical sum: two and one, or two and two ranks on a host."""
    programs = [program.format(folder=folder) for program in EVERYWHERE]
    start = ["-n", str(ranks), sys.executable, *PROGRAMS, *" + ".join(programs).split()]
    job = finish_job(start_job([*two_hosts, *start]), timeout=LIMIT)
    assert job.returncode == 0, job.stderr
    assert all(job.stdout.count(f"passed: {program}\n") == ranks for program in programs)
    assert job.stdout.count("2 nodes of 2\n") == len(SUMS)
    same_everywhere(folder, 1, ranks)


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


def test_the_check_of_sums_notices_a_missing_barrier() -> None:
    job = run_mpi(4, [*PROGRAMS, "broken_protocol"])
    assert job.returncode == 1 and ("wrong sum" in job.stderr or "bits differ" in job.stderr)


def test_without_mpi4py_one_process_works_and_says_so() -> None:
    hide = "import sys; sys.modules['mpi4py'] = None; sys.argv = ['', 'exchanges']; "
    log = "import logging; logging.basicConfig(level=logging.INFO); "
    job = run_alone(["-c", hide + log + "from tests.mpi.programs import *; run_guarded(main)"])
    assert job.returncode == 0 and "one process: no MPI is installed" in job.stderr, job.stderr


def test_a_small_shared_memory_makes_way_for_allreduce() -> None:
    """In a mount namespace whose /dev/shm has 64 MB, three ranks request a window of 160 MB."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made (that takes root)")
    small = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    ranks = [find_mpiexec(), "-n", "3", sys.executable, *PROGRAMS, "large_sum", "10000000"]
    job = finish_job(start_job(["unshare", "-m", "bash", "-c", small, "bash", *ranks]))
    assert job.returncode == 0, job.stderr
    assert "go through the allreduce: instead of shared memory" in job.stderr


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


def test_there_are_no_semaphores_without_the_calls_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_library", lambda: None)
    assert not semaphores_work()
    with pytest.raises(RuntimeError, match="no semaphores"):
        Semaphore(memory(), made=True)
