"""Parquet files whose targets are no classes, whose samples are token ids, or which name images by their paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.files import hold_out
from data_prep.datasets.registry import DATASETS
from data_prep.raw import RawDataset
from fedmpi.common.errors import UserError
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
ROWS = 20
RNG = np.random.default_rng(0)


def read(folder: Path, tally: Tally | None = None, **options: Any) -> RawDataset:
    data = DATASETS["parquet"]
    return data.read(folder, ReadOptions(**{**data.defaults, **options}), tally or Tally())


def write(path: Path, columns: dict[str, Any], names: dict[str, list[str]] | None = None) -> None:
    """A table; `names`: those of the classes whose numbers the lists of a column hold, as Hugging Face's datasets."""
    found = pa.table(columns)
    if names:
        features = {
            name: {"feature": {"names": known, "_type": "ClassLabel"}, "_type": "Sequence"}
            for name, known in names.items()
        }
        found = found.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(found, path)


def targets(raw: RawDataset) -> np.ndarray:
    """Of all rows, in their order in the file, which has no test part."""
    train, test = hold_out(len(raw.labels) + len(raw.test_y))
    found = np.empty((len(train) + len(test), *raw.target_shape), raw.test_y.dtype)
    found[train], found[test] = raw.targets_of(np.arange(len(train))), raw.test_y
    return found


def test_columns_of_numbers_are_predicted_together(tmp_path: Path) -> None:
    a, b = RNG.normal(size=ROWS), RNG.integers(0, 9, ROWS)
    write(tmp_path / "t.parquet", {"x": RNG.normal(size=ROWS), "a": a, "b": b, "user": [f"u{row % 3}" for row in b]})
    raw = read(tmp_path, label="a,b")
    assert raw.targets == "regression" and raw.target_shape == (2,) and raw.feature_names == ("x",)
    np.testing.assert_array_equal(targets(raw), np.column_stack([a, b]).astype(np.float32))
    single = read(tmp_path, label="a", features=("x", "b"), targets="regression")
    assert single.target_shape == () and raw.users is not None
    np.testing.assert_array_equal(targets(single), a.astype(np.float32))


def test_columns_of_zeros_and_ones_are_labels_with_their_names(tmp_path: Path) -> None:
    a, b = RNG.integers(0, 2, ROWS), RNG.integers(0, 2, ROWS).astype(bool)
    write(tmp_path / "t.parquet", {"x": RNG.normal(size=ROWS), "rain": a, "wind": b})
    raw = read(tmp_path, label="rain,wind")
    assert (raw.targets, raw.class_names, raw.classes) == ("multilabel", ("rain", "wind"), 2)
    np.testing.assert_array_equal(targets(raw), np.column_stack([a, b]))


def test_lists_of_the_labels_that_are_there_become_zeros_and_ones(tmp_path: Path) -> None:
    held = [[0, 2], [], [1]] * 6
    names = {"label": ["joy", "fear", "rage", "calm"]}
    write(tmp_path / "t.parquet", {"t": [f"word{row}" for row in range(18)], "label": held}, names)
    raw = read(tmp_path)
    assert (raw.task, raw.targets, raw.class_names) == ("text", "multilabel", ("joy", "fear", "rage", "calm"))
    expected = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]] * 6)
    np.testing.assert_array_equal(targets(raw), expected)
    write(tmp_path / "t.parquet", {"t": [f"word{row}" for row in range(18)], "label": held})
    np.testing.assert_array_equal(targets(read(tmp_path, targets="multilabel")), expected[:, :3])
    assert raw.refit is not None and raw.refit(np.arange(3)).targets == "multilabel"  # as a validation part makes it


def test_lists_of_token_ids_are_padded_and_their_targets_count_where_they_are(tmp_path: Path) -> None:
    x = [list(range(1, 2 + row % 4)) for row in range(ROWS)]
    y = [[*row[1:], -100] for row in x]
    write(tmp_path / "t.parquet", {"input_ids": x, "mask": x, "labels": y})
    raw = read(tmp_path, label="labels", task="text", features=("input_ids",))
    assert (raw.task, raw.targets, raw.feature_shape, raw.target_shape) == ("text", "tokens", (4,), (4,))
    assert raw.classes == len(raw.vocabulary) == 5
    found, (train, _) = targets(raw), hold_out(ROWS)
    for row, (ids, following) in enumerate(zip(x, y, strict=True)):
        assert found[row].tolist() == [*following[:-1], *[-1] * (5 - len(ids))]
    assert raw.read(np.arange(len(train))).tolist() == [x[row] + [0] * (4 - len(x[row])) for row in train]
    short = read(tmp_path, label="labels", task="text", features=("input_ids",), length=2)
    assert short.feature_shape == short.target_shape == (2,)
    with pytest.raises(UserError, match="one column of images or of token ids"):
        read(tmp_path, label="labels", task="text")


