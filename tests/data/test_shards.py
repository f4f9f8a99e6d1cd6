"""The shard store: what it reads, and what it says when a folder is not as it should be."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST, PREPARING, DataDescription

Write = Callable[..., Path]
SIZES = [3, 1, 7, 4, 5]


def test_a_client_is_read_as_views_of_the_mapped_file(write: Write) -> None:
    store = open_store(write(SIZES))
    x, y = store.client(2)
    np.testing.assert_array_equal(x[:, 0, 0, 0], np.arange(4, 11))
    np.testing.assert_array_equal(y, np.arange(4, 11) % 3)
    assert not x.flags.owndata and not x.flags.writeable and x.dtype == np.uint8


@pytest.mark.parametrize("shards", [1, 2, 5, 99])
def test_rows_are_found_whatever_the_number_of_shards(write: Write, shards: int) -> None:
    store = open_store(write(SIZES, shards))
    assert len(store.shard_starts) - 1 == min(shards, len(SIZES))
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


def test_a_good_folder_passes_the_checksums(write: Write) -> None:
    assert open_store(write(SIZES), verify=True).samples == 20


def refused(folder: Path, *words: str, verify: bool = False) -> None:
    with pytest.raises(UserError) as failure:
        open_store(folder, verify=verify)
    message = str(failure.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "does not exist", "data_prep")


def test_a_folder_without_manifest_is_no_shard_folder(tmp_path: Path) -> None:
    refused(tmp_path, MANIFEST, "missing")


def test_an_interrupted_preparation_is_recognised(write: Write) -> None:
    folder = write(SIZES)
    (folder / PREPARING).touch()
    refused(folder, "interrupted")


def test_a_manifest_that_is_not_json_is_refused(write: Write) -> None:
    folder = write(SIZES)
    (folder / MANIFEST).write_text("{ not json")
    refused(folder, MANIFEST, "not valid JSON")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "fedmpi-shards/9"}, ("fedmpi-shards/9", "fedmpi-shards/1")),
        ({"clients": 0, "samples": 0, "train": []}, ("no client",)),
        ({"clients": 6}, ("do not add up",)),
        ({"samples": 21}, ("do not add up",)),
        ({"train": None}, ("damaged",)),
        ({"empty_clients": 1}, ("0 clients", "hold no sample")),
    ],
)
def test_a_manifest_that_contradicts_the_files_is_refused(write: Write, change: dict, words: tuple[str, ...]) -> None:
    folder = write(SIZES)
    alter_manifest(folder, change)
    refused(folder, *words)


def test_a_missing_shard_is_named(write: Write) -> None:
    folder = write(SIZES)
    (folder / "train-00001.h5").unlink()
    refused(folder, "train-00001.h5", "missing")


def test_a_truncated_shard_is_named(write: Write) -> None:
    folder = write(SIZES)
    path = folder / "train-00000.h5"
    path.write_bytes(path.read_bytes()[:-10])
    refused(folder, "train-00000.h5", "truncated")


def test_a_shard_that_is_no_hdf5_is_named(write: Write) -> None:
    folder = write(SIZES)
    path = folder / "test.h5"
    path.write_bytes(b"x" * path.stat().st_size)
    refused(folder, "test.h5", "HDF5")


def test_a_changed_byte_is_found_by_the_checksum_only(write: Write) -> None:
    folder = write(SIZES)
    path = folder / "train-00001.h5"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert open_store(folder).samples == 20
    refused(folder, "train-00001.h5", "checksum", verify=True)


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


def test_a_shard_of_other_shape_is_refused(write: Write) -> None:
    folder, other = write(SIZES), write([3, 1, 7, 4, 6], name="other")
    replace_shard(folder, other / "train-00001.h5", 1)
    refused(folder, "train-00001.h5", "manifest says")


def test_a_compressed_shard_cannot_be_mapped(write: Write, tmp_path: Path) -> None:
    folder = write(SIZES)
    copy = tmp_path / "copy.h5"
    with h5py.File(folder / "train-00000.h5") as source, h5py.File(copy, "w") as target:
        for name in source:
            target.create_dataset(name, data=source[name][...], chunks=True)
    replace_shard(folder, copy, 0)
    refused(folder, "train-00000.h5", "contiguous")


def test_a_shard_without_labels_is_refused(write: Write, tmp_path: Path) -> None:
    folder = write(SIZES)
    copy = tmp_path / "copy.h5"
    shutil.copy(folder / "train-00000.h5", copy)
    with h5py.File(copy, "r+") as h5:
        del h5["y"]
    replace_shard(folder, copy, 0)
    refused(folder, "train-00000.h5", "'y'")


def test_offsets_that_fall_are_refused(write: Write, tmp_path: Path) -> None:
    folder = write(SIZES)
    copy = tmp_path / "copy.h5"
    shutil.copy(folder / "train-00000.h5", copy)
    with h5py.File(copy, "r+") as h5:
        h5["offsets"][1] = 99
    replace_shard(folder, copy, 0)
    refused(folder, "train-00000.h5", "offsets")


def test_a_client_without_samples_needs_the_manifests_word(write: Write) -> None:
    folder = write([3, 0, 2])
    assert open_store(folder).sizes.tolist() == [3, 0, 2]
    alter_manifest(folder, {"empty_clients": 0})
    refused(folder, "hold no sample", "client 1")


def alter_manifest(folder: Path, change: dict) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def replace_shard(folder: Path, source: Path, index: int) -> None:
    """Put another file in the place of a shard and let the manifest agree on its size."""
    target = folder / f"train-{index:05d}.h5"
    shutil.copy(source, target)
    train = json.loads((folder / MANIFEST).read_text())["train"]
    train[index]["bytes"] = target.stat().st_size
    alter_manifest(folder, {"train": train})


@pytest.mark.parametrize("part", ["mean", "std"])
def test_one_value_of_the_normalization_that_is_no_number_is_enough(part: str) -> None:
    good = DataDescription((3, 2, 2), "uint8", 2, "image", 0, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    good.check()
    with pytest.raises(ValueError, match="are finite numbers"):
        replace(good, **{part: (0.1, math.inf, 0.3)}).check()
