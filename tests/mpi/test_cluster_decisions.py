"""Decisions of the cluster without MPI: the launcher, the cores and the device of a rank.

A wait that is known to be long takes no core: the rank sleeps at once, and is woken by the awaited event.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.mpi import collectives
from fedmpi.mpi.collectives import wait_until
from fedmpi.mpi.device import choose_device, fair_threads
from fedmpi.mpi.launch import (
    Launch,
    LauncherMismatch,
    check_process_manager,
    check_world_size,
    read_launch,
    read_launches,
    short_version,
)
from fedmpi.mpi.window import CACHE_LINE, slice_of

MPICH = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH configure:    --with-device=ch4:ucx,ofi"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI builder Distribution, ident: 5.0.11"
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
SRUN = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
MPIEXEC = {"PMI_SIZE": "4", "PMI_RANK": "3"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        (BATCH_SCRIPT, None),
        (SRUN, Launch(3, 2, "SLURM_STEP_NUM_TASKS")),
        (MPIEXEC, Launch(4, 3, "PMI_SIZE")),
        ({**SRUN, **MPIEXEC}, Launch(4, 3, "PMI_SIZE")),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, Launch(2, 1, "OMPI_COMM_WORLD_SIZE")),
        ({"PMI_SIZE": "4"}, None),
    ],
)
def test_the_launcher_is_known_by_the_variables_of_this_process(environ, launch):
    assert read_launch(environ) == launch


@pytest.mark.parametrize(
    ("environ", "size", "joined"),
    [
        *(({}, 1, True), ({}, 5, True), (BATCH_SCRIPT, 1, True), (SRUN, 3, True), (MPIEXEC, 4, True)),
        *(({**SRUN, **MPIEXEC}, 4, True), (SRUN, 6, True)),
        *((SRUN, 1, False), (MPIEXEC, 1, False), (MPIEXEC, 2, False), ({**SRUN, **MPIEXEC}, 3, False)),
    ],
)
def test_a_world_of_another_size_than_launched_is_rejected(environ, size, joined):
    with nullcontext() if joined else pytest.raises(LauncherMismatch, match=rf"MPICH 5.0.2, which sees {size}\. "):
        check_world_size(read_launches(environ), size, MPICH)


def test_an_mpich_without_pmix_is_rejected_before_it_aborts_under_a_pmix_launcher():
    with pytest.raises(LauncherMismatch, match="srun --mpi=pmi2"):
        check_process_manager({"PMIX_RANK": "0"}, MPICH)
    check_process_manager({"PMIX_RANK": "0"}, OPEN_MPI)
    check_process_manager({"PMIX_RANK": "0"}, MPICH + " --with-pmix=/usr")
    check_process_manager({"PMIX_RANK": "0", "PMI_RANK": "0"}, MPICH)
    assert (short_version(MPICH), short_version(OPEN_MPI)) == ("MPICH 5.0.2", "Open MPI v5.0.11")


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1_000, 70_001])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_the_slices_of_the_ranks_cover_every_value_once_and_start_on_cache_lines(count, ranks):
    slices = [slice_of(rank, ranks, count) for rank in range(ranks)]
    assert [value for part in slices for value in range(count)[part]] == list(range(count))
    assert all(part.start % CACHE_LINE == 0 or part.start == count for part in slices)


def masks(*cores: list[int]) -> np.ndarray:
    mask = np.zeros((len(cores), 16), bool)
    for rank, own in enumerate(cores):
        mask[rank, own] = True
    return mask


EIGHT = list(range(8))


@pytest.mark.parametrize(
    ("cores", "rank", "allowed", "environ", "threads"),
    [
        *(((EIGHT, EIGHT), 0, 8, {}, 4), (([0, 1], [2, 3, 4]), 1, 3, {}, 3), ((EIGHT, EIGHT, EIGHT), 2, 8, {}, 2)),
        *((([0], [0], [0]), 0, 1, {}, 1), ((EIGHT, EIGHT), 0, 4, {}, 2)),
        ((EIGHT,), 0, 8, {"SLURM_CPUS_PER_TASK": "3"}, 3),
        ((EIGHT,), 0, 8, {"FEDMPI_MOST_THREADS": "2", "SLURM_CPUS_PER_TASK": "3"}, 2),
        ((EIGHT,), 0, 8, {"OMP_NUM_THREADS": "5,2"}, 5),
    ],
)
def test_cores_are_shared_fairly_by_the_ranks_that_may_use_them(cores, rank, allowed, environ, threads):
    assert fair_threads(masks(*cores), rank, allowed, environ) == threads


def test_an_unusable_device_is_the_users_error():
    assert choose_device("cpu", 3).type == "cpu"
    with pytest.raises(UserError, match="'abacus' cannot be used"):
        choose_device("abacus", 0)


class Clock:
    """Time that passes only by sleeping, yielding and testing, as the module `time` (and `os`) of `waiting`."""

    def __init__(self) -> None:
        self.now = self.slept = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def sched_yield(self) -> None:
        self.now += 5e-6

    def test(self) -> bool:
        self.now += 5e-6
        return False


@pytest.mark.parametrize("seconds", [0.1, 2.5])
def test_a_long_wait_is_nearly_all_sleep_and_no_sleep_is_long(seconds: float, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(collectives, "time", clock)
    monkeypatch.setattr(collectives, "os", clock)
    assert wait_until(lambda: clock.test() or clock.now > seconds)
    assert clock.now < seconds + collectives.LONGEST_SLEEP + 1e-4
    assert clock.slept > 0.95 * seconds


def test_waiting_gives_up_at_its_limit():
    assert wait_until(lambda: True)
    assert not wait_until(lambda: False, limit=0.01)


@pytest.mark.parametrize(("long", "asked", "yields"), [(True, 1 + 4, 0), (False, 200 + 4, 1)])
def test_a_long_wait_sleeps_at_once(long: bool, asked: int, yields: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, yielded, slept = [], [], []
    monkeypatch.setattr(os, "sched_yield", lambda: yielded.append(len(calls)))

    def arrived() -> bool:
        calls.append(len(slept))
        return bool(slept)

    assert wait_until(arrived, pause=slept.append, long=long)
    assert len(slept) == 1
    assert calls.count(0) >= asked and (calls.count(0) == asked) == long
    assert bool(yielded) == bool(yields)