def test_rows_of_other_targets_are_left_out_and_rows_without_refused(tmp_path: Path) -> None:
    y = [[1.0, 2.5], [3.0], None, [4.0, float("nan")], *[[0.0, 1.0]] * 16]
    write(tmp_path / "t.parquet", {"x": RNG.normal(size=ROWS), "label": y})
    with pytest.raises(UserError, match="2 of 19 rows lack a target, the first is row 1"):
        read(tmp_path)
    raw = read(tmp_path, tally := Tally(), skip_unlabelled=True)
    assert tally.unreadable == 1 and "1 targets where the first row has 2" in tally.first
    assert len(raw.labels) + len(raw.test_y) == 17 and raw.target_shape == (2,)


@pytest.mark.parametrize("form", ["texts", "Hugging Face"])
def test_images_named_by_their_paths_are_read_when_they_are_written(tmp_path: Path, form: str) -> None:
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    paths = []
    for row in range(10):
        paths.append(f"pictures/{row}.png")
        Image.fromarray(np.full((5, 4), 20 * row, np.uint8)).save(tmp_path / "data" / paths[-1])
    Image.new("L", (4, 5)).save(tmp_path.parent / "other.png")  # belongs to nobody here
    held: list[Any] = [*paths, "pictures/gone.png", "a\0b", "../../other.png", str(tmp_path.parent / "other.png")]
    if form == "Hugging Face":
        held = [{"bytes": None, "path": path} for path in held]
    write(tmp_path / "data" / "t.parquet", {"image": held, "label": [row % 2 for row in range(14)]})
    words = ["parquet", "--raw", str(tmp_path), "--partition", "iid", "--clients", "2", "--out", str(tmp_path / "out")]
    assert main([*words, *(["--task", "image"] if form == "texts" else [])]) == 0
    store = open_store(tmp_path / "out", verify=True)
    assert store.description.feature_shape == (1, 5, 4) and store.manifest.skipped == 4
    parts = (store.client(0)[0], store.client(1)[0], store.test()[0])
    seen = {int(pixels.flat[0]) for x in parts for pixels in np.asarray(x)}
    assert seen == {20 * row for row in range(10)}


@pytest.mark.parametrize(
    ("columns", "words", "message"),
    [
        ({"x": [1.0], "a": ["b"], "c": [1]}, ["--label", "a,c"], "targets that are no classes are numbers"),
        ({"x": [1.0], "a": [[1.0]], "c": [1]}, ["--label", "a,c"], "or one of lists"),
        ({"x": [1.0], "a": [1], "c": [1]}, ["--label", "a,a"], "names a column twice"),
        ({"x": [1.0], "label": [[1, 2]]}, ["--targets", "classification"], "a class is one"),
        ({"x": [1.0], "label": [1]}, ["--targets", "tokens"], "tokens are lists"),
        ({"x": [1.0], "label": [1]}, ["--targets", "multilabel"], "several columns, or a list"),
        ({"x": ["a"] * 9, "label": [[1, 2]] * 9}, [], "need samples that are"),
        ({"x": [1.0] * 9, "label": [[1, -5]] * 9}, [], "holds the token -5"),
        ({"x": [1.0] * 9, "label": [[1, -5]] * 9}, ["--targets", "multilabel"], "number them from 0 on"),
        ({"x": [1.0] * 9, "label": [[1], [2, 3], [4]] * 3}, ["--targets", "regression"], "lists of 1 to 2 numbers"),
        ({"x": [1.0] * 9, "label": [0] * 9}, ["--task", "image"], "name them with --features"),
        ({"x": [[2**40]] * 9, "label": [0] * 9}, ["--task", "text"], "no token ids"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    tmp_path: Path, columns: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "t.parquet", columns)
    command = ["parquet", "--raw", str(tmp_path), "--partition", "iid", "--clients", "1", *words]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
