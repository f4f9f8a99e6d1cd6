"""The cluster in real MPI jobs of 1, 2 and 4 ranks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.mpi.launch import find_mpiexec, finish_job, run_alone, run_mpi, start_job

PROGRAMS = ("-m", "tests.mpi.programs")


SUMS = [f"sum_rounds {reduction} 50" for reduction in ("window", "allreduce", "device")]
TOGETHER = {
    1: ["exchanges", "relays 1 12 0", *SUMS, "round_sums", "combined_updates {folder}"],
    2: ["exchanges", "relays 1 12 0", *SUMS, "combined_updates {folder}"],
    3: [
        *("exchanges 1000", "relays 4 12 0", "wait_politely {folder}", "crossing_sends", "say_hello"),
        *("sum_rounds device 10 1000", "round_sums", "gpus_without_cuda_aware_mpi", "combined_updates {folder}"),
    ],
    4: ["exchanges", "relays 0 12 0", *SUMS],
}
"""Programs by number of ranks: one job runs them one after another, so that Python starts and torch loads once."""
FOUR = pytest.param(4, marks=pytest.mark.slow)
Jobs = dict[int, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    """The jobs of several programs that have run."""
    return {}


@pytest.fixture
def passed(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Shows that a program has passed on all of n ranks; its job runs when the first of its programs is asked for."""

    def shown(n: int, program: str) -> subprocess.CompletedProcess[str]:
        if n not in jobs:
            folder = tmp_path_factory.mktemp("programs")
            words = [word.format(folder=folder) for word in " + ".join(TOGETHER[n]).split()]
            jobs[n] = run_mpi(n, [*PROGRAMS, *words])
        assert len(re.findall(rf"^passed: {program}( /.*)?$", jobs[n].stdout, re.MULTILINE)) == n, jobs[n].stderr
        return jobs[n]

    return shown


@pytest.mark.parametrize("n", [1, 2, 3, FOUR])
def test_a_job_of_several_programs_ends_well(n, passed):
    assert passed(n, TOGETHER[n][0]).returncode == 0


@pytest.mark.parametrize("n", [1, 2, FOUR])
def test_arrays_of_all_types_arrive_as_they_were_sent(n, passed):
    passed(n, "exchanges")


def test_messages_longer_than_a_chunk_arrive_whole(passed):
    passed(3, "exchanges 1000")


@pytest.mark.parametrize("n", [1, 2, FOUR])
@pytest.mark.parametrize("reduction", ["window", "allreduce", "device"])
def test_repeated_sums_are_right_and_the_same_bits_on_all_ranks_whoever_is_late(n, reduction, passed):
    passed(n, f"sum_rounds {reduction} 50")


def test_sums_of_tensors_longer_than_a_piece_are_whole(passed):
    passed(3, "sum_rounds device 10 1000")


@pytest.mark.parametrize("n", [1, 3])
def test_a_rounds_update_and_metrics_are_the_same_whichever_way_they_are_summed(n, passed):
    passed(n, "round_sums")


def test_a_combiner_makes_the_same_bits_of_updates_however_they_are_dealt_to_ranks(passed):
    results = []
    for n in (1, 2, 3):
        found = re.search(r"^passed: combined_updates (/.*)$", passed(n, "combined_updates").stdout, re.MULTILINE)
        results.append(np.load(Path(found[1]) / f"combined{n}.npz"))
    for name in results[0].files:
        assert results[0][name].any()
        assert len({result[name].tobytes() for result in results}) == 1, name


def test_tensors_on_gpus_are_staged_where_mpi_does_not_read_them_and_rank_0_says_so(passed):
    job = passed(3, "gpus_without_cuda_aware_mpi")
    if "cuda-aware" in job.stdout:
        pytest.skip("this MPI is CUDA-aware")
    staged = "sums: device tensors staged through pinned host memory: This MPI is not CUDA-aware"
    assert job.stderr.count("sums:") == job.stderr.count(staged) == 2


def test_the_check_of_sums_notices_a_missing_barrier():
    job = run_mpi(4, [*PROGRAMS, "broken_protocol"])
    assert job.returncode == 1
    assert "wrong sum" in job.stderr or "bits differ" in job.stderr


@pytest.mark.parametrize(("n", "most"), [(1, 1), (2, 1), (3, 4), pytest.param(4, 0, marks=pytest.mark.slow)])
def test_groups_hand_values_around_however_few_communicators_there_are(n, most, passed):
    """4 ranks form 60 groups of two and more; without any communicator they all share one."""
    passed(n, f"relays {most} 12 0")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_holds_as_many_communicators_as_it_may_and_other_groups_beside_them():
    job = run_mpi(6, [*PROGRAMS, "more_groups_than_allowed"], timeout=360)
    assert job.returncode == 0, job.stderr


def test_a_model_leaves_while_its_sender_computes(tmp_path):
    """Over TCP, as between hosts: within a host the receiver copies the model without its sender's help."""
    mpich = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}
    openmpi = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}
    job = run_mpi(2, [*PROGRAMS, "hand_over", tmp_path], env=mpich | openmpi)
    assert job.returncode == 0, job.stderr


def test_crossing_sends_do_not_deadlock_and_keep_their_order(passed):
    passed(3, "crossing_sends")


def test_a_waiting_rank_goes_to_sleep_whatever_it_waits_for(passed):
    """Rank 0 lets the others wait until they have slept thirty times: a call that spins would never end."""
    passed(3, "wait_politely")


def test_ranks_that_ask_for_different_buffers_are_refused():
    job = run_mpi(2, [*PROGRAMS, "different_buffers"])
    assert job.returncode == 1
    assert "the ranks ask for different sum buffers" in job.stderr


def test_rank_0_serves_and_the_others_work(passed):
    said = re.findall(r"rank \d of \d, workers \d, worker \w+", passed(3, "say_hello").stdout)
    assert sorted(said) == [
        "rank 0 of 3, workers 2, worker None",
        "rank 1 of 3, workers 2, worker 0",
        "rank 2 of 3, workers 2, worker 1",
    ]


def test_without_mpi4py_one_process_works_and_says_so():
    hide = "import sys; sys.modules['mpi4py'] = None; sys.argv = ['', 'exchanges']; "
    log = "import logging; logging.basicConfig(level=logging.INFO); "
    job = run_alone(["-c", hide + log + "from tests.mpi.programs import *; run_guarded(main)"])
    assert job.returncode == 0, job.stderr
    assert "one process: no MPI is installed" in job.stderr


def test_a_small_shared_memory_makes_way_for_allreduce():
    """In a mount namespace whose /dev/shm holds 64 MB, three ranks ask for a window of 160 MB."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made (that takes root)")
    small = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    ranks = [find_mpiexec(), "-n", "3", sys.executable, *PROGRAMS, "large_sum", "10000000"]
    job = finish_job(start_job(["unshare", "-m", "bash", "-c", small, "bash", *ranks]))
    assert job.returncode == 0, job.stderr
    assert "go through the allreduce: instead of shared memory" in job.stderr
