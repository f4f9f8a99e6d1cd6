"""How a job of several ranks ends: all together with one code, or at once for all by abort."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

import numpy as np

from fedmpi.common.errors import UNWRITABLE
from fedmpi.mpi.waiting import wait_until

# An abort can overtake what the rank has just printed, which then is lost: give the launcher time to pass it on.
SECONDS_FOR_LAST_WORDS = 0.3
SECONDS_FOR_ABORT = 2.0


def agree_on_end(code: int, digest: int = 0, limit: float | None = None) -> bool:
    """Wait politely for the other ranks to end, and compare how.

    Every rank that ends in order calls this once. It uses COMM_WORLD, on which nothing else in fedmpi
    communicates.
    """
    mpi = running_mpi()
    if mpi is None or mpi.COMM_WORLD.Get_size() == 1:
        return True
    mine = np.array([code, -code, digest, -digest], np.int64)
    most = np.empty_like(mine)
    if not wait_until(mpi.COMM_WORLD.Iallreduce(mine, most, op=mpi.MAX).Test, limit):
        return False
    return bool(np.array_equal(mine, most))


def abort_job(code: int) -> NoReturn:
    """End every rank of the job now with this non-zero exit code; a process alone ends as by `sys.exit`."""
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        with suppress(*UNWRITABLE):
            sys.stdout.flush()
            sys.stderr.flush()
        time.sleep(SECONDS_FOR_LAST_WORDS)
        mpi.COMM_WORLD.Abort(code)
    sys.exit(code)


def abort_anyway(code: int) -> NoReturn:
    """`abort_job` from any thread, also where the main one hangs within MPI: then this process leaves as it is.

    The launcher ends the others when one leaves with a code other than 0 (srun with `--kill-on-bad-exit`).
    """
    with suppress(Exception):
        sys.stdout.flush()
    if running_mpi() is not None:
        threading.Thread(target=abort_job, args=(code,), daemon=True).start()
        time.sleep(SECONDS_FOR_ABORT)
    os._exit(code)


def world_rank() -> int | None:
    """Return this rank of a running job of several ranks, else None."""
    mpi = running_mpi()
    return mpi.COMM_WORLD.Get_rank() if mpi is not None and mpi.COMM_WORLD.Get_size() > 1 else None


def running_mpi() -> ModuleType | None:
    """Return `mpi4py.MPI` if it is loaded, started and not finalized; never loads it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None
