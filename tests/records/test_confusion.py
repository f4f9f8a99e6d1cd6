"""Confusion matrices: the files of a finished run, and their contents."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

import fedmpi
from fedmpi.data.opening import open_store
from fedmpi.data.source import ClientData
from fedmpi.records.tables import CLASSES, CONFUSION

SETTINGS = {"rounds": 2, "clients.count": 5, "model.hidden": [8], "cluster.threads": 1, "checkpoint.every": 1}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> fedmpi.Run:
    return fedmpi.run("fedavg", SETTINGS, out=tmp_path_factory.mktemp("runs") / "RUN")


def matrix(folder: Path) -> pandas.DataFrame:
    return pandas.read_csv(folder / CONFUSION, index_col=0)


def test_the_files_are_those_of_the_final_model_on_the_test_part(done: fedmpi.Run):
    x, y = ClientData(open_store("digits")).test()
    with torch.no_grad():
        guess = done.model(x).argmax(1).numpy()
    found = matrix(done.folder)
    np.testing.assert_array_equal(found, confusion_matrix(y.numpy(), guess, labels=range(10)))
    with (done.folder / CLASSES).open(newline="") as file:
        rows = list(csv.DictReader(file))
    precision, recall, f1, support = precision_recall_fscore_support(
        y.numpy(), guess, labels=range(10), zero_division=0
    )
    for place, row in enumerate(rows):
        assert (row["class"], int(row["samples"])) == (str(place), support[place])
        values = [float(row[name]) for name in ("precision", "recall", "f1")]
        assert values == pytest.approx([precision[place], recall[place], f1[place]], rel=1e-12)
    assert np.mean([float(row["f1"]) for row in rows]) == pytest.approx(done.records[-1]["test_macro_f1"], rel=1e-12)


def test_validation_samples_are_not_among_them(tmp_path: Path):
    x, y = np.random.default_rng(1).standard_normal((60, 4)), np.arange(60) % 3
    data = fedmpi.ClientArrays(x, y, np.arange(60) % 4, test=(x[:21], y[:21]), val=(x[:35], y[:35]))
    settings = {"rounds": 1, "clients.sampler": "all", "evaluation.on": "both", "cluster.threads": 1}
    found = matrix(fedmpi.run("fedavg", settings, data=data, out=tmp_path / "RUN").folder)
    assert found.sum(axis=1).tolist() == [7, 7, 7] and [*found.columns] == ["0", "1", "2"]
