"""Targets of any shape in shards and in memory, and rejected ones."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from fedmpi import ClientArrays, UserError
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription, wrong_target
from fedmpi.data.source import ClientData
from fedmpi.describe.data import store_facts

GENERATOR = np.random.default_rng(8)
X, OWNER = GENERATOR.standard_normal((40, 3)), np.repeat([0, 1, 3, 4], [5, 11, 9, 15])
TARGETS = {
    "tokens": GENERATOR.integers(-1, 9, (40, 4)),
    "multilabel": GENERATOR.random((40, 6)).astype(np.float32),
    "regression": GENERATOR.standard_normal((40, 2)).astype(np.float32),
}


def arrays(name: str) -> ClientArrays:
    y = TARGETS[name]
    return ClientArrays(X, y, OWNER, test=(X[:7], y[:7]), clients=5, targets=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_read_by_client_by_position_and_as_tensors(name: str, tmp_path: Path):
    """tests/data/test_arrays.py compares the folder with the arrays."""
    y = TARGETS[name]
    data = ClientData(open_store(arrays(name).save(tmp_path / "out", shards=3), verify=True))
    assert data.load(1)[1].dtype == (torch.int64 if name == "tokens" else torch.float32)
    np.testing.assert_array_equal(data.load(1)[1], y[OWNER == 1])
    np.testing.assert_array_equal(data.labels(3), y[OWNER == 3])
    np.testing.assert_array_equal(data.load(3, np.array([2, 0]))[1], y[OWNER == 3][[2, 0]])
    np.testing.assert_array_equal(data.load_positions(np.array([20, 3, 3, 11]))[1], y[[20, 3, 3, 11]])


def test_a_folder_is_inspected_without_classes(tmp_path: Path):
    arrays("tokens").save(tmp_path / "out")
    facts = dict(store_facts(open_store(tmp_path / "out", verify=True)))
    assert facts["target"] == "the token at each of 4 positions, one of 9"
    assert "1 without samples" in facts["clients"] and "classes per client" not in facts
    with pytest.raises(UserError, match="no class each"):
        open_store(tmp_path / "out").class_counts()


def test_a_damaged_target_is_named_when_it_is_read(tmp_path: Path):
    arrays("tokens").save(tmp_path / "out", shards=1)
    with h5py.File(tmp_path / "out" / "train-00000.h5", "r+") as file:
        file["y"][5, 2] = 11
    with pytest.raises(UserError, match=r"train-00000.h5 .*row 5 is 11, none of the 9 classes"):
        open_store(tmp_path / "out").client(0)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("dtype", {"dtype": "float64"}),
        ("task", {"task": "sound"}),
        ("feature_shape", {"feature_shape": (0,)}),
        ("feature_shape", {"feature_shape": ()}),
        ("classes", {"classes": 0}),
        ("std", {"std": (1.0, 0.0, 1.0)}),
        ("std", {"std": (np.inf,)}),
        ("mean", {"mean": (np.nan,)}),
        ("mean", {"mean": (1.0, 2.0)}),
        ("vocabulary", {"task": "text"}),
        ("vocabulary", {"task": "text", "dtype": "int32"}),
        ("targets", {"targets": "ranks"}),
        ("target_shape", {"targets": "tokens", "target_shape": (0,)}),
        ("targets", {"target_shape": (3,)}),
        ("targets", {"targets": "multilabel", "target_shape": (3,)}),
        ("targets", {"targets": "regression", "target_shape": (5,)}),
    ],
)
def test_descriptions_of_no_possible_sample_are_rejected(key: str, wrong: dict):
    good = {"feature_shape": (3,), "dtype": "float32", "classes": 4, "task": "vector", "vocabulary": 0}
    good |= {"mean": (), "std": ()}
    assert DataDescription(**good).output_shape == (4,)
    with pytest.raises(ValueError, match=key):
        DataDescription(**(good | wrong))


@pytest.mark.parametrize(
    ("kind", "low", "high", "beyond"),
    [
        ("classification", 0, 3, 1),
        ("tokens", -1, 3, 1),
        ("multilabel", 0, 1, 0.01),
        ("regression", -np.finfo(np.float32).max, np.finfo(np.float32).max, np.inf),
    ],
)
def test_the_first_target_beyond_its_bounds_is_named(kind: str, low: float, high: float, beyond: float):
    shape, classes = ((), 4) if kind == "classification" else ((2,), 4 if kind == "tokens" else 2)
    described = DataDescription((3,), "float32", classes, "vector", 0, (), (), kind, shape)
    y = np.array([low, high] * 4, np.int64 if beyond == 1 else np.float64).reshape(-1, *described.target_shape)
    assert wrong_target(y, described) is None
    for value in (low - beyond, high + beyond, *([np.nan] if beyond != 1 else ())):
        bad = y.copy()
        bad[3:] = value
        found = wrong_target(bad, described)
        assert found is not None and found[0] == 3 and found[1].startswith(f"{value},")
