"""Shared memory that bears this job's own name and is left from an earlier start of it: removed before MPI starts.

MPICH 5 names the memory in which the ranks of a node meet after the job as the process manager calls it, as
`/dev/shm/mpich_shm_14f46f28_0` for "7.0" under SLURM: job and step. A job that is queued again has both once more. Of a
start that was killed the file is left, in which all ranks are marked as ready. The next start on that node takes it for
its own: the ranks do not wait for one another, first messages are overwritten, and MPI_Init never comes back.

mpiexec gives every job a name of its own, and is not concerned.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path

from fedmpi.common.processes import ancestors, start_time

log = logging.getLogger("fedmpi")

SHARED_MEMORY = Path("/dev/shm")
NAMES_OF_THE_JOB = ("PMI_JOBID", "PMIX_NAMESPACE")
KINDS = ("shm", "vci")
DAEMON = "slurmstepd"
"""What starts the ranks of a step on a node: one for all of them, before them."""
SECONDS_APART = 60.0
"""Without such a process in sight (inside a container, say): longer than the ranks of a node take to be started."""


def remove_namesakes(environ: Mapping[str, str]) -> None:
    """Remove the shared memory of this job's name that is older than this start of the job."""
    jobs = {environ[name] for name in NAMES_OF_THE_JOB if environ.get(name)}
    patterns = [f"mpich_{kind}_{fnv1a(job):x}_*" for job in jobs for kind in KINDS]
    found = [path for pattern in patterns for path in SHARED_MEMORY.glob(pattern)]
    if found:
        begun = _begun()
        for path in found:
            _remove_older(path, begun)


def fnv1a(text: str) -> int:
    """The 32-bit FNV-1a hash (Fowler, Noll and Vo, http://www.isthe.com/chongo/tech/comp/fnv/) of a text."""
    return reduce(lambda value, byte: (value ^ byte) * 16777619 % 2**32, text.encode(), 2166136261)


def _begun() -> float:
    """Seconds since the epoch at which this start of the job cannot have made a file yet."""
    daemons = [pid for pid, name in ancestors(os.getpid()) if name == DAEMON]
    if daemons:
        return _started(daemons[0])
    return _started(os.getpid()) - SECONDS_APART


def _started(pid: int) -> float:
    ago = time.clock_gettime(time.CLOCK_BOOTTIME) - start_time(pid)[0] / os.sysconf("SC_CLK_TCK")
    return time.time() - ago


def _remove_older(path: Path, begun: float) -> None:
    """Remove a file of this user that is older; ranks that do so at the same time do not remove a new one."""
    with suppress(OSError):
        if not stat.S_ISREG(path.lstat().st_mode):
            return
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # who comes second finds another file, or none, behind the name
            facts = os.fstat(file.fileno())
            ours = facts.st_uid == os.getuid() and os.path.samestat(facts, path.lstat())
            if ours and facts.st_mtime < begun:
                path.unlink()
                log.info("removed %s, left by an earlier start of this job", path)
