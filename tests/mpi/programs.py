"""What the ranks of the tests' jobs run: `python -m tests.mpi.programs NAME [ARGUMENTS] [+ NAME [ARGUMENTS]]`.

A wrong result raises. Of several programs, run one after another, every rank says which have passed.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from fedmpi import ClientFailure, UserError
from fedmpi.mpi import Cluster, collectives, column_rows, groups, window
from fedmpi.mpi.board import Board
from fedmpi.mpi.collectives import Communicators
from fedmpi.mpi.window import agree_on_device, cuda_aware
from fedmpi.process.exit_codes import run_guarded
from tests.quick_end import end_quickly

DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64")


def exchanges(chunk: str = "") -> None:
    """Broadcast, gather, maximum and counters; with a chunk every message longer than it is cut."""
    if chunk:
        collectives.CHUNK = groups.CHUNK = collectives.MOST_VALUES = int(chunk)
    cluster = Cluster.connect()
    check_broadcast(cluster)
    check_gather(cluster)
    assert cluster.maximum(10 - cluster.rank) == 10
    assert cluster.maximum(-5 * cluster.rank) == 0
    shared, own = cluster.share_bytes(), cluster.bytes_moved
    gathered = cluster.gather(np.array([own.total]))
    if gathered is not None:
        assert shared.total == sum(int(total[0]) for total in gathered)
    relay_between_all(cluster)
    check_sum(cluster, 5_000, "float64", 3)
    cluster.close()


def check_broadcast(cluster: Cluster) -> None:
    generator = np.random.default_rng(3)
    sent = [(generator.random((3, 5)) * 100).astype(dtype) for dtype in DTYPES]
    sent += [np.empty((0, 4), np.float32), np.array(7.5), np.arange(4000)[::2], np.arange(12).reshape(3, 4).T]
    for arrays in (sent, [], [np.empty(0, np.int64)]):
        received = cluster.broadcast(arrays if cluster.is_server else None)
        assert len(received) == len(arrays)
        for expected, array in zip(arrays, received, strict=True):
            assert array.dtype == expected.dtype and array.shape == expected.shape
            assert np.array_equal(array, expected)
    assert cluster.size == 1 or cluster.bytes_moved.broadcast == sum(array.nbytes for array in sent)


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
        slot = cluster.sum_buffer(count, dtype)
        slot[:] = 0
        nap(naps)
        slot += values(cluster.rank, t)
        nap(naps)
        total = cluster.reduce()
        assert not total.flags.writeable
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


def sum_rounds(reduction: str, rounds: str, chunk: str = "") -> None:
    """Repeated sums of two kinds, in turn; with a chunk longer ones are cut."""
    if chunk:
        collectives.MOST_VALUES = int(chunk)
    cluster = Cluster.connect(reduction)
    for _ in range(5):
        check_sum(cluster, 30_011, "float32", int(rounds) // 5)
        check_sum(cluster, 5_003, "int64", int(rounds) // 5)
    moved = cluster.share_bytes()
    if cluster.size > 1:
        assert (moved.window > 0) == (reduction == "window")
        assert (moved.allreduce > 0) == (reduction != "window" or cluster.nodes > 1)
    if cluster.is_server:
        sys.stdout.write(f"{cluster.nodes} nodes of {cluster.node_size}\n")  # one write: print makes two of a line
    cluster.close()


def round_sums() -> None:
    """The update and metrics of rounds are the same whichever way their one buffer is summed, float or exact."""
    import torch

    from fedmpi.common.plan import Plan
    from fedmpi.core.reduce import RankWork, RoundSum
    from fedmpi.local.work import WorkReport

    def update(rank: int, t: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng((rank, t)).standard_normal(5_003).astype(np.float32))

    for reduction in ("window", "allreduce", "device"):
        cluster = Cluster.connect(reduction)
        for exact in (False, True):
            summed = RoundSum(cluster, torch.zeros(5_003), exact)
            for t in range(3):
                summed.open(Plan(t, 0.1, np.arange(0), np.zeros(0), False, False), torch.zeros(5_003))
                summed.updates.add(update(cluster.rank, t), 0.5)
                report = WorkReport(clients=cluster.rank + 1, samples=10**9 + t, loss_sum=0.25)
                summed.close(RankWork(report), cluster.rank + 0.5, False)
                totals = summed.reduce()
                expected = sum(update(rank, t).double() for rank in range(cluster.size)) / 2
                assert totals.update.dtype == torch.float32
                assert torch.allclose(totals.update.double(), expected, rtol=0, atol=1e-5)
                assert totals.sums["clients"] == cluster.size * (cluster.size + 1) / 2
                assert totals.sums["samples"] == cluster.size * (10**9 + t)
                assert totals.sums["loss_sum"] == cluster.size / 4
                assert totals.busy.tolist() == [rank + 0.5 for rank in range(cluster.size)]
                checksum = crc32(totals.update.numpy().tobytes())
                assert cluster.maximum(checksum) == -cluster.maximum(-checksum), "the ranks' bits differ"
            summed.release()
        cluster.close()


def combined_updates(folder: str) -> None:
    """Every combiner on the same updates, dealt unevenly to the ranks: what they make of them, kept by rank 0."""
    import torch

    from fedmpi.aggregation.combiners import Combiner
    from fedmpi.aggregation.combining import CombinedSum
    from fedmpi.aggregation.exact import FloatSum
    from fedmpi.common.plan import Plan
    from fedmpi.common.registry import resolve

    rules = {
        "median": {},
        "trimmed-mean": {"trim": 0.2},
        "krum": {"byzantine": 2, "keep": 3},
        "norm-clip": {"bound": 3.0},
        "tests.mpi.combiners:spread": {"power": 1.5},
    }
    cluster, results = Cluster.connect(), {}
    for number, ((name, options), values) in enumerate(product(rules.items(), (20_003, 300))):  # 300: no block for each
        total = FloatSum(cluster.sum_tensor(values, "float32", torch.device("cpu")))
        kept = CombinedSum(total, Combiner(resolve("aggregator", name), options), cluster, torch.zeros(values))
        for t in range(2):
            column_rows.calls_from_threads = lambda threads=t == 0: threads  # received beside the work, and without
            kept.reset()
            kept.begin(Plan(t, 0.1, np.arange(11), np.zeros(11), False, True), torch.zeros(values))
            for client in range(11):
                if client * client % cluster.size == cluster.rank:  # of three ranks the last one has none
                    drawn = np.random.default_rng((number, t, client)).standard_normal(values)
                    kept.add(torch.from_numpy(drawn).float(), 1.0 + client, client)
            kept.flush()
            assert kept.combined == 11
            results[f"{name} {values} {t}"] = kept.to_update(cluster.reduce_tensor()).numpy()
    refused = CombinedSum(total, Combiner(resolve("aggregator", "krum"), {"byzantine": 5}), cluster, torch.zeros(300))
    refused.begin(Plan(0, 0.1, np.arange(11), np.zeros(11), False, True), torch.zeros(300))
    for client in range(11 if cluster.rank == cluster.size - 1 else 0):
        refused.add(torch.ones(300), 1.0, client)
    try:
        refused.flush()
    except UserError as error:  # on every rank, also where there is no coordinate to combine
        assert "needs more than 12 participants that send an update, but a round has 11" in str(error)
    else:
        raise AssertionError("krum took a round that its attackers could outvote")
    moved = cluster.share_bytes()
    assert (moved.exchange > 0) == (cluster.size > 1)
    if cluster.is_server:
        np.savez(Path(folder) / f"combined{cluster.size}.npz", **results)
    cluster.close()


def gpus_without_cuda_aware_mpi() -> None:
    """What all ranks decide when their tensors lie on GPUs and this MPI does not read them; no GPU is touched."""
    import torch
    from mpi4py import MPI

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    assert cuda_aware() == ("--with-cuda" in MPI.Get_library_version())
    if cuda_aware():
        sys.stdout.write("cuda-aware\n")
        return
    comms, gpu = Communicators.split(MPI.COMM_WORLD), torch.device("cuda:0")
    some = gpu if comms.world.rank else torch.device("cpu")
    for device in (gpu, some):
        assert not agree_on_device(comms, "auto", device, "This MPI")
        try:
            agree_on_device(comms, "device", device, "This MPI")
        except UserError as error:
            assert "which This MPI is not" in str(error)
        else:
            raise AssertionError("sums on GPUs were promised")
    assert agree_on_device(comms, "device", torch.device("cpu"), "This MPI")
    assert not agree_on_device(comms, "auto", torch.device("cpu"), "This MPI")
    comms.free()


def broken_protocol() -> None:
    """The window without its second barrier: the checks have to notice."""
    calls = 0
    synchronise = window.WindowSum._synchronise

    def every_other(self: window.WindowSum) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            synchronise(self)

    cluster = Cluster.connect("window")
    cluster.sum_buffer(30_011, "float32")
    window.WindowSum._synchronise = every_other
    check_sum(cluster, 30_011, "float32", 50)


def large_sum(values: str) -> None:
    """A window asked for, with more values than a small shared memory holds."""
    logging.basicConfig(level=logging.INFO)
    cluster = Cluster.connect("window")
    slot = cluster.sum_buffer(int(values), "float32")
    slot[:] = cluster.rank + 1
    assert np.all(cluster.reduce() == cluster.size * (cluster.size + 1) / 2)
    cluster.close()


def relay_between_all(cluster: Cluster) -> None:
    """A model goes twice round the ring of the ranks, backwards and forwards, and hop by hop through smaller groups."""
    for ranks in (range(cluster.size), range(cluster.size - 1, -1, -1)):
        group = joined(cluster, ranks)
        assert group.ranks == tuple(ranks) and group.ranks[group.rank] == cluster.rank
        model = np.zeros((3, 1_000), np.float32)
        for lap in range(2):
            if lap or group.rank:
                group.recv(model)
            model += cluster.rank + 1
            group.send(model)
            model[:] = -1  # the sent values are a copy
        if group.rank == 0:
            group.recv(model)
            assert np.all(model == 2 * sum(range(1, cluster.size + 1)))


def joined(cluster: Cluster, ranks: Sequence[int]) -> groups.RankGroup:
    """The one group of these ranks, this one among them."""
    group = cluster.groups([ranks])[0]
    assert group is not None
    return group


def relays(most: str, rounds: str, made_at_least: str) -> None:
    """Rounds of random groups of all lengths, handing values around, with few communicators at a time."""
    groups.MOST_COMMUNICATORS = int(most)
    cluster = Cluster.connect()
    all_groups = [ranks for size in range(1, cluster.size + 1) for ranks in permutations(range(cluster.size), size)]
    made = count_made()
    for t in range(int(rounds)):
        drawn = np.random.default_rng(t).choice(len(all_groups), len(all_groups) // 2)
        wanted, naps = [all_groups[g] for g in drawn], random.Random(cluster.rank + 100 * t)
        mine = cluster.groups(wanted)
        assert [group is not None for group in mine] == [cluster.rank in ranks for ranks in wanted]
        for tag, group in enumerate(mine):
            if group is not None:
                group.send(np.array([t, tag, cluster.rank]), tag=tag)
        if t % 10 == 0:
            nap(naps)
        for tag, group in reversed([*enumerate(mine)]):
            if group is not None:
                before = group.ranks[group.rank - 1]
                assert group.recv(np.empty(3, np.int64), tag=tag).tolist() == [t, tag, before]
        cluster.sum_buffer(3, "int64")
        cluster.reduce()
    old = joined(cluster, range(cluster.size))
    cluster.groups([ranks for ranks in all_groups if len(ranks) > 1 and ranks != old.ranks][: int(most)])
    try:
        old.send(np.zeros(1))
    except RuntimeError as error:
        assert "was freed" in str(error)
    else:
        raise AssertionError("a freed group still sends")
    if cluster.size > 1:
        everywhere = cluster.gather(np.array(made))
        if everywhere is not None:
            assert min(int(count[0]) for count in everywhere) >= int(made_at_least), everywhere
    cluster.close()


def more_groups_than_allowed() -> None:
    """One round of 1,100 different groups, with the real bound of communicators; every group hands a value around."""
    cluster = Cluster.connect()
    every = [ranks for size in range(2, cluster.size + 1) for ranks in permutations(range(cluster.size), size)]
    wanted = [every[g] for g in np.random.default_rng(0).permutation(len(every))[:1100]]
    made = count_made()
    mine = cluster.groups(wanted)
    own = [cluster.rank in ranks for ranks in wanted]
    assert made[0] == sum(own[: groups.MOST_COMMUNICATORS]) < sum(own), "some of this rank's have none of their own"
    assert [group is not None for group in mine] == own
    for tag, group in enumerate(mine):
        if group is not None:
            group.send(np.array([tag, cluster.rank]), tag=tag)
    for tag, group in reversed([*enumerate(mine)]):
        if group is not None:
            before = group.ranks[group.rank - 1]
            assert group.recv(np.empty(2, np.int64), tag=tag).tolist() == [tag, before]
    cluster.close()


def count_made() -> list[int]:
    """How many communicators this rank will have made, as a list of one number that grows."""
    made, create = [0], groups.Groups._create

    def counted(self: groups.Groups, ranks: tuple[int, ...]) -> Any:
        made[0] += 1
        return create(self, ranks)

    groups.Groups._create = counted  # type: ignore[method-assign]
    return made


def hand_over(folder: str) -> None:
    """A model leaves while its sender computes: rank 0 calls no MPI until the last rank says, by a file, that it came.

    The first large message between two hosts needs a handshake, which waited for the sender's next call of MPI.
    """
    cluster, here = Cluster.connect(), Path(folder)
    last, limit = cluster.size - 1, time.monotonic() + 60
    for values in (1_000_000, 100, 2_000_000):
        group, arrived = cluster.groups([(0, last)])[0], here / str(values)
        if cluster.rank == 0:
            assert group is not None
            group.send(np.zeros(values))
            while not arrived.exists():
                time.sleep(0.01)  # anything but a call of MPI
                assert time.monotonic() < limit, f"{values} values wait for the sender's next call of MPI"
        elif cluster.rank == last:
            assert group is not None
            time.sleep(0.05)  # the sender is at work by then
            group.recv(np.empty(values))
            arrived.touch()
        cluster.sum_buffer(3, "int64")
        cluster.reduce()
        check_nothing_is_pushed()
    cluster.close()


def check_nothing_is_pushed() -> None:
    """The thread that makes MPI work beside this rank's ends with the round, or when the groups are freed."""
    limit = time.monotonic() + 60
    while any(thread.name == "fedmpi-sends" for thread in threading.enumerate()):
        assert time.monotonic() < limit, "a thread goes on to push messages"
        time.sleep(0.01)


