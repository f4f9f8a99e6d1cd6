"""Parquet files whose targets are no classes, whose samples are token ids, or which name images by their paths."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.registry import DATASETS
from data_prep.holdout import train_test_rows
from data_prep.raw import RawDataset
from fedmpi import UserError
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
ROWS = 20
RNG = np.random.default_rng(0)
IDS = pa.list_(pa.int64())


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
    train, test = train_test_rows(len(raw.labels) + len(raw.test_y))
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


@pytest.mark.parametrize("said", ["multilabel", "regression"])
def test_a_list_that_is_missing_leaves_those_of_the_others_what_they_are(tmp_path: Path, said: str) -> None:
    held = [[0, 1], [1, 1], None] * 6
    write(tmp_path / "t.parquet", {"x": RNG.normal(size=18), "label": pa.array(held, IDS)})
    raw = read(tmp_path, targets=said, skip_unlabelled=True)
    assert (raw.targets, raw.target_shape) == (said, (2,))
    found = np.concatenate([raw.targets_of(np.arange(len(raw.labels))), raw.test_y])
    assert sorted(found.tolist()) == sorted(row for row in held if row)


def test_a_label_that_is_missing_leaves_columns_of_zeros_and_ones_labels(tmp_path: Path) -> None:
    columns = {"x": RNG.normal(size=18), "rain": [True, False, None] * 6, "wind": [True] * 18}
    write(tmp_path / "t.parquet", columns)
    raw = read(tmp_path, label="rain,wind", skip_unlabelled=True)
    assert (raw.targets, raw.class_names) == ("multilabel", ("rain", "wind"))


def test_numbers_of_a_list_named_like_whole_ones_and_decimals_are_predicted(tmp_path: Path) -> None:
    held = pa.array([[0.5, 1.5]] * ROWS, pa.list_(pa.field("point", pa.float64())))
    write(tmp_path / "t.parquet", {"x": RNG.normal(size=ROWS), "label": held})
    raw = read(tmp_path)
    assert raw.targets == "regression" and raw.test_y.tolist() == [[0.5, 1.5]] * 4
    money = pa.array([2] * ROWS, pa.decimal128(5, 2))
    write(tmp_path / "t.parquet", {"x": money, "label": money})
    raw = read(tmp_path, targets="regression")
    assert raw.test_x.tolist() == [[2.0]] * 4 and raw.test_y.tolist() == [2.0] * 4


def test_a_target_that_is_missing_is_named_by_its_file_and_row(tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", {"x": [1.0, float("nan"), 2.0], "a": [1.0, 2.0, 3.0]})
    write(tmp_path / "train-1.parquet", {"x": pa.array([], pa.float64()), "a": pa.array([], pa.float64())})
    write(tmp_path / "train-2.parquet", {"x": [float("nan"), 1.0, 2.0], "a": [1.0, 2.0, None]})
    with pytest.raises(UserError, match=r"1 of 4 samples have no label .*, the first is \S+/train-2.parquet, row 2\."):
        read(tmp_path, label="a", targets="regression")
    with pytest.raises(UserError, match=r"1 of 4 samples have no label .*, the first is \S+/train-2.parquet, row 2\."):
        read(tmp_path, label="a")
    write(tmp_path / "train-2.parquet", {"x": [float("nan"), 1.0, 2.0], "a": [1.0, 2.0, 0.5]})
    with pytest.raises(UserError, match=r"0.5 \(\S+/train-2.parquet, row 2\) is a number to be predicted"):
        read(tmp_path, label="a")
    write(tmp_path / "train-2.parquet", {"x": [1.0, 1.0, 2.0], "a": [None, 0.5, 2.0]})
    with pytest.raises(UserError, match=r"the first is \S+/train-2.parquet, row 0\."):
        read(tmp_path, label="a")
    with pytest.raises(UserError, match=r"0.5 \(\S+/train-2.parquet, row 1\) is a number to be predicted"):
        read(tmp_path, label="a", skip_unlabelled=True)


def test_lists_of_token_ids_are_padded_and_their_targets_count_where_they_are(tmp_path: Path) -> None:
    x = [list(range(1, 2 + row % 4)) for row in range(ROWS)]
    y = [[*row[1:], -100] for row in x]
    write(tmp_path / "t.parquet", {"input_ids": x, "mask": x, "labels": y})
    raw = read(tmp_path, label="labels", task="text", features=("input_ids",))
    assert (raw.task, raw.targets, raw.feature_shape, raw.target_shape) == ("text", "tokens", (4,), (4,))
    assert raw.classes == len(raw.vocabulary) == 5
    found, (train, _) = targets(raw), train_test_rows(ROWS)
    for row, (ids, following) in enumerate(zip(x, y, strict=True)):
        assert found[row].tolist() == [*following[:-1], *[-1] * (5 - len(ids))]
    assert raw.read(np.arange(len(train))).tolist() == [x[row] + [0] * (4 - len(x[row])) for row in train]
    short = read(tmp_path, label="labels", task="text", features=("input_ids",), length=2)
    assert short.feature_shape == short.target_shape == (2,)
    with pytest.raises(UserError, match="Name one column of images, of token ids"):
        read(tmp_path, label="labels", task="text")


def test_rows_of_other_targets_are_left_out_and_rows_without_refused(tmp_path: Path) -> None:
    y = [[1.0, 2.5], [3.0], None, [4.0, float("nan")], *[[0.0, 1.0]] * 16]
    write(tmp_path / "t.parquet", {"x": RNG.normal(size=ROWS), "label": y})
    with pytest.raises(UserError, match=r"2 of 20 samples have no label .*, the first is \S+/t.parquet, row 2\."):
        read(tmp_path)
    raw = read(tmp_path, tally := Tally(), skip_unlabelled=True)
    assert tally.unreadable == 1 and "1 targets where most samples have 2" in tally.first
    assert len(raw.labels) + len(raw.test_y) == 17 and raw.target_shape == (2,)


def test_paths_of_images_below_a_relative_folder_may_be_absolute_or_lead_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("data", "pictures"):
        (tmp_path / folder).mkdir()
    for row in range(10):
        Image.fromarray(np.full((5, 4), 20 * row, np.uint8)).save(tmp_path / "pictures" / f"{row}.png")
    starts = (f"{tmp_path}/", "../", "")
    held = [f"{starts[row % 3]}pictures/{row}.png" for row in range(10)]
    write(tmp_path / "data" / "t.parquet", {"image": held, "label": [0, 1] * 5})
    monkeypatch.chdir(tmp_path)
    raw = read(Path("."), task="image")
    found = np.concatenate([raw.read(np.arange(8)), raw.test_x])[:, 0, 0, 0]
    assert sorted(found.tolist()) == [20 * row for row in range(10)]


def test_images_that_are_none_are_counted_and_one_that_breaks_later_named(tmp_path: Path) -> None:
    Image.new("L", (2, 2)).save(tmp_path / "good.png")
    good = (tmp_path / "good.png").read_bytes()
    place = good.index(b"IDAT")
    size = int.from_bytes(good[place - 4 : place], "big")
    broken = b"IDAT" + b"\xff" * size  # a PNG is checked by its checksums, without being decoded
    odd = good[:place] + broken + zlib.crc32(broken).to_bytes(4, "big") + good[place + 8 + size :]
    held = [None, b"", b"no image", *[good] * 17]
    write(tmp_path / "t.parquet", {"image": held, "label": [0, 1] * 10})
    read(tmp_path, tally := Tally())
    assert tally.unreadable == 3 and tally.first.endswith("row 0: neither the bytes nor the path of an image")
    held[9] = odd
    write(tmp_path / "t.parquet", {"image": held, "label": [0, 1] * 10})
    with pytest.raises(UserError, match=r"t.parquet, row 9: the image cannot be decoded"):
        read(tmp_path)
    write(tmp_path / "t.parquet", {"image": [b"no image"] * 2, "label": [0, 1]})
    with pytest.raises(UserError, match="row 0: not a readable image .of no known format."):
        read(tmp_path)


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
        ({"x": [1.0], "a": ["b"], "c": [1]}, ["--label", "a,c"], "targets that are no classes must be numbers"),
        ({"x": [1.0], "a": [[1.0]], "c": [1]}, ["--label", "a,c"], "or one column of lists"),
        ({"x": [1.0], "a": [1], "c": [1]}, ["--label", "a,a"], "names a column twice"),
        ({"x": [1.0], "label": [[1, 2]]}, ["--targets", "classification"], "a class is one"),
        ({"x": [1.0], "label": [1]}, ["--targets", "tokens"], "tokens are lists"),
        ({"x": [1.0], "label": [1]}, ["--targets", "multilabel"], "several columns, or a list"),
        ({"x": ["a"] * 9, "label": [[1, 2]] * 9}, [], "need samples of token ids"),
        ({"x": [1.0] * 9, "label": [[1, -5]] * 9}, [], "holds the token -5"),
        ({"x": [1.0] * 9, "label": [[1, -5]] * 9}, ["--targets", "multilabel"], "Number them from 0 on"),
        (
            {"x": [1.0] * 9, "label": [[-1]] * 9},
            ["--targets", "multilabel"],
            "labels from -1 to -1 where there are none",
        ),
        (
            {"x": [1.0] * 9, "label": [[1 << 62]] * 9},
            ["--targets", "multilabel"],
            "holds 4.61e+18. Number classes from 0 on",
        ),
        ({"x": [1.0] * 9, "label": [[1 << 62]] * 9}, [], "holds 4.61e+18. Number classes from 0 on"),
        ({"x": [1.0] * 9, "label": [[1], []] + [None] * 7}, [], "7 of 9 samples have no label"),
        ({"x": [1.0] * 9, "label": [[None]] * 9}, ["--skip-unlabelled"], "holds no labels"),
        ({"x": [1.0] * 9, "label": pa.array([None] * 9, IDS)}, ["--skip-unlabelled"], "no sample has a label"),
        ({"x": [1.0] * 9, "label": [[[1]]] * 9}, [], "Labels must be whole numbers or texts"),
        ({"x": [[0.5]] * 9, "label": [0] * 9}, ["--task", "text"], "Name some with --features"),
        ({"x": [1.0] * 9, "label": [0] * 9}, ["--task", "image"], "Name some with --features"),
        (
            {"x": [1.0] * 9, "label": [[1.0, float("inf")]] * 9},
            [],
            ", column label holds numbers that are not finite",
        ),
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
    assert message in said and said.count("\n") == 1 and "ClientArrays" not in said
