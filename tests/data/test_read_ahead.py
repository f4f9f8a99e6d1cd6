"""Clients announced ahead are read by the system while nobody waits, and only they."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.partitions import Partition
from data_prep.writer import write_shards
from fedmpi.data import shards
from fedmpi.data.assignment import offsets_of
from fedmpi.data.embedded import open_digits
from fedmpi.data.read_ahead import MOST_BYTES, MOST_RANGES, NEIGHBOURS, Request, read_ahead
from fedmpi.data.shards import ShardStore, open_store
from tests.data.conftest import small_raw

SIDE, ROWS, CLIENTS = 64, 64, 24
"""Clients of 1 MiB in three shards of 8 MiB."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = ROWS * CLIENTS
    small, shape = small_raw(rows), (4, SIDE, SIDE)
    images = np.random.default_rng(0).integers(0, 256, (rows, *shape), np.uint8)
    raw = replace(
        small,
        feature_shape=shape,
        mean=(),
        std=(),
        read=lambda wanted: images[wanted],
        test_x=images[: len(small.test_y)],
    )
    folder = tmp_path_factory.mktemp("ahead") / "shards"
    write_shards(raw, Partition(np.arange(rows), offsets_of(np.full(CLIENTS, ROWS)), "given", {}), folder, 3, 0, "test")
    return folder


@pytest.fixture
def cold(folder: Path) -> ShardStore:
    """The store, with none of its training pages in memory."""
    store = open_store(folder)
    for file in sorted(folder.glob("*.h5")):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if any(resident(store, client) > 0.05 for client in range(CLIENTS)):
        pytest.skip(f"the file system of {folder} does not let pages be dropped from memory")
    return store


def resident_pages(store: ShardStore, client: int) -> np.ndarray:
    """Which of a client's pages lie in memory, by mincore; reads none of them."""
    x, _ = store.client(client)
    first = x.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(x.ctypes.data + x.nbytes - first) // mmap.PAGESIZE)
    answer = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    code = libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), answer)
    assert code == 0, os.strerror(ctypes.get_errno())
    return (np.frombuffer(answer, np.uint8) & 1).astype(bool)


def resident(store: ShardStore, client: int) -> float:
    """Share of a client's pages that lie in memory."""
    return float(resident_pages(store, client).mean())


def wait_until_read(store: ShardStore, clients: list[int]) -> None:
    """Until every page has been seen in memory: a system short of it, or eager to free it, takes single pages back.

    The system reads in its own time, up to half a minute on a busy machine.
    """
    seen = {client: resident_pages(store, client) for client in clients}
    for _ in range(1500):
        if all(pages.all() for pages in seen.values()):
            return
        time.sleep(0.02)
        for client, pages in seen.items():
            pages |= resident_pages(store, client)
    pytest.fail(f"not read: {[(client, float(pages.mean())) for client, pages in seen.items()]}")


def test_announced_clients_are_read_and_far_away_ones_are_not(cold: ShardStore) -> None:
    announced = [1, 2, 13]
    cold.expect(np.array(announced))
    wait_until_read(cold, announced)
    assert [resident(cold, client) for client in (5, 7, 9, 18, 23)] == [0.0] * 5


def test_nothing_is_read_when_nobody_is_announced(cold: ShardStore) -> None:
    cold.expect(np.empty(0, np.int64))
    assert max(resident(cold, client) for client in range(CLIENTS)) < 0.05


def test_a_client_is_announced_once_until_much_else_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(folder)
    assert store.unannounced(np.array([1, 4, 20])).tolist() == [1, 4, 20]
    assert store.unannounced(np.array([1, 5, 20])).tolist() == [5]
    monkeypatch.setattr(shards, "physical_memory", lambda: 20 << 20)  # forgotten after a quarter: 5 clients
    assert store.unannounced(np.array([1, 2, 3])).tolist() == [2, 3]
    assert store.unannounced(np.array([1, 2])).tolist() == [1, 2]


def test_clients_in_memory_need_no_announcement() -> None:
    open_digits().expect(np.arange(5))


class Noting:
    """Stands where a mapping does and notes what is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def madvise(self, advice: int, start: int, length: int) -> None:
        assert advice == mmap.MADV_WILLNEED and start % mmap.PAGESIZE == 0
        self.asked.append((start, start + length))


def asked_for(starts: list[int], stops: list[int], requests: int = 1) -> list[tuple[int, int]]:
    noting = Noting()
    read_ahead([Request(noting, np.array(starts), np.array(stops))] * requests)  # type: ignore[arg-type]
    return noting.asked


def test_neighbours_are_asked_for_as_one() -> None:
    far = 2 * NEIGHBOURS + 100
    assert asked_for([10, 300, far + 5000], [300, 5000, far + 6000]) == [
        (0, 5000),
        ((far + 5000) // mmap.PAGESIZE * mmap.PAGESIZE, far + 6000),
    ]


def test_the_number_of_ranges_and_their_bytes_are_bounded() -> None:
    starts = [10 * NEIGHBOURS * i for i in range(MOST_RANGES + 50)]
    assert len(asked_for(starts, [start + 100 for start in starts])) == MOST_RANGES
    assert asked_for([0, 2 * MOST_BYTES], [MOST_BYTES + 9, 3 * MOST_BYTES]) == [(0, MOST_BYTES)]
