"""Tables and arrays of users, through the commands: roles of columns, kinds of samples and targets, the test part."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet as pq

import fedmpi
from data_prep.formats import own
from data_prep.formats.own import value_codes
from data_prep.holdout import stratified_rows, train_test_groups
from fedmpi.data.opening import open_store
from fedmpi.models.inputs import unpacked
from tests.data_prep.command import main

RNG = np.random.default_rng(36)
ROWS = 60
COUNT, SHUFFLED = np.arange(ROWS), np.random.default_rng(1).permutation(ROWS)
A, B, Y = RNG.random(ROWS), RNG.random(ROWS) * 1e6, COUNT % 3
X, IDS = np.stack([A, B], 1), RNG.integers(0, 9, (ROWS, 4))
WORDS = [f"word{row} of a text" for row in range(ROWS)]
Table = dict[str, Any]
Prepared = Callable[..., Any]


@pytest.fixture
def prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Prepared:
    """Prepare a file for two clients: the store and the manifest, or, of exit code 2, the one sentence on stderr."""

    def prepare(raw: Path, *words: str) -> Any:
        laws = [] if "--partition" in words else ["--partition", "iid", "--clients", "2"]
        code = main(["arrays", "--raw", str(raw), *laws, *words, "--out", str(tmp_path / "out"), "--overwrite"])
        said = capsys.readouterr()
        if code == 2:
            assert said.err.startswith("error: ") and said.err.count("\n") == 1 and "ClientArrays" not in said.err
            return said.err
        assert code == 0, said.err
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        return open_store(tmp_path / "out"), manifest

    return prepare


def training(store: Any) -> tuple[np.ndarray, np.ndarray]:
    return store.rows(np.arange(store.samples))


def everything(store: Any) -> tuple[np.ndarray, np.ndarray]:
    """All samples and targets, training and test."""
    x, y = training(store)
    return np.concatenate([x, store.test()[0]]), np.concatenate([y, store.test()[1]])


def csv(path: Path, columns: Table, delimiter: str = ",", encoding: str = "utf-8") -> Path:
    rows = [delimiter.join(columns), *(delimiter.join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_bytes(("\n".join(rows) + "\n").encode(encoding))
    return path


def npz(path: Path, columns: Table) -> Path:
    features = [np.asarray(values) for name, values in columns.items() if name != "label"]
    np.savez(path, x=np.stack(features, axis=1), y=columns["label"])
    return path


def parquet(path: Path, columns: Table, index: Any = None) -> Path:
    pd.DataFrame(columns, index=index).to_parquet(path)
    return path


def unused(manifest: dict[str, Any]) -> dict[str, str]:
    return dict(manifest.get("understood", {}).get("unused", []))


# Roles of columns


@pytest.mark.parametrize(("write", "words"), [(csv, ("--val", "0.2")), (npz, ()), (parquet, ())])
def test_each_column_has_its_own_scale(tmp_path: Path, prepared: Prepared, write: Any, words: tuple[str, ...]) -> None:
    """Mean and standard deviation of each column of the training samples; a constant column is only shifted."""
    columns = {"small": A, "large": B, "offset": 1e3 + A, "same": np.full(ROWS, 0.1), "tiny": A * 1e-12, "label": Y}
    store, manifest = prepared(write(tmp_path / f"t.{write.__name__}", columns), *words)
    x = np.asarray(training(store)[0], np.float64)
    np.testing.assert_allclose(store.description.mean, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(store.description.std, np.where(x.std(0) == 0, 1, x.std(0)), rtol=1e-5)
    if write is not npz:
        assert manifest["understood"]["sample"] == "5 numbers: small, large, offset, same, tiny"
        assert manifest["understood"]["target"] == "column label"


def test_indexes_and_identifiers_are_not_used(tmp_path: Path, prepared: Prepared) -> None:
    columns = {
        "Unnamed: 0": SHUFFLED,
        "": [f"row {row}" for row in range(ROWS)],
        "__index_level_0__": SHUFFLED,
        "n": COUNT + 1,
        "patient_id": [f"p{row}" for row in SHUFFLED],
        "PassengerId": SHUFFLED * 3,
        "empty": [""] * ROWS,
        "a": A,
        "label": Y,
    }
    raw = csv(tmp_path / "t.csv", columns)
    store, manifest = prepared(raw)
    assert store.description.feature_shape == (1,)
    assert [*unused(manifest)] == ["Unnamed: 0", "Unnamed: 1", "__index_level_0__", *list(columns)[3:7]]
    store, manifest = prepared(raw, "--features", "n,PassengerId,a")  # the choice is the user's
    assert store.description.feature_shape == (3,) and len(unused(manifest)) == 5


def test_other_columns_are_used(tmp_path: Path, prepared: Prepared) -> None:
    columns = {"acid": SHUFFLED, "age": SHUFFLED, "grid": A, "house_id": COUNT // 2, "yes": Y == 1, "label": Y}
    for write in (csv, parquet):
        store, manifest = prepared(write(tmp_path / f"t.{write.__name__}", columns))
        assert store.description.feature_shape == (5,) and not unused(manifest)
        assert set(everything(store)[0][:, 4]) == {0, 1}
    store, _ = prepared(parquet(tmp_path / "t.parquet", {"a": A, "label": Y}, pd.Index(SHUFFLED, name="key")))
    assert store.description.feature_shape == (1,)  # the index is no column


def test_user_label_features_and_split_name_columns(tmp_path: Path, prepared: Prepared) -> None:
    who = [f"w{row % 4}" for row in range(ROWS)]
    raw = csv(tmp_path / "t.csv", {"kind": Y, "who": who, "a": A, "b": B, "site": COUNT // 6})
    words = ["--label", "kind", "--user", "who", "--features", "b", "--partition", "user", "--split", "site"]
    store, manifest = prepared(raw, *words)
    assert store.clients == 4 and store.description.feature_shape == (1,) and len(store.test()[1]) == 12
    assert set(unused(manifest)) == {"a", "site"} and manifest["class_names"] == ["0", "1", "2"]


@pytest.mark.parametrize("write", [csv, parquet])
def test_a_sample_is_made_of_one_kind(tmp_path: Path, prepared: Prepared, write: Any) -> None:
    raw = write(tmp_path / f"t.{write.__name__}", {"t": WORDS, "a": A, "b": B, "label": Y})
    said = prepared(raw)
    assert "columns of text (t)" in said and "of numbers (a,b)" in said
    assert prepared(raw, "--features", "a,b")[0].description.feature_shape == (2,)
    for words in (("--features", "t"), ("--task", "text")):
        store, manifest = prepared(raw, *words)
        assert store.description.task == "text" and set(unused(manifest)) == {"a", "b"}
    assert prepared(raw, "--task", "vector")[0].description.task == "vector"
    assert "Name one column of images" in prepared(raw, "--features", "t,a")
    raw = write(raw, {"file": [f"x/{row}.PNG" for row in range(ROWS)], "label": Y})
    assert "--task image" in prepared(raw) and prepared(raw, "--task", "text")[0].description.task == "text"


def test_a_column_is_of_numbers_if_most_of_its_cells_are(tmp_path: Path, prepared: Prepared) -> None:
    for words, task in ((27, "vector"), (33, "text")):
        cells = [f"word{row}" if row < words else row / 7 for row in range(ROWS)]
        store, manifest = prepared(csv(tmp_path / "t.csv", {"a": cells, "label": Y}))
        assert store.description.task == task and manifest["skipped"] == (words if task == "vector" else 0)


# CSV


MARKS = ["", " ", "?", "NA", "null", "None", "<NA>", "nan"]


@pytest.mark.parametrize("write", [csv, parquet, npz])
def test_numbers_beyond_float32_are_rejected(tmp_path: Path, prepared: Prepared, write: Any) -> None:
    ending = "npz" if write is npz else write.__name__
    table = {"a": A, "t": 1.7e9 + COUNT * 1085.5, "label": Y}
    assert "too little for float32" in prepared(write(tmp_path / f"t.{ending}", table))


def test_marks_of_missing_values_are_missing(tmp_path: Path, prepared: Prepared) -> None:
    said = prepared(csv(tmp_path / "t.csv", {"a": A[:12], "label": [*"abcd", *MARKS]}))
    assert "8 of 12 samples have no label" in said and ", line 6" in said
    store, manifest = prepared(csv(tmp_path / "t.csv", {"a": [*A[8:], *MARKS], "b": B, "label": Y}))
    assert manifest["skipped"] == 8 and store.samples + len(store.test()[1]) == ROWS - 8
    store, manifest = prepared(csv(tmp_path / "t.csv", {"t": [*WORDS[8:], *MARKS], "label": Y}))
    assert manifest["skipped"] == 8


@pytest.mark.parametrize("write", [csv, parquet, npz])
def test_samples_that_torch_ignores_are_left_out(tmp_path: Path, prepared: Prepared, write: Any) -> None:
    store, manifest = prepared(
        write(tmp_path / f"t.{write.__name__}", {"a": A, "b": B, "label": np.where(Y == 1, -100, Y)})
    )
    assert sorted(everything(store)[1]) == sorted(np.searchsorted([0, 2, 3], Y[Y != 1]))
    assert f"left out: {(Y == 1).sum()} samples of label -100" in manifest["notes"]


def test_texts_are_utf_8_or_of_the_encoding_that_is_given(tmp_path: Path, prepared: Prepared) -> None:
    for encoding in ("latin-1", "utf-16", "utf-8-sig"):
        raw = csv(tmp_path / "t.csv", {"label": ["été", "hiver"] * 30, "a": A}, encoding=encoding)
        assert encoding == "utf-8-sig" or "--encoding" in prepared(raw)
        given = () if encoding == "utf-8-sig" else ("--encoding", encoding)
        assert set(prepared(raw, *given)[1]["class_names"]) == {"été", "hiver"}


def test_separators_are_detected(tmp_path: Path, prepared: Prepared) -> None:
    for delimiter in ",;\t|":
        labels = ["a, b", "c"] if delimiter != "," else ["a;b", "c"]
        raw = csv(tmp_path / "t.csv", {"a": A, "b": B, "label": labels * 30}, delimiter)
        store, manifest = prepared(raw.rename(tmp_path / "t.csv.gz"))  # gzip is known by its content
        assert store.description.feature_shape == (2,) and manifest["class_names"] == sorted(labels)
        assert any("separated by" in note for note in manifest["notes"]) == (delimiter != ",")


def test_separators_can_be_given_and_semicolons_allow_decimal_commas(tmp_path: Path, prepared: Prepared) -> None:
    raw = csv(tmp_path / "t.csv", {"a": A, "label": Y}, delimiter=" ")
    assert "--delimiter" in prepared(raw)
    raw.write_text(raw.read_text().replace(" ", "   "))
    assert prepared(raw, "--delimiter", "space")[0].samples == ROWS * 4 // 5
    cells = [f"{value:.4f}".replace(".", ",") for value in A]
    raw = csv(tmp_path / "t.csv", {"a": cells, "b": A, "label": cells}, delimiter=";")
    assert "is a number to be predicted" in prepared(raw)
    x, y = everything(prepared(raw, "--targets", "regression")[0])
    np.testing.assert_allclose(sorted(y), sorted(A), atol=1e-4)
    np.testing.assert_allclose(x[:, 0], x[:, 1], atol=1e-4)


def test_rows_that_are_left_out_take_their_labels_along(tmp_path: Path, prepared: Prepared) -> None:
    rows = [f"{row * 2},c{row % 2},u{row % 3}" for row in range(500)]
    rows[4::50] = ["oops,c0,u0"] * 10
    rows[7::50] = ["1,c0"] * 10
    rows[9::50] = [""] * 10
    (tmp_path / "t.csv").write_text("\n".join(["a,label,user", *rows]) + "\n")
    store, manifest = prepared(tmp_path / "t.csv", "--partition", "user")
    x, y = everything(store)
    assert manifest["skipped"] == 20 and len(x) == 470 and store.clients == 3
    np.testing.assert_array_equal(x[:, 0] / 2 % 2, y)
    assert all(set(store.client(client)[0][:, 0] / 2 % 3) == {client} for client in range(3))
    assert "line 9: 2 fields where the header names 3" in prepared(tmp_path / "t.csv", "--strict")


@pytest.mark.parametrize("cells", ["1 9 10", "1.0 2.0 10.0", "10 9 b", "False True", f"{10**18 + 1} {10**18 + 2}"])
@pytest.mark.parametrize("write", [csv, npz])
def test_classes_are_numbers_or_texts(tmp_path: Path, prepared: Prepared, cells: str, write: Any) -> None:
    """They are sorted as what they are: whole numbers, or texts."""
    labels = np.array(cells.split()[::-1] * ROWS)[:ROWS]
    store, manifest = prepared(write(tmp_path / f"t.{write.__name__}", {"a": A, "label": labels}))
    assert manifest["class_names"] == cells.replace(".0", "").split()
    found = dict(zip(everything(store)[0][:, 0].tolist(), everything(store)[1].tolist(), strict=True))
    assert all(cells.split()[found[np.float32(A[row])]] == label for row, label in enumerate(labels))


def test_classes_of_one_part_alone_are_reported(prepared: Prepared, tmp_path: Path) -> None:
    arrays = {"x": RNG.random((6, 2)), "y": list("aabbcc"), "x_test": RNG.random((3, 2)), "y_test": list("aad")}
    np.savez(tmp_path / "a.npz", **arrays)
    notes = " ".join(prepared(tmp_path / "a.npz")[1]["notes"])
    assert "in the training part only, with their samples: b (2), c (2)" in notes and "test part only" in notes


def test_a_folder_of_csv_files_has_its_parts_by_name(tmp_path: Path, prepared: Prepared) -> None:
    (tmp_path / "raw").mkdir()
    for part, rows in (("train", slice(0, 40)), ("validation", slice(40, 60))):
        csv(tmp_path / "raw" / f"{part}.csv", {"a": A[rows], "label": Y[rows]})
    (tmp_path / "raw" / "README.txt").write_text("About these data\n")
    store, manifest = prepared(tmp_path / "raw")
    assert store.samples == 40 and len(store.test()[1]) == 20
    assert any("README.txt is not used" in note for note in manifest["notes"])
    csv(tmp_path / "raw" / "test.csv", {"a": A[:5], "label": Y[:5]})
    store, manifest = prepared(tmp_path / "raw")
    assert len(store.test()[1]) == 5 and any("1 files of a validation part" in note for note in manifest["notes"])
    csv(tmp_path / "raw" / "test.csv", {"b": A, "label": Y})
    assert "Name one file" in prepared(tmp_path / "raw")


# Parquet and Arrow


def hugging_face(path: Path, columns: Table, names: list[str] | None = None) -> Path:
    """Write a table with names of classes as Hugging Face's datasets keep them in the schema."""
    made = pa.table(columns)
    if names is not None:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        made = made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    if path.suffix == ".parquet":
        pq.write_table(made, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, made.schema) as writer:
            writer.write_table(made)
    return path


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_class_names_of_hugging_face_are_kept(tmp_path: Path, prepared: Prepared, ending: str) -> None:
    names = ["cat", "dog", "eel", "fox"]
    raw = hugging_face(tmp_path / f"t.{ending}", {"x": A, "label": Y}, names)
    store, manifest = prepared(raw)
    assert manifest["class_names"] == names and store.description.classes == 4
    assert sorted(everything(store)[1]) == sorted(Y)
    assert "no label" in prepared(hugging_face(raw, {"x": A, "label": Y - 1}, names))  # -1 marks unlabeled rows
    assert "beyond its 2 names" in prepared(hugging_face(raw, {"x": A, "label": Y}, names[:2]))
    (tmp_path / "d").mkdir()
    for part, held in (("train", names), ("test", names[::-1])):
        hugging_face(tmp_path / "d" / f"{part}.{ending}", {"x": A, "label": Y}, held)
    assert "or their class names differ" in prepared(tmp_path / "d")


