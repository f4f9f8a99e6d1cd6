"""Parquet and Arrow files, in the folders that Hugging Face's datasets save and publish."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.registry import DATASETS
from data_prep.holdout import stratified_rows
from data_prep.raw import RawDataset
from fedmpi import UserError
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
RNG = np.random.default_rng(5)


def read(raw: Path, tally: Tally | None = None, **options: Any) -> RawDataset:
    return DATASETS["parquet"].read(raw, ReadOptions(**options), tally or Tally())


def table(columns: dict[str, Any], names: list[str] | None = None) -> Any:
    """A table; with names of classes as Hugging Face's datasets keep them in the schema."""
    made = pa.table(columns)
    if names is not None:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        made = made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    return made


def png(width: int, height: int, grey: bool = False) -> tuple[bytes, np.ndarray]:
    pixels = RNG.integers(0, 256, (height, width) if grey else (height, width, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue(), pixels


def test_images_of_a_published_set_are_decoded_when_they_are_written(tmp_path: Path) -> None:
    drawn = [png(6, 5) for _ in range(7)]
    images = [{"bytes": content, "path": f"{row}.png"} for row, (content, _) in enumerate(drawn)]
    (tmp_path / "data").mkdir()
    for part, rows in (
        ("train-00000-of-00002", slice(0, 2)),
        ("train-00001-of-00002", slice(2, 5)),
        ("test-0", slice(5, 7)),
    ):
        columns = {"image": images[rows], "label": [2, 0, 1, 0, 2, 1, 0][rows], "user": list("aababcc")[rows]}
        pq.write_table(table(columns, ["cat", "dog", "eel"]), tmp_path / "data" / f"{part}.parquet")
    raw = read(tmp_path)
    assert raw.class_names == ("cat", "dog", "eel") and raw.labels.tolist() == [2, 0, 1, 0, 2]
    assert raw.test_y.tolist() == [1, 0] and raw.user_names == ("a", "b") and raw.feature_shape == (3, 5, 6)
    np.testing.assert_array_equal(raw.read(np.array([4, 0])), [drawn[row][1].transpose(2, 0, 1) for row in (4, 0)])
    np.testing.assert_array_equal(raw.test_x[1], drawn[6][1].transpose(2, 0, 1))
    words = ["parquet", "--raw", str(tmp_path), "--partition", "user", "--out", str(tmp_path / "out")]
    assert main(words) == 0 and open_store(tmp_path / "out").sizes.tolist() == [3, 2]


def test_images_of_several_sizes_want_one(tmp_path: Path) -> None:
    content = [png(6, 5, True)[0], png(6, 5, True)[0], png(3, 4, True)[0], b"no image", png(6, 5, True)[0]]
    content += [png(6, 5, True)[0] for _ in range(5)]
    pq.write_table(table({"image": content, "label": [0, 1] * 5}), tmp_path / "all.parquet")
    with pytest.raises(UserError, match="2 sizes .* --image-size"):
        read(tmp_path)
    tally = Tally()
    resized = read(tmp_path, tally, image_size=(4, 2))
    assert resized.feature_shape == (1, 2, 4) and len(resized.labels) + len(resized.test_y) == 9
    assert tally.unreadable == 1 and "row 3: not a readable image" in tally.first
    odd = read(tmp_path, skip_odd_sizes=True)
    assert odd.feature_shape == (1, 5, 6) and len(odd.labels) + len(odd.test_y) == 8


@pytest.mark.parametrize("stream", [True, False])
def test_texts_of_a_saved_set_are_read_from_arrow_files(tmp_path: Path, stream: bool) -> None:
    for part, texts, labels in (("train", ["Good day", "bad day", ""], [1, 0, 1]), ("test", ["a good one"], [1])):
        (tmp_path / part).mkdir()
        made = table({"text": texts, "label": labels}, ["neg", "pos"])
        path = tmp_path / part / "data-00000-of-00001.arrow"
        writer = (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), made.schema)
        with writer:
            writer.write_table(made)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    raw = read(tmp_path, tally := Tally(), length=3)
    assert raw.labels.tolist() == [1, 0] and raw.class_names == ("neg", "pos") and raw.users is None
    assert [raw.vocabulary[token] for token in raw.read(np.array([0]))[0]] == ["good", "day", "<pad>"]
    assert tally.unreadable == 1 and "row 2: the text is empty" in tally.first


@pytest.mark.parametrize("offsets", [(0, 8, 2**30), (0, -9, 15), (8, 0, 15)])
def test_offsets_in_an_arrow_file_that_lead_into_foreign_memory_are_refused(
    tmp_path: Path, offsets: tuple[int, ...]
) -> None:
    path, made = tmp_path / "train.arrow", table({"text": ["Good day", "bad day"], "label": [1, 0]})
    with pa.ipc.new_file(str(path), made.schema) as writer:
        writer.write_table(made)
    content, stored = path.read_bytes(), struct.pack("<3i", 0, 8, 15)
    assert content.count(stored) == 1
    path.write_bytes(content.replace(stored, struct.pack("<3i", *offsets)))
    with pytest.raises(UserError, match="train.arrow cannot be read"):
        read(path)


def test_columns_of_numbers_and_lists_are_a_vector(tmp_path: Path) -> None:
    rows = 2500  # more than one block
    x, more = RNG.normal(size=rows).astype(np.float32), RNG.normal(size=(rows, 2)).astype(np.float32)
    columns = {"a": x, "kind": [f"k{row % 3}" for row in range(rows)], "b": more.tolist(), "who": np.arange(rows) // 50}
    pq.write_table(table(columns), tmp_path / "mine.parquet")
    raw = read(tmp_path / "mine.parquet", label="kind", user="who")
    train, test = stratified_rows(rows, np.arange(rows) % 3)
    expected = np.column_stack([x, more])
    np.testing.assert_array_equal(raw.read(np.arange(len(train))), expected[train])
    np.testing.assert_array_equal(raw.test_x, expected[test])
    assert raw.labels.tolist() == (train % 3).tolist() and raw.users is not None
    assert [raw.user_names[user] for user in raw.users] == [str(row // 50) for row in train]  # type: ignore[index]
    named = read(tmp_path / "mine.parquet", label="kind", features=("who", "a"))
    np.testing.assert_array_equal(named.read(np.arange(3)), np.column_stack([np.arange(rows) // 50, x])[train[:3]])
    assert named.feature_names == ("who", "a") and named.users is None


def test_a_row_without_numbers_does_not_say_how_many_the_others_have(tmp_path: Path) -> None:
    columns = {"x": [[], *([1.0, float(row)] for row in range(10))], "label": [0] * 11}
    pq.write_table(table(columns), tmp_path / "t.parquet")
    raw = read(tmp_path, tally := Tally())
    assert raw.feature_shape == (2,) and len(raw.labels) + len(raw.test_y) == 10
    assert tally.unreadable == 1 and "row 0" in tally.first


def test_rows_of_another_length_are_counted_and_the_largest_float_is_kept(tmp_path: Path) -> None:
    largest = float(np.finfo(np.float32).max)
    held = [[1.0, -largest], [1.0], [largest, 2.0], [1.0, 1.001 * largest], *[[3.0, 4.0]] * 7]
    pq.write_table(table({"x": held, "label": [0] * 11}), tmp_path / "train.parquet")
    pq.write_table(table({"x": [[5.0, 6.0]], "label": [0]}), tmp_path / "test.parquet")
    raw = read(tmp_path, tally := Tally())
    assert raw.read(np.arange(2)).tolist() == [[1.0, -largest], [largest, 2.0]] and len(raw.labels) == 9
    assert tally.unreadable == 2 and tally.first.endswith("row 1: 1 numbers in column 'x' where most rows have 2")


def test_dictionaries_are_what_they_stand_for(tmp_path: Path) -> None:
    """As pandas writes its categories; parts whose dictionaries differ, or are none, belong together."""
    said = pa.array(["good day", "bad day"] * 5)
    coded = said.dictionary_encode()
    for part, values in enumerate((coded, said, coded.cast(pa.dictionary(pa.int8(), pa.string())))):
        columns = {"t": values, "label": pa.array([0, 1] * 5).dictionary_encode(), "user": values}
        pq.write_table(table(columns), tmp_path / f"train-{part}.parquet")
    raw = read(tmp_path, length=3)
    assert raw.task == "text" and set(raw.vocabulary[2:]) == {"good", "bad", "day"} and raw.classes == 2
    assert raw.user_names is not None and set(raw.user_names) == {"good day", "bad day"}


def test_columns_of_no_known_kind_are_left_out_and_named(tmp_path: Path) -> None:
    columns = {"x": [1.0] * 10, "boxes": [[[1, 2]]] * 10, "parts": [[{"a": 1}]] * 10, "label": [0, 1] * 5}
    pq.write_table(table(columns | {"user": pa.array([1] * 10, pa.date32())}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="x: double, boxes: .*with --features"):
        read(tmp_path)
    pq.write_table(pq.read_table(tmp_path / "t.parquet").drop(["boxes"]), tmp_path / "t.parquet")
    raw = read(tmp_path, tally := Tally())
    assert raw.feature_names == ("x",) and len(raw.labels) == 8 and not tally.unreadable
    assert [name for name, _ in raw.understood.unused] == ["parts"]


def test_parts_that_name_their_classes_otherwise_are_refused(tmp_path: Path) -> None:
    for part, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        pq.write_table(table({"x": [1.0, 2.0], "label": [0, 1]}, names), tmp_path / f"{part}.parquet")
    with pytest.raises(UserError, match="test.parquet names the classes of column 'label' differently from .*train"):
        read(tmp_path)
    pq.write_table(table({"x": [1.0, 2.0], "label": [0, 1]}), tmp_path / "test.parquet")
    assert read(tmp_path).class_names == ("cat", "dog")


@pytest.mark.parametrize("nobody", [None, "", float("nan")])
def test_rows_without_a_user_are_reported(tmp_path: Path, nobody: Any) -> None:
    users = [nobody, *([1.0] if isinstance(nobody, float) else ["Nan"]) * 9]
    pq.write_table(table({"x": [1.0] * 10, "label": [0] * 10, "user": users}), tmp_path / "train.parquet")
    pq.write_table(table({"x": [1.0], "label": [0], "user": users[1:2]}), tmp_path / "test.parquet")
    raw = read(tmp_path, tally := Tally())
    assert raw.users is None and "1 of 10 training rows name no user" in tally.notes[0]


@pytest.mark.parametrize("missing", [[], [None]])
def test_truth_values_are_classes_by_their_names(tmp_path: Path, missing: list[None]) -> None:
    held = [True, False] * 5 + missing
    pq.write_table(table({"x": [1.0] * len(held), "label": held}), tmp_path / "t.parquet")
    assert read(tmp_path, skip_unlabelled=True).class_names == ("False", "True")


def test_rows_without_a_label_are_refused_or_left_out(tmp_path: Path) -> None:
    columns = {"x": [float(row) for row in range(20)], "label": [-1, None, *([0, 1] * 9)]}
    pq.write_table(table(columns, ["no", "yes"]), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="2 of 20 samples have no label"):
        read(tmp_path)
    raw = read(tmp_path, skip_unlabelled=True)
    assert len(raw.labels) + len(raw.test_y) == 18 and raw.class_names == ("no", "yes")


def test_a_validation_part_tests_where_there_is_no_test_part(tmp_path: Path) -> None:
    for part, rows in (("train", 6), ("validation", 3)):
        pq.write_table(
            table({"x": [float(row) for row in range(rows)], "label": [0, 1, 2] * (rows // 3)}),
            tmp_path / f"{part}.parquet",
        )
    assert len(read(tmp_path, tally := Tally()).test_y) == 3 and not tally.notes
    pq.write_table(table({"x": [1.0], "label": [0]}), tmp_path / "test.parquet")
    raw = read(tmp_path, tally := Tally())
    assert len(raw.test_y) == 1 and tally.notes == ["1 files of a validation part are not used"]


@pytest.mark.parametrize(
    ("columns", "words", "message"),
    [
        ({"x": [1.0]}, [], "has no column 'label'"),
        ({"x": [1.0], "label": [0]}, ["--user", "who"], "has no column 'who'"),
        ({"x": [1.0], "label": [0]}, ["--features", "y"], "has no column 'y'"),
        ({"x": [1.0], "label": [0]}, ["--features", "x,label"], "'label' is the label column"),
        ({"x": [1.0], "label": [0]}, ["--features", "x,x"], "--features x,x names a column twice"),
        ({"x": [1.0], "t": ["a"], "label": [0]}, ["--features", "x,t"], "with --features"),
        ({"x": [{"a": 1}], "label": [0]}, [], "with --features"),
        ({"x": [1.0], "label": [{"a": 0}]}, [], "Labels must be whole numbers or texts"),
        ({"x": [1.0] * 9, "label": [0.5] * 9}, [], "is a number to be predicted"),
        ({"x": [float("nan")], "label": [0]}, [], "x: it has no value"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    tmp_path: Path, columns: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(table(columns), tmp_path / "t.parquet")
    command = ["parquet", "--raw", str(tmp_path), "--partition", "iid", "--clients", "1", *words]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([[1.0], [2.0], [0]], names=["x", "x", "label"]), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="names several columns 'x'"):
        read(tmp_path)


def test_folders_without_files_with_other_columns_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no table in"):
        read(tmp_path)
    pq.write_table(table({"x": [1.0], "label": [0]}), tmp_path / "train-0.parquet")
    pq.write_table(table({"x": ["a"], "label": [0]}), tmp_path / "train-1.parquet")
    with pytest.raises(UserError, match="The columns of .*train-1.parquet"):
        read(tmp_path)
    (tmp_path / "train-1.parquet").write_bytes((tmp_path / "train-0.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match="train-1.parquet cannot be read"):
        read(tmp_path)
    (tmp_path / "train-1.parquet").unlink()
    (tmp_path / "test.arrow").write_bytes(b"ARROW1 no more")
    with pytest.raises(UserError, match="test.arrow cannot be read"):
        read(tmp_path)


def test_pyarrow_is_asked_for_only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table({"x": [1.0], "label": [0]}), tmp_path / "t.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        read(tmp_path)
