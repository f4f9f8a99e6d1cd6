"""Official formats: real files where there are some, else small ones in the same layout, whole and damaged."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from data_prep.datasets import DATASETS
from data_prep.formats.cifar import CLASSES, load_batch
from data_prep.formats.leaf import LETTERS
from data_prep.raw import RawDataset, ReadOptions, Tally
from fedmpi import UserError
from fedmpi.data.opening import open_store
from tests.data_prep.command import main
from tests.data_prep.layouts import cifar10, class_folders, emnist_files, idx, leaf, mnist

RNG = np.random.default_rng(7)
# data set, folder of the real files, further words, (training samples, test samples, classes); others are prepared by
# tests/end_to_end/test_data_sets.py
CASES = {
    "balanced": ("emnist-balanced", "emnist", "--partition iid --clients 50", (2000, 2000, 47)),
    "cifar100": ("cifar100", "cifar100", "--partition iid --clients 50", (6000, 1500, 100)),
    "sentiment140": ("sentiment140", "sentiment140", "--partition user", (36_309, 359, 2)),
    "beauty": ("amazon", "amazon_beauty", "--partition user", (3370, 842, 5)),
}


def read(name: str, folder: Path, tally: Tally | None = None, **options: Any) -> RawDataset:
    if not folder.exists():
        pytest.skip(f"no real data at {folder}")
    return DATASETS[name].read(folder, ReadOptions(**options), tally or Tally()).fitted()


@pytest.mark.parametrize("case", CASES)
def test_a_real_data_set_is_prepared_inspected_and_read_back(
    case: str, tmp_path: Path, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, folder, words, expected = CASES[case]
    if not (data_folder / folder).exists():
        pytest.skip(f"no real data at {data_folder / folder}")
    command = [name, "--raw", str(data_folder / folder), *words.split(), "--shards", "3", "--out", str(tmp_path / "s")]
    assert main(command) == 0
    assert DATASETS[name].licence in capsys.readouterr().out.replace("\n", " ")
    store = open_store(tmp_path / "s", verify=True)
    assert (store.samples, len(store.test()[1]), store.description.classes) == expected
    x, y = store.client(store.clients - 1)
    assert len(x) == len(y) == store.sizes[-1] and x.shape[1:] == store.description.feature_shape
    assert store.class_counts().sum() == store.samples


FINE = {"fine_label_names": [f"c{label}" for label in range(100)]}
ROWS = {"data": RNG.integers(0, 256, (4, 3072), np.uint8), "fine_labels": [7, 7, 9, 2]}
WRITER = (RNG.integers(0, 256, (6, 784)) / 255).tolist(), RNG.integers(0, 62, 6).tolist()


def tff(path: Path, writers: dict[str, tuple[Any, Any]]) -> None:
    with h5py.File(path, "w") as file:
        for name, (pixels, labels) in writers.items():
            file[f"examples/{name}/pixels"] = np.asarray(pixels, np.float32).reshape(-1, 28, 28)
            file[f"examples/{name}/label"] = np.asarray(labels, np.int32)


def small(name: str, folder: Path, protocol: int = 2) -> None:
    """Write small files of a data set; "leaf" is FEMNIST in LEAF's format."""
    if name == "emnist-byclass":
        emnist_files(folder, "byclass", np.zeros((3, 28, 28), np.uint8), np.arange(3, dtype=np.uint8))
    elif name == "cifar100":
        for part, content in (("train", ROWS), ("test", ROWS), ("meta", FINE)):
            (folder / part).write_bytes(pickle.dumps(content, protocol))
    for part in ("train", "test"):
        if name == "femnist":
            tff(folder / f"fed_emnist_{part}.h5", {"f0_1": WRITER})
        elif name == "leaf":
            leaf(folder, part, {"w1": WRITER, "w2": ([[0.5] * 784], [1])})
        elif name == "shakespeare":
            leaf(folder, part, {"A": (["ab" * 40], ["a"]), "B": (["cd" * 40], ["c"])})


def cifar(**changed: Any) -> bytes:
    return pickle.dumps({**ROWS, **changed}, 2)


