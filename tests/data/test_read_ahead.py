"""Clients announced ahead are asked of the system, and only they; what the system makes of it is its own affair."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.partitions import Partition
from data_prep.writer import write_shards
from fedmpi.common.apportionment import offsets_of
from fedmpi.data import shards
from fedmpi.data.opening import open_store
from fedmpi.data.shardfile import MOST_BYTES, MOST_RANGES, NEIGHBOURS, ReadRequest, read_ahead
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
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the store asks the system to read: the bytes of the files, range by range."""
    found: list[bytes] = []

    def note(requests: list[ReadRequest]) -> None:
        read_ahead(requests)  # the system takes it
        for request in requests:
            found.extend(
                bytes(request.mapping[start:stop])
                for start, stop in zip(request.starts.tolist(), request.stops.tolist(), strict=True)
            )

    monkeypatch.setattr(shards, "read_ahead", note)
    return found


def test_announced_clients_are_asked_for_and_nothing_else(folder: Path, asked: list[bytes]) -> None:
    store, announced = open_store(folder), [1, 2, 13]
    store.expect(np.array(announced))
    samples = [store.client(client) for client in announced]
    expected = [array.tobytes() for x, y in samples for array in (x, y)]
    assert sorted(asked) == sorted(expected)
    assert sum(map(len, asked)) == sum(x.nbytes + y.nbytes for x, y in samples)


def test_a_client_is_announced_once_until_much_else_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(folder)
    assert store.unannounced(np.array([1, 4, 20])).tolist() == [1, 4, 20]
    assert store.unannounced(np.array([1, 5, 20])).tolist() == [5]
    monkeypatch.setattr(shards, "physical_memory", lambda: 20 << 20)  # forgotten after a quarter: 5 clients
    assert store.unannounced(np.array([1, 2, 3])).tolist() == [2, 3]
    assert store.unannounced(np.array([1, 2])).tolist() == [1, 2]


class Noting:
    """Stands where a mapping does and notes what is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def madvise(self, advice: int, start: int, length: int) -> None:
        assert advice == mmap.MADV_WILLNEED and start % mmap.PAGESIZE == 0
        self.asked.append((start, start + length))


def asked_for(starts: list[int], stops: list[int], requests: int = 1) -> list[tuple[int, int]]:
    noting = Noting()
    read_ahead([ReadRequest(noting, np.array(starts), np.array(stops))] * requests)  # type: ignore[arg-type]
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