def crossing_sends() -> None:
    """All send large arrays before any receives, twice on one tag and once on another."""
    cluster = Cluster.connect()
    group = joined(cluster, range(cluster.size))
    before = (cluster.rank - 1) % cluster.size
    for tag, value in ((0, 1.0), (0, 2.0), (5, 3.0)):
        group.send(np.full(500_000, 10 * cluster.rank + value), tag=tag)
    for tag, value in ((5, 3.0), (0, 1.0), (0, 2.0)):
        assert np.all(group.recv(np.empty(500_000), tag=tag) == 10 * before + value)
    try:
        group.send(np.zeros(3))
        group.recv(np.zeros(4))
    except ValueError as error:
        assert "expected" in str(error)
    else:
        raise AssertionError("a message of the wrong length was accepted")
    cluster.close()
    check_nothing_is_pushed()


def wait_politely(folder: str) -> None:
    """Rank 0 comes to every exchange only when all the others, waiting for it there, have slept often enough."""
    cluster, sleeps = Cluster.connect(), Sleeps()
    collectives.time = sleeps  # type: ignore[assignment]
    rest = Board._rest

    def counted(self: Board, waited: float) -> None:
        rest(self, waited)
        sleeps.slept()

    Board._rest = counted  # type: ignore[method-assign]
    group = joined(cluster, range(cluster.size))
    cluster.sum_buffer(1_000, "float32")
    for name, exchange in {
        "barrier": cluster.barrier,
        "reduce": cluster.reduce,
        "maximum": lambda: cluster.maximum(1),
        "broadcast": lambda: cluster.broadcast([np.arange(100_000)] if cluster.is_server else None),
        "recv": lambda: group.recv(np.empty(100_000), source=0) if cluster.rank else send_to_all(group),
    }.items():
        cluster.barrier()
        if cluster.is_server:
            others = [Path(folder) / f"{name}{rank}" for rank in range(1, cluster.size)]
            while not all(file.exists() for file in others):  # for ever where somebody spins: the job has a limit
                time.sleep(0.001)
        else:
            sleeps.mark_with(Path(folder) / f"{name}{cluster.rank}")
        exchange()
    cluster.close()


