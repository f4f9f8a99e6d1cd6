"""Child processes of a command: they end soon after it, and the last line they print explains a failure."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.mpi.launch import library_version

PR_SET_PDEATHSIG = 1
"""Option of prctl(2), on Linux."""
TAIL = 4096
"""Bytes at the end of a log that are searched for its last line."""


def ends_with_parent() -> Callable[[], None]:
    """Return a function for Popen's preexec_fn: the child gets SIGUSR1 when this process dies, for any reason."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGUSR1))
        if os.getppid() != parent:  # it died before this call
            os.kill(os.getpid(), signal.SIGUSR1)

    return end_with_parent


def how_it_ended(code: int, otherwise: str) -> str:
    """Return the reason for a return code: the signal that ended the command, else the given text."""
    names = {number.value: number.name for number in signal.Signals}  # some real-time signals have no names
    return f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else otherwise


def last_words(log: Path, begin: int = 0) -> str:
    """Return the text after "error:" in the last such line of a log from byte `begin` on, else the last line."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, os.path.getsize(log) - TAIL))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return [*(lines or ["it said nothing"]), *errors][-1]


def this_fedmpi() -> list[str]:
    """Return the command line of the fedmpi that runs now, even if the current folder holds another one."""
    installed = Path(fedmpi.__file__).resolve().parents[1] != Path.cwd()
    return [sys.executable, *(["-P"] if installed else []), "-m", "fedmpi"]


def launcher(ranks: int) -> list[str]:
    """Return the command line before that of a rank; empty for one rank."""
    if ranks == 1:
        return []
    unbound = ["--bind-to", "none"] if library_version().startswith("Open MPI") else []
    found = mpiexec()
    if found is None:
        raise UserError(f"ranks = {ranks}, but there is no mpiexec. Run pip install 'fedmpi[mpi]', or leave out ranks")
    return [found, "-n", str(ranks), *unbound]


def mpiexec() -> str | None:
    """Return the mpiexec next to this Python, else that of the PATH."""
    own = Path(sys.prefix) / "bin" / "mpiexec"
    return str(own) if own.exists() else shutil.which("mpiexec")
