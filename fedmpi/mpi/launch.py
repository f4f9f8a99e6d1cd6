"""How this process was launched, the start of MPI within a time limit, and the end of a job.

A launcher of one MPI family with the library of another gives N single processes that each believe to be the whole job,
or an abort inside MPI's start; both become one clear sentence. Ranks that wait in the start for ever end with a
sentence, to be started again. A job ends for all ranks together with one code, or at once by abort.
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
"""By MPICH as it starts, the latter by its library UCX."""
KEPT_SIGNALS = (signal.SIGTERM, signal.SIGINT, *TAKEN_BY_MPI)


# The variables that speak about THIS process. SLURM_NTASKS and SLURM_PROCID are also set for the single process of a
# batch script; SLURM_STEP_NUM_TASKS belongs to a step, and inside an mpiexec it counts the launcher's own helpers, so
# it comes last.
MPIEXEC_VARIABLES = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
SRUN_VARIABLES = (("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),)
NOT_STARTED = 76
"""Exit code of a job whose MPI did not start in time; the next start may well succeed."""
VARIABLE = "FEDMPI_START_SECONDS"
MARK = "FEDMPI_NOT_STARTED"
"""Names a file that is made then, for job scripts: launchers that kill the other ranks report other codes."""
SECONDS, SECONDS_PER_RANK = 120.0, 1.0
SECONDS_FOR_RANK_0 = 1.0
"""Rank 0 speaks for all: the others leave so much later, unless the launcher ends them before."""
# An abort can overtake what the rank has just printed, which then is lost: give the launcher time to pass it on.
SECONDS_FOR_LAST_WORDS = 0.3
SECONDS_FOR_ABORT = 2.0


class LauncherMismatch(UserError):
    """The launcher started several processes but MPI did not join them; every process sees the same."""


@dataclass(frozen=True)
class Launch:
    """One of several processes, as the launcher's environment variables say."""

    size: int  # Number of processes started together, and this one's place among them
    rank: int
    variable: str  # The variable that says so


def read_launches(environ: Mapping[str, str]) -> list[Launch]:
    """The launchers that claim this process: those of mpiexec (or srun with PMI) if any speaks, else srun's."""
    for family in (MPIEXEC_VARIABLES, SRUN_VARIABLES):
        found = [
            Launch(int(environ[size]), int(environ[rank]), size)
            for size, rank in family
            if environ.get(size, "").isdigit() and environ.get(rank, "").isdigit()
        ]
        if found:
            return found
    return []


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """The launch of this process, or None when it was started by itself (or with no launcher that we know)."""
    launches = read_launches(os.environ if environ is None else environ)
    return launches[0] if launches else None


def start_mpi(environ: Mapping[str, str] | None = None) -> ModuleType | None:
    """Load MPI and initialise it, once."""
    environ = os.environ if environ is None else environ
    launches = read_launches(environ)
    try:
        mpi = _import_mpi()
    except (ImportError, RuntimeError) as error:
        if any(launch.size > 1 for launch in launches):
            raise UserError(
                f"{_launched(launches)}, but no MPI library could be loaded ({_first_line(error)}): {MISSING_MPI}"
            ) from None
        return None
    if not mpi.Is_initialized():
        check_process_manager(environ, mpi.Get_library_version())

        ranks, rank = (launches[0].size, launches[0].rank) if launches else (1, 0)
        seconds = seconds_to_start(ranks, environ) if ranks > 1 else 0
        with kept_handlers(), limited(seconds, ranks, rank):
            initialise(mpi)
    check_world_size(launches, mpi.COMM_WORLD.Get_size(), mpi.Get_library_version())
    return mpi


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Afterwards Python's own signal handlers are in force again; signals that MPI takes meanwhile wait until then.

    SIGHUP ends the process again where it did before.
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
    """What the MPI library that mpi4py loads says of itself, without starting it; "" where there is none."""
    try:
        return str(_import_mpi().Get_library_version())
    except (ImportError, RuntimeError):
        return ""


def check_process_manager(environ: Mapping[str, str], library: str) -> None:
    """Refuse an MPICH without PMIx under a launcher that speaks nothing else: its start would abort the process."""
    only_pmix = "PMIX_RANK" in environ and "PMI_RANK" not in environ
    if only_pmix and library.startswith("MPICH") and "pmix" not in library.lower():
        raise LauncherMismatch(
            f"the launcher speaks PMIx (as Open MPI's mpiexec and `srun --mpi=pmix` do), but mpi4py loaded "
            f"{short_version(library)}, which does not: launch with the mpiexec beside this Python, or with "
            "`srun --mpi=pmi2`"
        )


def check_world_size(launches: list[Launch], size: int, library: str) -> None:
    """Compare the size of COMM_WORLD with what the launchers say."""
    if not launches or any(launch.size == size for launch in launches):
        return
    if size > 1 and launches[0].variable == "SLURM_STEP_NUM_TASKS":
        return  # another launcher on top of srun, or a job of several components: MPI did join the processes
    raise LauncherMismatch(
        f"{_launched(launches)}, but mpi4py loaded {short_version(library)}, which sees {size}: launcher and MPI "
        "library do not belong together; launch with the mpiexec beside this Python, or with `srun --mpi=pmi2` (MPICH) "
        "or `srun --mpi=pmix` (Open MPI)"
    )


def short_version(library: str) -> str:
    """`"MPICH 5.0.2"` out of the library's own, longer words."""
    words = library.split(",")[0].split("\n")[0].replace("Version:", " ").split()
    return " ".join(words)


def _import_mpi() -> ModuleType:
    import mpi4py

    # The version is asked before MPI starts, so that a start that would abort the process can be refused with a reason.
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    return MPI


def _launched(launches: list[Launch]) -> str:
    first = launches[0]
    return f"{first.size} processes were launched ({first.variable}={first.size})"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


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
