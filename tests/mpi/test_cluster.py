"""The cluster in real MPI jobs of 1 to 4 ranks, also as if they ran on two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmpi.mpi.window import semaphores_work
from tests.mpi.launch import run_alone, run_mpi

PROGRAMS = ("-m", "tests.mpi.programs")
SUMS = ("window", "allreduce", "device")
EVERYWHERE = ["exchanges", *(f"sum_rounds {way} 12" for way in SUMS)]
LACKING = ("semaphores", "room", "memory", "sums-room", "sums-memory")
TOGETHER = {
    1: EVERYWHERE,
    2: EVERYWHERE,
    3: [
        *("exchanges", "wait_politely", "sum_rounds window 24", "sum_rounds device 10", "gpus"),
        *("two_nodes window allreduce", "progress", "many_meetings 80", "server_away"),
        *(f"without {what}" for what in LACKING),
    ],
    4: ["exchanges", "two_nodes window auto"],
}
"""Programs by number of ranks: one job runs them sequentially, so that Python starts and torch loads once."""
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not semaphores_work(), reason="this system has no semaphores between processes"),
]


@pytest.mark.parametrize("n", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_all_programs_pass(n: int) -> None:
    job = run_mpi(n, [*PROGRAMS, *" + ".join(TOGETHER[n]).split()])
    for program in TOGETHER[n]:
        assert job.stdout.count(f"passed: {program}\n") == n, (program, job.stderr)
    assert job.returncode == 0, job.stderr


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
