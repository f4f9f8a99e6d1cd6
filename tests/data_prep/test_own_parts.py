"""Partition laws and readers of one's own, by "package.module:function"."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedmpi.data.shards import open_store
from tests.data_prep.command import main

OWN = """
import dataclasses
import numpy as np
from data_prep.datasets.digits import DIGITS

def by_label(labels, clients, generator, *, skip: int = 0, shift: int):
    "Client k gets the rows of label k + shift."
    owner = (labels - shift) % 10
    owner[labels < skip] = -1
    return owner

def wrong(labels, clients, generator):
    return labels[:3]

def halved(raw, options, tally):
    data = DIGITS.read(raw, options, tally)
    read, half = data.read, len(data.labels) // 2
    return dataclasses.replace(data, name="halved", labels=data.labels[:half])
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "prep_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "prep_of_mine", raising=False)
    return tmp_path


def test_a_law_of_ones_own_says_who_gets_each_row(own: Path) -> None:
    words = ["digits", "--partition", "prep_of_mine:by_label", "--shift", "3", "--skip", "2", "--out", "shards"]
    assert main(words) == 0
    store = open_store("shards")
    assert store.clients == 10
    counts = store.class_counts()
    assert np.flatnonzero(counts.sum(axis=1)).tolist() == [k for k in range(10) if (k + 3) % 10 >= 2]
    assert all(row.argmax() == (k + 3) % 10 and row.max() == row.sum() for k, row in enumerate(counts) if row.sum())
    assert store.manifest.partition_options["shift"] == 3


def test_a_law_of_ones_own_may_leave_the_last_clients_empty(own: Path) -> None:
    words = ["digits", "--partition", "prep_of_mine:by_label", "--shift", "0", "--clients", "12", "--out", "shards"]
    assert main(words) == 0
    store = open_store("shards")
    assert store.clients == 12 and store.manifest.empty_clients == 2
    assert np.flatnonzero(store.class_counts().sum(axis=1)).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "prep_of_mine:by_label"], "needs --shift"),
        (["--partition", "prep_of_mine:by_label", "--shfit", "3"], "did you mean --shift?"),
        (["--partition", "prep_of_mine:by_label", "--shift", "3", "--alpha", "1"], "takes no --alpha"),
        (["--partition", "prep_of_mine:by_lable"], "did you mean 'by_label'"),
    ],
)
def test_what_a_law_of_ones_own_does_not_know_is_refused(
    own: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["digits", *words, "--out", "shards"]) == 2
    assert message in capsys.readouterr().err


def test_a_useless_answer_of_a_law_names_it(own: Path) -> None:
    from fedmpi.common.errors import PartFailure

    with pytest.raises(PartFailure, match=r"partition prep_of_mine:wrong .* the client of each of the 1442 rows"):
        main(["digits", "--partition", "prep_of_mine:wrong", "--out", "shards"])


def test_a_reader_of_ones_own_is_a_data_set(own: Path) -> None:
    words = ["prep_of_mine:halved", "--raw", ".", "--partition", "iid", "--clients", "4", "--out", "shards"]
    assert main(words) == 0
    assert open_store("shards").sizes.sum() == 721
