"""Inputs that may end the interpreter, or never end: tried in a process beside, with a limit for each.

The limit is one of work, not of time: on a busy machine the same input takes ten times as long, but no more work. Two
threads that wait for one another on a busy core turn a second of work into fourteen, which the limit allows. A process
that neither works nor answers, as one that waits for a fifo does, is found by how little it has worked.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.verdict import Finding

CPU_SECONDS = 120.0
"""Work of one input, of all threads together."""
IDLE_SECONDS, LEAST_WORK = 60.0, 0.05
"""A process that worked no more than the second within the first, and wants no core either, waits for ever."""
MOST_MEMORY = 12 << 30
"""Bytes of address space."""
CLEAN = multiprocessing.get_context("forkserver")
"""Forks of a process that does nothing else: a fork of this one would lack the threads that its libraries count on."""
CLEAN.set_forkserver_preload(["torch", "scipy", "sklearn.cluster", "h5py", "fedmpi.cli", "data_prep.__main__"])


class Beside:
    """A process that tries one input after another; a new one follows where it died."""

    def __init__(self, attempt: Callable[[Any], str], work: float = CPU_SECONDS, idle: float = IDLE_SECONDS):
        self._attempt, self._work, self._idle = attempt, work, idle
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def __call__(self, case: Any) -> str:
        """Try a case."""
        if self._process is None:
            self._start()
        self._pipe.send(case)
        self._await()
        try:
            kind, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self._end()
            raise Finding(f"the process died with {code}") from None
        if kind == "finding":
            raise Finding(result)
        return str(result)

    def _await(self) -> None:
        """Wait for an answer as long as there is work."""
        begun, _ = _worked(self._process.pid)
        before, since = begun, time.monotonic()
        while not self._pipe.poll(0.5):
            worked, running = _worked(self._process.pid)
            if worked - begun > self._work:
                self._end()
                raise Finding(f"no end within {self._work:g} CPU seconds")
            if running or worked - before > LEAST_WORK:
                before, since = worked, time.monotonic()
            elif time.monotonic() - since > self._idle:
                self._end()
                raise Finding(f"waits for ever: no work within {self._idle:g} s")

    def _start(self) -> None:
        self._pipe, other = CLEAN.Pipe()
        self._process = CLEAN.Process(target=_serve, args=(other, self._attempt), daemon=True)
        self._process.start()
        other.close()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None


def _worked(process: int) -> tuple[float, bool]:
    """CPU seconds of a process (0 where it is gone), and whether it wants a core now or waits for a disk."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, False
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"), fields[0] in "RD"


def _serve(pipe: Any, attempt: Callable[[Any], str]) -> None:
    os.setpgrp()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))  # what grows without an end harms nobody else
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("fine", attempt(case)))
        except BaseException:
            pipe.send(("finding", traceback.format_exc(limit=-6)))
