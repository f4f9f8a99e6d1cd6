"""Programs for the ranks of the tests' jobs: `python -m tests.mpi.programs NAME [ARGUMENTS] [+ NAME [ARGUMENTS]]`.

A wrong result raises. Several programs run sequentially, and every rank prints which of them have passed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from fedmpi import ClientFailure, UserError
from fedmpi.mpi import Cluster, messages, sums, window
from fedmpi.mpi.collectives import Communicators
from fedmpi.mpi.messages import Messages
from fedmpi.process.exit_codes import run_guarded
from tests.quick_end import end_quickly

LATE = 0.4
"""Seconds that the others have to wait for a rank."""
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64")


def exchanges() -> None:
    """Broadcast, gather, maximum and counters."""
    cluster = Cluster.connect()
    workers = [0] if cluster.size == 1 else list(range(1, cluster.size))
    assert list(map(cluster.worker_rank, range(cluster.workers))) == workers
    assert cluster.worker == (workers.index(cluster.rank) if cluster.rank in workers else None)
    assert cluster.threads_for_rank() >= 1
    check_broadcast(cluster)
    check_gather(cluster)
    assert cluster.maximum(10 - cluster.rank) == 10
    assert cluster.maximum(-5 * cluster.rank) == 0
    shared, own = cluster.share_bytes(), cluster.moved.total()
    gathered = cluster.gather(np.array([own]))
    if gathered is not None:
        assert shared.total() == sum(int(total[0]) for total in gathered)
    relay_between_all(cluster)
    check_sum(cluster, 5_000, "float64", 3)
    cluster.close()


def check_broadcast(cluster: Cluster) -> None:
    generator = np.random.default_rng(3)
    sent = [(generator.random((3, 5)) * 100).astype(dtype) for dtype in DTYPES]
    sent += [np.empty((0, 4), np.float32), np.array(7.5), np.arange(4000)[::2], np.arange(12).reshape(3, 4).T]
    page = window.PAGE // 8  # longer data come through MPI, in any order with those that fit on a page
    longer = [[np.arange(count), np.zeros((2, 0))] for count in (10, page, 3, 8 * page, 0, page - 64)]
    for arrays in (sent, [], [np.empty(0, np.int64)], *longer):
        received = cluster.broadcast(arrays if cluster.is_server else None)
        assert len(received) == len(arrays)
        for expected, array in zip(arrays, received, strict=True):
            assert array.dtype == expected.dtype and array.shape == expected.shape
            assert np.array_equal(array, expected)
    counted = sum(array.nbytes for arrays in (sent, *longer) for array in arrays)
    assert cluster.size == 1 or cluster.moved["broadcast"] == counted


def check_gather(cluster: Cluster) -> None:
    def array_of(rank: int, dtype: str) -> np.ndarray:
        return (np.random.default_rng(rank).random((rank * 700, 2)) * 100).astype(dtype)

    for dtype in (*DTYPES, None):
        kinds = [dtype or DTYPES[rank] for rank in range(cluster.size)]
        received = cluster.gather(array_of(cluster.rank, kinds[cluster.rank]))
        assert (received is None) == (not cluster.is_server)
        for rank, array in enumerate(received or []):
            expected = array_of(rank, kinds[rank])
            assert array.dtype == expected.dtype and np.array_equal(array, expected)


def check_sum(cluster: Cluster, count: int, dtype: str, rounds: int) -> None:
    """Values of normal size, sums compared with NumPy's; ranks sleep at random everywhere between the calls."""

    def values(rank: int, t: int) -> np.ndarray:
        generator = np.random.default_rng((rank, t))
        if dtype == "int64":
            return generator.integers(-(2**40), 2**40, count)
        return generator.standard_normal(count).astype(dtype)

    naps = random.Random(cluster.rank)
    for t in range(rounds):
        slot = cluster.sum_tensor(count, dtype).numpy()
        slot[:] = 0
        nap(naps)
        slot += values(cluster.rank, t)
        nap(naps)
        total = cluster.reduce_tensor().numpy()
        expected = values(0, t)
        for rank in range(1, cluster.size):
            expected += values(rank, t)
        nap(naps)  # the others are already overwriting their slots
        if dtype == "int64":
            assert np.array_equal(total, expected), f"round {t}: wrong sum"
        else:
            assert np.allclose(total, expected, rtol=0, atol=1e-5), f"round {t}: wrong sum"
        checksum = crc32(total.tobytes())
        assert cluster.maximum(checksum) == -cluster.maximum(-checksum), f"round {t}: the ranks' bits differ"


def nap(naps: random.Random) -> None:
    if naps.random() < 0.4:
        time.sleep(naps.random() * 0.004)


def two_nodes(*reductions: str) -> None:
    """Exchanges and hierarchical sums of ranks that meet on two nodes, as every second one of this host does here."""
    Communicators.ranks_of_node = lambda comm: comm.Split(comm.rank % 2, comm.rank)  # type: ignore[assignment]
    exchanges()
    for reduction in reductions:
        sum_rounds(reduction, "4", nodes=2)


