"""The data source of the engines: normalized tensors, one client or thousands."""

from __future__ import annotations

import gc
import mmap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedmpi import ClientArrays
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription
from fedmpi.data.shards import Section, ShardStore
from fedmpi.data.source import LEAST_SHARED, ClientData, Normalizer, Residence

SIZES = [3, 1, 7, 4, 5]


@pytest.fixture
def store(write: Callable[..., Path]) -> ShardStore:
    return open_store(write(SIZES, 3))


def test_images_are_normalized_per_channel(store: ShardStore) -> None:
    x, y = ClientData(store).load(2)
    raw = torch.arange(4, 11, dtype=torch.float32) / 255
    assert x.shape == (7, 2, 2, 2) and x.dtype == torch.float32 and y.dtype == torch.int64
    torch.testing.assert_close(x[:, 0, 0, 0], (raw - 0.25) / 0.5)
    torch.testing.assert_close(x[:, 1, 1, 0], (raw - 0.5) / 0.25)


def test_chosen_rows_come_in_the_order_asked_for(store: ShardStore) -> None:
    data = ClientData(store)
    rows = np.array([6, 0, 3, 0])
    before = data.load(2, rows)
    everything = data.load(2)
    after = data.load(2, rows)  # now from the copy kept
    for got in (before, after):
        assert torch.equal(got[0], everything[0][rows]) and torch.equal(got[1], everything[1][rows])


def test_many_clients_are_the_concatenation_of_each(store: ShardStore) -> None:
    data = ClientData(store)
    clients = [4, 0, 2, 1]
    rows_of = [np.arange(5), np.array([2, 1]), np.array([], np.int64), np.array([0])]
    first = np.cumsum(SIZES) - SIZES
    x, y = data.load_positions(np.concatenate([first[k] + rows for k, rows in zip(clients, rows_of, strict=True)]))
    each = [data.load(client, rows) for client, rows in zip(clients, rows_of, strict=True)]
    assert torch.equal(x, torch.cat([part[0] for part in each]))
    assert torch.equal(y, torch.cat([part[1] for part in each]))


def test_a_client_read_whole_stays_within_the_budget(store: ShardStore) -> None:
    keeping, reading = ClientData(store), ClientData(store, resident_bytes=0)
    assert keeping.load(2)[0].data_ptr() == keeping.load(2)[0].data_ptr()
    first = reading.load(2)[0]
    assert first.data_ptr() != reading.load(2)[0].data_ptr() and torch.equal(first, keeping.load(2)[0])


def test_each_dtype_is_normalized_in_its_way() -> None:
    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    for dtype, mean, expected in (("float32", (1.0,), [[0.0, 0.5], [1.0, 1.5]]), ("float32", (), x), ("int32", (), x)):
        description = DataDescription(
            (2,), dtype, 2, "text" if dtype == "int32" else "vector", 9, mean, mean and (2.0,)
        )
        found = Normalizer(description, torch.device("cpu"))(x.astype(dtype))
        assert found.tolist() == np.asarray(expected).tolist() and str(found.dtype) == f"torch.{dtype}"


def floats(**more: object) -> ClientArrays:
    x = np.random.default_rng(3).standard_normal((10, LEAST_SHARED // 8)).astype(np.float32)  # 3 are enough
    return ClientArrays(x, np.arange(10) % 2, np.repeat([0, 1], 5), test=(x[:3], [0, 1, 0]), **more)  # type: ignore[arg-type]


def test_samples_that_stay_as_they_are_are_not_copied(tmp_path: Path) -> None:
    arrays = floats()
    arrays.save(tmp_path / "floats")
    data = ClientData(arrays.store, resident_bytes=0)
    for x, there in ((data.load(1)[0], arrays.x[5:]), (data.test()[0], arrays.test[0])):
        assert x.data_ptr() == there.ctypes.data and np.array_equal(x.numpy(), there)
    scaled = ClientData(floats(mean=1.0).store).load(1)[0]
    assert scaled.data_ptr() != arrays.x[5:].ctypes.data and np.array_equal(scaled.numpy(), arrays.x[5:] - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's of arrays that cannot be written to
        x = ClientData(open_store(tmp_path / "floats")).load(0)[0]
    gc.collect()  # the tensor remains after the store whose file it maps
    assert np.array_equal(x.numpy(), arrays.x[:5])
    for budget, kept in ((5 * 8 - 1, False), (5 * 8 + 1024, True)):  # only the targets are copied, and count
        data = ClientData(open_store(tmp_path / "floats"), resident_bytes=budget)
        assert (data.load(0)[1] is data.load(0)[1]) is kept


def test_arrays_whose_memory_torch_cannot_share_are_copied() -> None:
    plain = Normalizer(DataDescription((2,), "float32", 2, "vector", 0, (), ()), torch.device("cpu"))
    x = np.arange(LEAST_SHARED, dtype=np.float32).reshape(-1, 2)
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(-1, 2)
    assert not odd.flags.aligned
    for given in (np.asfortranarray(x), x.astype(">f4"), odd, x.astype(np.float64)):
        assert plain(given).tolist() == x.tolist()


def test_rows_are_read_ahead_from_the_page_on_which_they_begin() -> None:
    seen: list[tuple[int, int]] = []
    section = Section(Path("some.h5"), mmap.ALLOCATIONGRANULARITY + 100, (9, 5000), np.dtype(np.uint8))
    mapping = SimpleNamespace(madvise=lambda advice, start, length: seen.append((start, start + length)))
    section.__dict__["_mapping"] = SimpleNamespace(_mmap=mapping)
    section.read_ahead(2, 4)  # the mapping begins 100 bytes before the dataset
    assert seen == [(10_100 // mmap.PAGESIZE * mmap.PAGESIZE, 20_100)]


def test_ranks_that_share_a_gpu_leave_half_of_it_free_together() -> None:
    """Four of 1000 bytes in steps of ten: each could keep 500 by itself, but what the others keep is seen."""
    used, kept = 0, [0] * 4
    ranks = [Residence(500, lambda: 1000 - used) for _ in range(4)]
    for _ in range(100):
        for rank, residence in enumerate(ranks):
            used += 10  # the piece is on the device when it is requested
            if residence.takes(10):
                kept[rank] += 10
            else:
                used -= 10
    assert sum(kept) == 500 and max(kept) - min(kept) <= 10
    alone = Residence(100)
    assert [alone.takes(size) for size in (60, 50, 40, 1, 0)] == [True, False, True, False, True]


def test_announced_clients_are_read_ahead_once(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    ahead = Section.read_ahead

    def noted(section: Section, first: int, last: int) -> None:
        ahead(section, first, last)  # the system takes it
        seen.append((section.path.name, first, last))

    monkeypatch.setattr(Section, "read_ahead", noted)
    store.expect(np.array([1, 2, 4]))  # in shards of clients 0 and 1, 2 and 3, and 4
    assert seen[::2] == seen[1::2] == [("train-00000.h5", 3, 4), ("train-00001.h5", 0, 7), ("train-00002.h5", 0, 5)]
    store.expect(np.array([0, 1, 2]))
    assert seen[6:] == [("train-00000.h5", 0, 3)] * 2