def replacing(old: str, new: str) -> Any:
    return lambda content: content.replace(old.encode(), new.encode())


IDX = struct.pack(">4I", 2051, 3, 28, 28) + bytes(3 * 784)
IMAGES, LABELS = "emnist-byclass-train-images-idx3-ubyte.gz", "emnist-byclass-train-labels-idx1-ubyte.gz"
MAPPING, H5 = "emnist-byclass-mapping.txt", "fed_emnist_train.h5"
JSON = "data/train/all_data_niid_0_keep_0_train_9.json"
NO_BATCH = r"train is not a CIFAR batch \([^\n]{1,400}\)\. Fetch it again$"
HALF = str([0.5] * 784)
DAMAGED: list[tuple[str, str, Any, str]] = [
    ("emnist-byclass", IMAGES, b"<html>moved</html>", "is not an idx file of unsigned bytes in 3 dimension"),
    ("emnist-byclass", IMAGES, IDX[:-1], "does not hold the 2352 bytes of data"),
    ("emnist-byclass", IMAGES, gzip.compress(IDX, mtime=0)[:-8], "damaged or cut short"),
    ("emnist-byclass", LABELS, struct.pack(">2I", 2049, 3) + bytes([0, 62, 1]), "record 1: label 62 is not one of"),
    ("emnist-byclass", MAPPING, b"0 48\n1 x\n", "line 2: '1 x' is not a label"),
    ("emnist-byclass", MAPPING, b"0 48\n", "names 1 classes where emnist-byclass has 62"),
    ("cifar100", "train", cifar(fine_labels=[7, 7, 9, 100]), "train, record 3: label 100 is not one of the 100"),
    ("cifar100", "train", cifar(data=np.zeros((4, 3000), np.uint8)), r"'data' is uint8 \(4, 3000\) instead of uint8"),
    ("cifar100", "meta", pickle.dumps({"fine_label_names": ["a"]}), "not a list of 100 values"),
    ("cifar100", "train", b"\x80\x02cos\nsystem\nU\x02ls\x85R.", NO_BATCH),
    ("cifar100", "train", pickle.dumps([1, 2]), NO_BATCH),
    ("femnist", H5, b"<html>moved</html>", "is not an HDF5 file"),
    ("leaf", JSON, replacing(HALF, str([0.5] * 783)), "writer w2: not images of 784 numbers"),
    ("leaf", JSON, replacing(HALF, str([1.5] * 784)), "writer w2: not images of 784 numbers"),
    ("leaf", JSON, replacing('"y": [1]', '"y": [62]'), "writer w2: not images of 784 numbers"),
    ("leaf", JSON, b'{"users": [], "user_data": {}}', "no image of training writers"),
    ("shakespeare", JSON, lambda content: content[:-5], "role none yet: not LEAF's format"),
    ("shakespeare", JSON, replacing('["' + "ab" * 40 + '"]', '"ab"'), "role A: not LEAF's format"),
    ("shakespeare", JSON, replacing("ab" * 40, "ab"), "role A, record 0: not 80 characters"),
]
"""Data set, file, its damaged content or the change of it, words of the error."""


@pytest.mark.parametrize(("name", "file", "damaged", "message"), DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, name: str, file: str, damaged: Any, message: str) -> None:
    small(name, tmp_path)
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(damaged if isinstance(damaged, bytes) else damaged(content))
    with pytest.raises(UserError, match=message):
        read(name.replace("leaf", "femnist"), tmp_path, Tally(strict=True))


