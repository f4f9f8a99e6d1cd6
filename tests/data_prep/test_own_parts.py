"""Custom partitions and readers, by "package.module:function"."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedmpi import ComponentFailure
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

OWN = """
import dataclasses
from pathlib import Path
import numpy as np
from data_prep.raw import ReadOptions, Tally
from data_prep.datasets import DATASETS

def by_label(labels, clients, generator, *, skip: int = 0, shift: int):
    "Client k gets the rows of label k + shift."
    owner = (labels - shift) % 10
    owner[labels < skip] = -1
    return owner

def wrong(labels, clients, generator):
    return labels[:3]

def spoiling(labels, clients, generator, *, keep: bool = True, path: str | None = None, at: tuple[int, ...] = (1, 2)):
    "Rows of the labels `at` belong to no client, unless they are kept."
    gone = np.isin(labels, at) & (not keep)
    labels %= clients
    return np.where(gone, -1, labels)

def halved(raw):
    data = DATASETS["digits"].read(raw, ReadOptions(), Tally())
    return dataclasses.replace(data, name="halved", labels=data.labels[: len(data.labels) // 2])

def points(*, count: int, label: str = "u", far: bool = False):
    "Points on a line."
    x = np.arange(count, dtype=np.float32)[:, None] + 1000 * far
    return {"x": x, "y": np.array([label, "v"])[np.arange(count) % 2], "user": np.arange(count) // 4}

def columns(raw, *, skip: int = 0):
    table = np.loadtxt(raw, delimiter=",", skiprows=skip)
    return {"x": table[:, :-1], "y": table[:, -1].astype(int), "x_test": table[:3, :-1], "y_test": table[:3, -1]}

def clashing(*, seed: int = 1):
    return points(count=8)

def dated(features, owners, generator, *, seed: int = 3):
    return features

def no_labels():
    return {"x": np.ones((3, 2))}

def labels_misnamed():
    return {"x": np.ones((3, 2)), "label": [0, 1, 2]}

def no_arrays():
    return [1, 2]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "prep_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "prep_of_mine", raising=False)
    return tmp_path


def test_a_custom_partition_assigns_each_row(own: Path) -> None:
    words = ["digits", "--partition", "prep_of_mine:by_label", "--shift", "3", "--skip", "2", "--out", "shards"]
    assert main([*words, "--clients", "12"]) == 0
    assert open_store("shards").clients == 12  # the last ones are empty
    assert main([*words, "--overwrite"]) == 0
    store = open_store("shards")
    assert store.clients == 10
    counts = store.class_counts()
    assert np.flatnonzero(counts.sum(axis=1)).tolist() == [k for k in range(10) if (k + 3) % 10 >= 2]
    assert all(row.argmax() == (k + 3) % 10 and row.max() == row.sum() for k, row in enumerate(counts) if row.sum())
    assert store.manifest.partition_options["shift"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "prep_of_mine:by_label"], "needs --shift"),
        (["--partition", "prep_of_mine:by_label", "--shfit", "3"], "did you mean --shift?"),
        (["--partition", "prep_of_mine:by_label", "--shift", "3", "--alpha", "1"], "--alpha is no option of"),
        (
            ["--partition", "prep_of_mine:spoiling", "--clients", "2", "--keep", "perhaps"],
            "--keep = 'perhaps' does not",
        ),
        (["--partition", "prep_of_mine:by_lable"], "did you mean 'by_label'"),
        (["--partition", "iid", "--feature-shift", "prep_of_mine:dated"], "--seed is an option of data_prep itself"),
    ],
)
def test_what_a_custom_law_does_not_know_is_rejected(
    own: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["digits", *words, "--out", "shards"]) == 2
    assert message in capsys.readouterr().err


def test_a_law_that_changes_its_labels_does_not_change_the_data(own: Path) -> None:
    assert main(["digits", "--partition", "prep_of_mine:spoiling", "--clients", "3", "--out", "shards"]) == 0
    store = open_store("shards")
    assert store.manifest.partition_options == {"keep": True, "path": "None", "at": "(1, 2)"}
    assert all(np.flatnonzero(store.class_counts()[:, label]).tolist() == [label % 3] for label in range(10))


def test_a_useless_answer_of_a_law_names_it(own: Path) -> None:
    with pytest.raises(ComponentFailure, match=r"partition prep_of_mine:wrong .* the client of each of the 1442 rows"):
        main(["digits", "--partition", "prep_of_mine:wrong", "--out", "shards"])


def test_a_readers_arrays_are_a_data_set_and_its_parameters_options(own: Path) -> None:
    words = ["prep_of_mine:points", "--partition", "user", "--count", "40", "--label", "w", "--out", "shards"]
    assert main(words) == 0
    store = open_store("shards")
    assert store.manifest.class_names == ("v", "w") and store.clients == 10
    assert store.part_samples("test") == 8 and store.sizes.sum() == 32
    assert store.test()[0].max() < 40
    assert main([*words, "--far", "--overwrite"]) == 0
    assert open_store("shards").test()[0].min() >= 1000


def test_a_reader_gets_the_path_that_raw_names(own: Path) -> None:
    Path("t.csv").write_text("a,b,c\n" + "".join(f"{i}.5,{i},{i % 3}\n" for i in range(9)))
    words = ["--partition", "iid", "--clients", "3", "--out", "shards", "--skip", "1"]
    assert main(["prep_of_mine:columns", "--raw", "t.csv", *words]) == 0
    store = open_store("shards")
    assert store.sizes.tolist() == [3, 3, 3] and store.test()[0].tolist() == [[0.5, 0], [1.5, 1], [2.5, 2]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prep_of_mine:points"], "needs --count, which has no default"),
        (["prep_of_mine:points", "--cuont", "8"], "did you mean --count?"),
        (["prep_of_mine:points", "--count", "8", "--raw", "."], "leave out --raw"),
        (["prep_of_mine:columns"], "where is prep_of_mine:columns? give --raw"),
        (["prep_of_mine:pionts"], "did you mean 'points'?"),
        (["prep_of_mine:clashing"], "--seed is an option of data_prep itself"),
        (["prep_of_mine:halved", "--raw", ".", "--task", "vector"], "gives a RawDataset: --task"),
        (["prep_of_mine:points", "--count", "8", "--length", "3"], "--length is no option of"),
    ],
)
def test_what_a_custom_reader_does_not_know_is_rejected(
    own: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--partition", "iid", "--clients", "2", "--out", "shards"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_labels", "returned no array 'y'"),
        ("labels_misnamed", "returned an array 'label': those that have a meaning are x, y"),
        ("no_arrays", "returned a list: return a dictionary of arrays"),
    ],
)
def test_a_useless_answer_of_a_reader_names_it(own: Path, name: str, message: str) -> None:
    with pytest.raises(ComponentFailure, match=rf"data set prep_of_mine:{name} .* {message}"):
        main([f"prep_of_mine:{name}", "--partition", "iid", "--clients", "2", "--out", "shards"])