def sum_rounds(reduction: str, rounds: str, nodes: int = 1) -> None:
    """Repeated sums of two kinds, in turn."""
    cluster = Cluster.connect(reduction)
    for _ in range(2):
        check_sum(cluster, 30_011, "float32", int(rounds) // 2)
        check_sum(cluster, 5_003, "int64", int(rounds) // 2)
    moved = cluster.share_bytes()
    if cluster.size > 1 and reduction != "auto":  # which takes the faster one
        assert (moved["window"] > 0) == (reduction == "window")
        assert (moved["allreduce"] > 0) == (reduction != "window" or cluster.nodes > 1)
    assert cluster.nodes == nodes
    cluster.close()


def gpus() -> None:
    """Decision of all ranks when tensors are on GPUs and MPI reads them or not; no GPU is touched."""
    import torch
    from mpi4py import MPI

    assert sums.cuda_aware() == ("--with-cuda" in MPI.Get_library_version())
    comms, cpu, gpu = Communicators.split(MPI.COMM_WORLD), torch.device("cpu"), torch.device("cuda:0")
    some = gpu if comms.world.rank else cpu
    for readable, wanted, device, expected in (
        *(
            (True, "auto", gpu, True),
            (True, "auto", some, False),
            (True, "auto", cpu, False),
            (True, "window", gpu, False),
        ),
        *((True, "device", gpu, True), (True, "device", some, True), (False, "device", cpu, True)),
        *((False, "auto", gpu, False), (False, "allreduce", gpu, False), (False, "auto", some, False)),
    ):
        sums.cuda_aware = lambda able=readable: able
        assert sums.sums_on_device(comms, wanted, device) == expected, (readable, wanted, device)
    for device in (gpu, some):
        with pytest.raises(UserError, match="cluster.reduction"):
            sums.sums_on_device(comms, "device", device)
    comms.free()


def relay_between_all(cluster: Cluster) -> None:
    """A model goes twice round the ring of the ranks, and all ranks send large arrays before any receives."""
    if cluster.size == 1:
        return
    mail, before, after = cluster.messages(), (cluster.rank - 1) % cluster.size, (cluster.rank + 1) % cluster.size
    model = np.zeros((3, 1_000), np.float32)
    for lap in range(2):
        if lap or cluster.rank:
            mail.recv(model, before)
        model += cluster.rank + 1
        mail.send(model, after)
        model[:] = -1  # the sent values are a copy
    if cluster.is_server:
        mail.recv(model, before)
        assert np.all(model == 2 * sum(range(1, cluster.size + 1)))
    for tag, value in ((0, 1.0), (0, 2.0), (5, 3.0)):
        mail.send(np.full(500_000, 10 * cluster.rank + value), after, tag)
    for tag, value in ((5, 3.0), (0, 1.0), (0, 2.0)):
        assert np.all(mail.recv(np.empty(500_000), before, tag) == 10 * before + value)
    mail.send(np.zeros(3), after)
    try:
        mail.recv(np.zeros(4), before)
    except ValueError as error:
        assert "expected" in str(error)
    else:
        raise AssertionError("a message of the wrong length was accepted")
    mail.recv(np.zeros(3), before)
    if cluster.size > 2:
        relay_in_groups(mail, cluster)


def relay_in_groups(mail: Messages, cluster: Cluster) -> None:
    """Groups that overlap have a sub-communicator each; those beyond the limit use the communicator of all ranks."""
    everybody, pairs = tuple(range(cluster.size)), [(0, rank) for rank in range(1, cluster.size)]
    for most in (cluster.size, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages, "MOST_GROUPS", most)
            mail.use_groups([everybody, *pairs])
        sizes = [comm.size for comm in mail._groups.values() if comm]
        assert sizes == [cluster.size, *([2] * (len(pairs) if cluster.is_server else 1) if most > 1 else [])]
        for pair in pairs:
            if cluster.is_server:
                mail.send(np.array([2.0]), pair[1], 7, everybody)
                mail.send(np.array([1.0]), pair[1], 7, pair)
            elif cluster.rank in pair:
                assert mail.recv(np.empty(1), 0, 7, pair) == 1
                assert mail.recv(np.empty(1), 0, 7, everybody) == 2
        mail.end_round()


def hand_over(folder: str) -> None:
    """A model leaves while its sender computes: rank 0 calls no MPI until the last rank says, by a file, that it came.

    The first large message between two hosts needs a handshake, which waited for the sender's next call of MPI.
    """
    cluster, here = Cluster.connect(), Path(folder)
    mail, last, limit = cluster.messages(), cluster.size - 1, time.monotonic() + 60
    for values in (1_000_000, 100, 2_000_000):
        arrived = here / str(values)
        if cluster.rank == 0:
            mail.send(np.zeros(values), last)
            while not arrived.exists():
                time.sleep(0.01)  # anything but a call of MPI
                assert time.monotonic() < limit, f"{values} values wait for the sender's next call of MPI"
        elif cluster.rank == last:
            time.sleep(0.05)  # the sender is at work by then
            mail.recv(np.empty(values), 0)
            arrived.touch()
        cluster.sum_tensor(3, "int64")
        cluster.reduce_tensor()
    cluster.close()


def fail(how: str, who: str = "1") -> int:
    """The named ranks fail in the given way while the others wait for them."""
    cluster = Cluster.connect()
    if who == "all" or cluster.rank == int(who):
        if how == "exception":
            raise ZeroDivisionError("a test fault")
        if how == "client":
            raise ClientFailure(17, cluster.rank, ValueError("bad sample"))
        if how == "user":
            raise UserError("the folder 'nowhere' does not exist. Prepare it first")
        if how == "different":
            raise UserError(f"rank {cluster.rank} cannot read its own folder: check it")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how.isdigit():
            sys.exit(int(how))
        if how.startswith("return"):
            return int(how.removeprefix("return"))
    cluster.barrier()
    return 0


def wait_politely() -> None:
    """Ranks that wait for a late one hardly use their cores, and continue soon after it has come."""
    cluster = Cluster.connect()
    mail, others = cluster.messages(), range(1, cluster.size)
    window.LONGEST_REST = 60.0
    cluster.sum_tensor(1_000, "float32")
    for exchange in (
        cluster.barrier,
        cluster.reduce_tensor,
        lambda: cluster.maximum(1),
        lambda: cluster.gather(np.arange(3)),
        lambda: cluster.broadcast([np.arange(100_000)] if cluster.is_server else None),
        lambda: mail.recv(np.empty(9), 0) if cluster.rank else [mail.send(np.zeros(9), rank) for rank in others],
    ):
        cluster.barrier()
        if cluster.is_server:
            time.sleep(LATE)
        began, busy = time.monotonic(), time.process_time()
        exchange()
        assert time.process_time() - busy < LATE / 2, "a rank spins"
        assert time.monotonic() - began < 30, "a rank was not woken"
    cluster.close()


def progress() -> None:
    """A rank at the board still progresses its MPI operations: a large message to a rank that waits for it."""
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


def many_meetings(rounds: str) -> None:
    """No rank leaves a meeting before all have come, in any order."""
    cluster, naps = Cluster.connect(), random.Random(os.getpid())
    sums = cluster.sum_tensor(cluster.size, "int64")
    for t in range(int(rounds)):
        sums[cluster.rank] = t
        if naps.random() < 0.3:
            time.sleep(naps.random() * 0.002)
        cluster.barrier()
        received = cluster.broadcast([np.full(t % 7, t), np.array([t])] if cluster.is_server else None)
        assert len(received[0]) == t % 7 and received[1][0] == t and (received[0] == t).all()
        assert (np.asarray(cluster.reduce_tensor()) == t).all()
    cluster.close()


def server_away() -> None:
    """Sums are the same where a server that only serves leaves them to the others, as it does on shared cores."""
    cluster = Cluster.connect()
    cluster.server_trains = False
    check_sum(cluster, 30_011, "float32", 10)
    check_sum(cluster, 5_003, "int64", 10)
    crowded = cluster.size > cluster.fewest_cores
    assert (cluster.moved["window"] == 0) == (cluster.is_server and crowded)
    cluster.close()


def without(what: str) -> None:
    """Without a board on a node, ranks wait and sum as ever: no semaphores, no room, or no memory to share."""
    if what == "semaphores":
        window.semaphores_work = lambda: False
    elif what == "room":
        window.shared_memory_lacks = lambda nbytes: True
    elif what == "memory":
        window.Board = _refused  # type: ignore[assignment,misc]
    cluster = Cluster.connect("window")
    assert (cluster._board is None) == (not what.startswith("sums"))
    if what == "sums-room":  # for messages, but not for sums
        window.shared_memory_lacks = lambda nbytes: True
    elif what == "sums-memory":
        window.WindowSum = _refused  # type: ignore[assignment,misc]
    check_sum(cluster, 30_011, "float32", 3)
    assert cluster.broadcast([np.arange(3)] if cluster.is_server else None)[0].tolist() == [0, 1, 2]
    assert cluster.moved["window"] == 0 and cluster.moved["allreduce"] > 0
    cluster.close()


def _refused(*_: Any) -> None:
    from mpi4py import MPI

    raise MPI.Exception(MPI.ERR_OTHER)


REPLACED: list[tuple[Any, str]] = [
    (Communicators, "ranks_of_node"),
    *((window, name) for name in ("LONGEST_REST", "semaphores_work", "Board", "WindowSum", "shared_memory_lacks")),
    (sums, "cuda_aware"),
]
"""Module values that programs replace; they are restored for the next program of the job."""


def main() -> int | None:
    """Run the programs on the command line sequentially; return the result of the last one."""
    asked: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        asked.append([]) if word == "+" else asked[-1].append(word)
    own = [getattr(*place) for place in REPLACED]
    result: int | None = None
    for name, *arguments in asked:
        result = globals()[name](*arguments)
        for place, value in zip(REPLACED, own, strict=True):
            setattr(*place, value)
        if len(asked) > 1:
            sys.stdout.write(f"passed: {' '.join([name, *arguments])}\n")
            sys.stdout.flush()
    return result


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
