"""Targets of any shape: what a folder of shards and arrays in memory hold of them, old folders, and what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

import fedmpi
from data_prep.holdout import hold_out_validation
from data_prep.partitions import Partition, partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi import UserError
from fedmpi.data.assignment import offsets_of
from fedmpi.data.opening import open_store
from fedmpi.data.schema import SCHEMA, SCHEMA_OF_TARGETS, DataDescription, read_manifest, wrong_target
from fedmpi.data.source import ClientData
from fedmpi.describe.data import inspect_folder

ROWS, SIZES = 40, [5, 11, 0, 9, 15]
GENERATOR = np.random.default_rng(8)
X = GENERATOR.standard_normal((ROWS, 3)).astype(np.float32)
TARGETS = {
    "tokens": GENERATOR.integers(-1, 9, (ROWS, 4)),
    "multilabel": GENERATOR.random((ROWS, 6)) < 0.4,
    "regression": GENERATOR.standard_normal((ROWS, 2)).astype(np.float32),
    "one number": GENERATOR.standard_normal(ROWS).astype(np.float32),
    "shares": GENERATOR.random((ROWS, 6)).astype(np.float32),
}
KINDS = {"one number": "regression", "shares": "multilabel"}
STORED = {"tokens": "<i2", "multilabel": "|u1", "regression": "<f4", "one number": "<f4", "shares": "<f4"}


def raw(name: str) -> RawDataset:
    y, kind = TARGETS[name], KINDS.get(name, name)
    classes = 9 if kind == "tokens" else int(np.prod(y.shape[1:]))
    return RawDataset(
        name, "vector", classes, (), (3,), "float32", (), (), np.zeros(ROWS, np.int64), None, None,
        lambda rows: X[rows], X[:7], y[:7], 0, "none", "nobody",
        targets=kind, target_shape=y.shape[1:], read_targets=lambda rows: y[rows],
    )  # fmt: skip


def given(seed: int = 0) -> Partition:
    rows = np.random.default_rng(seed).permutation(ROWS)
    return Partition(rows, offsets_of(np.array(SIZES)), "given", {})


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_written_is_read_by_client_by_position_and_as_tensors(name: str, tmp_path: Path):
    y, dealt = TARGETS[name], given()
    manifest = write_shards(raw(name), dealt, tmp_path / "out", 3, 0, "test", val_fraction=0.2)
    generator = fedmpi_generator()
    rows, offsets, held, held_offsets = hold_out_validation(dealt.rows, dealt.offsets, 0.2, generator)
    store = open_store(tmp_path / "out", verify=True)
    data = ClientData(store)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["schema"] == SCHEMA_OF_TARGETS
    assert (manifest.description.targets, manifest.description.target_shape) == (KINDS.get(name, name), y.shape[1:])
    for client in range(len(SIZES)):
        own = rows[offsets[client] : offsets[client + 1]]
        x, found = store.client(client)
        np.testing.assert_array_equal(x, X[own])
        np.testing.assert_array_equal(found, y[own])
        assert found.dtype == np.dtype(STORED[name])
        tensor = data.load(client)[1].numpy()
        assert tensor.dtype == (np.int64 if name == "tokens" else np.float32)
        np.testing.assert_array_equal(tensor, y[own])
        part = store.validation_of(client)
        assert part is not None
        np.testing.assert_array_equal(part[1], y[held[held_offsets[client] : held_offsets[client + 1]]])
    places = np.array([20, 3, 3, 11])
    np.testing.assert_array_equal(store.rows(places)[1], y[rows[places]])
    np.testing.assert_array_equal(data.load_positions(places)[1].numpy(), y[rows[places]])
    np.testing.assert_array_equal(data.load(3, np.array([2, 0]))[1].numpy(), y[rows[offsets[3] + [2, 0]]])
    np.testing.assert_array_equal(store.test()[1], y[:7])


def fedmpi_generator() -> np.random.Generator:
    from data_prep.writer import _HOLD_OUT_STREAM
    from fedmpi.common.streams import Purpose, Streams

    return Streams(0).generator(Purpose.PARTITION, _HOLD_OUT_STREAM)


def test_a_run_learns_from_a_folder(tmp_path: Path):
    write_shards(raw("regression"), given(), tmp_path / "out", 2, 0, "test")
    settings = {"rounds": 1, "clients.sampler": "all", "cluster.threads": 1, "task.kind": "regression"}
    done = fedmpi.run("fedavg", {**settings, "model.hidden": [4]}, data=str(tmp_path / "out"))
    assert done.records[0]["test_rmse"] > 0 and done.records[0]["samples"] == ROWS


def test_a_folder_is_inspected_without_classes(tmp_path: Path):
    write_shards(raw("tokens"), given(), tmp_path / "out", 2, 0, "test")
    facts = dict(inspect_folder(tmp_path / "out", verify=True).lines())
    assert facts["target"] == "the token at each of 4 positions, one of 9"
    assert "1 hold no sample" in facts["clients"] and "classes per client" not in facts
    with pytest.raises(UserError, match="no class each"):
        open_store(tmp_path / "out").class_counts()


def test_laws_that_go_by_classes_are_refused_where_rows_have_none():
    for law in ("dirichlet", "shards", "label-sorted"):
        options = {"alpha": 1.0} if law == "dirichlet" else {}
        with pytest.raises(UserError, match="have none"):
            partition(law, np.zeros(ROWS, np.int64), 1, 4, np.random.default_rng(0), labelled=False, **options)
    dealt = partition("iid", np.zeros(ROWS, np.int64), 1, 4, np.random.default_rng(0), labelled=False)
    assert dealt.sizes.tolist() == [10, 10, 10, 10]


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("tokens", np.full((ROWS, 4), 9), "9, none of the 9 classes"),
        ("tokens", np.full((ROWS, 4), -2), "-2, none of the 9 classes"),
        ("shares", np.full((ROWS, 6), 1.5, np.float32), "1.5, which is not in 0 to 1"),
        ("multilabel", np.full((ROWS, 6), 0.5), "fractions"),
        ("regression", np.full((ROWS, 2), np.nan, np.float32), "no number of single precision"),
    ],
)
def test_targets_that_are_none_are_not_written(name: str, wrong: np.ndarray, words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        write_shards(replace(raw(name), read_targets=lambda rows: wrong[rows]), given(), tmp_path / "out", 1, 0, "test")


def test_a_damaged_target_is_named_when_it_is_read(tmp_path: Path):
    write_shards(raw("tokens"), given(), tmp_path / "out", 1, 0, "test")
    with h5py.File(tmp_path / "out" / "train-00000.h5", "r+") as file:
        file["y"][5, 2] = 11
    with pytest.raises(UserError, match=r"row 5 of .*train-00000.h5 is 11, none of the 9 classes"):
        open_store(tmp_path / "out").client(0)


@pytest.mark.parametrize(("kind", "least"), [("classification", 0), ("tokens", -1)])
def test_only_a_position_may_count_nowhere(kind: str, least: int):
    shape = () if kind == "classification" else (2,)
    described = DataDescription((3,), "float32", 4, "vector", 0, (), (), kind, shape)
    y = np.full((5, *shape), least)
    assert wrong_target(y, described) is None and wrong_target(y + 4, described) == (
        None if least < 0 else (0, "4, none of the 4 classes")
    )
    y[3] = least - 1
    assert wrong_target(y, described) == (3, f"{least - 1}, none of the 4 classes")


def old_folder(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """A folder as it was written before targets had a shape, made here with h5py alone."""
    folder.mkdir()
    x = np.arange(48, dtype=np.uint8).reshape(12, 1, 2, 2)
    y = (np.arange(12) % 3).astype(np.uint8)
    offsets = np.array([0, 5, 9])
    counts = np.array([np.bincount(y[a:b], minlength=3) for a, b in zip(offsets, offsets[1:], strict=False)], np.uint8)

    def listed(name: str, arrays: dict[str, np.ndarray], **entries: int) -> dict:
        with h5py.File(folder / name, "w") as file:
            for key, values in arrays.items():
                file.create_dataset(key, data=values, track_times=False)
        content = (folder / name).read_bytes()
        blank = {"first_client": 0, "clients": 0, "samples": 0}
        return {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), **blank, **entries}

    train = {"offsets": offsets, "client_ids": np.arange(2), "class_counts": counts, "y": y[:9], "x": x[:9]}
    manifest = {
        "schema": "fedmpi-shards/1",
        "dataset": "old",
        "partition": "given",
        "partition_options": {},
        "seed": 0,
        "clients": 2,
        "samples": 9,
        "classes": 3,
        "class_names": ["a", "b", "c"],
        "description": {
            "feature_shape": [1, 2, 2],
            "dtype": "uint8",
            "classes": 3,
            "task": "image",
            "vocabulary": 0,
            "mean": [0.25],
            "std": [0.5],
        },
        "train": [listed("train-00000.h5", train, clients=2, samples=9)],
        "test": listed("test.h5", {"y": y[9:].astype(np.int64), "x": x[9:]}, samples=3),
        "val": None,
        "extras": None,
        "words": None,
        "vectors": None,
        "empty_clients": 0,
        "dropped": 0,
        "skipped": 0,
        "licence": "",
        "citation": "",
        "command": "",
        "notes": [],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return x, y


def test_a_folder_written_before_targets_had_a_shape_is_read_as_it_was(tmp_path: Path):
    x, y = old_folder(tmp_path / "old")
    store = open_store(tmp_path / "old", verify=True)
    assert store.description.labelled and store.description.target_shape == ()
    np.testing.assert_array_equal(store.client(1)[0], x[5:9])
    np.testing.assert_array_equal(store.client(1)[1], y[5:9])
    assert ClientData(store).load(0)[1].tolist() == y[:5].tolist()
    assert store.class_counts().tolist() == [[2, 2, 1], [1, 1, 2]]
    assert read_manifest(tmp_path / "old").to_json() == (tmp_path / "old" / "manifest.json").read_text()
    assert read_manifest(tmp_path / "old").as_dict()["schema"] == SCHEMA
    settings = {"rounds": 1, "clients.sampler": "all", "model.hidden": [4], "cluster.threads": 1}
    assert "test_accuracy" in fedmpi.run("fedavg", settings, data=str(tmp_path / "old")).records[0]


ARRAYS = (np.zeros((6, 2), np.float32), np.zeros(6, np.int64))


@pytest.mark.parametrize(
    ("y", "targets", "classes"),
    [
        (np.arange(6), "classification", 6),
        (np.arange(12).reshape(6, 2), "tokens", 12),
        (np.ones((6, 4), bool), "multilabel", 4),
        (np.zeros(6), "regression", 1),
        (np.zeros((6, 2, 3)), "regression", 6),
    ],
)
def test_arrays_tell_by_their_type_and_shape_what_they_are(y: np.ndarray, targets: str, classes: int):
    arrays = fedmpi.ClientArrays(ARRAYS[0], y, ARRAYS[1], test=(ARRAYS[0], y))
    assert (arrays.description.targets, arrays.description.classes) == (targets, classes)
    assert arrays.description.target_shape == y.shape[1:]
    np.testing.assert_array_equal(arrays.store.client(0)[1], y)


def test_arrays_may_say_what_they_are():
    ages = fedmpi.ClientArrays(*ARRAYS, np.zeros(6, int), test=ARRAYS, targets="regression")
    assert ages.description.targets == "regression" and ages.y.dtype == np.float32
    shares = np.full((6, 2), 0.5)
    soft = fedmpi.ClientArrays(ARRAYS[0], shares, ARRAYS[1], test=(ARRAYS[0], shares), targets="multilabel")
    assert soft.description.targets == "multilabel"


@pytest.mark.parametrize(
    ("y", "further", "words"),
    [
        (np.zeros(6), {"targets": "ranks"}, "'ranks' is unknown"),
        (np.array(list("abcdef")), {}, "or other numbers"),
        (np.full((6, 2), -2), {}, "holds the token -2"),
        (np.full((6, 2), 0.5), {"targets": "tokens"}, "whole numbers"),
        (np.full((6, 2), 2.0), {"targets": "multilabel"}, "neither 0 nor 1"),
        (np.full(6, np.inf), {}, "not finite"),
        (np.zeros((6, 0)), {}, "has no target"),
        (np.zeros(6), {"targets": "classification"}, "whole numbers, the classes"),
        (np.zeros(6, int), {"targets": "tokens"}, "a row of values"),
        (np.zeros((6, 2)), {"classes": 3}, "leave classes out"),
    ],
)
def test_arrays_of_other_targets_are_refused(y: np.ndarray, further: dict, words: str):
    with pytest.raises(UserError, match=words):
        fedmpi.ClientArrays(ARRAYS[0], y, ARRAYS[1], test=(ARRAYS[0], y), **further)


def test_the_test_part_has_targets_of_the_same_shape():
    with pytest.raises(UserError, match=r"test's y has targets \(3,\) where those of y are \(2,\)"):
        fedmpi.ClientArrays(ARRAYS[0], np.zeros((6, 2)), ARRAYS[1], test=(ARRAYS[0], np.zeros((6, 3))))
