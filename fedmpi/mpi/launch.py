"""Launch of this process, the start of MPI within a time limit, and the end of a job.

A launcher of one MPI family with the library of another gives N single processes that each believe to be the whole job,
or an abort inside MPI's start; both lead to one clear message. Ranks that wait in the start forever end with a message.
A file shows the job script that the start failed, and the script starts the ranks again. A job ends for all ranks
together with one code, or at once by abort.
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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy as np

from fedmpi.common.errors import UNWRITABLE, UserError
from fedmpi.mpi.collectives import wait_until

MISSING_MPI = "install an MPI with `pip install 'fedmpi[mpi]'` and launch with the mpiexec of the same environment"

TAKEN_BY_MPI = (signal.SIGUSR1, signal.SIGHUP)
"""Signals that MPICH uses from its start on, the latter through its library UCX."""
KEPT_SIGNALS = (signal.SIGTERM, signal.SIGINT, *TAKEN_BY_MPI)


# Variables about THIS process. SLURM_NTASKS and SLURM_PROCID are also set for the single process of a batch script.
# SLURM_STEP_NUM_TASKS belongs to a step, and inside an mpiexec it counts the launcher's own helpers, so it comes last.
VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
NOT_STARTED = 76
"""Exit code of a job whose MPI did not start in time; the next start may succeed."""
LIMIT = "FEDMPI_START_SECONDS"
MARK = "FEDMPI_NOT_STARTED"
"""Environment variable that names a file to keep until MPI has started: an abort in MPI's start, and a launcher that
kills the other ranks, report other codes."""
SECONDS, SECONDS_PER_RANK = 120.0, 1.0
"""Time limit of the start, and what each rank adds to it."""
SECONDS_FOR_RANK_0 = 1.0
"""Seconds by which the other ranks end later than rank 0, which prints the message for all."""
# An abort can discard the rank's last output: give the launcher time to pass it on.
SECONDS_FOR_LAST_WORDS = 0.3


@dataclass(frozen=True)
class Launch:
    """One of several processes, as the launcher's environment variables say."""

    size: int  # Number of processes started together, and this one's index among them
    rank: int
    variable: str  # Variable that contains this


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Return the launch of this process, or None if it is standalone (or from an unknown launcher)."""
    environ = os.environ if environ is None else environ
    for size, rank in VARIABLES:
        if environ.get(size, "").isdigit() and environ.get(rank, "").isdigit():
            return Launch(int(environ[size]), int(environ[rank]), size)
    return None


def start_mpi() -> ModuleType | None:
    """Load MPI and initialize it, once; None if there is none to load."""
    launch = read_launch()
    try:
        mpi = _import_mpi()
    except (ImportError, RuntimeError) as error:
        if launch is not None and launch.size > 1:
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"{_launched(launch)}, but no MPI library could be loaded ({reason}): {MISSING_MPI}"
            ) from None
        return None
    if not mpi.Is_initialized():
        check_process_manager(os.environ, mpi.Get_library_version())
        ranks, rank = (launch.size, launch.rank) if launch else (1, 0)
        seconds = seconds_to_start(ranks, os.environ) if ranks > 1 else 0
        with kept_handlers(), limited(seconds, ranks, rank), marked(rank):
            initialize(mpi)
            mpi.COMM_WORLD.Barrier()
    check_world_size(launch, mpi.COMM_WORLD.Get_size(), mpi.Get_library_version())
    return mpi


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Restore Python's own signal handlers afterwards; signals that MPI takes meanwhile are delayed.

    SIGHUP ends the process again if it did before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    handlers = {number: signal.getsignal(number) for number in KEPT_SIGNALS}
    kept = {signal.SIGHUP: (signal.SIG_DFL, signal.SIG_IGN)}
    own = {number: found for number, found in handlers.items() if callable(found) or found in kept.get(number, ())}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, own.keys() & set(TAKEN_BY_MPI))
    try:
        yield
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def library_version() -> str:
    """Return the version text of the MPI library that mpi4py loads, without starting it; "" if there is none."""
    try:
        return str(_import_mpi().Get_library_version())
    except (ImportError, RuntimeError):
        return ""


def check_process_manager(environ: Mapping[str, str], library: str) -> None:
    """Reject an MPICH without PMIx under a launcher that supports only PMIx: its start would abort the process."""
    only_pmix = "PMIX_RANK" in environ and "PMI_RANK" not in environ
    if only_pmix and library.startswith("MPICH") and "pmix" not in library.lower():
        raise UserError(
            f"the launcher speaks PMIx (as Open MPI's mpiexec and `srun --mpi=pmix` do), but mpi4py loaded "
            f"{short_version(library)}, which does not. Launch with the mpiexec beside this Python, or with "
            "`srun --mpi=pmi2`"
        )


def check_world_size(launch: Launch | None, size: int, library: str) -> None:
    """Compare the size of COMM_WORLD with the launcher's."""
    if launch is None or launch.size == size:
        return
    if size > 1 and launch.variable == "SLURM_STEP_NUM_TASKS":
        return  # another launcher on top of srun, or a job of several programs: MPI did join the processes
    raise UserError(
        f"{_launched(launch)}, but mpi4py loaded {short_version(library)}, which sees {size}. Launcher and MPI "
        "library do not belong together; launch with the mpiexec beside this Python, or with `srun --mpi=pmi2` (MPICH) "
        "or `srun --mpi=pmix` (Open MPI)"
    )


