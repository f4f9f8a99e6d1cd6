"""The start of MPI itself, with a limit: ranks that wait in it for ever end with a sentence, to be started again."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from fedmpi.common.errors import UserError

NOT_STARTED = 76
"""Exit code of a job whose MPI did not start in time; the next start may well succeed."""
VARIABLE = "FEDMPI_START_SECONDS"
MARK = "FEDMPI_NOT_STARTED"
"""Names a file that is made then, for job scripts: launchers that kill the other ranks report other codes."""
SECONDS, SECONDS_PER_RANK = 120.0, 1.0
SECONDS_FOR_RANK_0 = 1.0
"""Rank 0 speaks for all: the others leave so much later, unless the launcher ends them before."""


def initialise(mpi: ModuleType) -> None:
    """`MPI_Init_thread` for several threads, during which the other threads of this process run.

    mpi4py's own call keeps Python's lock until all ranks have come: neither a signal's thread nor a limit could act.

    Parameters
    ----------
    mpi : module
        `mpi4py.MPI`, not initialised.
    """
    call = getattr(ctypes.CDLL(mpi.__file__), "MPI_Init_thread", None)
    if call is None:  # an mpi4py with the library's functions hidden inside it
        mpi.Init_thread()
        return
    level = ctypes.c_int()
    error = call(None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(level))
    if error:
        raise RuntimeError(f"MPI_Init_thread failed with error {error}")
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # errors become exceptions of mpi4py's, as after its own call


def seconds_to_start(ranks: int, environ: Mapping[str, str]) -> float:
    """Seconds that MPI may take to start with so many ranks; 0 for as long as it likes.

    Raises
    ------
    UserError
        If the environment's FEDMPI_START_SECONDS is no number of seconds.
    """
    told = environ.get(VARIABLE)
    if told is None:
        return SECONDS + SECONDS_PER_RANK * ranks
    try:
        seconds = float(told)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise UserError(f"{VARIABLE}={told}: give the seconds that MPI may take to start, or 0 for no limit")
    return seconds


@contextmanager
def limited(seconds: float, ranks: int, rank: int) -> Iterator[None]:
    """What is done within takes at most so many seconds, or this process ends with `NOT_STARTED` and a sentence."""
    if not seconds:
        yield
        return
    limit = threading.Timer(seconds, _give_up, (seconds, ranks, rank))
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()


def _give_up(seconds: float, ranks: int, rank: int) -> NoReturn:
    if os.environ.get(MARK):
        with suppress(OSError):
            mark = Path(os.environ[MARK])
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    if rank:
        time.sleep(SECONDS_FOR_RANK_0)
    with suppress(OSError):  # a closed terminal must not keep the job from ending
        sys.stderr.write(
            f"rank {rank}: error: MPI did not start within {seconds:g} s: not all of {ranks} ranks came, or they "
            f"missed one another; start again ({VARIABLE} sets the limit, 0 for none)\n"
        )
        sys.stderr.flush()
    os._exit(NOT_STARTED)
