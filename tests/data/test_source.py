"""The data source of the engines: normalized tensors, one client or thousands."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedmpi import ClientArrays
from fedmpi.common import arithmetic
from fedmpi.data import source
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription
from fedmpi.data.shards import ShardStore
from fedmpi.data.source import ClientData, Normalizer, loaded_ahead
from tests.local.elsewhere import elsewhere, transfers

SIZES = [3, 1, 7, 4, 5]


@pytest.fixture
def store(write: Callable[..., Path]) -> ShardStore:
    return open_store(write(SIZES, 3))


def test_a_second_stream_copies_the_next_samples_while_a_gpu_uses_these(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: events.append(f"{name} waits for {other.name}"))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(events.append(f"on {stream.name}")))
    monkeypatch.setattr(arithmetic, "second_stream", lambda device: stream("side"))
    for loaded in loaded_ahead(lambda k: (events.append(f"load {k}"), k)[1], range(2), torch.device("cuda")):
        events.append(f"use {loaded}")
    turn = ["main waits for side", "side waits for main", "on side"]
    assert events == [*turn, "load 0", *turn, "load 1", "use 0", *turn, "use 1"]


def test_images_are_normalized_per_channel(store: ShardStore) -> None:
    x, y = ClientData(store).load(2)
    raw = torch.arange(4, 11, dtype=torch.float32) / 255
    assert x.shape == (7, 2, 2, 2) and x.dtype == torch.float32 and y.dtype == torch.int64
    torch.testing.assert_close(x[:, 0, 0, 0], (raw - 0.25) / 0.5)
    torch.testing.assert_close(x[:, 1, 1, 0], (raw - 0.5) / 0.25)


def test_rows_are_those_of_each_client_in_the_order_asked_for_read_from_the_store_or_kept(store: ShardStore) -> None:
    data, first = ClientData(store), np.cumsum(SIZES) - SIZES
    asked = {4: np.arange(5), 0: np.array([2, 1, 2]), 2: np.array([], np.int64), 1: np.array([0])}
    positions = np.concatenate([first[client] + rows for client, rows in asked.items()])
    before = [data.load(client, rows) for client, rows in asked.items()]
    whole = [data.load(client) for client in asked]
    after = [data.load(client, rows) for client, rows in asked.items()]
    chosen = [(x[rows], y[rows]) for (x, y), rows in zip(whole, asked.values(), strict=True)]
    for parts in (before, after, chosen):
        for together, some in zip(data.load_positions(positions), zip(*parts, strict=True), strict=True):
            assert torch.equal(together, torch.cat(some))


@pytest.mark.parametrize("fits", [True, False])
def test_a_gpu_receives_all_samples_once_if_they_fit(
    store: ShardStore, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2 * store.samples * (8 + 8)  # bytes of a sample and of its label
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free if fits else free - 1, free))
    monkeypatch.setattr(source, "UPLOADED_ROWS", 7)
    here = ClientData(store)
    with elsewhere() as device:
        there = ClientData(store, device)
        there.load(0)
        for ask in (
            lambda data: data.load(2),
            lambda data: data.load(4, np.array([3, 0, 3])),
            lambda data: data.load_positions(np.array([19, 0, 5])),
        ):
            with transfers() as seen:
                found = ask(there)
            assert all(torch.equal(one.cpu(), other) for one, other in zip(found, ask(here), strict=True))
            assert seen.count("to the device") <= (1 if fits else 2), "an index, or features and labels"
        with transfers() as seen:
            there.load(3)
        assert ("to the device" in seen) is not fits


def test_each_dtype_is_normalized_in_its_way() -> None:
    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    for dtype, mean, expected in (("float32", (1.0,), [[0.0, 0.5], [1.0, 1.5]]), ("float32", (), x), ("int32", (), x)):
        description = DataDescription(
            (2,), dtype, 2, "text" if dtype == "int32" else "vector", 9, mean, mean and (2.0,)
        )
        found = Normalizer(description, torch.device("cpu"))(x.astype(dtype))
        assert found.tolist() == np.asarray(expected).tolist() and str(found.dtype) == f"torch.{dtype}"


def test_samples_that_stay_as_they_are_are_not_copied_and_the_others_are_kept_within_the_budget(tmp_path: Path) -> None:
    x = np.random.default_rng(3).standard_normal((10, 9)).astype(np.float32)
    arrays, scaled = (
        ClientArrays(x, np.arange(10) % 2, np.repeat([0, 1], 5), test=(x[:3], [0, 1, 0]), mean=mean)
        for mean in (None, 1.0)
    )
    arrays.save(tmp_path / "floats")
    data = ClientData(arrays.store, resident_bytes=0)
    for found, there in ((data.load(1)[0], arrays.x[5:]), (data.test()[0], arrays.test[0])):
        assert found.data_ptr() == there.ctypes.data and np.array_equal(found.numpy(), there)
    assert np.array_equal(ClientData(scaled.store).load(1)[0].numpy(), arrays.x[5:] - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's of arrays that cannot be written to
        mapped = ClientData(open_store(tmp_path / "floats")).load(0)[0]
    gc.collect()  # the tensor remains after the store whose file it maps
    assert np.array_equal(mapped.numpy(), arrays.x[:5])
    features, targets = x[:5].nbytes, 5 * 8
    for one, counted in ((arrays, targets), (scaled, features + targets)):
        for budget, kept in ((counted + 1023, False), (counted + 1024, True)):
            data = ClientData(one.store, resident_bytes=budget)
            assert (data.load(0)[1] is data.load(0)[1]) is kept
            assert data.load(1)[1] is not data.load(1)[1], "the budget is spent"


def test_arrays_whose_memory_torch_cannot_share_are_copied() -> None:
    plain = Normalizer(DataDescription((2,), "float32", 2, "vector", 0, (), ()), torch.device("cpu"))
    x = np.arange(8, dtype=np.float32).reshape(-1, 2)
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(-1, 2)
    assert not odd.flags.aligned
    for given in (np.asfortranarray(x), x.astype(">f4"), odd, x.astype(np.float64)):
        assert plain(given).tolist() == x.tolist() and plain(given).data_ptr() % x.itemsize == 0