def test_dictionaries_are_the_values_that_they_represent(tmp_path: Path, prepared: Prepared) -> None:
    """pandas writes its categories as dictionaries; those of two parts may differ, or one part may have none."""
    said = pa.array(["good day", "bad day"] * 5)
    coded = said.dictionary_encode()
    for part, values in enumerate((coded, said, coded.cast(pa.dictionary(pa.int8(), pa.string())))):
        columns = {"t": values, "label": pa.array([0, 1] * 5).dictionary_encode(), "user": values}
        hugging_face(tmp_path / f"train-{part}.parquet", columns)
    store, _ = prepared(tmp_path, "--partition", "user")
    assert store.description.task == "text" and set(store.vocabulary[2:]) == {"good", "bad", "day"}
    assert store.client_ids.tolist() == ["bad day", "good day"] and store.description.classes == 2


def test_lists_are_vectors_or_series_of_one_shape(tmp_path: Path, prepared: Prepared) -> None:
    series = RNG.normal(size=(ROWS, 5, 2)) * [1, 1000]
    raw = parquet(tmp_path / "t.parquet", {"w": [s.tolist() for s in series], "label": Y})
    store, manifest = prepared(raw)
    assert store.description.feature_shape == (5, 2) and len(store.description.mean) == 2
    np.testing.assert_allclose(sorted(everything(store)[0][:, 0, 1]), sorted(series[:, 0, 1].astype(np.float32)))
    assert "5 x 2" in manifest["understood"]["sample"]
    store, _ = prepared(parquet(raw, {"a": A, "w": X.tolist(), "label": Y}))
    np.testing.assert_array_equal(np.sort(everything(store)[0], 0), np.sort(np.c_[A, X].astype(np.float32), 0))
    for lists in (
        [[[1.0, 2.0]] * (3 + row % 5) for row in range(ROWS)],
        [[[1.0, 2.0], [1.0]] for _ in range(ROWS)],
        [[1.0] * (1 + row % 7) for row in range(ROWS)],
    ):
        assert "column 'w' differ in shape" in prepared(parquet(raw, {"w": lists, "label": Y}))
    gone = [None if row == 5 else [A[row], 2.0, 3.0] for row in range(ROWS)]
    store, manifest = prepared(parquet(raw, {"w": gone, "label": Y}))
    assert store.description.feature_shape == (3,) and manifest["skipped"] == 1
    x, y = everything(store)
    assert dict(zip(x[:, 0], y, strict=True)) == {np.float32(A[row]): Y[row] for row in range(ROWS) if row != 5}


