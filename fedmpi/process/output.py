"""Standard output and error of a command, whose reader may go: a pipe is closed, a terminal hangs up, a disk is full.

A run of hours does not end because nobody reads what it prints, least of all where Ctrl-C has ended the reader, too
(`fedmpi train … | tee log`), and the run is about to save. Other commands have nothing else to do, and end.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

OUTPUT, ERROR = 1, 2
"""Descriptors."""


class OutputLost(Exception):
    """What a command prints cannot be written any more: a sentence."""

    def __init__(self, error: OSError):
        advice = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see where it goes"
        super().__init__(f"standard output cannot be written ({error.strerror}): {advice}")
        self.unread = error.errno == errno.EPIPE


class Stream(io.RawIOBase):
    """A descriptor to which writing fails at most once: what comes after that is dropped."""

    def __init__(self, descriptor: int, name: str, raises: bool):
        self.name = name
        self._descriptor, self._raises, self._lost = descriptor, raises, False

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        """Write the data, or a part of them; returns how many bytes."""
        while not self._lost:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # a launcher or a remote shell has set its pipe so
                select.select([], [self._descriptor], [])
            except OSError as error:
                self._lose(error)
        return memoryview(data).nbytes

    def _lose(self, error: OSError) -> None:
        self._lost = True
        if self._raises:
            raise OutputLost(error) from error
        import logging

        logging.getLogger("fedmpi").info("%s is lost (%s): nothing more is printed there", self.name, error.strerror)


def open_descriptors() -> None:
    """Open those of 0 to 2 that the parent has closed, on /dev/null: no pipe or file of the run may get the number."""
    for descriptor in range(ERROR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def prepare_streams(outlives: bool) -> None:
    """Make standard output and error what this module says; names of files in them need not be UTF-8.

    Streams that somebody else has put in the place of the process's own are left alone.
    """
    open_descriptors()
    sys.stdout = _stream(sys.stdout, sys.__stdout__, OUTPUT, "standard output", not outlives)
    sys.stderr = _stream(sys.stderr, sys.__stderr__, ERROR, "standard error", False)


def _stream(now: object, own: object, descriptor: int, name: str, raises: bool) -> io.TextIOWrapper:
    if now is not own or not isinstance(now, io.TextIOWrapper | None):
        if isinstance(now, io.TextIOWrapper):
            now.reconfigure(errors="backslashreplace")
        return now  # type: ignore[return-value]
    encoding, at_once = ("utf-8", True) if now is None else (now.encoding, now.line_buffering)
    if now is not None:
        now.flush()
    buffer = io.BufferedWriter(Stream(descriptor, name, raises))
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=at_once)
