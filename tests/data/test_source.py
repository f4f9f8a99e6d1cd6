"""What engines read: normalized tensors, one client or thousands."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmpi import ClientArrays
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription
from fedmpi.data.shards import ShardStore
from fedmpi.data.source import LEAST_SHARED, ClientData, Normaliser

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
    rows_of = [None, np.array([2, 1]), np.array([], np.int64), None]
    x, y = data.load_many(clients, rows_of)
    each = [data.load(client, rows) for client, rows in zip(clients, rows_of, strict=True)]
    assert torch.equal(x, torch.cat([part[0] for part in each]))
    assert torch.equal(y, torch.cat([part[1] for part in each]))


def test_a_client_read_whole_stays_within_the_budget(store: ShardStore) -> None:
    keeping, reading = ClientData(store), ClientData(store, resident_bytes=0)
    assert keeping.load(2)[0].data_ptr() == keeping.load(2)[0].data_ptr()
    first = reading.load(2)[0]
    assert first.data_ptr() != reading.load(2)[0].data_ptr() and torch.equal(first, keeping.load(2)[0])


def test_tokens_stay_int32() -> None:
    normalize = Normaliser(DataDescription((4,), "int32", 2, "text", 9, (), ()), torch.device("cpu"))
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    assert torch.equal(normalize(tokens), torch.from_numpy(tokens))


def test_vectors_are_normalized_by_one_mean_or_left_alone() -> None:
    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    scaled = Normaliser(DataDescription((2,), "float32", 2, "vector", 0, (1.0,), (2.0,)), torch.device("cpu"))(x)
    plain = Normaliser(DataDescription((2,), "float32", 2, "vector", 0, (), ()), torch.device("cpu"))(x)
    assert scaled.tolist() == [[0.0, 0.5], [1.0, 1.5]] and plain.tolist() == x.tolist()


def test_the_test_part_is_normalized_as_the_training_part(store: ShardStore) -> None:
    data = ClientData(store)
    x, y = data.test()
    assert torch.equal(x[:3], data.load(0)[0]) and y.tolist() == [0, 1, 2] * 3
    assert torch.equal(data.test(2, 5)[0], x[2:5]) and data.validation() is None


def floats(**more: object) -> ClientArrays:
    x = np.random.default_rng(3).standard_normal((10, LEAST_SHARED // 8)).astype(np.float32)  # 3 are enough
    return ClientArrays(x, np.arange(10) % 2, np.repeat([0, 1], 5), test=(x[:3], [0, 1, 0]), **more)  # type: ignore[arg-type]


def test_samples_that_stay_as_they_are_are_not_copied() -> None:
    arrays = floats()
    data = ClientData(arrays.store, resident_bytes=0)
    for x, there in ((data.load(1)[0], arrays.x[5:]), (data.test()[0], arrays.test[0])):
        assert x.data_ptr() == there.ctypes.data and np.array_equal(x.numpy(), there)
    scaled = ClientData(floats(mean=1.0).store).load(1)[0]
    assert scaled.data_ptr() != arrays.x[5:].ctypes.data and np.array_equal(scaled.numpy(), arrays.x[5:] - 1)


def test_a_few_values_are_copied_sooner() -> None:
    plain = Normaliser(DataDescription((2,), "float32", 2, "vector", 0, (), ()), torch.device("cpu"))
    for values, lent in ((LEAST_SHARED // 4 - 2, False), (LEAST_SHARED // 4, True)):
        x = np.ones((values // 2, 2), np.float32)
        assert (plain(x).data_ptr() == x.ctypes.data) is lent and plain(x).tolist() == x.tolist()


def test_only_what_is_copied_counts_as_resident(tmp_path: Path) -> None:
    floats().save(tmp_path / "floats")
    targets = 5 * 8
    for budget, kept in ((targets - 1, False), (targets + 1024, True)):
        data = ClientData(open_store(tmp_path / "floats"), resident_bytes=budget)
        assert (data.load(0)[1] is data.load(0)[1]) is kept


def test_a_tensor_outlives_the_store_whose_file_it_lies_on(tmp_path: Path) -> None:
    arrays = floats()
    arrays.save(tmp_path / "floats")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's of arrays that cannot be written to
        x = ClientData(open_store(tmp_path / "floats")).load(0)[0]
    gc.collect()
    assert np.array_equal(x.numpy(), arrays.x[:5])


def test_arrays_that_torch_cannot_lie_on_are_copied() -> None:
    plain = Normaliser(DataDescription((2,), "float32", 2, "vector", 0, (), ()), torch.device("cpu"))
    x = np.arange(LEAST_SHARED, dtype=np.float32).reshape(-1, 2)
    turned, swapped = np.asfortranarray(x), x.astype(">f4")
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(-1, 2)
    assert not odd.flags.aligned
    for given in (turned, swapped, odd, x.astype(np.float64)):
        assert plain(given).tolist() == x.tolist()
