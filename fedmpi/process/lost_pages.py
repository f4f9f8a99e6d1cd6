"""SIGBUS in a sentence: a file was cut off under its mapping, its disk fails, or shared memory has run full.

The signal belongs to an instruction that cannot be done, so nothing can go on; Python's own handlers would never be
called, since they wait for that instruction to end. One of the C library's, which calls back into Python, is.
"""

from __future__ import annotations

import ctypes
import os
import signal

from fedmpi.common.errors import RunFailure
from fedmpi.data.source import DataWatch
from fedmpi.mpi import world_rank

OUR_FAULT = 1
PLAIN = (
    "a file that is mapped into memory can no longer be read (SIGBUS): see to the disk with the data, and whether "
    "/dev/shm is full, then go on with --resume"
)


def report_lost_pages() -> None:
    """From now on a SIGBUS ends the process with a sentence and exit code 1; only a command asks for this."""
    ctypes.CDLL(None).signal(signal.SIGBUS, _handler)


def _end(number: int) -> None:
    message = PLAIN
    try:
        if DataWatch.latest is not None:
            DataWatch.latest.check()
    except RunFailure as failure:
        message = str(failure)
    finally:
        rank = world_rank()
        os.write(2, f"{'' if rank is None else f'rank {rank}: '}error: {message}\n".encode())
        os._exit(OUR_FAULT)


_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_end)
"""Kept: the C library does not count references."""
