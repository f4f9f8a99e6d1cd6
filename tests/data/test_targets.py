"""Targets of any shape in shards and in arrays in memory, old folders, and rejected targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep.holdout import hold_out_validation
from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi import UserError
from fedmpi.data.assignment import offsets_of
from fedmpi.data.opening import open_store
from fedmpi.data.schema import SCHEMA_OF_TARGETS, DataDescription, wrong_target
from fedmpi.data.source import ClientData
from fedmpi.describe.data import inspect_folder
from tests.data.validation import validation_of

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
        np.testing.assert_array_equal(
            validation_of(store, client)[1], y[held[held_offsets[client] : held_offsets[client + 1]]]
        )
    places = np.array([20, 3, 3, 11])
    np.testing.assert_array_equal(store.rows(places)[1], y[rows[places]])
    np.testing.assert_array_equal(data.load_positions(places)[1].numpy(), y[rows[places]])
    np.testing.assert_array_equal(data.load(3, np.array([2, 0]))[1].numpy(), y[rows[offsets[3] + [2, 0]]])
    np.testing.assert_array_equal(store.test()[1], y[:7])


def fedmpi_generator() -> np.random.Generator:
    from data_prep.writer import _HOLD_OUT_STREAM
    from fedmpi.common.streams import Purpose, Streams

    return Streams(0).generator(Purpose.PARTITION, _HOLD_OUT_STREAM)


def test_a_folder_is_inspected_without_classes(tmp_path: Path):
    write_shards(raw("tokens"), given(), tmp_path / "out", 2, 0, "test")
    facts = dict(inspect_folder(tmp_path / "out", verify=True).lines())
    assert facts["target"] == "the token at each of 4 positions, one of 9"
    assert "1 hold no sample" in facts["clients"] and "classes per client" not in facts
    with pytest.raises(UserError, match="no class each"):
        open_store(tmp_path / "out").class_counts()


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
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
    with pytest.raises(UserError, match=r"train-00000.h5 .*row 5 is 11, none of the 9 classes"):
        open_store(tmp_path / "out").client(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": "tokens", "target_shape": (0,)}, "contain nothing"),
        ({"target_shape": (3,)}, "are no classification of 4 values"),
        ({"targets": "multilabel", "target_shape": (3,)}, "are no multilabel"),
        ({"targets": "regression", "target_shape": (5,)}, "are no regression"),
        ({"targets": "ranks"}, "the targets 'ranks'"),
        ({"dtype": "float64"}, "the dtype 'float64'"),
        ({"task": "sound"}, "the task 'sound'"),
        ({"feature_shape": (0,)}, "contain nothing"),
        ({"task": "text"}, "texts are token ids"),
        ({"mean": (1.0, 2.0)}, "one for each of 3"),
        ({"std": (1.0, 0.0, 1.0)}, "std above 0"),
        ({"classes": 0}, "there is at least one"),
    ],
)
def test_descriptions_of_no_possible_sample_are_rejected(change: dict, words: str):
    good = DataDescription((3,), "float32", 4, "vector", 0, (), ())
    good.check()
    with pytest.raises(ValueError, match=words):
        replace(good, **change).check()


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
