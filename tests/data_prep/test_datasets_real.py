"""Every data set of the real files, prepared by the command line and read back; subsets are subsets."""

from __future__ import annotations

import csv
import gzip
import io
import struct
from pathlib import Path

import numpy as np
import pytest

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.registry import DATASETS
from data_prep.raw import RawDataset
from data_prep.text import tokens
from fedmpi.data.opening import open_store
from fedmpi.describe.data import inspect_folder
from tests.data_prep.command import main

# data set, folder of the real files, further words, (training samples used, test samples, classes)
CASES = {
    "digits": ("digits", "", "--partition dirichlet --alpha 0.3 --clients 20", (1442, 355, 10)),
    "mnist": ("mnist", "mnist", "--partition shards --classes-per-client 2 --clients 100", (None, 10_000, 10)),
    "balanced": ("emnist-balanced", "emnist", "--partition user", (2000, 2000, 47)),
    "letters": ("emnist-letters", "emnist", "--partition label-sorted --size 50", (1550, 1569, 26)),
    "cifar10": ("cifar10", "cifar10", "--partition dirichlet --alpha 0.5 --clients 50", (10_000, 2000, 10)),
    "cifar100": ("cifar100", "cifar100", "--partition iid --clients 50", (6000, 1500, 100)),
    "sentiment140": ("sentiment140", "sentiment140", "--partition user", (36_309, 359, 2)),
    "mind": ("mind", "mind/MINDsmall_train", "--partition lognormal --sigma 1 --clients 2000", (None, 10_257, 17)),
    "beauty": ("amazon", "amazon_beauty", "--partition user", (3370, 842, 5)),
    "toys": (
        "amazon",
        "amazon_toys",
        "--file Toys_and_Games_2023.subset.json.gz --partition iid --clients 100",
        (7996, 1999, 5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_real_data_set_is_prepared_inspected_and_read_back(
    case: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    name, folder, words, (samples, tests, classes) = CASES[case]
    raw = [] if name == "digits" else ["--raw", str(_folder(request, folder))]
    assert main([name, *raw, *words.split(), "--shards", "3", "--out", str(tmp_path / "s")]) == 0
    assert DATASETS[name].licence in capsys.readouterr().out.replace("\n", " ")
    assert inspect_folder(tmp_path / "s", verify=True).lines()
    store = open_store(tmp_path / "s", verify=True)
    assert samples is None or store.samples == samples
    assert store.description.classes == classes
    x, y = store.client(store.clients - 1)
    assert len(x) == len(y) == store.sizes[-1] and x.shape[1:] == store.description.feature_shape
    assert len(store.test()[1]) == tests
    assert store.class_counts().sum() == store.samples


def test_mnist_training_rows_are_those_of_the_idx_file(data_folder: Path) -> None:
    raw = _read("mnist", data_folder / "mnist")
    content = gzip.decompress((data_folder / "mnist" / "train-images-idx3-ubyte.gz").read_bytes())
    rows = np.array([59_999, 0, 1234])
    for row, image in zip(rows, raw.read(rows), strict=True):
        assert image.tobytes() == content[16 + 784 * row : 16 + 784 * (row + 1)]
    labels = gzip.decompress((data_folder / "mnist" / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    assert bytes(raw.labels.astype(np.uint8)) == labels


def test_mnist_is_read_from_unzipped_files_too(data_folder: Path, tmp_path: Path) -> None:
    for path in (data_folder / "mnist").glob("t10k-*.gz"):
        for stem in (path.stem, path.stem.replace("t10k", "train")):
            (tmp_path / stem).write_bytes(gzip.decompress(path.read_bytes()))
    raw = _read("mnist", tmp_path)
    assert len(raw.labels) == 10_000
    assert np.array_equal(raw.read(np.arange(5)), raw.test_x[:5])


@pytest.mark.parametrize(
    ("letter", "heaviest_columns", "heaviest_rows"),
    [("T", range(9, 19), range(4, 9)), ("E", range(4, 12), range(9, 19))],
)
def test_emnist_letters_stand_upright(
    data_folder: Path, letter: str, heaviest_columns: range, heaviest_rows: range
) -> None:
    """Of the mean image, T has its stem in the middle and its bar on top, E its stem on the left.

    Transposed as published, T has its stem across the middle and its bar on the left, E its stem on top.
    """
    raw = _read("emnist-balanced", data_folder / "emnist")
    rows = np.flatnonzero(raw.labels == raw.class_names.index(letter))
    mean = raw.read(rows)[:, 0].astype(float).mean(0)
    assert mean.sum(0).argmax() in heaviest_columns
    assert mean.sum(1).argmax() in heaviest_rows


def test_emnist_letters_are_labelled_from_zero(data_folder: Path) -> None:
    raw = _read("emnist-letters", data_folder / "emnist")
    assert raw.class_names[0] == "Aa" and raw.class_names[25] == "Zz"
    assert raw.labels.min() == 0 and raw.labels.max() == 25


def test_emnist_writers_are_the_users(data_folder: Path) -> None:
    raw = _read("emnist-balanced", data_folder / "emnist")
    writers = np.load(data_folder / "emnist" / "emnist-balanced-train-writers.npy")
    assert raw.users is not None and raw.user_names is not None
    assert [int(raw.user_names[user]) for user in raw.users] == writers.tolist()


def test_cifar_rows_are_red_green_and_blue_planes(data_folder: Path) -> None:
    """The published file names say the class: an upright check of labels; the planes are those of the pickled rows."""
    raw = _read("cifar10", data_folder / "cifar10")
    assert raw.class_names[0] == "airplane" and raw.feature_shape == (3, 32, 32)
    assert np.bincount(raw.labels).tolist() == [1000] * 10
    pixels = raw.read(np.arange(0, len(raw.labels), 5)).mean((0, 2, 3)) / 255
    assert np.allclose(pixels, raw.mean, atol=0.02)


def test_every_tweet_goes_to_its_author(data_folder: Path) -> None:
    raw = _read("sentiment140", data_folder / "sentiment140")
    path = data_folder / "sentiment140" / "training.subset.processed.noemoticon.csv.gz"
    rows = list(csv.reader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))
    assert raw.users is not None and raw.user_names is not None
    assert [raw.user_names[user] for user in raw.users] == [row[4] for row in rows]
    assert raw.labels.tolist() == [int(row[0]) // 4 for row in rows]
    assert _words(raw, raw.read(np.array([1]))[0]) == _expected(raw, rows[1][5])


def test_neutral_test_tweets_are_dropped_and_counted(data_folder: Path) -> None:
    tally = Tally(strict=True)
    raw = DATASETS["sentiment140"].read(data_folder / "sentiment140", ReadOptions(), tally)
    assert tally.dropped == {"neutral tweets (label 2)": 139}
    assert np.bincount(raw.test_y).tolist() == [177, 182] and raw.skipped == 0


def test_mind_is_split_in_row_order(data_folder: Path) -> None:
    raw = _read("mind", data_folder / "mind" / "MINDsmall_train")
    path = data_folder / "mind" / "MINDsmall_train" / "news.tsv.gz"
    rows = [line.split("\t") for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    assert len(raw.labels) == int(0.8 * len(rows)) == 41_025
    assert [raw.class_names[label] for label in raw.labels[:50]] == [row[1] for row in rows[:50]]
    assert raw.class_names[raw.test_y[0]] == rows[41_025][1]
    assert _words(raw, raw.test_x[0]) == _expected(raw, rows[41_025][3])


def test_an_ambiguous_folder_is_refused(data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mind", "--raw", str(data_folder / "mind"), "--partition", "iid", "--clients", "3", "--out", "unused"]
    assert main(words) == 2
    assert "point --raw at one folder" in capsys.readouterr().err


def test_reviews_without_text_are_counted_or_refused(data_folder: Path) -> None:
    tally = Tally()
    raw = DATASETS["amazon"].read(data_folder / "amazon_beauty", ReadOptions(), tally)
    assert raw.skipped == 5 and "line 360" in tally.first
    assert len(raw.labels) + len(raw.test_y) == 5269 - 5 - 1052
    with pytest.raises(Exception, match=r"line 360: no 'reviewText'; .*--strict"):
        DATASETS["amazon"].read(data_folder / "amazon_beauty", ReadOptions(), Tally(strict=True))


@pytest.mark.parametrize(("keep", "rows"), [(False, (3370, 842)), (True, (4212, 1052))])
def test_repeated_reviews_are_left_out(data_folder: Path, keep: bool, rows: tuple[int, int]) -> None:
    tally = Tally()
    raw = DATASETS["amazon"].read(data_folder / "amazon_beauty", ReadOptions(keep_duplicates=keep), tally)
    assert (len(raw.labels), len(raw.test_y)) == rows
    assert sum(tally.dropped.values()) == 5269 - 5 - sum(rows)


def test_beauty_split_by_texts_tests_on_new_texts_only(data_folder: Path) -> None:
    raw = DATASETS["amazon"].read(data_folder / "amazon_beauty", ReadOptions(split="texts"), Tally())
    assert (len(raw.labels), len(raw.test_y)) == (3370, 842)


def test_reviews_without_reviewers_have_no_users(data_folder: Path) -> None:
    name = "Toys_and_Games_5.human_subset.json.gz"
    raw = DATASETS["amazon"].read(data_folder / "amazon_toys", ReadOptions(files=(name,)), Tally())
    assert raw.users is None
    assert len(raw.labels) + len(raw.test_y) == 1897


def test_a_truncated_official_file_is_named(data_folder: Path, tmp_path: Path) -> None:
    for path in (data_folder / "mnist").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[: 5000 if "train-images" in path.name else None])
    with pytest.raises(Exception, match="train-images-idx3-ubyte.gz is damaged or cut short"):
        _read("mnist", tmp_path)


def test_an_idx_file_shorter_than_its_header_says_is_refused(data_folder: Path, tmp_path: Path) -> None:
    for path in (data_folder / "mnist").glob("t10k*"):
        for stem in (path.stem, path.stem.replace("t10k", "train")):
            (tmp_path / stem).write_bytes(gzip.decompress(path.read_bytes()))
    short = tmp_path / "train-labels-idx1-ubyte"
    short.write_bytes(struct.pack(">II", 2049, 10_001) + short.read_bytes()[8:])
    with pytest.raises(Exception, match="holds 10000 bytes of data where its header says 10001"):
        _read("mnist", tmp_path)


def _folder(request: pytest.FixtureRequest, name: str) -> Path:
    folder: Path = request.getfixturevalue("data_folder") / name
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder


def _read(name: str, folder: Path) -> RawDataset:
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return DATASETS[name].read(folder, ReadOptions(), Tally(strict=True))


def _words(raw: RawDataset, ids: np.ndarray) -> list[str]:
    return [raw.vocabulary[code] for code in ids if code]


def _expected(raw: RawDataset, text: str) -> list[str]:
    known = set(raw.vocabulary)
    return [word if word in known else "<unk>" for word in tokens(text)][:30]
