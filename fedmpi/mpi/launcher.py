"""How this process was launched, and the start of MPI with a check that launcher and MPI library belong together.

A launcher of one MPI family with the library of another gives N lonely processes that each believe to be the whole job,
or an abort inside MPI's start; both become one clear sentence here.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from fedmpi.common.errors import UserError
from fedmpi.mpi.namesakes import remove_namesakes
from fedmpi.mpi.starting import initialise, limited, room_to_meet, seconds_to_start

MISSING_MPI = "install an MPI with `pip install 'fedmpi[mpi]'` and launch with the mpiexec of the same environment"

TAKEN_BY_MPI = (signal.SIGUSR1, signal.SIGHUP)
"""By MPICH as it starts, the latter by its library UCX."""
KEPT_SIGNALS = (signal.SIGTERM, signal.SIGINT, *TAKEN_BY_MPI)


class LauncherMismatch(UserError):
    """The launcher started several processes but MPI did not join them; every process sees the same."""


@dataclass(frozen=True)
class Launch:
    """One of several processes, as the launcher's environment variables say."""

    size: int  # Number of processes started together, and this one's place among them
    rank: int
    variable: str  # The variable that says so


# The variables that speak about THIS process. SLURM_NTASKS and SLURM_PROCID are also set for the single process of a
# batch script; SLURM_STEP_NUM_TASKS belongs to a step, and inside an mpiexec it counts the launcher's own helpers, so
# it comes last.
MPIEXEC_VARIABLES = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
SRUN_VARIABLES = (("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),)


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
        remove_namesakes(environ)
        ranks, rank = (launches[0].size, launches[0].rank) if launches else (1, 0)
        seconds = seconds_to_start(ranks, environ) if ranks > 1 else 0
        with kept_handlers(), room_to_meet(rank), limited(seconds, ranks, rank):
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
