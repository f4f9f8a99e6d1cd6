"""Custom partitions and readers, by "package.module:function"."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpi import ComponentFailure
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

OWN = """
import dataclasses
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

def halved():
    data = DATASETS["digits"].read(None, ReadOptions(), Tally())
    return dataclasses.replace(data, name="halved", train=data.train[: len(data.train) // 2])

def points(*, count: int, label: str = "u", far: bool = False):
    "Points on a line."
    x = np.arange(count, dtype=np.float32)[:, None] + 1000 * far
    return {"x": x, "y": np.array([label, "v"])[np.arange(count) % 2], "user": np.arange(count) // 4}

def columns(raw, *, skip: int = 0):
    table = np.loadtxt(raw, delimiter=",", skiprows=skip)
    return {"x": table[:, :-1], "y": table[:, -1].astype(int), "x_test": table[:3, :-1], "y_test": table[:3, -1]}

def no_labels():
    return {"x": np.ones((3, 2))}

def no_arrays():
    return [1, 2]
"""


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prepare with components of `mine`; return the store."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def prepared(words: str) -> Any:
        assert main([*words.split(), "--out", "shards", "--overwrite"]) == 0
        return open_store("shards")

    return prepared


def test_a_custom_partition_assigns_each_row(prepare: Any) -> None:
    words = "digits --partition mine:by_label --shift 3 --skip 2"
    assert prepare(f"{words} --clients 12").clients == 12  # the last ones are empty
    store = prepare(words)
    counts = store.class_counts()
    assert store.clients == 10 and store.manifest.partition_options["shift"] == 3
    assert np.flatnonzero(counts.sum(axis=1)).tolist() == [k for k in range(10) if (k + 3) % 10 >= 2]
    assert all(row.argmax() == (k + 3) % 10 and row.max() == row.sum() for k, row in enumerate(counts) if row.sum())
    store = prepare("digits --partition mine:spoiling --clients 3")  # it changes its argument, not the data
    assert store.manifest.partition_options == {"keep": True, "path": "None", "at": "(1, 2)"}
    assert all(np.flatnonzero(store.class_counts()[:, label]).tolist() == [label % 3] for label in range(10))


def test_a_readers_arrays_are_a_data_set_and_its_parameters_options(prepare: Any) -> None:
    words = "mine:points --partition user --count 40 --label w"
    store = prepare(words)
    assert store.manifest.class_names == ("v", "w") and store.clients == 10
    assert store.part_samples("test") == 8 and store.sizes.sum() == 32 and store.test()[0].max() < 40
    assert prepare(f"{words} --far").test()[0].min() >= 1000
    Path("t.csv").write_text("a,b,c\n" + "".join(f"{i}.5,{i},{i % 3}\n" for i in range(9)))
    store = prepare("mine:columns --raw t.csv --partition iid --clients 3 --skip 1")
    assert store.sizes.tolist() == [3, 3, 3] and store.test()[0].tolist() == [[0.5, 0], [1.5, 1], [2.5, 2]]
    assert prepare("mine:halved --partition iid --clients 3 --val 0.1").manifest.dropped == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digits --partition mine:by_label", "needs --shift"),
        ("digits --partition mine:by_label --shfit 3", "did you mean --shift?"),
        ("digits --partition mine:by_label --shift 3 --alpha 1", "--alpha is no option of"),
        ("digits --partition mine:spoiling --clients 2 --keep perhaps", "--keep = 'perhaps' does not"),
        ("mine:points --partition user", "needs --count, without a default"),
        ("mine:points --partition user --count 8 --raw .", "leave out --raw"),
        ("mine:columns --partition user", "where is mine:columns? give --raw"),
        ("mine:points --partition user --count 8 --length 3", "--length is no option of"),
    ],
)
def test_options_that_a_component_does_not_have_are_rejected(
    prepare: Any, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--out", "shards"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digits --partition mine:wrong", r"mine:wrong .* the client of each of the 1442 rows"),
        ("mine:no_labels --partition iid --clients 2", r"mine:no_labels .* returned no array 'y'"),
        ("mine:no_arrays --partition iid --clients 2", "returned a list: return a dictionary of arrays"),
    ],
)
def test_a_useless_answer_names_the_component(prepare: Any, words: str, message: str) -> None:
    with pytest.raises(ComponentFailure, match=message):
        main([*words.split(), "--out", "shards"])
