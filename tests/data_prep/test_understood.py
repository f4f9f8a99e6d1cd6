"""Description of the user's data by a preparation, and the test part held out of them: through the commands alone."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fedmpi
from fedmpi.cli import app
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

RNG = np.random.default_rng(36)
Output = pytest.CaptureFixture[str]
Prepared = Callable[..., tuple[Path, str]]


@pytest.fixture
def prepared(tmp_path: Path, capsys: Output) -> Prepared:
    """Prepare a data set for three clients: the folder, and the output in one line."""

    def prepare(data_set: str, raw: Path | None, *words: str, out: str = "out") -> tuple[Path, str]:
        where = [] if raw is None else ["--raw", str(raw)]
        laws = [] if "--partition" in words else ["--partition", "iid", "--clients", "3"]
        code = main([data_set, *where, *laws, *words, "--out", str(tmp_path / out)])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return tmp_path / out, flat(shown.out)

    return prepare


def flat(shown: str) -> str:
    """Words of a table or of lines, without frames and wraps."""
    return " ".join(shown.replace("│", " ").split())


def parts_of(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    store = open_store(folder)
    val = store.validation()
    held = {} if val is None else {"validation": val}
    return {"training": store.rows(np.arange(store.samples)), "test": store.test(), **held}


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def image(path: Path, value: int, grey: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((6, 5) if grey else (6, 5, 3), value, np.uint8)
    Image.fromarray(pixels).save(path)


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


# -- A0: what was understood ------------------------------------------------------------------------------------------


def digits(folder: Path) -> tuple[str, Path | None, tuple[str, ...]]:
    return "digits", None, ()


def vectors(folder: Path) -> tuple[str, Path | None, tuple[str, ...]]:
    return "arrays", npz(folder / "a.npz", x=RNG.random((20, 4)), y=np.array(["cat", "dog"] * 10)), ()


def tokens(folder: Path) -> tuple[str, Path | None, tuple[str, ...]]:
    x = RNG.integers(0, 30, (20, 7))
    return "arrays", npz(folder / "a.npz", x=x, y=np.arange(20) % 2), ("--task", "text")


def images(folder: Path) -> tuple[str, Path | None, tuple[str, ...]]:
    for number in range(10):
        image(folder / "raw" / ("moths", "ants")[number % 2] / f"{number}.png", 20 * number)
    return "imagefolder", folder / "raw", ()


DATA = [
    (digits, ["image of 8 x 8 pixels", "one of 10 classes", "classes 10: 0, 1, 2", "1,442 train, 355 test"]),
    (vectors, ["sample 4 numbers", "one of 2 classes", "classes 2: cat, dog", "16 train, 4 test, 0 validation"]),
    (tokens, ["text of 7 tokens", "vocabulary of 30", "classes 2: 0, 1", "16 train, 4 test"]),
    (images, ["gray image of 5 x 6 pixels", "classes 2: ants, moths", "8 train, 2 test"]),
]


@pytest.mark.parametrize(("make", "said"), DATA, ids=[make.__name__ for make, _ in DATA])
def test_preparation_and_inspection_say_what_was_understood(
    make: Callable[[Path], tuple[str, Path | None, tuple[str, ...]]],
    said: list[str],
    prepared: Prepared,
    tmp_path: Path,
) -> None:
    data_set, raw, words = make(tmp_path)
    folder, shown = prepared(data_set, raw, *words)
    inspected = CliRunner().invoke(app, ["inspect", str(folder)], env={"COLUMNS": "80"})
    assert inspected.exit_code == 0
    for words_of_it in said:
        assert words_of_it in shown, shown
        assert words_of_it in flat(inspected.output)


def test_a_run_on_arrays_logs_and_prints_what_the_data_are(
    tmp_path: Path, capsys: Output, caplog: pytest.LogCaptureFixture
) -> None:
    x = RNG.random((30, 5)).astype(np.float32)
    y = np.arange(30) % 3
    y[7] = 3  # a class of the training part alone
    arrays = fedmpi.ClientArrays(x, y, np.arange(30) % 3, test=(x[:10], y[:10] % 3))
    settings = {"rounds": 1, "clients.count": 2, "model.name": "mlp"}
    with caplog.at_level(logging.INFO, "fedmpi"):
        fedmpi.run("fedavg", settings, data=arrays, out=tmp_path / "run", progress=True)
    printed, logged = flat(capsys.readouterr().out), flat((tmp_path / "run" / "run.log").read_text())
    for said in (
        "sample: 5 numbers",
        "target: one of 4 classes",
        "classes: 4: 0, 1, 2, 3",
        "30 train, 10 test, 0 validation",
        "1 class occurs in the training part only (samples in brackets): 3 (1)",
        "10 of 10 test samples (100.0%) have exactly the features of a training sample",
    ):
        assert said in printed and said in logged, (said, printed, logged)


# -- A8: the test part ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(50, 50), (10, 5, 5), (97, 3), (8, 7, 6, 5, 4, 3, 2), (2, 2), (3,), (1, 1, 1)])
def test_classes_are_shared_by_largest_remainders(counts: tuple[int, ...], prepared: Prepared, tmp_path: Path) -> None:
    y = RNG.permutation(np.repeat(np.arange(len(counts)), counts))
    raw = npz(tmp_path / "a.npz", x=RNG.random((len(y), 3)), y=y)
    folder, _ = prepared("arrays", raw, "--partition", "iid", "--clients", "1")
    found = parts_of(folder)
    tested = np.bincount(found["test"][1], minlength=len(counts))
    assert tested.sum() + len(found["training"][1]) == len(y) and tested.sum() >= 1
    for count, held in zip(counts, tested, strict=True):
        assert abs(held - 0.2 * count) < 1 or (count > 1 and held == 1) or max(counts) == 1
        assert held >= 1 or count == 1 or max(counts) == 1
        assert held < count or max(counts) == 1


def test_the_test_part_is_the_same_for_every_seed_and_training_alone_gives_the_statistics(
    prepared: Prepared, tmp_path: Path
) -> None:
    raw = npz(tmp_path / "a.npz", x=RNG.random((50, 3)) ** 4, y=np.arange(50) % 2)
    found = [prepared("arrays", raw, "--seed", seed, out=f"out{seed}")[0] for seed in ("0", "5")]
    first, second = (parts_of(folder) for folder in found)
    np.testing.assert_array_equal(first["test"][0], second["test"][0])
    mean = np.asarray(manifest_of(found[0])["description"]["mean"])
    np.testing.assert_allclose(mean.mean(), first["training"][0].mean(), rtol=1e-5)


def csv_of_users(folder: Path) -> tuple[str, Path]:
    rows = [
        {"value": number % 12, "other": RNG.random(), "user": f"u{number % 12}", "label": "ab"[number % 2]}
        for number in range(60)
    ]
    return "arrays", table(folder / "t.csv", rows)


def test_users_are_held_out_whole(prepared: Prepared, tmp_path: Path) -> None:
    data_set, raw = csv_of_users(tmp_path)
    folder, shown = prepared(data_set, raw, "--split", "users", "--partition", "user", out="users")
    found = parts_of(folder)
    users = {name: set(x[:, 0].tolist()) for name, (x, _) in found.items()}  # the first feature is the user
    assert users["test"] and not users["training"] & users["test"] and "drawn by rows" not in shown
    assert open_store(folder).clients == len(users["training"])
    assert 0 < len(found["test"][1]) <= 0.2 * (len(found["training"][1]) + len(found["test"][1]))
    _, shown = prepared(data_set, raw, out="rows")
    assert shown.count("the test part is drawn by rows") == 2  # once before, once in the report
    assert "--split users keeps the samples of one together" in shown


def test_the_smallest_of_users_that_are_all_too_large_is_the_test_part(prepared: Prepared, tmp_path: Path) -> None:
    user = RNG.permutation(np.repeat(["anna", "bob", "cem"], [12, 8, 10]))
    x = np.column_stack([user == name for name in ("anna", "bob", "cem")]).astype(np.float32)
    raw = npz(tmp_path / "a.npz", x=x, y=RNG.integers(0, 2, 30), user=user)
    folder, _ = prepared("arrays", raw, "--split", "users", "--partition", "user")
    assert parts_of(folder)["test"][0].tolist() == [[0, 1, 0]] * 8
    store = open_store(folder)
    names = {str(store.client_ids[client]): np.asarray(store.client(client)[0])[0].tolist() for client in range(2)}
    assert names == {"anna": [1, 0, 0], "cem": [0, 0, 1]}


def test_words_of_the_test_part_are_those_of_the_vocabulary_that_validation_leaves(
    prepared: Prepared, tmp_path: Path
) -> None:
    kinds = RNG.integers(0, 12, 120).tolist()
    rows = [{"text": f"a{kind} b{kind} once{row}", "label": "ab"[row % 2]} for row, kind in enumerate(kinds)]
    folder, _ = prepared("arrays", table(tmp_path / "t.csv", rows), "--val", "0.4")
    words = (folder / "vocabulary.txt").read_text().split()
    for name, (x, _) in parts_of(folder).items():
        for first, second, once in ([words[code] for code in row[:3]] for row in x):
            assert first[1:] == second[1:] and (once != "<unk>") == (name == "training")


def csv_of_patients(folder: Path) -> tuple[str, Path]:
    rows = [{"patient": f"p{n % 9}", "value": n % 9, "other": RNG.random(), "label": "ab"[n % 2]} for n in range(60)]
    return "arrays", table(folder / "t.csv", rows)


def test_groups_of_a_column_are_held_out_whole(prepared: Prepared, tmp_path: Path) -> None:
    folder, shown = prepared(*csv_of_patients(tmp_path), "--split", "patient")
    patients = {name: set(x[:, 0].tolist()) for name, (x, _) in parts_of(folder).items()}  # the first feature
    assert patients["test"] and not patients["training"] & patients["test"]
    assert open_store(folder).description.feature_shape[0] < 3  # the group is no feature


def test_groups_are_held_out_with_their_share_of_each_class(prepared: Prepared, tmp_path: Path) -> None:
    """Half of the users have one class, half the other: a fifth of each class is tested, not users of one class."""
    for sizes, held in (([4] * 100, [40, 40]), ([4, 4, 4, 4, 2, 2], [2, 2])):
        user = np.repeat(np.arange(len(sizes)), sizes)
        raw = npz(tmp_path / "a.npz", x=RNG.random((len(user), 2)), y=user % 2, user=user)
        folder, _ = prepared("arrays", raw, "--split", "users", out=str(len(sizes)))
        assert np.bincount(parts_of(folder)["test"][1]).tolist() == held


def with_test(folder: Path) -> Path:
    x, y = RNG.random((6, 2)), np.arange(6) % 2
    return npz(folder / "a.npz", x=x, y=y, user=y, x_test=x, y_test=y)


REJECTED: list[tuple[Callable[[Path], Path], str, str]] = [
    (with_test, "users", "has a test part, so --split users has no effect. Leave --split out."),
    (lambda folder: npz(folder / "a.npz", x=np.eye(6), y=np.arange(6) % 2), "users", "--split users needs a user"),
    (
        lambda folder: npz(folder / "a.npz", x=np.eye(6), y=np.arange(6) % 2, user=list("aabb ") + [""]),
        "users",
        "fill it",
    ),
    (lambda folder: npz(folder / "a.npz", x=np.eye(6), y=np.arange(6) % 2), "patient", "patient"),
    (lambda folder: npz(folder / "a.npz", x=np.eye(6), y=np.arange(6) % 2, user=np.zeros(6)), "users", "one user"),
    (lambda folder: npz(folder / "a.npz", x=np.eye(3)[:1], y=[0]), "rows", "one sample"),
]


@pytest.mark.parametrize(("make", "split", "message"), REJECTED)
def test_a_split_that_cannot_be_is_rejected_with_one_sentence(
    make: Callable[[Path], Path], split: str, message: str, tmp_path: Path, capsys: Output
) -> None:
    words = ["--partition", "iid", "--clients", "1", "--split", split, "--out", str(tmp_path / "out")]
    assert main(["arrays", "--raw", str(make(tmp_path)), *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.startswith("error: ") and shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


def repeated_images(folder: Path) -> tuple[str, Path]:
    for part, values in (("train", range(8)), ("test", (3, 4, 99))):
        for value in values:
            image(folder / "raw" / part / "ab"[value % 2] / f"{value}.png", value)
    return "imagefolder", folder / "raw"


def repeated_texts(folder: Path) -> tuple[str, Path]:
    row = '"{}","1","date","NO_QUERY","anna","{}"\n'
    for name, texts in (("training.csv", ("so sad", "glad", "mad")), ("testdata.csv", ("glad", "sad mad", "So sad!"))):
        (folder / name).write_text("".join(row.format(4 * (text == "glad"), text) for text in texts))
    return "sentiment140", folder


REPEATED = [repeated_images, repeated_texts]


@pytest.mark.parametrize("make", REPEATED, ids=[make.__name__ for make in REPEATED])
def test_samples_in_both_parts_are_counted(
    make: Callable[[Path], tuple[str, Path]], prepared: Prepared, tmp_path: Path
) -> None:
    folder, shown = prepared(*make(tmp_path))
    assert "2 of 3 test samples (66.7%) have exactly the features of a training sample" in shown
    assert manifest_of(folder)["duplicates"] == {"test in training": 2}


def test_validation_samples_are_compared_too(prepared: Prepared, tmp_path: Path) -> None:
    """Every sample is there four times: nearly all of a small validation part are trained on."""
    x = np.repeat(RNG.random((40, 3)), 4, axis=0)
    raw = npz(tmp_path / "a.npz", x=x, y=np.arange(160) % 2)
    folder, shown = prepared("arrays", raw, "--val", "0.25")
    found = {name: {row.tobytes() for row in x} for name, (x, _) in parts_of(folder).items()}
    counted = {
        f"{one} in {other}": sum(row.tobytes() in found[other] for row in parts_of(folder)[one][0])
        for one, other in (("test", "training"), ("test", "validation"), ("validation", "training"))
    }
    assert manifest_of(folder)["duplicates"] == counted and min(counted.values()) > 0
    assert f"{counted['validation in training']} of 32 validation samples" in shown


@pytest.mark.parametrize("data_set", ["digits", "arrays"])
def test_data_without_repetitions_give_no_note(data_set: str, prepared: Prepared, tmp_path: Path) -> None:
    raw = npz(tmp_path / "a.npz", x=RNG.random((40, 3)), y=np.arange(40) % 2) if data_set == "arrays" else None
    folder, shown = prepared(data_set, raw)
    assert manifest_of(folder)["duplicates"] == {"test in training": 0} and "note" not in shown


def test_classes_of_one_part_only_are_named_with_their_samples(prepared: Prepared, tmp_path: Path) -> None:
    arrays = {"x": RNG.random((6, 2)), "y": list("aabbcc"), "x_test": RNG.random((3, 2)), "y_test": list("aad")}
    _, shown = prepared("arrays", npz(tmp_path / "a.npz", **{k: np.array(v) for k, v in arrays.items()}))
    assert "2 classes occur in the training part only (samples in brackets): b (2), c (2)" in shown
    assert "1 class occurs in the test part only (samples in brackets): d (1)" in shown
