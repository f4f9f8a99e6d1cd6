"""Processes that a command starts: they do not outlive it by much, and what they print last is why they failed."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.mpi.launch import library_version

PR_SET_PDEATHSIG = 1
"""Of prctl(2), on Linux."""
TAIL = 4096
"""Bytes of a log that its last words are looked for in."""


def ends_with_parent(at_once: bool = False) -> Callable[[], None]:
    """For Popen's preexec_fn: the child is sent a signal when this process dies, however it dies."""
    parent, number = os.getpid(), signal.SIGKILL if at_once else signal.SIGUSR1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def end_with_parent() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, int(number))
            if os.getppid() != parent:  # it died before this call
                os.kill(os.getpid(), number)

    return end_with_parent


def how_it_ended(code: int, otherwise: str) -> str:
    """Why a command failed, of its return code: the signal that ended it, else what is given."""
    names = {number.value: number.name for number in signal.Signals}  # some real-time signals have none
    return f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else otherwise


def last_words(log: Path, begin: int = 0, any_line: bool = False) -> str:
    """What the last line of a log that says "error:" says after that, else "" or, if `any_line`, the last line."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, os.path.getsize(log) - TAIL))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return errors[-1] if errors else (lines or ["it said nothing"])[-1] if any_line else ""


def launcher(ranks: int) -> list[str]:
    """The command line before that of a rank; none for one."""
    if ranks == 1:
        return []
    unbound = ["--bind-to", "none"] if library_version().startswith("Open MPI") else []
    found = mpiexec()
    if found is None:
        raise UserError(f"ranks = {ranks}, but there is no mpiexec: pip install 'fedmpi[mpi]', or leave out ranks")
    return [found, "-n", str(ranks), *unbound]


def mpiexec() -> str | None:
    """The mpiexec beside this Python, else that of the PATH."""
    own = Path(sys.prefix) / "bin" / "mpiexec"
    return str(own) if own.exists() else shutil.which("mpiexec")
