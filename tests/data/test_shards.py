"""The shard store: what it reads, and what it says when a folder is not as it should be."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.data import shards
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST, PREPARING
from tests.local.synthetic import SMALL_IMAGES, TEXTS

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
    np.testing.assert_array_equal(np.concatenate([x for x, _ in store.span(1, 18)])[:, 0, 0, 0], np.arange(1, 18))


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


def swapped(h5: h5py.File) -> None:
    del h5["client_ids"]
    h5["client_ids"] = np.zeros(1)


def elsewhere(h5: h5py.File) -> None:
    del h5["x"]
    h5["x"] = h5py.ExternalLink("other.h5", "x")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: list[tuple[Callable[[Path], object], tuple[str, ...]]] = [
    (shutil.rmtree, ("shards", "does not exist", "data_prep")),
    (lambda folder: (folder / MANIFEST).unlink(), (MANIFEST, "missing")),
    (lambda folder: (folder / PREPARING).touch(), ("interrupted",)),
    (lambda folder: (folder / MANIFEST).write_text("{ not json"), (MANIFEST, "not valid JSON")),
    (lambda folder: alter_manifest(folder, schema="fedmpi-shards/9"), ("fedmpi-shards/9", "fedmpi-shards/1")),
    (lambda folder: alter_manifest(folder, clients=0, samples=0, train=[]), ("no client",)),
    (lambda folder: alter_manifest(folder, clients=6), ("do not add up",)),
    (lambda folder: alter_manifest(folder, samples=21), ("do not add up",)),
    (lambda folder: alter_manifest(folder, train=None), ("damaged",)),
    (lambda folder: alter_manifest(folder, empty_clients=1), ("0 clients", "hold no sample")),
    (lambda folder: (folder / "train-00001.h5").unlink(), ("train-00001.h5", "missing")),
    (lambda folder: os.truncate(folder / "train-00000.h5", 900), ("train-00000.h5", "truncated")),
    (lambda folder: (folder / "test.h5").write_bytes(b"x" * (folder / "test.h5").stat().st_size), ("test.h5", "HDF5")),
    (lambda folder: alter(folder, compressed), ("train-00000.h5", "contiguous")),
    (lambda folder: alter(folder, elsewhere), ("train-00000.h5", "link")),
    (lambda folder: alter(folder, lambda h5: h5.pop("y")), ("train-00000.h5", "'y'")),
    (lambda folder: alter(folder, lambda h5: h5["offsets"].__setitem__(1, 99)), ("train-00000.h5", "offsets")),
    (lambda folder: alter(folder, swapped), ("client_ids", "manifest says")),
    (lambda folder: flipped(folder / "train-00001.h5"), ("train-00001.h5", "checksum")),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_folder_is_rejected_with_what_is_wrong(
    write: Write, damage: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    folder = write(SIZES)
    assert open_store(folder, verify=True).samples == 20
    damage(folder)
    if words[-1] == "checksum":
        assert open_store(folder).samples == 20
    with pytest.raises(UserError) as failure:
        open_store(folder, verify=words[-1] == "checksum")
    message = str(failure.value)
    assert all(word in message for word in words) and "\n" not in message, message


def test_files_that_may_not_be_opened_any_more_are_said_with_what_helps(write: Write) -> None:
    store = open_store(write(SIZES))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as next_one:
        first_free = next_one.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
    try:
        with pytest.raises(UserError, match=r"train-00000\.h5 can no longer be read .*Too many open files.*ulimit -n"):
            store.client(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(store.client(0)[0]) == SIZES[0]


def test_a_client_without_samples_needs_the_manifests_word(write: Write) -> None:
    folder = write([3, 0, 2])
    assert open_store(folder).sizes.tolist() == [3, 0, 2]
    alter_manifest(folder, empty_clients=0)
    with pytest.raises(UserError, match="hold no sample.*client 1"):
        open_store(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at_once", [1, 100])
def test_one_feature_that_is_not_finite_is_named_by_its_row(
    at_once: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_VALUES_AT_ONCE", at_once)
    x = np.ones((9, 1, 6, 6), np.float32)
    shards.check_features(Path("train.h5"), x, SMALL_IMAGES)
    x[7, 0, 2, 3] = bad
    with pytest.raises(UserError, match=f"row 7 of train.h5 holds {bad}, which is not a finite number"):
        shards.check_features(Path("train.h5"), x, SMALL_IMAGES)


@pytest.mark.parametrize("bad", [-1, 60])
def test_one_token_outside_the_vocabulary_is_named_by_its_row(bad: int) -> None:
    x = np.tile(np.arange(12, dtype=np.int32), (5, 1))
    x[1, 4], x[2, 3] = 59, 0
    shards.check_features(Path("train.h5"), x, TEXTS)
    x[3, 11] = bad
    with pytest.raises(UserError, match=f"row 3 of train.h5 holds {bad}, which is no word of the 60"):
        shards.check_features(Path("train.h5"), x, TEXTS)
