"""The shard store: what it reads, and what it says when a folder is not as it should be."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST, PREPARING

Write = Callable[..., Path]
SIZES = [3, 1, 7, 4, 5]


def test_a_client_is_read_as_views_of_the_mapped_file(write: Write) -> None:
    store = open_store(write(SIZES))
    x, y = store.client(2)
    np.testing.assert_array_equal(x[:, 0, 0, 0], np.arange(4, 11))
    np.testing.assert_array_equal(y, np.arange(4, 11) % 3)
    assert not x.flags.owndata and not x.flags.writeable and x.dtype == np.uint8


@pytest.mark.parametrize("count", [1, 2, 5, 99])
def test_rows_are_found_whatever_the_number_of_shards(write: Write, count: int) -> None:
    store = open_store(write(SIZES, count))
    assert len(store.shard_starts) - 1 == min(count, len(SIZES))
    positions = np.array([0, 2, 3, 9, 10, 19])
    with pytest.raises(IndexError):
        store.rows(np.array([3, 20]))
    for wanted in (positions, positions[::-1], positions[:1], positions[:0]):
        x, y = store.rows(wanted)
        np.testing.assert_array_equal(x[:, 1, 1, 1], wanted)
        np.testing.assert_array_equal(y, wanted % 3)


def test_sizes_offsets_and_class_counts_describe_the_clients(write: Write) -> None:
    store = open_store(write(SIZES, 3))
    assert (store.clients, store.samples, store.name) == (5, 20, "small")
    assert store.sizes.tolist() == SIZES and store.offsets.tolist() == [0, 3, 4, 11, 15, 20]
    expected = [np.bincount(store.client(k)[1], minlength=3) for k in range(5)]
    np.testing.assert_array_equal(store.class_counts(), expected)
    np.testing.assert_array_equal(store.class_counts(np.array([4, 0, 4])), [expected[4], expected[0], expected[4]])
    np.testing.assert_array_equal(np.concatenate(list(store.class_count_blocks())), expected)
    assert store.client_ids.tolist() == [0, 1, 2, 3, 4]
    assert [part.shape[0] for part in store.test()] == [9, 9] and store.validation() is None


def alter_manifest(folder: Path, **change: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def alter(folder: Path, change: Callable[[h5py.File], object]) -> None:
    """Change the first shard and let the manifest agree on its size."""
    path = folder / "train-00000.h5"
    with h5py.File(path, "r+") as h5:
        change(h5)
    train = json.loads((folder / MANIFEST).read_text())["train"]
    train[0]["bytes"] = path.stat().st_size
    alter_manifest(folder, train=train)


def compressed(h5: h5py.File) -> None:
    x = h5["x"][...]
    del h5["x"]
    h5.create_dataset("x", data=x, chunks=True)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    ("does not exist", shutil.rmtree),
    (MANIFEST, lambda folder: (folder / MANIFEST).unlink()),
    ("interrupted", lambda folder: (folder / PREPARING).touch()),
    (MANIFEST, lambda folder: (folder / MANIFEST).write_text("{ not json")),
    ("fedmpi-shards/9", lambda folder: alter_manifest(folder, schema="fedmpi-shards/9")),
    ("clients", lambda folder: alter_manifest(folder, clients=0, samples=0, train=[])),
    ("do not add up", lambda folder: alter_manifest(folder, clients=6)),
    ("do not add up", lambda folder: alter_manifest(folder, samples=21)),
    (MANIFEST, lambda folder: alter_manifest(folder, train=None)),
    ("train-00001.h5", lambda folder: (folder / "train-00001.h5").unlink()),
    ("train-00000.h5", lambda folder: os.truncate(folder / "train-00000.h5", 900)),
    ("test.h5", lambda folder: (folder / "test.h5").write_bytes(b"x" * (folder / "test.h5").stat().st_size)),
    ("train-00000.h5", lambda folder: alter(folder, compressed)),
    ("name", lambda folder: alter_manifest(folder, test={"name": "../test.h5", "bytes": 1, "sha256": ""})),
    ("'y'", lambda folder: alter(folder, lambda h5: h5.pop("y"))),
    ("offsets", lambda folder: alter(folder, lambda h5: h5["offsets"].__setitem__(1, 99))),
    ("offsets", lambda folder: alter(folder, lambda h5: h5["offsets"].__setitem__(-1, h5["offsets"][-1] - 1))),
    ("checksum", lambda folder: flipped(folder / "train-00001.h5")),
]


@pytest.mark.parametrize(("named", "damage"), DAMAGES)
def test_a_damaged_folder_is_rejected_with_what_is_wrong(
    write: Write, named: str, damage: Callable[[Path], object]
) -> None:
    folder = write(SIZES)
    assert open_store(folder, verify=True).samples == 20
    damage(folder)
    if named == "checksum":
        assert open_store(folder).samples == 20
    with pytest.raises(UserError) as failure:
        open_store(folder, verify=named == "checksum")
    message = str(failure.value)
    assert named in message and "data_prep" in message and "\n" not in message, message
