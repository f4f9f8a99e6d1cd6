"""Inputs that may end the interpreter, or never end: tried in a process beside, with a limit of seconds each."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

from tests.fuzz.verdict import Finding

SECONDS = 150.0
FORK = multiprocessing.get_context("fork")


class Beside:
    """A process that tries one input after another; a new one follows where it died.

    Parameters
    ----------
    attempt : callable
        ``attempt(case)`` raises an exception where the case is a finding, and returns a word for the counts otherwise.
    seconds : float
        Limit of each.
    """

    def __init__(self, attempt: Callable[[Any], str], seconds: float = SECONDS):
        self._attempt, self._seconds = attempt, seconds
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def __call__(self, case: Any) -> str:
        """Try a case.

        Raises
        ------
        Finding
            It is one, or the process died of it, or it took too long.
        """
        if self._process is None:
            self._start()
        self._pipe.send(case)
        if not self._pipe.poll(self._seconds):
            self._end()
            raise Finding(f"no end within {self._seconds:g} s")
        try:
            kind, told = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self._end()
            raise Finding(f"the process died with {code}") from None
        if kind == "finding":
            raise Finding(told)
        return str(told)

    def _start(self) -> None:
        self._pipe, other = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(other, self._pipe, self._attempt), daemon=True)
        self._process.start()
        other.close()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None


def _serve(pipe: Any, parents: Any, attempt: Callable[[Any], str]) -> None:
    parents.close()
    os.setpgrp()
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("fine", attempt(case)))
        except BaseException:
            pipe.send(("finding", traceback.format_exc(limit=-6)))
