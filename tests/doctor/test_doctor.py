"""`fedmpi doctor`: facts of the ranks are gathered, and each problem is named with advice."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from fedmpi import UserError, doctor
from fedmpi.doctor import Findings, advise, examination_text, find
from fedmpi.mpi import Cluster
from tests.mpi.launch import run_mpi

QUIET: Findings = {
    **{"cores": [0, 1, 2, 3], "cores_at_once": 4, "cores_of_node": 4, "load": 0.0, "threads": 1, "host": "n1"},
    **{"shm_free": 8 << 30, "folder_free": 80 << 30, "folder_writable": True},
    **{"driver": False, "torch_cuda": None, "gpus": [], "cuda_aware": False, "sees_folder": True},
    **{"mpi": "MPICH 5", "sbatch": None},
}
"""A quiet machine of four cores without SLURM."""
CUDA = {"cuda_aware": True, "driver": True, "torch_cuda": "12.6"}


@pytest.fixture(scope="module")
def alone() -> Findings:
    """Facts of this process, with those of a quiet machine."""
    cluster = Cluster.connect()
    found = find(cluster, environ={})
    cluster.close()
    return found | QUIET


@pytest.mark.parametrize(
    ("ranks", "changes", "last", "advice"),
    [
        (1, {}, {}, ""),
        (2, {}, {}, ""),
        (2, {}, {"host": "n2"}, ""),
        (4, {"load": 4.0}, {}, ""),  # the load of its own ranks
        (1, {"shm_free": 0}, {}, ""),
        (2, CUDA | {"gpus": ["A", "B"]}, {}, ""),
        (1, CUDA | {"gpus": ["A", "B"]}, {}, ""),
        (4, {"cores": [0, 1], "cores_of_node": 8}, {"cores": [2, 3]}, ""),
        (1, {"mpi_trouble": "2 processes were launched, but"}, {}, "problem: 2 processes"),
        (2, {}, {"torch": "2.0", "host": "n2"}, "problem: torch is"),
        (3, {}, {"python": "3.99", "host": "n2"}, "problem: python is .* but 3.99 on rank 2 .n2"),
        (1, {"h5py": "cannot be loaded (no libhdf5)"}, {}, "problem: h5py cannot be loaded .* on rank 0"),
        (2, CUDA | {"gpus": ["H100"]}, {"host": "n2", "gpus": []}, "problem: rank 1 .n2. see no GPU"),
        (2, {}, {"sees_folder": False, "host": "n2"}, "problem: rank 1 .n2. do not see rank 0's files"),
        (1, {"mpi": "none"}, {}, "warning: no MPI"),
        (1, {"variables": {"SLURM_NTASKS": "8"}}, {}, "8 tasks"),
        (5, {}, {}, "5 ranks share 4 core"),
        (3, {"cores_at_once": 2}, {}, "3 ranks share 2 core"),
        (2, {"cores": [2]}, {}, "2 ranks on n1 are bound to 1 core"),
        (2, {"cores_of_node": 8}, {}, "share cores, although"),
        (1, {"load": 3.0}, {}, "busy .load 3.0"),
        (3, {}, {"threads": 4}, "warning: threads is 1, but 4"),
        (2, {"shm_free": 0}, {}, "0 MB free in /dev/shm"),
        (1, {"folder_free": 1 << 30}, {}, "1.1 GB are free"),
        (1, {"folder_writable": False}, {}, "not writable"),
        (1, {"driver": True}, {}, "no CUDA.*https://download.pytorch.org/whl"),
        (1, {"driver": True, "torch_cuda": "12.6"}, {}, "torch sees no GPU"),
        (3, CUDA | {"gpus": ["A", "B"]}, {}, "3 ranks share 2 GPU"),
        (2, CUDA | {"gpus": ["A", "B", "C"]}, {}, "leave 1 of its 3 GPUs idle"),
        (2, CUDA | {"gpus": ["A", "B"], "cuda_aware": False}, {}, "not CUDA-aware"),
    ],
)
def test_each_finding_gives_one_piece_of_advice(
    ranks: int, changes: dict[str, Any], last: dict[str, Any], advice: str, alone: Findings
) -> None:
    job = [alone | changes for _ in range(ranks)]
    given = advise([*job[:-1], job[-1] | last])
    assert len(given) == bool(advice), given
    assert all(re.search(advice, one) for one in given)


def test_the_report_names_nodes_and_advice(alone: Findings) -> None:
    ranks = [alone, alone, alone | {"host": "n2"}]
    text = examination_text(ranks, advise(ranks), Path("/nowhere/site.toml"))
    assert "2 rank(s), 4 of 4 cores" in text and "node n2" in text and "no problems found" in text
    bad = [alone | {"mpi": "none"}]
    assert "warning: no MPI" in examination_text(bad, advise(bad), Path("/nowhere/site.toml"))


@pytest.mark.slow
def test_it_runs_under_mpiexec() -> None:
    done = run_mpi(2, ["-m", "fedmpi", "doctor"])
    assert done.returncode == 0, done.stderr
    assert "2 on 1 node(s), launched 2 by " in done.stdout and "do not see" not in done.stdout
    assert not [name for name in os.listdir() if name.startswith(".fedmpi-doctor-")]


def test_a_job_that_mpi_cannot_join_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Cluster:
        raise UserError("2 processes were launched, but MPI knows one")

    monkeypatch.setattr(Cluster, "connect", fails)
    assert not doctor.examine()
    assert "problem: 2 processes were launched" in capsys.readouterr().out


@pytest.mark.parametrize(("level", "starts"), [("problem", False), ("warning", True)])
def test_only_a_problem_keeps_a_run_from_starting(
    level: str, starts: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "advise", lambda ranks: [f"{level}: something"])
    assert doctor.examine() is starts and f"{level}: something" in capsys.readouterr().out