class Sleeps:
    """Stands for the module `time` where ranks wait, and makes a file when enough sleeps, or rests, were taken."""

    ENOUGH = 10

    def __init__(self) -> None:
        self.monotonic, self.file, self.count = time.monotonic, Path(os.devnull), 0

    def mark_with(self, file: Path) -> None:
        self.file, self.count = file, 0

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.slept()

    def slept(self) -> None:
        self.count += 1
        if self.count == self.ENOUGH:
            self.file.touch()


def send_to_all(group: groups.RankGroup) -> None:
    for member in range(1, group.size):
        group.send(np.zeros(100_000), to=member)


def different_buffers() -> None:
    cluster = Cluster.connect()
    cluster.sum_buffer(10 + cluster.rank, "float32")


def fail(how: str, who: str = "1") -> int:
    """The named ranks fail in the given way while the others wait for them."""
    cluster = Cluster.connect()
    if who == "all" or cluster.rank == int(who):
        if how == "exception":
            raise ZeroDivisionError("a made-up fault")
        if how == "client":
            raise ClientFailure(17, cluster.rank, ValueError("bad sample"))
        if how == "user":
            raise UserError("the folder 'nowhere' does not exist: prepare it first")
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


def say_hello() -> None:
    logging.basicConfig(level=logging.INFO)
    cluster = Cluster.connect()
    sys.stdout.write(
        f"rank {cluster.rank} of {cluster.size}, workers {cluster.workers}, worker {cluster.worker}, {cluster.mpi}\n"
    )
    assert [cluster.worker_rank(worker) for worker in range(cluster.workers)] == (
        [0] if cluster.size == 1 else list(range(1, cluster.size))
    )
    assert cluster.node_size <= cluster.size and cluster.threads_for_rank() >= 1
    cluster.close()


REPLACED = (
    (collectives, "CHUNK"),
    (groups, "CHUNK"),
    (collectives, "MOST_VALUES"),
    (groups, "MOST_COMMUNICATORS"),
    (groups.Groups, "_create"),
    (collectives, "time"),
    (Board, "_rest"),
)
"""What programs put other values into; the next program of the job finds the package's own."""


def run_programs(programs: Mapping[str, Any], replaced: Sequence[tuple[Any, str]]) -> int | None:
    """Run what the command line names, one after another; returns what the last one does."""
    asked: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        asked.append([]) if word == "+" else asked[-1].append(word)
    own = [getattr(*place) for place in replaced]
    result: int | None = None
    for name, *arguments in asked:
        result = programs[name](*arguments)
        for place, value in zip(replaced, own, strict=True):
            setattr(*place, value)
        if len(asked) > 1:
            sys.stdout.write(f"passed: {' '.join([name, *arguments])}\n")
            sys.stdout.flush()
    return result


def main() -> int | None:
    return run_programs(globals(), REPLACED)


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
