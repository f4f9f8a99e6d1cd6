"""Processes that a sweep starts: they do not outlive it by much, and what they say last is why they failed."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

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
            if os.getppid() != parent:  # it died before it was asked for
                os.kill(os.getpid(), number)

    return end_with_parent


def how_it_ended(code: int, otherwise: str) -> str:
    """Why a command failed, of its return code: the signal that ended it, else what is given."""
    names = {number.value: number.name for number in signal.Signals}  # some real-time signals have none
    return f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else otherwise


def error_sentence(log: Path, begin: int = 0) -> str | None:
    """What the last line of a log that says "error:" says, behind that; None without one. It begins at byte `begin`."""
    return _error(_last_lines(log, begin) or [])


def last_words(log: Path, begin: int = 0) -> str:
    """Why a command failed: its `error_sentence`, else its last line."""
    lines = _last_lines(log, begin)
    if lines is None:
        return "it left no words"
    return _error(lines) or (lines[-1] if lines else "it said nothing")


def _error(lines: Sequence[str]) -> str | None:
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return errors[-1] if errors else None


def _last_lines(log: Path, begin: int) -> list[str] | None:
    """The last lines of a log that are not empty; None where it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, os.path.getsize(log) - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    return [line.strip() for line in lines if line.strip()]