def test_emnist_is_turned_upright_and_its_labels_begin_at_zero(data_folder: Path, tmp_path: Path) -> None:
    images, labels = RNG.integers(0, 256, (70, 28, 28), np.uint8), (np.arange(70) % 62).astype(np.uint8)
    emnist_files(tmp_path, "byclass", images, labels)
    raw = read("emnist-byclass", tmp_path)
    assert raw.class_names[10] == "A" and raw.class_names[61] == "z" and np.array_equal(raw.y[raw.train], labels)
    for row, place in ((3, 3), (75, 5)):
        assert np.array_equal(raw.read(np.array([row]))[0, 0], images[place].T)
    letters = read("emnist-letters", data_folder / "emnist")
    assert letters.class_names[0] == "Aa" and set(letters.y[letters.train]) == set(range(26))
    balanced = read("emnist-balanced", data_folder / "emnist")
    mean = balanced.read(np.flatnonzero(balanced.y[balanced.train] == balanced.class_names.index("T")))[:, 0].mean(0)
    assert mean.sum(0).argmax() in range(9, 19) and mean.sum(1).argmax() in range(4, 9)  # a stem below a bar
    emnist_files(tmp_path, "letters", images[:3], np.array([1, 0, 2], np.uint8))
    (tmp_path / "emnist-letters-mapping.txt").write_text("".join(f"{1 + k} {65 + k}\n" for k in range(26)))
    with pytest.raises(UserError, match="record 1: label 0, but the labels of letters begin with 1"):
        read("emnist-letters", tmp_path)


@pytest.mark.parametrize(("classes", "first"), [(10, 0), (26, 1)])
def test_another_set_under_mnists_names_is_not_called_mnist(classes: int, first: int, tmp_path: Path) -> None:
    mnist(tmp_path, classes, first)
    raw = read("mnist", tmp_path, tally := Tally())
    assert raw.name == "mnist-format" and raw.licence == raw.citation == "not stated"
    assert raw.class_names == tuple(str(first + label) for label in range(classes))
    assert abs(raw.mean[0] - 49.5 / 255) < 0.01 and abs(raw.std[0] - 0.1132) < 0.01
    assert "these are not mnist's own files" in tally.notes[0] and raw.notes == tuple(tally.notes)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((60, 20, 20))))
    with pytest.raises(UserError, match="belong together"):
        read("mnist", tmp_path)