def short_version(library: str) -> str:
    """Extract `"MPICH 5.0.2"` from the library's longer text."""
    words = library.split(",")[0].split("\n")[0].replace("Version:", " ").split()
    return " ".join(words)


def _import_mpi() -> ModuleType:
    import mpi4py

    # The version is read before MPI starts, to reject with a reason a start that would abort the process.
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    return MPI


def _launched(launch: Launch) -> str:
    return f"{launch.size} processes were launched ({launch.variable}={launch.size})"


def initialize(mpi: ModuleType) -> None:
    """Call `MPI_Init_thread` for several threads while the other threads of this process run.

    mpi4py's own call keeps Python's lock until all ranks have arrived: no signal thread or time limit could act.
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
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # errors raise mpi4py's exceptions, as after its own call


def seconds_to_start(ranks: int, environ: Mapping[str, str]) -> float:
    """Return the time limit in seconds for starting MPI with so many ranks; 0 for none."""
    given = environ.get(LIMIT)
    try:
        return SECONDS + SECONDS_PER_RANK * ranks if given is None else float(given)
    except ValueError:
        raise UserError(f"{LIMIT}={given}. Give the seconds that MPI may take to start, or 0 for no limit") from None


@contextmanager
def limited(seconds: float, ranks: int, rank: int) -> Iterator[None]:
    """Limit the duration of the context in seconds; beyond it, end the process with `NOT_STARTED` and a message."""

    def give_up() -> NoReturn:
        with suppress(OSError):  # the terminal may be closed
            time.sleep(SECONDS_FOR_RANK_0 if rank else 0)
            sys.stderr.write(
                f"rank {rank}: error: MPI did not start within {seconds:g} s: not all of {ranks} ranks came, or they "
                f"missed one another; start again ({LIMIT} sets the limit, 0 for none)\n"
            )
            sys.stderr.flush()
        os._exit(NOT_STARTED)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def marked(rank: int) -> Iterator[None]:
    """Keep the file that `MARK` names while the block runs on any rank; a failing block leaves it."""
    mark = os.environ.get(MARK)
    with suppress(OSError):  # the run itself reports a folder that cannot be written
        if mark:
            Path(mark).parent.mkdir(parents=True, exist_ok=True)
            Path(mark).touch()
    yield
    if mark and rank == 0:
        with suppress(OSError):
            Path(mark).unlink()


def agree_on_end(code: int, digest: int = 0, limit: float | None = None) -> bool:
    """Wait politely for the other ranks to end, and compare the way they end.

    Every rank that ends in order calls this once. It uses COMM_WORLD, on which nothing else in fedmpi communicates.
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
    """End every rank of the job now with this non-zero exit code; a standalone process ends as by `sys.exit`."""
    mpi = running_mpi()
    if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
        with suppress(*UNWRITABLE):
            sys.stdout.flush()
            sys.stderr.flush()
        time.sleep(SECONDS_FOR_LAST_WORDS)
        mpi.COMM_WORLD.Abort(code)
    sys.exit(code)


def world_rank() -> int | None:
    """Return this rank of a running job of several ranks, else None."""
    mpi = running_mpi()
    return mpi.COMM_WORLD.Get_rank() if mpi is not None and mpi.COMM_WORLD.Get_size() > 1 else None


def running_mpi() -> ModuleType | None:
    """Return `mpi4py.MPI` if it is loaded, started and not finalized; never loads it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None
