"""Programs of several ranks that meet at a node's board, each a function: `python -m tests.mpi.boards NAME [ARGUMENTS]
[+ NAME [ARGUMENTS]]`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np

from fedmpi.mpi import Cluster, board, collectives, ranks, window
from fedmpi.process.exit_codes import run_guarded
from tests.mpi.programs import check_sum, run_programs
from tests.quick_end import end_quickly

LATE = 1.0
"""Seconds that the others have to wait for a rank."""


def counted(owner: Any, name: str) -> list[int]:
    """How often a method will have been called, as a list of one number that grows."""
    calls, inner = [0], getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        return inner(*arguments, **named)

    setattr(owner, name, call)
    return calls


def woken() -> None:
    """Who waits a second rests a few times only, and is up soon after the last one has come; whoever that is."""
    cluster = Cluster.connect()
    assert cluster._board is not None
    collectives.YIELDING_SECONDS = 0.0
    board.LONGEST_REST = 60.0
    slowest = []
    for late in range(cluster.size):
        rests = counted(board.Board, "_rest")
        if cluster.rank == late:
            time.sleep(LATE)
        came = time.monotonic()
        cluster.barrier()
        up = time.monotonic()
        everybody = cluster.gather(np.array([came, up, rests[0]]))
        if everybody is not None:
            last = max(one[0] for one in everybody)
            slowest.append(max(one[1] for one in everybody) - last)
            assert all(one[2] <= 3 for one in everybody), "a rank woke up again and again"
    if cluster.is_server:
        assert sorted(slowest)[len(slowest) // 2] < LATE / 2, slowest
    cluster.close()


def progress() -> None:
    """A rank that waits at the board lets go on what it began in MPI: a large message to one who waits for it there."""
    from mpi4py import MPI

    cluster = Cluster.connect()
    assert cluster._board is not None
    values, last = np.full(2_000_000, float(cluster.rank)), cluster.size - 1
    request = MPI.COMM_WORLD.Isend(values, dest=last) if cluster.rank == 0 else None
    if cluster.rank == last:
        time.sleep(0.2)
        received = np.empty_like(values)
        MPI.COMM_WORLD.Recv(received, source=0)
        assert not received.any()
    cluster.barrier()
    if request is not None:
        request.Wait()
    cluster.close()


def signals() -> None:
    """A rank that rests at the board hears of signals at once."""
    cluster, handled = Cluster.connect(), []
    board.LONGEST_REST = 60.0
    signal.signal(signal.SIGUSR2, lambda *_: handled.append(time.monotonic()))
    if cluster.rank == 1:
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGUSR2))
    if cluster.rank == 0:
        time.sleep(LATE + 0.5)
    cluster.barrier()
    if cluster.rank == 1:
        assert handled and handled[0] - started < LATE
    cluster.close()


def many_meetings(rounds: str) -> None:
    """Nobody leaves a meeting before all have come, however they come."""
    cluster, naps = Cluster.connect(), random.Random(os.getpid())
    sums = cluster.sum_buffer(cluster.size, "int64")
    for t in range(int(rounds)):
        sums[cluster.rank] = t
        if naps.random() < 0.3:
            time.sleep(naps.random() * 0.002)
        cluster.barrier()
        received = cluster.broadcast([np.full(t % 7, t), np.array([t])] if cluster.is_server else None)
        assert len(received[0]) == t % 7 and received[1][0] == t and (received[0] == t).all()
        assert (np.asarray(cluster.reduce()) == t).all()
    cluster.close()


def server_away() -> None:
    """Sums are the same where a server that only serves leaves them to the others, as it does on shared cores."""
    window.WINDOW_FROM_BYTES = window.WINDOW_FROM_BYTES_CROWDED = 0
    cluster = Cluster.connect()
    cluster.server_trains = False
    check_sum(cluster, 30_011, "float32", 60)
    check_sum(cluster, 5_003, "int64", 60)
    crowded = cluster.size > cluster.fewest_cores
    assert (cluster.bytes_moved.window == 0) == (cluster.is_server and crowded)
    cluster.close()


def large_broadcasts() -> None:
    """What does not fit on a page comes through MPI, cut into pieces, in any order with what does."""
    cluster, collectives.CHUNK = Cluster.connect(), 3_000_000
    for count in (10, board.PAGE // 8, 3, board.PAGE, 0, board.PAGE // 8 - 64):
        sent = [np.arange(count), np.arange(5.0), np.zeros((2, 0), np.float32)]
        received = cluster.broadcast(sent if cluster.is_server else None)
        assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(received, sent, strict=True))
    assert cluster.broadcast([] if cluster.is_server else None) == []
    cluster.close()


def without(what: str) -> None:
    """Where a node cannot have a board, ranks wait and sum as ever: no semaphores, no room, or no memory to share."""
    if what == "semaphores":
        board.semaphores_work = lambda: False
    elif what == "room":
        ranks.shared_memory_lacks = lambda nbytes: True
    else:
        board.Board = _refused  # type: ignore[assignment,misc]
    cluster = Cluster.connect()
    assert cluster._board is None
    check_sum(cluster, 30_011, "float32", 10)
    assert cluster.broadcast([np.arange(3)] if cluster.is_server else None)[0].tolist() == [0, 1, 2]
    cluster.close()


def _refused(node: Any) -> None:
    from mpi4py import MPI

    raise MPI.Exception(MPI.ERR_OTHER)


REPLACED: list[tuple[Any, str]] = [
    (collectives, "YIELDING_SECONDS"),
    (collectives, "CHUNK"),
    (board, "LONGEST_REST"),
    (board, "semaphores_work"),
    (board, "Board"),
    (board.Board, "_rest"),
    (ranks, "shared_memory_lacks"),
    (window, "WINDOW_FROM_BYTES"),
    (window, "WINDOW_FROM_BYTES_CROWDED"),
]
"""What programs put other values into; the next program of the job finds the package's own."""


def main() -> None:
    run_programs(globals(), REPLACED)


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
