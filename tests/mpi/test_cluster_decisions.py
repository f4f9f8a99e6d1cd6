"""Decisions of the cluster without MPI: the launcher, the cores and the device of a rank, waiting."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.mpi.collectives import wait_until
from fedmpi.mpi.device import choose_device, fair_threads
from fedmpi.mpi.launch import (
    SECONDS,
    Launch,
    check_process_manager,
    check_world_size,
    limited,
    read_launch,
    seconds_to_start,
    short_version,
)
from fedmpi.mpi.window import CACHE_LINE, slice_of

MPICH = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH configure:    --with-device=ch4:ucx,ofi"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI builder Distribution, ident: 5.0.11"
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
SRUN = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
MPIEXEC = {"PMI_SIZE": "4", "PMI_RANK": "3"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "launch", "joined", "alone"),
    [
        ({}, None, (1, 5), ()),
        (BATCH_SCRIPT, None, (1,), ()),
        (SRUN, Launch(3, 2, "SLURM_STEP_NUM_TASKS"), (3, 6), (1,)),
        (MPIEXEC, Launch(4, 3, "PMI_SIZE"), (4,), (1, 2)),
        ({**SRUN, **MPIEXEC}, Launch(4, 3, "PMI_SIZE"), (4,), (3,)),
        (OMPI, Launch(2, 1, "OMPI_COMM_WORLD_SIZE"), (2,), (1,)),
        ({"PMI_SIZE": "4"}, None, (1,), ()),
    ],
)
def test_the_launcher_is_known_by_the_variables_of_this_process_and_must_be_that_of_mpi(environ, launch, joined, alone):
    assert read_launch(environ) == launch
    for size in (*joined, *alone):
        with nullcontext() if size in joined else pytest.raises(UserError, match=f"sees {size}"):
            check_world_size(launch, size, MPICH)


def test_an_mpich_without_pmix_is_rejected_before_it_aborts_under_a_pmix_launcher():
    with pytest.raises(UserError, match="srun --mpi=pmi2"):
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
    masks = np.zeros((len(cores), 16), bool)
    for mask, own in zip(masks, cores, strict=True):
        mask[own] = True
    assert fair_threads(masks, rank, allowed, environ) == threads


def test_an_unusable_device_is_the_users_error():
    assert choose_device("cpu", 3).type == "cpu"
    with pytest.raises(UserError, match="'abacus' cannot be used .* Set the device to 'auto', or to 'cpu'"):
        choose_device("abacus", 0)


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
    assert not wait_until(lambda: False, limit=0.01)


def test_the_environment_sets_the_limit_of_the_start_which_ends_with_it() -> None:
    assert SECONDS + 64 <= seconds_to_start(64, {}) <= 10 * SECONDS
    assert [seconds_to_start(64, {"FEDMPI_START_SECONDS": seconds}) for seconds in ("0", "2.5")] == [0, 2.5]
    with pytest.raises(UserError, match="FEDMPI_START_SECONDS="):
        seconds_to_start(64, {"FEDMPI_START_SECONDS": "soon"})
    before = set(threading.enumerate())
    with limited(0, 2, 0):
        assert set(threading.enumerate()) == before
    with limited(3600, 2, 0):
        (limit,) = set(threading.enumerate()) - before
    limit.join(60)
    assert not limit.is_alive()
