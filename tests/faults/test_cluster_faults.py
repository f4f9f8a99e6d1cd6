"""However a rank ends, the job ends, with the right exit code and words, and nobody left waiting."""

from __future__ import annotations

import re
import socket

import pytest

from tests.mpi.launch import run_alone, run_mpi

HOST = socket.gethostname()
PROGRAMS = ("-m", "tests.mpi.programs")

NOISE = re.compile(r"abort|bad termination|traceback|rank \d+( on .*)?:", re.IGNORECASE)


def end_of(n: int, *args: str):
    return run_mpi(n, [*PROGRAMS, *args])


@pytest.mark.parametrize("who", ["0", "2"])
def test_an_exception_on_one_rank_ends_the_job_and_names_the_rank(who):
    job = end_of(3, "fail", "exception", who)
    assert job.returncode == 1
    assert f"rank {who}: ZeroDivisionError: a made-up fault" in job.stderr
    assert f"rank {who} on {HOST}: Traceback" in job.stderr


def test_a_failing_client_is_named_in_one_sentence():
    job = end_of(3, "fail", "client", "1")
    assert job.returncode == 1
    assert f"rank 1 on {HOST}: error: client 17 on rank 1: ValueError: bad sample" in job.stderr
    assert "Traceback" not in job.stderr


def test_a_user_error_on_all_ranks_is_printed_once_and_exits_with_2():
    job = end_of(4, "fail", "user", "all")
    assert job.returncode == 2
    assert job.stderr.count("error: the folder 'nowhere' does not exist: prepare it first\n") == 1
    assert not NOISE.search(job.stderr)


def test_a_user_error_on_one_rank_names_it_and_exits_with_2():
    job = end_of(3, "fail", "user", "2")
    assert job.returncode == 2
    assert f"rank 2 on {HOST}: error: the folder 'nowhere' does not exist" in job.stderr
    assert "Traceback" not in job.stderr


def test_different_user_errors_are_all_printed_by_their_ranks():
    job = end_of(2, "fail", "different", "all")
    assert job.returncode == 2
    assert (
        f"rank 0 on {HOST}: error: rank 0 cannot read" in job.stderr
        and f"rank 1 on {HOST}: error: rank 1 cannot read" in job.stderr
    )


def test_sys_exit_on_one_rank_ends_the_job_with_its_code():
    job = end_of(3, "fail", "3", "1")
    assert job.returncode == 3
    assert f"rank 1 on {HOST}: ends alone with exit code 3" in job.stderr


@pytest.mark.parametrize("how", ["75", "return75"])
def test_ranks_that_stop_together_after_saving_end_quietly_with_75(how):
    job = end_of(3, "fail", how, "all")
    assert job.returncode == 75
    assert not NOISE.search(job.stderr)


def test_an_orderly_end_is_quiet():
    job = end_of(3, "fail", "nothing")
    assert (job.returncode, job.stderr) == (0, "")


def test_a_killed_rank_ends_the_job():
    job = end_of(3, "fail", "kill", "1")
    assert job.returncode != 0


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exception", 1, "ZeroDivisionError: a made-up fault"),
        ("user", 2, "error: the folder 'nowhere' does not exist: prepare it first\n"),
        ("75", 75, ""),
    ],
)
def test_a_process_alone_ends_with_the_same_codes(how, code, words):
    job = run_alone([*PROGRAMS, "fail", how, "0"])
    assert job.returncode == code
    assert words in job.stderr and "rank" not in job.stderr.replace("ranks", "")


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_SIZE": "2", "PMI_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
    ],
    ids=["mpich", "openmpi", "slurm"],
)
def test_processes_that_mpi_does_not_join_are_refused(environ):
    job = run_alone([*PROGRAMS, "say_hello"], env=environ)
    assert job.returncode == 2
    assert "error: 2 processes were launched" in job.stderr and "which sees 1: launcher and MPI library" in job.stderr


def test_only_the_first_of_the_unjoined_processes_speaks():
    job = run_alone([*PROGRAMS, "say_hello"], env={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert job.returncode == 2
    assert "error" not in job.stderr


def test_a_launcher_of_another_family_is_refused_before_mpi_aborts():
    library = run_alone(["-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]).stdout
    if not library.startswith("MPICH") or "pmix" in library.lower():
        pytest.skip("mpi4py loads no MPICH that would abort")
    job = run_alone([*PROGRAMS, "say_hello"], env={"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"})
    assert job.returncode == 2
    assert "error: the launcher speaks PMIx" in job.stderr


def test_the_process_of_a_batch_script_runs_alone():
    job = run_alone([*PROGRAMS, "say_hello"], env={"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"})
    assert job.returncode == 0, job.stderr
    assert "rank 0 of 1" in job.stdout


def test_several_processes_without_an_mpi_library_are_refused():
    several = {"PMI_SIZE": "2", "PMI_RANK": "0"}
    job = run_alone([*PROGRAMS, "say_hello"], env={**several, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert job.returncode == 2
    assert "no MPI library could be loaded" in job.stderr and "pip install 'fedmpi[mpi]'" in job.stderr


def test_one_process_without_an_mpi_library_works_and_says_so():
    job = run_alone([*PROGRAMS, "say_hello"], env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert job.returncode == 0, job.stderr
    assert "one process: no MPI is installed" in job.stderr