def test_lists_of_token_ids_are_padded_and_their_targets_are_lists_of_one_length(
    tmp_path: Path, prepared: Prepared
) -> None:
    x = [list(range(1, 2 + row % 4)) for row in range(20)]
    y = [(row[1:] + [-1] * 4)[:4] for row in x]
    raw = hugging_face(tmp_path / "t.parquet", {"input_ids": x, "mask": x, "labels": y})
    words = ("--label", "labels", "--task", "text")
    store, _ = prepared(raw, *words, "--features", "input_ids")
    assert (store.description.targets, store.description.target_shape, store.description.classes) == ("tokens", (4,), 5)
    rows = {(tuple(ids), tuple(after)) for ids, after in zip(*(v.tolist() for v in everything(store)), strict=True)}
    assert rows == {(tuple(row + [0] * (4 - len(row))), tuple(after)) for row, after in zip(x, y, strict=True)}
    short, _ = prepared(raw, *words, "--features", "input_ids", "--length", "2")
    assert short.description.feature_shape == (2,)
    assert "Name one column of images, of token ids" in prepared(raw, *words)


@pytest.mark.parametrize("form", ["paths", "structs", "bytes"])
def test_images_of_tables_are_read_when_they_are_written(tmp_path: Path, prepared: Prepared, form: str) -> None:
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    paths = [tmp_path / "data" / "pictures" / f"{row}.png" for row in range(10)]
    for row, path in enumerate(paths):
        Image.fromarray(np.full((5, 4), 20 * row, np.uint8)).save(path)
    held: list[Any] = [*(f"pictures/{path.name}" for path in paths), "pictures/gone.png", ""]
    if form == "structs":
        held = [{"bytes": None, "path": path} for path in held]
    elif form == "bytes":
        held = [*(path.read_bytes() for path in paths), b"no image", None]
    raw = hugging_face(tmp_path / "data" / "t.parquet", {"image": held, "label": [row % 2 for row in range(12)]})
    store, manifest = prepared(raw.parent, *(["--task", "image"] if form == "paths" else []))
    assert store.description.feature_shape == (1, 5, 4) and manifest["skipped"] == 2
    assert {int(pixels.flat[0]) for pixels in everything(store)[0]} == {20 * row for row in range(10)}


