"""Arrays and tables of the user's: arrays of .npz files, Parquet and Arrow files, labels and other targets."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep.datasets import DATASETS
from data_prep.holdout import stratified_rows, train_test_groups, train_test_rows
from data_prep.raw import RawDataset, ReadOptions, Tally
from fedmpi import UserError
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
RNG = np.random.default_rng(5)
ROWS = 20
IDS = pa.list_(pa.int64())


def read(raw: Path, tally: Tally | None = None, **options: Any) -> RawDataset:
    data = DATASETS["parquet"]
    return data.read(raw, ReadOptions(**options), tally or Tally())


def targets(raw: RawDataset) -> np.ndarray:
    """Return all rows, in their order in the file, which has no test part."""
    train, test = train_test_rows(len(raw.labels) + len(raw.test_y))
    found = np.empty((len(train) + len(test), *raw.target_shape), raw.test_y.dtype)
    found[train], found[test] = raw.targets_of(np.arange(len(train))), raw.test_y
    return found


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_groups_are_held_out_whole_and_never_more_than_a_fifth(drawn: list[int]) -> None:
    groups = np.unique(drawn, return_inverse=True)[1]
    train, test = train_test_groups(groups)
    assert np.array_equal(np.sort(np.r_[train, test]), np.arange(len(groups)))
    assert not set(groups[train]) & set(groups[test])
    sizes, share = np.bincount(groups), len(groups) // 5
    if len(sizes) > 1 and sizes.min() > share:
        assert len(test) == sizes.min()  # the smallest group, as none fits
    else:
        assert len(test) <= share and all(sizes[group] > share - len(test) for group in set(groups[train]))


def pq_write(path: Path, columns: dict[str, Any]) -> None:
    pq.write_table(pa.table(columns), path)


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


def test_dictionaries_are_the_values_that_they_represent(tmp_path: Path) -> None:
    """pandas writes its categories as dictionaries; those of two parts may differ, or one part may have none."""
    said = pa.array(["good day", "bad day"] * 5)
    coded = said.dictionary_encode()
    for part, values in enumerate((coded, said, coded.cast(pa.dictionary(pa.int8(), pa.string())))):
        columns = {"t": values, "label": pa.array([0, 1] * 5).dictionary_encode(), "user": values}
        pq.write_table(table(columns), tmp_path / f"train-{part}.parquet")
    raw = read(tmp_path, length=3)
    assert raw.task == "text" and set(raw.vocabulary[2:]) == {"good", "bad", "day"} and raw.classes == 2
    assert raw.user_names is not None and set(raw.user_names) == {"good day", "bad day"}


def test_parts_that_name_their_classes_otherwise_are_rejected(tmp_path: Path) -> None:
    for part, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        pq.write_table(table({"x": [1.0, 2.0], "label": [0, 1]}, names), tmp_path / f"{part}.parquet")
    with pytest.raises(UserError, match="test.parquet names the classes of column 'label' differently from .*train"):
        read(tmp_path)
    pq.write_table(table({"x": [1.0, 2.0], "label": [0, 1]}), tmp_path / "test.parquet")
    assert read(tmp_path).class_names == ("cat", "dog")


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


def test_a_target_that_is_missing_is_named_by_its_file_and_row(tmp_path: Path) -> None:
    pq_write(tmp_path / "train-0.parquet", {"x": [1.0, float("nan"), 2.0], "a": [1.0, 2.0, 3.0]})
    pq_write(tmp_path / "train-1.parquet", {"x": pa.array([], pa.float64()), "a": pa.array([], pa.float64())})
    for values, words in (
        ([1.0, 2.0, None], "1 of 4 samples have no label"),
        ([1.0, 2.0, 0.5], "0.5 .* is a number to"),
    ):
        pq_write(tmp_path / "train-2.parquet", {"x": [float("nan"), 1.0, 2.0], "a": values})
        with pytest.raises(UserError, match=words) as refusal:
            read(tmp_path, label="a")
        assert "train-2.parquet, row 2" in str(refusal.value)


def test_lists_of_token_ids_are_padded_and_their_targets_are_lists_of_one_length(tmp_path: Path) -> None:
    x = [list(range(1, 2 + row % 4)) for row in range(ROWS)]
    y = [(row[1:] + [-1] * 4)[:4] for row in x]
    pq_write(tmp_path / "t.parquet", {"input_ids": x, "mask": x, "labels": y})
    raw = read(tmp_path, label="labels", task="text", features=("input_ids",))
    assert (raw.task, raw.targets, raw.feature_shape, raw.target_shape) == ("text", "tokens", (4,), (4,))
    assert raw.classes == len(raw.vocabulary) == 5
    found, (train, _) = targets(raw), train_test_rows(ROWS)
    assert found.tolist() == y
    assert raw.read(np.arange(len(train))).tolist() == [x[row] + [0] * (4 - len(x[row])) for row in train]
    short = read(tmp_path, label="labels", task="text", features=("input_ids",), length=2)
    assert short.feature_shape == (2,)
    with pytest.raises(UserError, match="Name one column of images, of token ids"):
        read(tmp_path, label="labels", task="text")
    with pytest.raises(UserError, match="column 'mask' differ in shape"):
        read(tmp_path, label="mask", task="text", features=("input_ids",))


@pytest.mark.parametrize("form", ["texts", "Hugging Face"])
def test_images_named_by_their_paths_are_read_when_they_are_written(tmp_path: Path, form: str) -> None:
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    paths = []
    for row in range(10):
        paths.append(f"pictures/{row}.png")
        Image.fromarray(np.full((5, 4), 20 * row, np.uint8)).save(tmp_path / "data" / paths[-1])
    held: list[Any] = [*paths, "pictures/gone.png", "a\0b"]
    if form == "Hugging Face":
        held = [{"bytes": None, "path": path} for path in held]
    pq_write(tmp_path / "data" / "t.parquet", {"image": held, "label": [row % 2 for row in range(12)]})
    words = ["parquet", "--raw", str(tmp_path), "--partition", "iid", "--clients", "2", "--out", str(tmp_path / "out")]
    assert main([*words, *(["--task", "image"] if form == "texts" else [])]) == 0
    store = open_store(tmp_path / "out", verify=True)
    assert store.description.feature_shape == (1, 5, 4) and store.manifest.skipped == 2
    parts = (store.client(0)[0], store.client(1)[0], store.test()[0])
    seen = {int(pixels.flat[0]) for x in parts for pixels in np.asarray(x)}
    assert seen == {20 * row for row in range(10)}


@pytest.mark.parametrize(
    ("columns", "words", "message"),
    [
        ({"x": [float("nan")], "label": [0]}, [], "x: it has no value"),
        ({"x": [1.0], "a": ["b"], "c": [1]}, ["--label", "a,c"], "Targets that are no classes must be numbers"),
        ({"x": [1.0], "a": [[1.0]], "c": [1]}, ["--label", "a,c"], "holds no labels"),
        ({"x": ["a"] * 9, "label": [[1, 2]] * 9}, [], "need samples of token ids"),
        ({"x": [1.0] * 9, "label": [[1, -5]] * 9}, [], "holds the token -5"),
        ({"x": [1.0] * 9, "label": pa.array([None] * 9, IDS)}, [], "has no target"),
        ({"x": [[0.5]] * 9, "label": [0] * 9}, ["--task", "text"], "Name some with --features"),
        (
            {"x": [1.0] * 9, "label": [[1.0, float("inf")]] * 9},
            [],
            ", column label holds numbers that are not finite",
        ),
        ({"x": [[10_000_001]] * 9, "label": [0] * 9}, ["--task", "text"], "no token ids"),
    ],
)
def test_columns_that_do_not_fit_are_rejected(
    tmp_path: Path, columns: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pq_write(tmp_path / "t.parquet", columns)
    command = ["parquet", "--raw", str(tmp_path), "--partition", "iid", "--clients", "1", *words]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "ClientArrays" not in said
