"""The hierarchical sum over two hosts, emulated by two network namespaces with host names of their own (takes root)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.mpi.hosts import NoHosts, emulated_hosts
from tests.mpi.launch import LIMIT, finish_job, start_job
from tests.mpi.programs import combined_updates


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[str]]:
    """The beginning of a command that runs mpiexec on two hosts; skips where no namespaces can be made."""
    try:
        with emulated_hosts(2) as hosts:
            yield hosts.command(2)
    except NoHosts as reason:
        pytest.skip(str(reason))


pytestmark = pytest.mark.slow
REDUCTIONS = ("window", "allreduce", "device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("combined")


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.slow)])
def together(two_hosts: list[str], request: pytest.FixtureRequest, folder: Path) -> tuple[int, str]:
    """Ranks of a job of several programs, one after another, and what it printed: two and one on a host or two each."""
    programs = ["exchanges", *(f"sum_rounds {reduction} 20" for reduction in REDUCTIONS), f"combined_updates {folder}"]
    words = " + ".join(programs).split()
    ranks = ["-n", str(request.param), sys.executable, "-m", "tests.mpi.programs", *words]
    job = finish_job(start_job([*two_hosts, *ranks]), timeout=LIMIT)
    assert job.returncode == 0, job.stderr
    return request.param, job.stdout


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sums_over_two_hosts_are_right_and_the_same_bits_everywhere(together, reduction):
    n, printed = together
    assert printed.count(f"passed: sum_rounds {reduction} 20\n") == n
    assert printed.count("2 nodes of 2\n") == len(REDUCTIONS)


def test_arrays_and_relays_cross_from_host_to_host(together):
    n, printed = together
    assert printed.count("passed: exchanges\n") == n


def test_a_combiner_makes_the_bits_that_one_process_makes(together, folder):
    n, printed = together
    assert printed.count(f"passed: combined_updates {folder}\n") == n
    combined_updates(str(folder))
    alone, dealt = (np.load(folder / f"combined{ranks}.npz") for ranks in (1, n))
    assert alone.files == dealt.files and len(alone.files) == 20
    for name in alone.files:
        assert np.array_equal(alone[name], dealt[name]), name


def test_a_model_leaves_for_another_host_while_its_sender_computes(two_hosts, tmp_path):
    one_a_host = [*two_hosts[:-1], "1"]  # instead of two
    ranks = ["-n", "2", sys.executable, "-m", "tests.mpi.programs", "hand_over", str(tmp_path)]
    job = finish_job(start_job([*one_a_host, *ranks]), timeout=100)
    assert job.returncode == 0, job.stderr


def test_a_fault_on_one_host_ends_the_job_on_both(two_hosts):
    job = finish_job(
        start_job([*two_hosts, "-n", "4", sys.executable, "-m", "tests.mpi.programs", "fail", "exception", "3"]), LIMIT
    )
    assert job.returncode == 1
    assert "rank 3: ZeroDivisionError" in job.stderr