# Targets that are no classes

TARGETS = {"a": A, "b": B, "rain": COUNT / 4, "wind": COUNT * 3, "wet": COUNT % 2, "dry": COUNT % 3 // 2, "t": WORDS}


@pytest.mark.parametrize("write", [csv, parquet])
@pytest.mark.parametrize(
    ("words", "kind", "expected"),
    [
        ("rain,wind", "regression", [COUNT / 4, COUNT * 3]),
        ("wet,dry --targets multilabel", "multilabel", [COUNT % 2, COUNT % 3 // 2]),
        ("rain --targets regression", "regression", [COUNT / 4]),
    ],
)
def test_targets_of_tables_are_what_they_look_like_or_what_is_said(
    tmp_path: Path, prepared: Prepared, write: Any, words: str, kind: str, expected: Any
) -> None:
    raw = write(tmp_path / f"t.{write.__name__}", TARGETS)
    store, manifest = prepared(raw, "--features", "a,b", "--label", *words.split())
    x, y = everything(store)
    assert store.description.targets == kind
    assert kind == "regression" or manifest["class_names"] == words.split()[0].split(",")
    order = np.argsort(x[:, 0]), np.argsort(A)
    np.testing.assert_allclose(y.reshape(len(y), -1)[order[0]], np.stack(expected, 1)[order[1]], rtol=1e-6)


# Arrays

FLAGS = np.stack([Y > 0, Y > 1, Y < 2, Y == 1], 1).astype(np.int64)
BYTES = RNG.integers(0, 256, (ROWS, 8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "words", "facts"),
    [
        ({"x": X, "y": RNG.random((ROWS, 5)) < 0.5}, "", ("vector", "multilabel", (5,), 2)),
        ({"x": X, "y": RNG.normal(size=(ROWS, 2, 3))}, "", ("vector", "regression", (2, 3), 2)),
        ({"x": X, "y": A}, "--targets regression", ("vector", "regression", (), 2)),
        ({"x": IDS, "y": IDS}, "--task text", ("text", "tokens", (4,), 0)),
        ({"x": IDS, "y": Y}, "--task vector", ("vector", "classification", (), 4)),
        ({"x": RNG.random((ROWS, 6, 5)), "y": Y}, "", ("image", "classification", (), 1)),
        ({"x": RNG.random((ROWS, 6, 5)), "y": Y}, "--task vector", ("vector", "classification", (), 5)),
        ({"x": BYTES, "y": Y}, "", ("image", "classification", (), 3)),
        ({"x": BYTES[:, :, 0, 0], "y": Y}, "", ("vector", "classification", (), 1)),
        ({"x": np.asfortranarray(X), "y": Y.astype(np.uint64), "user": Y}, "", ("vector", "classification", (), 2)),
        ({"x": X, "y": np.array([b"cat", b"dog", b"eel"] * 20)}, "", ("vector", "classification", (), 2)),
        ({"x": X, "y": Y[:, None]}, "", ("vector", "classification", (), 2)),
        ({"x": X, "y": FLAGS}, "--targets multilabel", ("vector", "multilabel", (4,), 2)),
    ],
)
def test_arrays_are_what_their_shape_and_numbers_say(
    tmp_path: Path, prepared: Prepared, arrays: Table, words: str, facts: tuple[Any, ...]
) -> None:
    np.savez(tmp_path / "t.npz", **arrays, x_test=arrays["x"][:9], y_test=arrays["y"][:9])
    store, _ = prepared(tmp_path / "t.npz", *words.split())
    found = store.description
    assert (found.task, found.targets, found.target_shape, len(found.mean)) == facts
    x = arrays["x"][:9]
    x = x[:, None] if x.ndim == 3 and facts[0] == "image" else np.moveaxis(x, 3, 1) if x.ndim == 4 else x
    np.testing.assert_array_equal(store.test()[0], x.astype(found.dtype))
    y = Y[:9] if facts[1] == "classification" else arrays["y"][:9].astype(store.test()[1].dtype)
    np.testing.assert_array_equal(store.test()[1], y)


NINE = {"x": [1.0] * 9}
SIX = {"x": np.eye(6), "y": np.arange(6) % 2}
REJECTED: list[tuple[str, Table | bytes, str, str]] = [
    ("t.csv", b"", "", "is empty"),
    ("t.csv", b"a,label\n", "", "holds no readable row"),
    ("t.csv", b"5.1,3.5,Iris-setosa\n4.9,3.0,Iris-virginica\n", "", "Does the file begin with a header?"),
    ("t.csv", b"a,b,label\n1,2\n3\n", "", "line 2: 2 fields where the header names 3"),
    ("t.csv", b"a,b,label\nNA,2,x\n1,NA,y\n", "", "line 2: no finite number in column 'a'"),
    ("t.csv", b"a,a,label\n1,2,0\n", "", "names several columns 'a'"),
    ("t.csv", gzip.compress(b"a,label\n" + b"1,2\n" * 999, mtime=0)[:-9], "", "damaged or cut short"),
    ("t.xlsx", b"PK", "", "an unsupported format"),
    ("t.npz", b"no zip at all", "", "is not a readable .npz file"),
    ("t.parquet", b"PAR1 no more", "", "cannot be read"),
    ("t.npz", SIX | {"user": COUNT[:6], "x_test": np.eye(6), "y_test": SIX["y"]}, "--split users", "has a test part"),
    ("t.npz", SIX, "--split users", "--split users needs a user"),
    ("t.npz", SIX, "--split patient", "--split patient is unknown"),
    ("t.npz", SIX | {"site": [1, 2, 3, 1, 2, np.nan]}, "--split site", "1 of 6 samples have no value of site"),
    ("t.csv", {"a": A, "label": Y, "t": WORDS, "b": B}, "--label x", "no column 'x'"),
    ("t.csv", {"a": A, "label": Y}, "--features label,a", "'label' is the label column"),
    ("t.parquet", {"x": [1.0], "a": ["b"], "c": [1]}, "--label a,c", "Targets that are no classes must be numbers"),
    ("t.parquet", {"x": [1.0], "a": [[1.0]], "c": [1]}, "--label a,c", "holds no labels"),
    ("t.parquet", {"x": [[0.5]] * 9, "label": [0] * 9}, "--task text", "no token ids"),
    ("t.parquet", NINE | {"label": [[1.0, float("inf")]] * 9}, "", "no number of single precision"),
    ("t.parquet", NINE | {"label": [0.5] * 9}, "", "row 0) is a number to be predicted"),
    ("t.parquet", NINE | {"label": [None, *range(8)]}, "", "1 of 9 samples have no label"),
    ("t.csv", TARGETS, "--label rain,snow", "has no column 'snow'"),
    ("t.csv", TARGETS, "--label t --features a --targets regression", "must be numbers"),
    ("t.csv", TARGETS, "--label rain,wind --features a --targets multilabel", "not in 0 to 1"),
    ("t.npz", {"arr_0": X, "arr_1": Y}, "", "arr_0, arr_1, but x and y are needed"),
    ("t.npz", {"x": X, "y": Y, "x_test": X}, "", "x_test and y_test go together"),
    ("t.npz", {"x": X, "y": Y[:-1]}, "", "y has shape (59,) where x has (60, 2)"),
    ("t.npz", {"x": np.array([{}] * ROWS), "y": Y}, "", "Python objects"),
    ("t.npz", {"x": A, "y": Y}, "", "is float64 (60,)"),
    ("t.npz", {"x": IDS, "y": Y}, "", "task ="),
    ("t.npz", {"x": RNG.random((ROWS, 3, 6, 5)), "y": Y}, "--task vector", "images (n, h, w)"),
    ("t.npz", {"x": X, "y": A}, "", "(array y, row 0) is a number to be predicted"),
    ("t.npz", {"x": X, "y": np.where(COUNT == 4, np.nan, 1.0)}, "", "1 of 60 samples have no label"),
    ("t.npz", {"x": X * np.nan, "y": Y}, "", "x holds numbers that are not finite"),
    ("t.npz", {"x": X, "y": FLAGS}, "", "zeros and ones alone. Say --targets"),
]
"""File, its content or columns or arrays, further words of the command, words of the error."""


@pytest.mark.parametrize(("name", "columns", "words", "sentence"), REJECTED)
def test_tables_and_arrays_that_do_not_fit_are_rejected(
    tmp_path: Path, prepared: Prepared, name: str, columns: Table | bytes, words: str, sentence: str
) -> None:
    raw = tmp_path / name
    if isinstance(columns, bytes):
        raw.write_bytes(columns)
    elif name == "t.npz":
        np.savez(raw, **columns)
    else:
        (csv if name == "t.csv" else hugging_face)(raw, columns)
    assert sentence in prepared(raw, *words.split()) and not (tmp_path / "out").exists()


def test_unknown_arrays_and_rows_without_a_user_are_reported(tmp_path: Path, prepared: Prepared) -> None:
    np.savez(tmp_path / "t.npz", x=X, y=Y, user=np.where(COUNT < 7, "", "ann"), users=COUNT)
    _, manifest = prepared(tmp_path / "t.npz")
    assert value_codes(np.array([1e300, 2, np.nan]))[1] == ("2.0", "1e+300")  # int64 cannot hold all
    assert "users" in unused(manifest) and any("training rows name no user" in note for note in manifest["notes"])


# The test part


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7).filter(lambda counts: sum(counts) > 1))
def test_classes_are_shared_by_largest_remainders(counts: list[int]) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    train, test = stratified_rows(len(y), y)
    assert np.array_equal(np.sort(np.r_[train, test]), np.arange(len(y))) and len(test) >= 1
    for count, held in zip(counts, np.bincount(y[test], minlength=len(counts)), strict=True):
        assert abs(held - 0.2 * count) < 1 or (count > 1 and held == 1) or max(counts) == 1
        assert 1 <= held < count or count == 1 or max(counts) == 1


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


@pytest.mark.parametrize(("split", "column"), [("users", "user"), ("patient", "patient")])
def test_users_and_groups_are_held_out_whole(prepared: Prepared, tmp_path: Path, split: str, column: str) -> None:
    columns = {"value": COUNT % 12 + 0.5, "other": A, column: [f"u{row % 12}" for row in range(ROWS)]}
    raw = csv(tmp_path / "t.csv", columns | {"label": ["ab"[row % 2] for row in range(ROWS)]})
    for words, whole in ((("--split", split), True), ((), False))[: 2 if split == "users" else 1]:
        store, manifest = prepared(raw, *words)
        assert store.description.feature_shape == (2,)  # the group is no feature
        tested, trained = (set(x[:, 0].tolist()) for x in (store.test()[0], training(store)[0]))
        assert tested and (len(store.test()[1]) <= 12 and not tested & trained) == whole
        said = any(f"{len(tested & trained)} of its {len(tested)} users" in note for note in manifest["notes"])
        assert said == (split == "users" and not whole)


def test_groups_are_held_out_with_their_share_of_each_class(prepared: Prepared, tmp_path: Path) -> None:
    """Half of the users have one class, half the other: a fifth of each class is tested, not users of one class."""
    for sizes, held in (([4] * 100, [40, 40]), ([4, 4, 4, 4, 2, 2], [2, 2])):
        user = np.repeat(np.arange(len(sizes)), sizes)
        np.savez(tmp_path / "a.npz", x=RNG.random((len(user), 2)), y=user % 2, user=user)
        stores = [prepared(tmp_path / "a.npz", "--split", "users", "--seed", seed)[0] for seed in ("0", "5")]
        assert np.bincount(stores[0].test()[1]).tolist() == held
        np.testing.assert_array_equal(*(store.test()[0] for store in stores))  # the same for every seed


def test_the_vocabulary_is_that_of_the_rows_left_for_training(prepared: Prepared, tmp_path: Path) -> None:
    kinds = RNG.integers(0, 12, 120).tolist()
    texts = [f"a{kind} b{kind} once{row}" for row, kind in enumerate(kinds)]
    raw = csv(tmp_path / "t.csv", {"text": texts, "label": ["ab"[row % 2] for row in range(120)]})
    store, _ = prepared(raw, "--val", "0.4")
    for x, trained in ((training(store)[0], True), (store.validation()[0], False), (store.test()[0], False)):
        for first, second, once in ([store.vocabulary[code] for code in row[:3]] for row in x):
            assert first[1:] == second[1:] and (once != "<unk>") == trained


def hdf5(path: Path, filters: Table, **arrays: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, **(filters if name.startswith("x") else {}))
    return path


@pytest.mark.parametrize("form", ["vectors", "images", "tokens"])
def test_hdf5_gives_the_same_shards_as_npz_however_it_is_stored(
    form: str, tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = {"vectors": X, "images": RNG.integers(0, 256, (ROWS, 6, 6, 3), np.uint8), "tokens": IDS}[form]
    words = ["--partition", "user", *(["--task", "text"] if form == "tokens" else [])]
    users = np.array([f"u{row % 7}" for row in range(ROWS)])
    np.savez(tmp_path / "a.npz", x=x, y=Y, user=users, x_test=x[:9], y_test=Y[:9])
    store, expected = prepared(tmp_path / "a.npz", *words)
    wanted = everything(store)
    monkeypatch.setattr(own, "BLOCK_BYTES", 500)
    one = hdf5(tmp_path / "a.h5", {}, x=x, y=Y, user=users.astype("S"), x_test=x[:9], y_test=Y[:9])
    hdf5(tmp_path / "two" / "train.hdf5", {"chunks": True, "compression": "gzip"}, x=x, y=Y, user=users.astype("S"))
    hdf5(tmp_path / "two" / "test.hdf5", {}, x=x[:9], y=Y[:9])
    for raw in (one, tmp_path / "two"):
        store, manifest = prepared(raw, *words)
        assert all(map(np.array_equal, everything(store), wanted)) and store.client_ids.tolist()[1] == "u1"
        assert manifest["description"] == expected["description"]


def test_hdf5_that_cannot_be_read_is_rejected(tmp_path: Path, prepared: Prepared) -> None:
    (tmp_path / "a.h5").write_bytes(b"no HDF5")
    assert "is no readable HDF5 file" in prepared(tmp_path / "a.h5")
    bad = X.copy()
    bad[40] = np.inf
    assert "x holds numbers that are not finite" in prepared(hdf5(tmp_path / "b.h5", {}, x=bad, y=Y))
    assert "x and y are needed" in prepared(hdf5(tmp_path / "c.h5", {}, features=X, y=Y))
    (tmp_path / "a.h5").rename(tmp_path / "train1.h5")
    assert "holds 3 HDF5 files (b.h5, c.h5, train1.h5)" in prepared(tmp_path)


def test_several_arrays_are_read_from_all_files(tmp_path: Path, prepared: Prepared):
    """The stored samples are those of ClientArrays; a column of lists is padded, as its targets are."""
    known = np.arange(4) < 1 + COUNT[:, None] % 4
    lines, x = [row[here] for row, here in zip(IDS, known, strict=True)], {"ids": IDS, "facts": X.astype(np.float32)}
    arrays = {f"x/{name}": values for name, values in x.items()} | {"y": Y, "user": COUNT % 2}
    arrays |= {f"x_test/{name}": values[:9] for name, values in x.items()} | {"y_test": Y[:9]}
    np.savez(tmp_path / "two.npz", **arrays)
    with h5py.File(tmp_path / "two.h5", "w") as file:
        for name, values in arrays.items():
            file[name] = values
    expected = fedmpi.ClientArrays(x, Y, COUNT % 2, test=({name: one[:9] for name, one in x.items()}, Y[:9])).store
    for file_name in ("two.npz", "two.h5"):
        store, manifest = prepared(tmp_path / file_name, "--partition", "user")
        assert manifest["schema"] == "fedmpi-shards/3"
        assert {*store.description.inputs} == {*expected.description.inputs}, "HDF5 sorts its names"
        samples = []
        for one in (store, expected):
            arrays, y = unpacked(torch.from_numpy(everything(one)[0]), one.description.inputs), everything(one)[1]
            order = arrays["facts"][:, 0].numpy().argsort(kind="stable")  # a partition shuffles the samples of a client
            samples.append([*(arrays[name].numpy()[order] for name in x), y[order]])
        assert all(np.array_equal(*pair) for pair in zip(*samples, strict=True))
    table = {"ids": list(lines), "age": A, "group": COUNT, "label": list(lines), "user": COUNT % 2}
    words = ("--partition", "user", "--inputs", "ids,age,group", "--split", "users")
    store, _ = prepared(parquet(tmp_path / "t.parquet", table), *words)
    of_table = {"ids": lines, "age": A, "group": COUNT}
    expected = fedmpi.ClientArrays(of_table, lines, COUNT % 2, test=(of_table, lines)).description
    assert store.description.inputs == expected.inputs and store.description.target_shape == (4,)
    assert [one.dtype for one in expected.inputs] == ["int64", "float32", "int64", "bool"]
    arrays, y = unpacked(torch.from_numpy(everything(store)[0]), expected.inputs), everything(store)[1]
    assert np.array_equal(y, np.where(arrays["attention_mask"], arrays["ids"], -1))
    table = {"a": [None, *A[1:]], "n": [*range(len(A) - 1), None], "grid": [[[1, 2], [3, 4]]] * len(A), "label": Y}
    store, _ = prepared(parquet(tmp_path / "n.parquet", table), "--inputs", "n,a,grid")
    arrays = unpacked(torch.from_numpy(everything(store)[0]), store.description.inputs)
    assert len(arrays["n"]) == len(A) - 2 and (arrays["grid"] == torch.tensor([[1, 2], [3, 4]])).all()
    assert np.array_equal(arrays["a"], A[arrays["n"].long()].astype(np.float32))
    store, _ = prepared(csv(tmp_path / "t.csv", {"a": A, "n": COUNT, "label": Y}), "--inputs", "n,a")
    assert [(one.name, one.dtype) for one in store.description.inputs] == [("n", "int64"), ("a", "float32")]
    both = prepared(tmp_path / "t.csv", "--inputs", "n", "--features", "a")
    assert "--inputs and --features both name the columns" in both
    assert "--task has no effect on samples of several arrays" in prepared(tmp_path / "two.npz", "--task", "text")
    assert "each sample needs numbers" in prepared(csv(tmp_path / "w.csv", {"a": WORDS, "label": Y}), "--inputs", "a")
