"""The hierarchical sum over two hosts, emulated by two network namespaces with host names of their own (takes root)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.mpi.launch import LIMIT, find_mpiexec, finish_job, start_job

ADDRESSES = ("10.77.0.1", "10.77.0.2")
# What mpiexec calls in the place of ssh: options, a host's address, a command.
SHELL_ON_HOST = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
namespace={prefix}${{1##*.}}
shift
exec ip netns exec $namespace unshare -u bash -c "hostname $namespace; $*"
"""


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The beginning of a command that runs mpiexec on two hosts; skips where no namespaces can be made."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("no network namespaces: iproute2 and util-linux are not installed")
    if "hydra" not in subprocess.run([find_mpiexec(), "--version"], capture_output=True, text=True).stdout.lower():
        pytest.skip("written for the options of MPICH's mpiexec")
    prefix = f"fedmpi{os.getpid()}h"
    hosts = [f"{prefix}{address[-1]}" for address in ADDRESSES]
    try:
        connect(hosts)
    except subprocess.CalledProcessError as error:
        remove(hosts)
        pytest.skip(f"no network namespaces can be made: {error.stderr.strip()}")
    shell = tmp_path_factory.mktemp("hosts") / "shell_on_host"
    shell.write_text(SHELL_ON_HOST.format(prefix=prefix))
    shell.chmod(0o755)
    launcher = ["-launcher", "ssh", "-launcher-exec", str(shell), "-hosts", ",".join(ADDRESSES), "-ppn", "2"]
    first = ["ip", "netns", "exec", hosts[0], "unshare", "-u", "bash", "-c", f'hostname {hosts[0]}; exec "$@"', "bash"]
    yield [*first, find_mpiexec(), *launcher]
    remove(hosts)


def connect(hosts: list[str]) -> None:
    for host in hosts:
        ip("netns", "add", host)
    ip("link", "add", "name", "wire", "netns", hosts[0], "type", "veth", "peer", "name", "wire", "netns", hosts[1])
    for host, address in zip(hosts, ADDRESSES, strict=True):
        ip("-n", host, "addr", "add", f"{address}/24", "dev", "wire")
        for device in ("wire", "lo"):
            ip("-n", host, "link", "set", device, "up")


def remove(hosts: list[str]) -> None:
    for host in hosts:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


REDUCTIONS = ("window", "allreduce", "device")


@pytest.fixture(scope="module", params=[4, 3])
def together(two_hosts: list[str], request: pytest.FixtureRequest) -> tuple[int, str]:
    """Ranks of a job of several programs, one after another, and what it printed: two on each host, or two and one."""
    words = " + ".join(["exchanges", *(f"sum_rounds {reduction} 20" for reduction in REDUCTIONS)]).split()
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
