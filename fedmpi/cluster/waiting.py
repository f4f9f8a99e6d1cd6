"""Polite waiting: a rank that waits must leave its core to the ranks that compute.

A blocking MPI call spins. Here a tiny non-blocking operation is polled, first eagerly (a short wait costs
microseconds), then with growing sleeps; only when everybody has arrived is the blocking collective called. Large
non-blocking collectives are never polled with sleeps: they only progress inside the test, so the sleeps would starve
them. Python signal handlers run between polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

EAGER_TESTS = 200
FIRST_SLEEP = 50e-6
SLEEP_GROWTH = 1.5
LONGEST_SLEEP = 2e-3


def wait_until(arrived: Callable[[], bool], limit: float | None = None, longest_sleep: float = LONGEST_SLEEP) -> bool:
    """Poll `arrived` until it is true.

    Parameters
    ----------
    arrived : callable
        A cheap test, for example the `Test` of a request.
    limit : float, optional
        Give up after this many seconds; None waits for ever.
    longest_sleep : float
        Where the growing sleeps end, in seconds.

    Returns
    -------
    bool
        Whether it became true within the limit.
    """
    for _ in range(EAGER_TESTS):
        if arrived():
            return True
    deadline = None if limit is None else time.monotonic() + limit
    sleep = FIRST_SLEEP
    while not arrived():
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(sleep)
        sleep = min(sleep * SLEEP_GROWTH, longest_sleep)
    return True


def meet(comm: MPI.Intracomm) -> None:
    """Wait politely until every rank of `comm` has come here (a barrier)."""
    wait_until(comm.Ibarrier().Test)
