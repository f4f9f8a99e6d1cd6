"""Content decides, not names: gzip, HDF5 without locks, sets that are not MNIST."""

from __future__ import annotations

import csv
import fcntl
import gzip
import io
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from fedmpi.data.opening import open_store
from tests.data_prep import layouts
from tests.data_prep.command import main

Output = pytest.CaptureFixture[str]


def idx(part: str, rows: int, classes: int, first: int = 0) -> dict[str, bytes]:
    """The two idx files of a part under MNIST's names."""
    labels = (first + np.arange(rows) % classes).astype(np.uint8)
    pixels = np.random.default_rng(rows).integers(0, 100, (rows, 28, 28), np.uint8)
    return {
        f"{part}-images-idx3-ubyte": struct.pack(">4i", 2051, rows, 28, 28) + pixels.tobytes(),
        f"{part}-labels-idx1-ubyte": struct.pack(">2i", 2049, rows) + labels.tobytes(),
    }


def mnist(folder: Path, classes: int = 10, first: int = 0) -> None:
    """The four idx files of another data set."""
    folder.mkdir(exist_ok=True)
    for name, content in (idx("train", 120, classes, first) | idx("t10k", 60, classes, first)).items():
        (folder / name).write_bytes(content)


def tweets(folder: Path) -> None:
    """The two tables of Sentiment140."""
    stream = io.StringIO()
    csv.writer(stream).writerows([label, row, "d", "q", "u", f"word {row}"] for row in range(20) for label in (0, 4))
    for name in ("training.csv", "testdata.csv"):
        (folder / name).write_text(stream.getvalue())


SETS: dict[str, Callable[[Path], object]] = {
    "mnist": mnist,
    "sentiment140": tweets,
    "shakespeare": layouts.FILES["shakespeare"],
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rename", ["zipped without the ending", "the ending without zip"])
def test_gzip_is_known_by_content(name: str, rename: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    SETS[name](tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "other")
    for path in [path for path in (tmp_path / "other").rglob("*") if path.is_file()]:
        if rename == "zipped without the ending":
            path.write_bytes(gzip.compress(path.read_bytes()))
        else:
            path.rename(path.with_name(path.name + ".gz"))
    for folder in ("plain", "other"):
        words = [name, "--raw", str(tmp_path / folder), "--partition", "iid", "--clients", "2"]
        assert main([*words, "--out", str(tmp_path / f"s-{folder}")]) == 0
    plain, other = (open_store(tmp_path / f"s-{folder}").manifest for folder in ("plain", "other"))
    assert [file.sha256 for file in plain.files()] == [file.sha256 for file in other.files()]


def writers(folder: Path) -> list[Path]:
    """The two files of TFF's FEMNIST."""
    paths = [folder / f"fed_emnist_{part}.h5" for part in ("train", "test")]
    for path in paths:
        with h5py.File(path, "w") as file:
            for name in ("A", "B"):
                file[f"examples/{name}/pixels"] = np.zeros((2, 28, 28), np.float32)
                file[f"examples/{name}/label"] = np.arange(2)
    return paths


TFF = ["femnist", "--partition", "iid", "--clients", "2"]


def test_tff_files_are_read_where_they_cannot_be_locked(tmp_path: Path) -> None:
    with writers(tmp_path)[0].open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main([*TFF, "--raw", str(tmp_path), "--out", str(tmp_path / "s")]) == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>moved</html>", "is not an HDF5 file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "not a TFF file"),
    ],
    ids=["html", "no groups"],
)
def test_what_is_wrong_with_a_tff_file_is_said(content: bytes, reason: str, tmp_path: Path, capsys: Output) -> None:
    writers(tmp_path)[0].write_bytes(content)
    assert main([*TFF, "--raw", str(tmp_path), "--out", str(tmp_path / "s")]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("classes", "first"), [(10, 0), (26, 1)])
def test_another_set_under_mnists_names_is_not_called_mnist(
    classes: int, first: int, tmp_path: Path, capsys: Output
) -> None:
    mnist(tmp_path / "raw", classes, first)
    words = ["mnist", "--raw", str(tmp_path / "raw"), "--partition", "iid", "--clients", "2"]
    assert main([*words, "--out", str(tmp_path / "s")]) == 0
    assert "these are not mnist's own files" in capsys.readouterr().out
    manifest = open_store(tmp_path / "s").manifest
    assert manifest.dataset == "mnist-format" and manifest.licence == manifest.citation == "not stated"
    assert manifest.class_names == tuple(str(first + label) for label in range(classes))
    assert abs(manifest.description.mean[0] - 49.5 / 255) < 0.01 and abs(manifest.description.std[0] - 0.1132) < 0.01
    assert any("not mnist's own" in note for note in manifest.notes)


def test_mnist_is_mnist_zipped_or_not(data_folder: Path, tmp_path: Path, capsys: Output) -> None:
    for path in (data_folder / "mnist").iterdir():
        (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    words = ["mnist", "--raw", str(tmp_path), "--partition", "label-sorted", "--clients", "2", "--size", "9"]
    assert main([*words, "--out", str(tmp_path / "s")]) == 0 and "own files" not in capsys.readouterr().out
    with (tmp_path / "t10k-labels-idx1-ubyte").open("r+b") as labels:
        labels.seek(-1, 2)
        labels.write(b"\x07")
    assert main([*words, "--out", str(tmp_path / "t")]) == 0 and "own files" in capsys.readouterr().out
    manifest = open_store(tmp_path / "s").manifest
    assert (manifest.dataset, manifest.description.mean, manifest.description.std) == ("mnist", (0.1307,), (0.3081,))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_another_set_in_cifars_format_is_not_called_cifar(name: str, tmp_path: Path) -> None:
    layouts.FILES[name](tmp_path)
    words = [name, "--raw", str(tmp_path), "--partition", "iid", "--clients", "2", "--out", str(tmp_path / "s")]
    assert main(words) == 0
    manifest = open_store(tmp_path / "s").manifest
    assert manifest.dataset == f"{name}-format" and manifest.licence == "not stated"
    assert abs(manifest.description.mean[0] - 0.5) < 0.02
