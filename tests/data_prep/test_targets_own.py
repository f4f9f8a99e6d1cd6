"""Targets of the user's own that are no classes: columns of a table, arrays of several values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.registry import DATASETS
from data_prep.holdout import train_test_rows
from data_prep.raw import RawDataset
from fedmpi import UserError
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

RNG = np.random.default_rng(2)


def read(path: Path, tally: Tally | None = None, **options: Any) -> RawDataset:
    return DATASETS["arrays"].read(path, ReadOptions(**options), tally or Tally())


def table(path: Path, rows: list[str], header: str = "a,b,rain,wind,user") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_several_columns_of_numbers_are_a_regression(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [f"{row},{-row},{row / 4},{row * 3},u{row % 2}" for row in range(20)])
    raw = read(path, label="rain,wind")
    train, test = train_test_rows(20)
    assert raw.targets == "regression" and raw.target_shape == (2,) and raw.classes == 2
    np.testing.assert_array_equal(raw.targets_of(np.arange(16)), np.column_stack([train / 4, train * 3]))
    np.testing.assert_array_equal(raw.test_y, np.column_stack([test / 4, test * 3]))
    np.testing.assert_array_equal(raw.read(np.arange(16)), np.column_stack([train, -train]))
    assert raw.feature_names == ("a", "b") and raw.users is not None and raw.user_names == ("u0", "u1")


def test_several_columns_of_zeros_and_ones_are_labels_with_the_columns_names(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [f"{row},1,{row % 2},{int(row > 4)},u" for row in range(10)])
    raw = read(path, label="rain,wind")
    assert raw.targets == "multilabel" and raw.class_names == ("rain", "wind")
    assert read(path, label="rain,wind", targets="regression").targets == "regression"
    words = [
        "arrays",
        "--raw",
        str(path),
        "--label",
        "wind,rain",
        "--partition",
        "user",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    store = open_store(tmp_path / "out", verify=True)
    assert store.description.targets == "multilabel" and store.description.target_shape == (2,)
    x, y = (np.asarray(part) for part in store.client(0))
    np.testing.assert_array_equal(y, np.column_stack([x[:, 0] > 4, x[:, 0] % 2]))


def test_one_column_of_numbers_is_a_regression_where_the_user_says_so(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [f"{row},1,{row / 4},2,u" for row in range(10)])
    raw = read(path, label="rain", targets="regression")
    train, _ = train_test_rows(10)
    assert raw.target_shape == () and raw.classes == 1
    np.testing.assert_array_equal(raw.targets_of(np.arange(8)), (train / 4).astype(np.float32))


def test_arrays_of_several_values_are_recognised_by_their_numbers(tmp_path: Path) -> None:
    x, tokens = RNG.normal(size=(20, 3)), RNG.integers(0, 9, (20, 4))
    for y, targets in (
        (RNG.random((20, 5)) < 0.5, "multilabel"),
        (RNG.normal(size=(20, 2)), "regression"),
        (RNG.normal(size=(20, 2, 3)), "regression"),
    ):
        np.savez(tmp_path / "t.npz", x=x, y=y, x_test=x[4:8], y_test=y[4:8])
        raw = read(tmp_path / "t.npz")
        np.testing.assert_array_equal(raw.test_y, y[4:8].astype(np.float32))
        assert raw.targets == targets and raw.target_shape == y.shape[1:]
        np.testing.assert_array_equal(raw.targets_of(np.arange(20)), y.astype(np.float32))
    for y, targets in ((tokens.astype(np.uint8), "tokens"), ((tokens > 4).astype(np.uint8), "multilabel")):
        np.savez(tmp_path / "t.npz", x=tokens, y=y)
        assert read(tmp_path / "t.npz", task="text").targets == targets
    after = np.where(RNG.random((20, 4)) < 0.2, -1, tokens)
    np.savez(tmp_path / "t.npz", x=tokens, y=after)
    raw = read(tmp_path / "t.npz", task="text")
    assert raw.targets == "tokens" and raw.classes == len(raw.vocabulary) == 9
    np.testing.assert_array_equal(raw.targets_of(np.arange(16)), after[train_test_rows(20)[0]])


def test_rows_without_a_target_are_refused_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    y = RNG.normal(size=(20, 2))
    y[3, 1] = np.nan
    np.savez(tmp_path / "t.npz", x=np.arange(40.0).reshape(20, 2), y=y, user=np.arange(20) // 5)
    words = ["arrays", "--raw", str(tmp_path / "t.npz"), "--partition", "user", "--out", str(tmp_path / "out")]
    assert main(words) == 2 and "1 of 20 rows lack a target, the first is row 3" in capsys.readouterr().err
    assert main([*words, "--skip-unlabelled"]) == 0
    rows = [store_rows for client in range(4) for store_rows in open_store(tmp_path / "out").client(client)[0][:, 0]]
    assert 6.0 not in rows and len(rows) == 16  # of 19, a fifth is for testing
    path = table(tmp_path / "t.csv", ["1,2,0.5,,u", "1,2,0.5,x,u", *["1,2,0.5,3,u"] * 8])
    tally = Tally()
    assert len(read(path, tally, label="rain,wind", skip_unlabelled=True).labels) == 7
    assert tally.unreadable == 1 and "'x' in column 'wind'" in tally.first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--label", "rain,snow"], "has no column 'snow'"),
        (["--label", "rain,rain"], "names a column twice"),
        (["--label", "rain,wind", "--targets", "classification"], "a class is one value"),
        (["--label", "rain", "--targets", "multilabel"], "have several values each"),
        (["--label", "user", "--targets", "regression"], "targets that are no classes are numbers"),
        (["--label", "a,b", "--targets", "multilabel"], "neither 0 nor 1"),
        (["--label", "rain", "--targets", "numbers"], "--targets 'numbers' is unknown"),
        (["--label", "rain"], "--targets regression"),
    ],
)
def test_targets_that_are_not_what_is_said_are_refused(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "t.csv", [f"{row},{-row},{row / 4},{row * 3},u" for row in range(10)])
    command = ["arrays", "--raw", str(path), "--partition", "iid", "--clients", "2", "--out", str(tmp_path / "out")]
    assert main([*command, *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_targets_of_no_value_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((9, 2)), y=np.zeros((9, 0), np.int64))
    with pytest.raises(UserError, match="a sample has no target"):
        read(tmp_path / "t.npz")


def test_targets_of_another_shape_in_the_test_part_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = RNG.normal(size=(9, 2))
    np.savez(tmp_path / "t.npz", x=x, y=x, x_test=x, y_test=x[:, :1])
    words = ["arrays", "--raw", str(tmp_path / "t.npz"), "--partition", "iid", "--clients", "2"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "a row of y has (2,) values, one of y_test (1,)" in capsys.readouterr().err
