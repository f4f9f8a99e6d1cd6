"""Polite waiting: a rank that waits must leave its core to the ranks that compute.

A blocking MPI call spins. Here a tiny non-blocking operation is polled: first eagerly (a short wait costs
microseconds), for a millisecond giving way to whoever wants the core, then with sleeps of a tenth of the time waited so
far, at most 2 ms; ranks of one node sleep until they are woken instead (`board.py`). A poll tests several times: a
barrier takes several steps, each within a test, and with one step a sleep it would hold up the ranks that arrived last.
Only when everybody has arrived is the blocking collective called. Large non-blocking collectives are never polled with
sleeps: they only progress inside the test, so sleeps would starve them. Python's signal handlers run between polls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

EAGER_TESTS = 200
YIELDING_SECONDS = 1e-3
TESTS_PER_POLL = 4
SLEEP_SHARE = 0.1
SHORTEST_SLEEP = 50e-6
LONGEST_SLEEP = 2e-3


def wait_until(
    arrived: Callable[[], bool],
    limit: float | None = None,
    longest_sleep: float = LONGEST_SLEEP,
    pause: Callable[[float], None] | None = None,
    long: bool = False,
) -> bool:
    """Poll `arrived` until it is true."""
    for _ in range(1 if long else EAGER_TESTS):
        if arrived():
            return True
    return _poll(arrived, limit, pause or partial(_sleep, longest_sleep), 0.0 if long else YIELDING_SECONDS)


def _poll(arrived: Callable[[], bool], limit: float | None, pause: Callable[[float], None], yielding: float) -> bool:
    started = time.monotonic()
    while not any(arrived() for _ in range(TESTS_PER_POLL)):
        waited = time.monotonic() - started
        if limit is not None and waited > limit:
            return False
        if waited < yielding:
            os.sched_yield()
        else:
            pause(waited)
    return True


def _sleep(longest: float, waited: float) -> None:
    time.sleep(min(max(waited * SLEEP_SHARE, SHORTEST_SLEEP), longest))


def meet(comm: MPI.Intracomm) -> None:
    """Wait politely until every rank of `comm` has come here (a barrier)."""
    wait_until(comm.Ibarrier().Test)
