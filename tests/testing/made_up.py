"""Small made-up files in the layout of each published data set, for checks that need no real rows."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data_prep.test_datasets_images import _cinic as class_folders
from tests.data_prep.test_datasets_images import _emnist as emnist_files
from tests.data_prep.test_datasets_leaf import cifar, faces, leaf
from tests.data_prep.test_datasets_sequences import comment, hdf5, reddit, tagged

RNG = np.random.default_rng(11)
PARTS = ("train", "test")
WORDS = ["a", "good", "sad", "day", "to", "see", "the", "sea", "and", "no", "bad", "news", "today", "my", "friend"]
USERS, EACH = 6, 5
"""Users of a made-up set, and rows of each."""


def sentence(number: int) -> str:
    """Some of the words."""
    return " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 6))


def mnist(folder: Path) -> None:
    """The four idx files."""
    for stem, rows in (("train", 60), ("t10k", 20)):
        images, labels = RNG.integers(0, 256, (rows, 28, 28), np.uint8), (np.arange(rows) % 10).astype(np.uint8)
        header = struct.pack(">IIII", 2051, rows, 28, 28)
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        header = struct.pack(">II", 2049, rows)
        (folder / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.tobytes()))


def emnist(split: str, classes: int, first: int = 0) -> Callable[[Path], None]:
    """The files of a split."""

    def write(folder: Path) -> None:
        labels = (first + np.arange(3 * classes) % classes).astype(np.uint8)
        emnist_files(folder, split, RNG.integers(0, 256, (len(labels), 28, 28), np.uint8), labels)
        names = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[10 * (split == "letters") :]
        lines = [f"{first + place} {ord(name)}\n" for place, name in enumerate(names[:classes])]
        (folder / f"emnist-{split}-mapping.txt").write_text("".join(lines))

    return write


def cifar10(folder: Path) -> None:
    """The batches, as pickles."""
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = {"data": RNG.integers(0, 256, (10, 3072), np.uint8), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(rows, 2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"c{label}" for label in range(10)]}, 2))


def cifar100(folder: Path) -> None:
    """Both parts with superclasses of five classes each."""
    fine = list(range(100))
    for part in PARTS:
        rows = {"data": RNG.integers(0, 256, (100, 3072), np.uint8), "fine_labels": fine}
        (folder / part).write_bytes(pickle.dumps(rows | {"coarse_labels": [label // 5 for label in fine]}, 2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"c{label}" for label in fine]}, 2))


def fed_cifar100(folder: Path) -> None:
    """TFF's file: every user has images of all twenty superclasses."""
    for part in PARTS:
        users = {}
        for user in range(USERS):
            fine = [(user + 5 * row) % 100 for row in range(20)]
            images = RNG.integers(0, 256, (20, 32, 32, 3), np.uint8)
            users[str(user)] = images, fine, [label // 5 for label in fine]
        cifar(folder / f"fed_cifar100_{part}.h5", users)


def cinic10(folder: Path) -> None:
    """A folder of pictures for each class."""
    for part in ("train", "valid", "test"):
        class_folders(folder / part, 2)


def imagefolder(folder: Path) -> None:
    """Two classes of pictures."""
    for part in PARTS:
        for name in ("cats", "dogs"):
            (folder / part / name).mkdir(parents=True)
            for number in range(5):
                pixels = RNG.integers(0, 256, (6, 7, 3), np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")


def femnist(folder: Path) -> None:
    """LEAF's images of writers."""
    for part in PARTS:
        pixels = RNG.integers(0, 256, (USERS, EACH, 784)) / 255
        leaf(folder, part, {f"w{k}": (pixels[k].tolist(), [k] * EACH) for k in range(USERS)})


def celeba(folder: Path) -> None:
    """Faces of celebrities."""
    names = faces(folder, [(12, 14)] * 12)
    for part, low, high in (("train", 0, 8), ("test", 8, 12)):
        rows = {str(k): (names[k : k + 2], [1.0, 0.0]) for k in range(low, high, 2)}
        leaf(folder, part, rows)


def synthetic(folder: Path) -> None:
    """Vectors of users."""
    for part in PARTS:
        leaf(folder, part, {f"{k}": (RNG.normal(size=(EACH, 4)).tolist(), [0, 1, 2, 1, 0]) for k in range(USERS)})


def sent140(folder: Path) -> None:
    """Tweets of authors, as LEAF gives them."""
    for part in PARTS:
        rows = {}
        for user in range(USERS):
            tweets = [["1", "Mon", "NO_QUERY", f"u{user}", sentence(user + row)] for row in range(EACH)]
            rows[f"u{user}"] = tweets, [row % 2 for row in range(EACH)]
        leaf(folder, part, rows)


def shakespeare(folder: Path) -> None:
    """Windows of 80 characters and what follows."""
    text = "To be, or not to be: that is the question. " * 4
    for part in PARTS:
        rows = {}
        for user in range(USERS):
            starts = range(user, user + EACH)
            rows[f"ROLE {user}"] = [text[at : at + 80] for at in starts], [text[at + 80] for at in starts]
        leaf(folder, part, rows)


def comments(folder: Path) -> None:
    """Comments of authors, as LEAF gives Reddit's."""
    for part in PARTS:
        said = {str(user): [comment(sentence(user + row).split()) for row in range(EACH)] for user in range(USERS)}
        reddit(folder, part, {user: ([x for x, _ in rows], [y for _, y in rows]) for user, rows in said.items()})


def snippets(stem: str, field: str) -> Callable[[Path], None]:
    """Texts of users in TFF's HDF5."""

    def write(folder: Path) -> None:
        for part in PARTS:
            texts = {f"{user:04}": [sentence(user + row) for row in range(EACH)] for user in range(USERS)}
            hdf5(folder / f"{stem}_{part}.h5", field, texts)

    return write


def stackoverflow_tags(folder: Path) -> None:
    """Sentences with the tags of their questions."""
    for part in PARTS:
        rows = [(sentence(row), "title", "python|list" if row % 2 else "c") for row in range(EACH)]
        tagged(folder / f"stackoverflow_{part}.h5", {str(user): rows for user in range(USERS)})


def sentiment140(folder: Path) -> None:
    """Tweets, one a line."""
    for name in ("training.csv", "testdata.csv"):
        with (folder / name).open("w", newline="") as file:
            lines = csv.writer(file, quoting=csv.QUOTE_ALL)
            lines.writerows([4 * (row % 2), row, "d", "q", f"u{row % USERS}", sentence(row)] for row in range(30))


def mind(folder: Path) -> None:
    """News with their categories."""
    rows = [f"N{row}\t{'news' if row % 2 else 'autos'}\t\t{sentence(row)}\t\t\t[]\t[]\n" for row in range(40)]
    (folder / "news.tsv").write_text("".join(rows))


def amazon(folder: Path) -> None:
    """Reviews with their stars."""
    reviews = [
        {"reviewerID": f"u{row % USERS}", "overall": 1.0 + row % 5, "reviewText": f"{sentence(row)} {row}"}
        for row in range(40)
    ]
    (folder / "reviews.json.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in reviews).encode()))


def arrays(folder: Path) -> Path:
    """An .npz file with users."""
    rows = np.arange(90)
    x = RNG.normal(size=(90, 4)).astype(np.float32)
    np.savez(folder / "arrays.npz", x=x, y=rows % 3, user=rows % 12)
    return folder / "arrays.npz"


def parquet(folder: Path) -> Path:
    """A table with users."""
    import pyarrow
    from pyarrow import parquet as files

    columns = {"a": RNG.normal(size=60), "label": np.arange(60) % 3, "user": [f"u{row % USERS}" for row in range(60)]}
    files.write_table(pyarrow.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


FILES: dict[str, Callable[[Path], Path | None]] = {
    "mnist": mnist,
    "emnist-balanced": emnist("balanced", 47),
    "emnist-byclass": emnist("byclass", 62),
    "emnist-bymerge": emnist("bymerge", 47),
    "emnist-letters": emnist("letters", 26, 1),
    "emnist-digits": emnist("digits", 10),
    "emnist-mnist": emnist("mnist", 10),
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cinic10": cinic10,
    "sentiment140": sentiment140,
    "mind": mind,
    "amazon": amazon,
    "femnist": femnist,
    "celeba": celeba,
    "sent140": sent140,
    "shakespeare": shakespeare,
    "synthetic": synthetic,
    "reddit": comments,
    "fed-cifar100": fed_cifar100,
    "fed-shakespeare": snippets("shakespeare", "snippets"),
    "stackoverflow": snippets("stackoverflow", "tokens"),
    "stackoverflow-tags": stackoverflow_tags,
    "arrays": arrays,
    "parquet": parquet,
    "imagefolder": imagefolder,
}
"""What writes the files of each data set into a folder; the file to name, where it is not the folder."""


def raw_of(name: str, folder: Path) -> Path:
    """The path that `--raw` takes: files of a data set, written into a new folder there."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    return FILES[name](place) or place
