"""In whatever way a rank ends, the job ends with the right exit code and words, and no rank is left waiting."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from fedmpi.data.opening import open_store
from tests.end_to_end.runs import TRAIN, choices
from tests.mpi.launch import run_alone, run_mpi

HOST = socket.gethostname()
PROGRAMS = ("-m", "tests.mpi.programs")
NOISE = re.compile(r"abort|bad termination|traceback|rank \d+( on .*)?:", re.IGNORECASE)
NOWHERE = "error: the folder 'nowhere' does not exist. Prepare it first"


@pytest.mark.parametrize(
    ("how", "who", "code", "words"),
    [
        ("exception", "2", 1, [f"rank 2 on {HOST}: Traceback", "rank 2: ZeroDivisionError: a test fault"]),
        ("client", "1", 1, [f"rank 1 on {HOST}: error: client 17 on rank 1: ValueError: bad sample"]),
        ("user", "2", 2, [f"rank 2 on {HOST}: {NOWHERE}"]),
        ("different", "all", 2, [f"rank {rank} on {HOST}: error: rank {rank} cannot read" for rank in range(3)]),
        ("3", "1", 3, [f"rank 1 on {HOST}: ends alone with exit code 3"]),
        ("kill", "1", None, []),
    ],
)
def test_a_rank_that_ends_alone_ends_the_job_and_is_named(how: str, who: str, code: int | None, words: list[str]):
    job = run_mpi(3, [*PROGRAMS, "fail", how, who])
    assert job.returncode == code if code is not None else job.returncode
    assert all(said in job.stderr for said in words), job.stderr
    assert "Traceback" not in job.stderr or how == "exception"


@pytest.mark.parametrize(("how", "code", "words"), [("user", 2, NOWHERE), ("return75", 75, "")])
def test_ranks_that_end_together_say_it_once(how: str, code: int, words: str):
    job = run_mpi(3, [*PROGRAMS, "fail", how, "all"])
    assert job.returncode == code and not NOISE.search(job.stderr)
    assert job.stderr.count(words) == 1 if words else "error:" not in job.stderr  # Open MPI reports exit codes


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "error: 2 processes were launched .* sees 1. Launcher and MPI library"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "^$"),  # only the first of them speaks
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, r"no MPI library.*fedmpi\[mpi\]"),
    ],
)
def test_processes_that_mpi_does_not_join_are_rejected(environ: dict[str, str], words: str):
    job = run_alone([*PROGRAMS, "fail", "nothing"], env=environ)
    assert job.returncode == 2 and re.search(words, job.stderr, re.S), job.stderr


def test_a_launcher_of_another_family_is_rejected_before_mpi_aborts():
    library = run_alone(["-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]).stdout
    if not library.startswith("MPICH") or "pmix" in library.lower():
        pytest.skip("mpi4py loads no MPICH that would abort")
    job = run_alone([*PROGRAMS, "fail", "nothing"], env={"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"})
    assert job.returncode == 2 and "error: the launcher speaks PMIx" in job.stderr


def test_a_model_that_fails_on_a_client_names_client_and_rank(tmp_path: Path):
    rows = 7
    asked = choices(
        *("preset=fedavg", "rounds=1000000", "logging.tensorboard=false", "clients.fraction=1.0"),
        *("model.name=tests.end_to_end.user_models:choosy", f"model.refused={rows}"),
    )
    job = run_mpi(3, [*TRAIN, *asked, "--out", tmp_path / "RUN"])
    assert job.returncode == 1
    said = re.findall(
        r"^rank (\d) on \S+: error: client (\d+) on rank (\d): ValueError: this model takes no batch of 7 "
        r"\(\S+user_models.py:\d+, round 0\)$",
        job.stderr,
        re.M,
    )
    assert re.search(r"^rank \d:   File .*user_models.py\", line \d+, in forward$", job.stderr, re.M)
    assert said and "Traceback" not in job.stderr
    sizes = open_store("digits").sizes
    for speaker, client, rank in said:
        assert speaker == rank != "0"
        assert sizes[int(client)] % 10 == rows  # the last batch of an epoch is the short one
