"""The start of MPI itself, with a limit: ranks that wait in it for ever end with a sentence, to be started again.

So do those that find no room in the shared memory of their node.
"""

from __future__ import annotations

import ctypes
import os
import signal
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
SHARED_MEMORY, NO_ROOM = "/dev/shm", 1
"""Where the ranks of a node meet, and the exit code of one that finds no room there."""
SECONDS_FOR_RANK_0 = 1.0
"""Rank 0 speaks for all: the others leave so much later, unless the launcher ends them before."""


def initialise(mpi: ModuleType) -> None:
    """`MPI_Init_thread` for several threads, during which the other threads of this process run.

    mpi4py's own call keeps Python's lock until all ranks have come: neither a signal's thread nor a limit could act.
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
    """Seconds that MPI may take to start with so many ranks; 0 for as long as it likes."""
    given = environ.get(VARIABLE)
    if given is None:
        return SECONDS + SECONDS_PER_RANK * ranks
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise UserError(f"{VARIABLE}={given}: give the seconds that MPI may take to start, or 0 for no limit")
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


@contextmanager
def room_to_meet(rank: int) -> Iterator[None]:
    """Within, a rank for whose memory /dev/shm has no room ends with a sentence instead of a bus error.

    The system promises more than there is: what lacks is known only when it is first written to.
    """
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: _no_room(rank))
    before = set_handler(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGBUS, before)


def _no_room(rank: int) -> NoReturn:
    message = f"rank {rank}: error: MPI finds no room in {SHARED_MEMORY} as it starts"
    with suppress(OSError):
        found = os.statvfs(SHARED_MEMORY)
        free, whole = (blocks * found.f_frsize / 2**20 for blocks in (found.f_bavail, found.f_blocks))
        message += f" ({free:.1f} of {whole:.1f} MiB are free; MPICH takes 1 MiB a rank at the least)"
    advice = "make it larger (containers: --shm-size), or remove what dead jobs have left there"
    os.write(2, f"{message}: {advice}\n".encode())
    os._exit(NO_ROOM)


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