def test_mnist_is_known_by_content_zipped_or_not(data_folder: Path, tmp_path: Path) -> None:
    for path in (data_folder / "mnist").iterdir():
        (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    raw = read("mnist", tmp_path)
    assert (raw.name, raw.mean, raw.std, raw.fit) == ("mnist", (0.1307,), (0.3081,), None)
    for path in tmp_path.iterdir():  # the ending without zip
        path.rename(path.with_name(path.name + ".gz"))
    again = read("mnist", tmp_path)
    rows = np.arange(0, 70_000, 999)
    assert again.name == "mnist" and np.array_equal(raw.read(rows), again.read(rows))
    with (tmp_path / "t10k-labels-idx1-ubyte.gz").open("r+b") as labels:
        labels.seek(-1, 2)
        labels.write(b"\x07")
    assert read("mnist", tmp_path).name == "mnist-format"


# CIFAR's pickles


def test_cifar_rows_are_those_that_pickle_reads(data_folder: Path) -> None:
    path = data_folder / "cifar10" / "cifar-10-batches-py" / "data_batch_1"
    found, expected = load_batch(path), pickle.loads(path.read_bytes(), encoding="latin1")
    assert np.array_equal(found.pop("data"), expected.pop("data")) and found == expected
    raw = read("cifar10", data_folder / "cifar10")
    assert raw.class_names == CLASSES and np.bincount(raw.y[raw.train]).tolist() == [1000] * 10
    pixels = raw.read(np.arange(0, len(raw.y[raw.train]), 5)).mean((0, 2, 3)) / 255
    assert np.allclose(pixels, raw.mean, atol=0.02)


def test_another_set_in_cifars_format_is_not_called_cifar(tmp_path: Path) -> None:
    cifar10(tmp_path)
    assert read("cifar10", tmp_path).name == "cifar10-format"


@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar_100_has_fine_labels(tmp_path: Path, protocol: int) -> None:
    small("cifar100", tmp_path, protocol)
    raw = read("cifar100", tmp_path)
    assert np.array_equal(raw.read(np.array([3, 0])).reshape(2, -1), ROWS["data"][[3, 0]])
    assert raw.y[raw.train].tolist() == ROWS["fine_labels"]


# CINIC-10's folders (others in test_image_folders)


def test_cinic10_is_read_from_its_folders(tmp_path: Path) -> None:
    pictures = {part: class_folders(tmp_path / "CINIC-10" / part, 3) for part in ("train", "valid", "test")}
    raw = read("cinic10", tmp_path)
    assert raw.feature_shape == (3, 32, 32) and raw.class_names == CLASSES
    assert np.bincount(raw.y[raw.train]).tolist() == [3] * 10 and raw.mean == (0.4789, 0.4723, 0.4305)
    assert np.array_equal(raw.read(np.array([4, 29])), pictures["train"][[4, 29]])
    assert np.array_equal(raw.read(raw.test), pictures["test"])
    folder = tmp_path / "CINIC-10"
    cut = folder / "train" / "cat" / "0.png"
    cut.write_bytes(cut.read_bytes()[:-200])
    assert read("cinic10", tmp_path, tally := Tally()).skipped == 1 and "cat/0.png" in tally.first
    with pytest.raises(UserError, match=r"cat/0.png: not a readable image .*--strict"):
        read("cinic10", tmp_path, Tally(strict=True))
    (folder / "train" / "cat").rename(folder / "train" / "zebra")
    with pytest.raises(UserError, match="'zebra'"):
        read("cinic10", tmp_path)


def test_fashion_mnist_names_its_classes_and_is_not_mnist(tmp_path: Path, data_folder: Path) -> None:
    mnist(tmp_path, 10, 0)
    raw = read("fashion-mnist", tmp_path)
    assert (raw.classes, raw.class_names[9], len(raw.train), len(raw.test)) == (10, "Ankle boot", 120, 60)
    assert raw.y[:12].tolist() == [*range(10), 0, 1] and 0 < raw.mean[0] < 1
    with pytest.raises(UserError, match="holds the files of MNIST, not of Fashion-MNIST"):
        read("fashion-mnist", data_folder / "mnist")


# LEAF's JSON and TFF's HDF5


@pytest.mark.parametrize("name", ["femnist", "leaf"])
def test_femnist_is_read_from_hdf5_and_json(name: str, tmp_path: Path) -> None:
    small(name, tmp_path)
    raw = read("femnist", tmp_path)
    assert raw.user_names == (("f0_1",) if name == "femnist" else ("w1", "w2")) and raw.y[:6].tolist() == WRITER[1]
    assert np.array_equal(raw.read(np.arange(6)).reshape(6, -1), np.rint(np.array(WRITER[0]) * 255))


def test_shakespeares_characters_predict_the_next(tmp_path: Path) -> None:
    line = "                         To be, or not to be? that is the question:\nWhether 'tis nobler"
    windows = [line[start : start + 80] for start in range(len(line) - 80)]
    nexts, count = [line[start + 80] for start in range(len(line) - 80)], len(line) - 80
    odd = ["—" + windows[0][1:], windows[0][:79], windows[0]]
    leaf(tmp_path, "train", {"HAMLET": (windows, nexts), "GHOST": (odd, ["a", "a", "é"])})
    leaf(tmp_path, "test", {"HAMLET": (windows[:1], nexts[:1])})
    raw = read("shakespeare", tmp_path, tally := Tally())
    ids = raw.read(np.arange(count + 1))
    assert [LETTERS[label] for label in raw.y[raw.train]] == [*nexts, "a"] and tally.unreadable == 2
    assert ["".join(LETTERS[token - 2] for token in row) for row in ids[:count]] == windows
    assert ids[count, 0] == 1 and (ids[count, 1:] == ids[0, 1:]).all()
    assert raw.classes == 80 and len(raw.vocabulary) == 82 and raw.vocabulary[2] == "\\n"
    assert raw.user_names == ("HAMLET", "GHOST") and "record 1: not 80 characters" in tally.first


# Texts


def test_rows_of_tweets_that_cannot_be_read_are_named_by_line(tmp_path: Path) -> None:
    good = '"0","1","date","NO_QUERY","anna","sad, very sad"\n'
    bad = '"3","2","date","NO_QUERY","bert","what"\n"4","short"\n"4","5","d","q","b"," "\n'
    latin = '"4","5","d","q","b","caf\xe9"\n'.encode("latin-1")
    (tmp_path / "training.csv").write_bytes((good + bad + good).encode() + latin)
    (tmp_path / "testdata.csv").write_text(good.replace('"0"', '"2"') + good)
    raw = read("sentiment140", tmp_path, tally := Tally())
    assert raw.y[raw.train].tolist() == [0, 0, 1] and raw.skipped == 3 and "café" in raw.vocabulary
    assert "training.csv, line 2: the target is '3'" in tally.first
    assert tally.dropped == {"neutral tweets (label 2)": 1} and raw.user_names == ("anna", "b")


def test_tweets_without_a_test_file_give_a_fifth_of_the_training_tweets(tmp_path: Path) -> None:
    line = '"{}","1","date","NO_QUERY","user{}","tweet {}"\n'
    (tmp_path / "training.csv").write_text("".join(line.format(4 * (n % 2), n // 4, n) for n in range(40)))
    raw = read("sentiment140", tmp_path)
    assert np.bincount(raw.y[raw.test]).tolist() == [4, 4] and len(raw.train) == 32
    users = read("sentiment140", tmp_path, split="users")
    assert users.users is not None and not set(users.users[users.train]) & set(users.users[users.test])


def test_mind_is_split_in_row_order(tmp_path: Path) -> None:
    line = "N{}\t{}\t\ttitle {}\t\t\t[]\t[]\n"
    good = "".join(line.format(number, "news" if number % 2 else "autos", number) for number in range(10))
    blank = line.format(13, "news", 13).replace("title 13", " ")
    (tmp_path / "news.tsv").write_text(good + "N11\tnews\n" + line.format(12, "", 12) + blank)
    raw = read("mind", tmp_path, tally := Tally())
    assert (len(raw.y[raw.train]), len(raw.y[raw.test]), raw.skipped) == (8, 2, 3)
    assert "line 11: 2 columns instead of 8" in tally.first and raw.y[raw.train].tolist() == [0, 1] * 4


def reviews(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


REVIEW = {"reviewerID": "A", "asin": "1", "overall": 5.0, "reviewText": "fine thing"}


def test_real_reviews_without_text_and_repeated_ones(data_folder: Path) -> None:
    rows, raw = (3370, 842), read("amazon", data_folder / "amazon_beauty", tally := Tally())
    assert (
        raw.skipped == 5
        and "line 360: no 'reviewText'" in tally.first
        and (len(raw.y[raw.train]), len(raw.y[raw.test])) == rows
    )
    assert sum(tally.dropped.values()) == 5269 - 5 - sum(rows)
    toys = "Toys_and_Games_5.human_subset.json.gz"
    assert read("amazon", data_folder / "amazon_toys" / toys).users is None


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (["overall", 4], "not a JSON object"),
        (REVIEW | {"reviewText": " "}, "no 'reviewText'"),
        (REVIEW | {"overall": True}, "'overall' is True instead of 1 to 5 stars"),
        (REVIEW | {"overall": 6}, "'overall' is 6 instead"),
    ],
)
def test_a_line_that_is_no_review_is_left_out(tmp_path: Path, row: Any, why: str) -> None:
    reviews(tmp_path / "r.json.gz", [*(REVIEW | {"reviewText": f"thing {number}"} for number in range(5)), row])
    raw = read("amazon", tmp_path, tally := Tally())
    assert raw.skipped == 1 and [*raw.y[raw.train], *raw.y[raw.test]] == [4] * 5 and f"line 6: {why}" in tally.first


def test_a_review_given_twice_counts_once(tmp_path: Path) -> None:
    others = [{"reviewerID": "B"}, {"asin": "2"}, {"reviewText": "bad thing"}]
    unnamed = {key: value for key, value in REVIEW.items() if key != "asin"}
    repeated = [REVIEW, REVIEW | {"overall": 4.0}, REVIEW | {"reviewText": " fine thing\n"}]
    reviews(tmp_path / "r.json.gz", repeated + [REVIEW | other for other in others] + [unnamed] * 4)
    raw = read("amazon", tmp_path, tally := Tally(strict=True))
    assert len(raw.y[raw.train]) + len(raw.y[raw.test]) == 8 and list(tally.dropped.values()) == [2]
    assert any("left out: 2 reviews that repeat" in note for note in raw.notes)
