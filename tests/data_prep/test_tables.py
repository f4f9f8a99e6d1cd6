"""Tables and arrays of users, through the commands: use of their columns, labels and marks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmpi
from fedmpi import ClientArrays, UserError
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

RNG = np.random.default_rng(36)
ROWS = 60
A, B = RNG.random(ROWS), RNG.random(ROWS) * 1e6
Y = np.arange(ROWS) % 3
Table = dict[str, Any]
Prepared = Callable[..., Any]


@pytest.fixture
def prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Prepared:
    """Prepare a file for two clients: the store and the manifest, or, of exit code 2, the one sentence on stderr."""

    def prepare(raw: Path, *words: str) -> Any:
        data_set = "parquet" if raw.suffix in (".parquet", ".arrow") else "arrays"
        laws = [] if "--partition" in words else ["--partition", "iid", "--clients", "2"]
        out = ["--out", str(tmp_path / "out"), "--overwrite"]
        code = main([data_set, "--raw", str(raw), *laws, *words, *out])
        said = capsys.readouterr().err
        if code == 2:
            assert said.startswith("error: ") and said.count("\n") == 1
            return said
        assert code == 0, said
        return open_store(tmp_path / "out"), json.loads((tmp_path / "out" / "manifest.json").read_text())

    return prepare


def everything(store: Any) -> tuple[np.ndarray, np.ndarray]:
    """All samples and targets, training and test."""
    x, y = store.rows(np.arange(store.samples))
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
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pd.DataFrame(columns, index=index).to_parquet(path)
    return path


WRITERS = {"t.csv": csv, "t.npz": npz, "t.parquet": parquet}


def unused(manifest: dict[str, Any]) -> dict[str, str]:
    return dict(manifest.get("understood", {}).get("unused", []))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("extra", [(), ("--val", "0.2")])
def test_each_column_has_its_own_scale(tmp_path: Path, prepared: Prepared, name: str, extra: tuple[str, ...]) -> None:
    """Mean and standard deviation of each column of the training samples; a constant column is only shifted."""
    columns = {"small": A, "large": B, "offset": 1e3 + A, "same": np.full(ROWS, 0.1), "tiny": A * 1e-12, "label": Y}
    store, _ = prepared(WRITERS[name](tmp_path / name, columns), *extra)
    x = np.asarray(store.rows(np.arange(store.samples))[0], np.float64)
    mean, std = np.array(store.description.mean), np.array(store.description.std)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)
    expected = np.where(x.std(0) == 0, 1, x.std(0))
    np.testing.assert_allclose(std, expected, rtol=1e-5)


def test_one_scale_for_bytes_and_channels_of_images(tmp_path: Path, prepared: Prepared) -> None:
    for shape, scales in (((ROWS, 9), 1), ((ROWS, 4, 5), 1), ((ROWS, 3, 4, 5), 3)):
        x = RNG.integers(0, 256, shape, np.uint8)
        np.savez(tmp_path / "t.npz", x=x, y=Y)
        store, _ = prepared(tmp_path / "t.npz")
        assert len(store.description.mean) == len(store.description.std) == scales


def test_arrays_in_memory_take_one_scale_a_column() -> None:
    x = np.stack([A, B], 1).astype(np.float32)
    data = ClientArrays(x, Y, np.arange(ROWS) % 2, test=(x, Y), mean=x.mean(0), std=x.std(0))
    assert len(data.description.mean) == 2
    series = np.stack([x] * 4, 1) / 1e6
    data = ClientArrays(series, Y, np.arange(ROWS) % 2, test=(series, Y), task="vector", mean=[0, 1], std=[1, 2])
    run = fedmpi.run("fedavg", {"rounds": 1, "clients.sampler": "all"}, data=data)
    assert data.description.feature_shape == (4, 2) and run.records
    with pytest.raises(UserError, match="one for each of 2 channels or columns"):
        ClientArrays(x, Y, np.arange(ROWS) % 2, test=(x, Y), mean=[0, 1, 2])


COUNT, SHUFFLED = np.arange(ROWS), np.random.default_rng(1).permutation(ROWS)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("", COUNT),
        ("", [f"row {row}" for row in range(ROWS)]),
        ("Unnamed: 0", SHUFFLED),
        ("__index_level_0__", SHUFFLED),
        ("n", COUNT + 1),
        ("id", SHUFFLED),
        ("patient_id", [f"p{row}" for row in SHUFFLED]),
        ("PassengerId", SHUFFLED * 3),
        ("empty", [""] * ROWS),
    ],
)
def test_indexes_and_identifiers_are_not_used(tmp_path: Path, prepared: Prepared, name: str, index: Any) -> None:
    store, manifest = prepared(csv(tmp_path / "t.csv", {name: index, "a": A, "label": Y}))
    assert store.description.feature_shape == (1,) and list(unused(manifest)) == [name or "Unnamed: 0"]
    assert "a" in manifest["understood"]["sample"] and "label" in manifest["understood"]["target"]
    if name and isinstance(index, np.ndarray):  # the choice is the user's
        store, manifest = prepared(tmp_path / "t.csv", "--features", f"{name},a")
        assert store.description.feature_shape == (2,) and not unused(manifest)


@pytest.mark.parametrize("name", [None, "key", "subject"])
def test_the_index_of_a_parquet_file_is_known_by_its_metadata(tmp_path: Path, prepared: Prepared, name: Any) -> None:
    pd = pytest.importorskip("pandas")
    index = pd.Index(SHUFFLED * 2.5, name=name)
    store, manifest = prepared(parquet(tmp_path / "t.parquet", {"a": A, "label": Y}, index))
    assert store.description.feature_shape == (1,) and list(unused(manifest)) == [name or "__index_level_0__"]


def test_columns_that_are_no_identifiers_are_used(tmp_path: Path, prepared: Prepared) -> None:
    columns = {"acid": SHUFFLED, "age": SHUFFLED + 1, "grid": A, "house_id": COUNT // 2, "yes": Y == 1, "label": Y}
    for write in (csv, parquet):
        store, manifest = prepared(write(tmp_path / f"t.{write.__name__}", columns))
        assert store.description.feature_shape == (5,) and not unused(manifest)
        assert set(everything(store)[0][:, 4]) == {0, 1}
        assert ["house_id" in note for note in manifest["notes"]].count(True) == 1
        _, manifest = prepared(tmp_path / f"t.{write.__name__}", "--features", "house_id,age")
        assert not any("identifier" in note for note in manifest["notes"])
        _, manifest = prepared(write(tmp_path / f"t.{write.__name__}", {"a": A, "big": SHUFFLED * 999_983, "label": Y}))
        assert any("'big': whole numbers beyond 16,777,216" in note for note in manifest["notes"])


@pytest.mark.parametrize("ending", ["PNG", "jpg"])
@pytest.mark.parametrize("write", [csv, parquet])
def test_names_of_images_are_no_texts_unless_it_is_said(
    tmp_path: Path, prepared: Prepared, write: Any, ending: str
) -> None:
    raw = write(tmp_path / f"t.{write.__name__}", {"file": [f"x/{row}.{ending}" for row in range(ROWS)], "label": Y})
    assert "--task image" in prepared(raw)
    assert prepared(raw, "--task", "text")[0].description.task == "text"


WORDS = [f"word{row} of a text" for row in range(ROWS)]


@pytest.mark.parametrize("write", [csv, parquet])
def test_texts_and_numbers_together_are_rejected_with_a_remedy(tmp_path: Path, prepared: Prepared, write: Any) -> None:
    raw = write(tmp_path / f"t.{write.__name__}", {"t": WORDS, "a": A, "b": B, "label": Y})
    said = prepared(raw)
    assert "columns of text (t" in said and "of numbers (a, b)" in said
    features = said.split("--features ")[-1].strip().rstrip(".")
    assert prepared(raw, "--features", features)[0].description.feature_shape == (2,)
    for words in (("--features", "t"), ("--task", "text")):
        store, manifest = prepared(raw, *words)
        assert store.description.task == "text" and set(unused(manifest)) == {"a", "b"}
    assert prepared(raw, "--task", "vector")[0].description.task == "vector"


def test_nested_lists_of_one_shape_are_series(tmp_path: Path, prepared: Prepared) -> None:
    series = RNG.normal(size=(ROWS, 5, 2)) * [1, 1000]
    store, manifest = prepared(parquet(tmp_path / "t.parquet", {"w": [s.tolist() for s in series], "label": Y}))
    assert store.description.feature_shape == (5, 2) and len(store.description.mean) == 2
    x, _ = everything(store)
    np.testing.assert_allclose(sorted(x[:, 0, 1]), sorted(series[:, 0, 1].astype(np.float32)))
    assert "5 x 2" in manifest["understood"]["sample"]
    np.savez(tmp_path / "t.npz", x=series, y=Y)
    assert prepared(tmp_path / "t.npz", "--task", "vector")[0].description.feature_shape == (5, 2)


@pytest.mark.parametrize(
    "lists",
    [
        [[[1.0, 2.0]] * (3 + row % 5) for row in range(ROWS)],
        [[[1.0, 2.0], [1.0]] for _ in range(ROWS)],
        [[1.0] * (1 + row % 7) for row in range(ROWS)],
    ],
)
def test_lists_of_different_shapes_are_rejected(tmp_path: Path, prepared: Prepared, lists: Any) -> None:
    said = prepared(parquet(tmp_path / "t.parquet", {"w": lists, "label": Y}))
    assert "column 'w' differ in shape" in said and "Pad or cut" in said
    odd = [[1.0, 2.0, 3.0][: 3 - (row == 5)] for row in range(ROWS)]
    store, manifest = prepared(parquet(tmp_path / "t.parquet", {"w": odd, "label": Y}))
    assert store.description.feature_shape == (3,) and manifest["skipped"] == 1


@pytest.mark.parametrize("write", [csv, parquet, npz])
@pytest.mark.parametrize("values", [1.7e9 + COUNT * 1.5, 2**53 + COUNT * 7.0, 1e15 + A])
def test_numbers_beyond_float32_are_rejected_unless_chosen(
    tmp_path: Path, prepared: Prepared, write: Any, values: Any
) -> None:
    raw = write(tmp_path / f"t.{write.__name__}", {"a": A, "t": values, "label": Y})
    said = prepared(raw)
    assert "too little for float32" in said
    if write is not npz:
        _, manifest = prepared(raw, "--features", "a,t")
        assert any("too little for float32" in note for note in manifest["notes"])


def test_user_label_features_and_split_name_columns_of_csv_files(tmp_path: Path, prepared: Prepared) -> None:
    who = [f"w{row % 4}" for row in range(ROWS)]
    raw = csv(tmp_path / "t.csv", {"kind": Y, "who": who, "a": A, "b": B, "site": COUNT // 6})
    words = ["--label", "kind", "--user", "who", "--features", "b", "--partition", "user", "--split", "site"]
    store, manifest = prepared(raw, *words)
    assert store.clients == 4 and store.description.feature_shape == (1,) and len(store.test()[1]) == 12
    assert set(unused(manifest)) == {"a", "site"} and manifest["class_names"] == ["0", "1", "2"]
    for flag, column in (("--label", "x"), ("--user", "y"), ("--features", "z"), ("--split", "q")):
        assert f"no column {column!r}" in prepared(raw, *["--label", "kind", flag, column])


ONE_HOT = np.eye(3, dtype=np.int64)[Y]
ONE_COLUMN = [Y[:, None], Y[:, None].astype(np.uint8), Y[:, None].astype(float), np.array(["x", "y", "z"])[Y][:, None]]
X = np.stack([A, B], 1)


@pytest.mark.parametrize("test_shape", ["one column", "flat"])
@pytest.mark.parametrize("y", [*ONE_COLUMN, ONE_HOT, ONE_HOT.astype(np.float32), ONE_HOT.astype(bool)])
def test_labels_of_one_column_or_one_hot_are_classes(
    tmp_path: Path, prepared: Prepared, y: Any, test_shape: str
) -> None:
    y_test = y[:6, 0] if test_shape == "flat" and y.shape[1] == 1 else y[:6]
    np.savez(tmp_path / "t.npz", x=X, y=y, x_test=X[:6], y_test=y_test)
    store, manifest = prepared(tmp_path / "t.npz")
    assert store.description.targets == "classification" and store.description.classes == 3
    np.testing.assert_array_equal(store.test()[1], Y[:6])
    assert any("one 1 among zeros" in note for note in manifest["notes"]) == (y.shape[1] == 3)


def test_columns_and_lists_that_are_one_hot_are_classes(tmp_path: Path, prepared: Prepared) -> None:
    columns = {"a": A, "b": B, **{name: ONE_HOT[:, place] for place, name in enumerate(("cat", "dog", "eel"))}}
    raw = csv(tmp_path / "t.csv", columns)
    store, manifest = prepared(raw, "--label", "cat,dog,eel")
    assert store.description.targets == "classification" and manifest["class_names"] == ["cat", "dog", "eel"]
    store, _ = prepared(raw, "--label", "cat,dog,eel", "--targets", "multilabel")
    assert store.description.targets == "multilabel"
    for lists, classes in ((ONE_HOT.tolist(), 3), ([[int(y) + 4] for y in Y], 3)):
        store, _ = prepared(parquet(tmp_path / "t.parquet", {"a": A, "label": lists}))
        assert store.description.targets == "classification" and store.description.classes == classes


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (["1_0", "10", "1e1", "010"], ["010", "10", "1_0", "1e1"]),
        (["007", "7"], ["7", "007"]),
        (["10", "9", "1"], ["1", "9", "10"]),
        (["1.0", "2.0", "10.0"], ["1", "2", "10"]),
        (["True", "False"], ["False", "True"]),
        (["1000000000000000001", "1000000000000000002"], ["1000000000000000001", "1000000000000000002"]),
        (["1" + "0" * 23 + "1", "1" + "0" * 24], ["1" + "0" * 24, "1" + "0" * 23 + "1"]),
    ],
)
def test_classes_of_csv_files_are_texts_or_plain_numbers(
    tmp_path: Path, prepared: Prepared, cells: list[str], classes: list[str]
) -> None:
    labels = [cells[row % len(cells)] for row in range(ROWS)]
    _, manifest = prepared(csv(tmp_path / "t.csv", {"a": A, "label": labels}))
    assert manifest["class_names"] == classes
    if all(not cell.endswith(".0") for cell in cells):
        np.savez(tmp_path / "t.npz", x=X, y=np.array(labels))
        assert prepared(tmp_path / "t.npz")[1]["class_names"] == classes


@pytest.mark.parametrize("mark", ["", " ", "?", "NA", "N/A", "null", "None", "<NA>", "nan"])
def test_marks_of_missing_values_are_missing(tmp_path: Path, prepared: Prepared, mark: str) -> None:
    labels = [mark if row in (3, 4) else f"c{row % 3}" for row in range(ROWS)]
    raw = csv(tmp_path / "t.csv", {"a": A, "label": labels})
    assert "2 of 60 samples have no label" in prepared(raw) and ", line 5" in prepared(raw)
    held = [mark if row == 7 else value for row, value in enumerate(A)]
    store, manifest = prepared(csv(tmp_path / "t.csv", {"a": held, "b": B, "label": Y}))
    assert manifest["skipped"] == 1 and store.samples + len(store.test()[1]) == ROWS - 1


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8-sig"])
def test_texts_are_utf_8_or_of_the_encoding_that_is_given(tmp_path: Path, prepared: Prepared, encoding: str) -> None:
    labels = [("été", "hiver")[row % 2] for row in range(ROWS)]
    raw = csv(tmp_path / "t.csv", {"label": labels, "a": A}, encoding=encoding)
    if encoding != "utf-8-sig":
        assert "--encoding" in prepared(raw)
    given = () if encoding == "utf-8-sig" else ("--encoding", encoding)
    assert set(prepared(raw, *given)[1]["class_names"]) == {"été", "hiver"}
    assert "'klingon' is unknown" in prepared(raw, "--encoding", "klingon")


@pytest.mark.parametrize("ending", ["tsv", "csv.gz"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_separators_are_detected(tmp_path: Path, prepared: Prepared, delimiter: str, ending: str) -> None:
    labels = ["a, b", "c"] if delimiter != "," else ["a;b", "c"]
    columns = {"a": A, "b": B, "label": [labels[row % 2] for row in range(ROWS)]}
    raw = csv(tmp_path / "t.csv", columns, delimiter).rename(tmp_path / f"t.{ending}")  # gzip is known by its content
    store, manifest = prepared(raw)
    assert store.description.feature_shape == (2,) and manifest["class_names"] == sorted(labels)
    assert any("separated by" in note for note in manifest["notes"]) == (delimiter != ",")


def test_separators_and_decimal_signs_can_be_given(tmp_path: Path, prepared: Prepared) -> None:
    raw = csv(tmp_path / "t.csv", {"a": A, "label": Y}, delimiter=" ")
    assert "--delimiter" in prepared(raw)
    assert prepared(raw, "--delimiter", "space")[0].description.feature_shape == (1,)
    raw.write_text(raw.read_text().replace(" ", "   "))
    assert prepared(raw, "--delimiter", "space")[0].samples == ROWS * 4 // 5
    assert "'ab' is not possible" in prepared(raw, "--delimiter", "ab")
    numbers = [f"{value:.3f}".replace(".", ",") for value in B]
    raw = csv(tmp_path / "t.csv", {"a": numbers, "b": numbers[::-1], "label": Y}, delimiter=";")
    x, _ = everything(prepared(raw)[0])
    assert x.max() > 1e5  # six digits before the comma cannot be thousands
    np.testing.assert_allclose(sorted(everything(prepared(raw, "--decimal", ",")[0])[0][:, 0]), sorted(B), atol=0.1)
    raw = csv(tmp_path / "t.csv", {"a": ["1,234", "2,345", "3,456"] * 20, "label": Y}, delimiter=";")
    assert "--decimal" in prepared(raw)
    x, _ = everything(prepared(raw, "--decimal", ",")[0])
    assert x.max() == np.float32(3.456)
    raw = csv(tmp_path / "t.csv", {"a": ["0,125", "2,345", "-0,500"] * 20, "label": Y}, delimiter=";")
    assert everything(prepared(raw)[0])[0].max() == np.float32(2.345)  # no thousand begins with 0


@pytest.mark.parametrize(
    ("cells", "skipped"),
    [
        ({10: '"word 10'}, 50),
        ({10: '"word 10', 40: '"word 40'}, 31),
        ({10: '"a word" 10', 40: 'so-called "words"'}, 0),
        ({10: '"word 10\n and more"', 40: '"""word"""'}, 0),
    ],
)
def test_lines_that_a_quotation_mark_joins_are_counted(
    tmp_path: Path, prepared: Prepared, cells: dict[int, str], skipped: int
) -> None:
    texts = [cells.get(row, f"word {row}") for row in range(ROWS)]
    raw = csv(tmp_path / "t.tsv", {"text": texts, "label": Y}, "\t")
    store, manifest = prepared(raw)
    assert manifest["skipped"] == skipped and store.samples + len(store.test()[1]) == ROWS - skipped
    if skipped:
        said = prepared(raw, "--strict")
        assert ", line 12:" in said and f"joins {skipped} lines" in said


def test_targets_have_decimal_commas_as_well(tmp_path: Path, prepared: Prepared) -> None:
    cells = [f"{value:.4f}".replace(".", ",") for value in A]
    raw = csv(tmp_path / "t.csv", {"a": cells, "label": cells}, delimiter=";")
    assert "is a number to be predicted" in prepared(raw)
    store, _ = prepared(raw, "--targets", "regression")
    np.testing.assert_allclose(sorted(everything(store)[1]), sorted(A), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("t.csv", b"", "is empty"),
        ("t.csv", b"a,label\n", "holds no readable row"),
        ("t.csv", b"\n\n", "holds no row"),
        ("t.csv", b"5.1,3.5,Iris-setosa\n4.9,3.0,Iris-virginica\n", "Does the file begin with a header?"),
        ("t.csv", b"a,b,label\n1,2\n3\n", "line 2: 2 fields where the header names 3"),
        ("t.csv", b"a,b,label\n1,2,0,\n1,2,1,\n", "line 2: 4 fields where the header names 3"),
        ("t.csv", b"a,b,label\nNA,2,x\n1,NA,y\n", "line 2: no finite number in column 'a'"),
        ("t.csv", b"a,a,label\n1,2,0\n", "names several columns 'a'"),
        (
            "t.csv",
            b"a,b,c,d,e,f,g,h,i,j,k,l,m,n\n1,2,3,4,5,6,7,8,9,1,2,3,4,5\n",
            "but a, b, c, d, e, f, g, h, i, j, k, l and 2",
        ),
        ("t.csv", b"PAR1" + b"\0" * 40, "is a binary file"),
        ("t.csv", b"PK\x03\x04" + b"\0" * 40, "is a binary file"),
        ("t.csv", b"a,label\n\0\0\n", "is a binary file"),
        ("t.csv", b"a,label\r1,0\r2,1\r", "end lines with a line feed"),
        ("t.npy", b"\x93NUMPY", "one array without labels"),
        ("t.xlsx", b"PK", "an unsupported format"),
        ("t.npz", b"no zip at all", "is not a readable .npz file"),
        ("t.parquet", b"PAR1 no more", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read_say_why(
    tmp_path: Path, prepared: Prepared, name: str, content: bytes, sentence: str
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    assert sentence in prepared(tmp_path / name)


def test_files_that_are_zipped_under_another_name_are_read(tmp_path: Path, prepared: Prepared) -> None:
    raw = csv(tmp_path / "t.csv", {"a": A, "label": Y})
    raw.write_bytes(gzip.compress(raw.read_bytes()))
    assert prepared(raw)[0].description.feature_shape == (1,)
    raw.write_bytes(raw.read_bytes()[:-20])
    assert "damaged or cut short" in prepared(raw)


@pytest.mark.parametrize(
    "arrays",
    [
        {"arr_0": X, "arr_1": Y},
        {"x": X, "y": Y, "x_test": X, "labels_test": Y},
    ],
)
def test_misnamed_arrays_are_listed(tmp_path: Path, prepared: Prepared, arrays: Table) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    said = prepared(tmp_path / "t.npz")
    assert all(name in said for name in arrays) and "numpy.savez(" in said


def test_arrays_of_other_names_are_reported(tmp_path: Path, prepared: Prepared) -> None:
    np.savez(tmp_path / "t.npz", x=X, y=Y, users=COUNT)
    assert "users" in unused(prepared(tmp_path / "t.npz")[1])


def test_a_folder_of_csv_files_has_its_parts_by_name(tmp_path: Path, prepared: Prepared) -> None:
    (tmp_path / "raw").mkdir()
    for part, rows in (("train", slice(0, 40)), ("test", slice(40, 60))):
        csv(tmp_path / "raw" / f"{part}.csv", {"a": A[rows], "label": Y[rows]})
    (tmp_path / "raw" / "README.txt").write_text("About these data\n")
    store, manifest = prepared(tmp_path / "raw")
    assert store.samples == 40 and len(store.test()[1]) == 20
    assert any("README.txt is not used" in note for note in manifest["notes"])
    csv(tmp_path / "raw" / "test.csv", {"b": A, "label": Y})
    assert "Name one file" in prepared(tmp_path / "raw")


IMAGES = RNG.integers(0, 256, (ROWS, 28, 28, 3), np.uint8)


@pytest.mark.parametrize(
    ("x", "task", "kind"),
    [(X, None, "multilabel"), (IMAGES, "image", "multilabel"), (A.repeat(8).reshape(ROWS, 4, 2), "vector", "tokens")],
)
def test_zeros_and_ones_are_labels_where_samples_have_no_positions(
    tmp_path: Path, prepared: Prepared, x: Any, task: Any, kind: str
) -> None:
    y = np.stack([Y > 0, Y > 1, Y < 2, Y == 1], 1).astype(np.int64)
    np.savez(tmp_path / "t.npz", x=x, y=y)
    store, _ = prepared(tmp_path / "t.npz", *(("--task", task) if task else ()))
    assert store.description.targets == kind


def test_rows_that_are_left_out_take_their_labels_along(tmp_path: Path, prepared: Prepared) -> None:
    """A file of more rows than one block: every sample keeps its label and user, the bad ones are counted."""
    rows = [f"{row * 2},c{row % 2},u{row % 3}" for row in range(5000)]
    rows[4::500] = ["oops,c0,u0"] * 10
    rows[7::500] = ["1,c0"] * 10
    rows[9::500] = [""] * 10
    (tmp_path / "t.csv").write_text("\n".join(["a,label,user", *rows]) + "\n")
    store, manifest = prepared(tmp_path / "t.csv", "--partition", "user")
    x, y = everything(store)
    assert manifest["skipped"] == 20 and len(x) == 4970 and store.clients == 3
    np.testing.assert_array_equal(x[:, 0] / 2 % 2, y)
    for client in range(3):
        assert set(store.client(client)[0][:, 0] / 2 % 3) == {client}
    said = prepared(tmp_path / "t.csv", "--strict")
    assert "line 9: 2 fields where the header names 3" in said


def test_a_column_is_of_numbers_if_most_of_its_cells_are(tmp_path: Path, prepared: Prepared) -> None:
    for words, task in ((27, "vector"), (33, "text")):
        cells = [f"word{row}" if row < words else row / 7 for row in range(ROWS)]
        store, manifest = prepared(csv(tmp_path / "t.csv", {"a": cells, "label": Y}))
        assert store.description.task == task and manifest["skipped"] == (words if task == "vector" else 0)


TARGETS = {"a": A, "b": B, "rain": COUNT / 4, "wind": COUNT * 3, "wet": COUNT % 2, "dry": COUNT % 3 // 2, "t": WORDS}


@pytest.mark.parametrize("write", [csv, parquet])
@pytest.mark.parametrize(
    ("words", "kind", "expected"),
    [
        (("rain,wind",), "regression", [COUNT / 4, COUNT * 3]),
        (("wet,dry",), "multilabel", [COUNT % 2, COUNT % 3 // 2]),
        (("rain", "--targets", "regression"), "regression", [COUNT / 4]),
    ],
)
def test_targets_of_tables_that_are_no_classes(
    tmp_path: Path, prepared: Prepared, write: Any, words: tuple[str, ...], kind: str, expected: Any
) -> None:
    raw = write(tmp_path / f"t.{write.__name__}", TARGETS)
    store, manifest = prepared(raw, "--features", "a,b", "--label", *words)
    x, y = everything(store)
    assert store.description.targets == kind and (kind != "multilabel" or manifest["class_names"] == ["wet", "dry"])
    order = np.argsort(x[:, 0]), np.argsort(A)
    np.testing.assert_allclose(y.reshape(len(y), -1)[order[0]], np.stack(expected, 1)[order[1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("rain,snow", "has no column 'snow'"),
        ("rain,rain", "names a column twice"),
        ("a,rain --targets classification", "a class is one value"),
        ("rain --targets multilabel", "needs several"),
        ("rain --targets tokens", "needs several"),
        ("t --targets regression", "must be numbers"),
        ("rain,wind --targets multilabel", "not in 0 to 1"),
        ("rain --features a,rain", "'rain' is the label column"),
        ("wet --features t,a", "Name one column of images"),
    ],
)
@pytest.mark.parametrize("write", [csv, parquet])
def test_columns_that_are_not_what_is_said_are_rejected(
    tmp_path: Path, prepared: Prepared, write: Any, words: str, sentence: str
) -> None:
    raw = write(tmp_path / f"t.{write.__name__}", TARGETS)
    features = () if "--features" in words else ("--features", "a,b")
    if words.startswith("a,"):
        features = ("--features", "b")
    assert sentence in prepared(raw, *features, "--label", *words.split())


IDS = RNG.integers(0, 9, (ROWS, 4))


@pytest.mark.parametrize(
    ("arrays", "words", "facts"),
    [
        ({"x": X, "y": RNG.random((ROWS, 5)) < 0.5}, "", ("vector", "multilabel", (5,))),
        ({"x": X, "y": RNG.normal(size=(ROWS, 2, 3))}, "", ("vector", "regression", (2, 3))),
        ({"x": X, "y": A}, "--targets regression", ("vector", "regression", ())),
        ({"x": IDS, "y": IDS}, "--task text", ("text", "tokens", (4,))),
        ({"x": IDS, "y": Y}, "--task vector", ("vector", "classification", ())),
        ({"x": RNG.random((ROWS, 6, 5)), "y": Y}, "", ("image", "classification", ())),
        ({"x": RNG.random((ROWS, 6, 5, 13)), "y": Y}, "--channels last", ("image", "classification", ())),
        ({"x": np.asfortranarray(X), "y": Y.astype(np.uint64), "user": Y}, "", ("vector", "classification", ())),
        ({"x": X, "y": np.array([b"cat", b"dog"] * (ROWS // 2))}, "", ("vector", "classification", ())),
    ],
)
def test_arrays_are_what_their_shape_and_numbers_say(
    tmp_path: Path, prepared: Prepared, arrays: Table, words: str, facts: tuple[Any, ...]
) -> None:
    np.savez(tmp_path / "t.npz", **arrays, x_test=arrays["x"][:9], y_test=arrays["y"][:9])
    store, _ = prepared(tmp_path / "t.npz", *words.split())
    found = store.description
    assert (found.task, found.targets, found.target_shape) == facts
    x = arrays["x"][:9]
    x = x[:, None] if x.ndim == 3 else np.moveaxis(x, 3, 1) if x.ndim == 4 else x
    np.testing.assert_array_equal(store.test()[0], x.astype(found.dtype))
    if facts[1] != "classification":
        np.testing.assert_array_equal(store.test()[1], arrays["y"][:9].astype(store.test()[1].dtype))


HALVES = np.where(COUNT[:, None] == 4, np.inf, X / 2e6).astype(np.float16)
HOLES = np.where(COUNT == 4, np.nan, 1.0)[:, None] * X


@pytest.mark.parametrize(
    ("arrays", "words", "sentence"),
    [
        ({"x": X, "y": Y[:-1]}, "", "y has shape (59,) where x has 60 rows"),
        ({"x": np.array([{}] * ROWS), "y": Y}, "", "Python objects"),
        ({"x": A, "y": Y}, "", "one row of them a sample"),
        ({"x": IDS, "y": Y}, "", "--task text"),
        ({"x": RNG.random((ROWS, 3, 6, 5)), "y": Y}, "--task vector", "images (n, h, w)"),
        ({"x": RNG.random((ROWS, 16, 16, 13)), "y": Y}, "", "--channels first for"),
        ({"x": RNG.random((ROWS, 6, 5)), "y": Y}, "--channels last", "Leave out --channels"),
        ({"x": X, "y": A}, "", "(array y, row 0) is a number to be predicted"),
        ({"x": X, "y": HOLES}, "", "1 of 60 samples have no label"),
        ({"x": X, "y": np.zeros((ROWS, 0))}, "", "a sample has no target"),
        ({"x": X, "y": np.zeros(ROWS, "datetime64[s]")}, "", "Labels must be whole numbers or texts"),
        ({"x": X, "y": np.array([b"\xe9"] * ROWS)}, "", "is no UTF-8 text"),
        ({"x": X, "y": X, "x_test": X, "y_test": X[:, :1]}, "", "y is (60, 2), but y_test (60, 1)"),
        ({"x": X * np.nan, "y": Y}, "", "no usable training sample. The first: .* array x, row 0"),
        (
            {"x": X, "y": Y, "x_test": X * np.nan, "y_test": Y},
            "",
            "no usable test sample. The first: .* array x_test, row 0",
        ),
        ({"x": IDS + 10**8, "y": Y}, "--task text", "the largest token id"),
    ],
)
def test_arrays_that_do_not_fit_are_rejected(
    tmp_path: Path, prepared: Prepared, arrays: Table, words: str, sentence: str
) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    said, pieces = prepared(tmp_path / "t.npz", *words.split()), sentence.split(".* ")
    assert all(piece in said for piece in pieces), said


def test_rows_without_a_number_or_a_user_are_counted(tmp_path: Path, prepared: Prepared) -> None:
    np.savez(tmp_path / "t.npz", x=HOLES, y=Y, user=np.where(COUNT < 7, "", "ann"))
    _, manifest = prepared(tmp_path / "t.npz")
    assert manifest["skipped"] == 1 and any("6 of 59 training rows name no user" in note for note in manifest["notes"])
    np.savez(tmp_path / "t.npz", x=HALVES, y=Y)
    assert prepared(tmp_path / "t.npz")[1]["skipped"] == 1
    np.savez(tmp_path / "t.npz", x=np.where(COUNT[:, None] == 3, -1, IDS), y=Y)
    assert prepared(tmp_path / "t.npz", "--task", "text")[1]["skipped"] == 1
