"""Small synthetic files in the layout of each published data set, for checks that need no real rows."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.formats.cifar import CLASSES

RNG = np.random.default_rng(11)
PARTS = ("train", "test")
WORDS = ["a", "good", "sad", "day", "to", "see", "the", "sea", "and", "no", "bad", "news", "today", "my", "friend"]
USERS, EACH = 6, 5
"""Users of a synthetic set, and rows of each."""


def sentence(number: int) -> str:
    """Some of the words."""
    return " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 6))


def class_folders(folder: Path, per_class: int) -> np.ndarray:
    """CINIC-10's pictures of random pixels, in the order of reading, (n, 3, 32, 32)."""
    pixels = RNG.integers(0, 256, (len(CLASSES), per_class, 32, 32, 3), np.uint8)
    for name, group in zip(CLASSES, pixels, strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(group):
            Image.fromarray(image).save(folder / name / f"{number}.png")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def emnist_files(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """The files of a split; both parts are the same."""
    for part in ("train", "test"):
        for kind, values, head in (("images-idx3", images, 2051), ("labels-idx1", labels, 2049)):
            header = struct.pack(f">{1 + values.ndim}I", head, *values.shape)
            path = folder / f"emnist-{split}-{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + values.tobytes()))
    names = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    mapping = "".join(f"{label} {ord(name)}\n" for label, name in enumerate(names))
    (folder / f"emnist-{split}-mapping.txt").write_text(mapping)


def leaf(folder: Path, part: str, users: dict[str, tuple[Any, Any]], packed: bool = False) -> Path:
    """A file as LEAF's scripts write it."""
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    content = {"users": list(data), "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
    (folder / "data" / part).mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    path = folder / "data" / part / f"all_data_niid_0_keep_0_{part}_9.json{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


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


def shakespeare(folder: Path) -> None:
    """Windows of 80 characters and what follows."""
    text = "To be, or not to be: that is the question. " * 4
    for part in PARTS:
        rows = {}
        for user in range(USERS):
            starts = range(user, user + EACH)
            rows[f"ROLE {user}"] = [text[at : at + 80] for at in starts], [text[at + 80] for at in starts]
        leaf(folder, part, rows)


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
    "shakespeare": shakespeare,
    "arrays": arrays,
    "parquet": parquet,
    "imagefolder": imagefolder,
}
"""Functions that write the files of each data set into a folder, and the file to name, where it is not the folder."""


def raw_of(name: str, folder: Path) -> Path:
    """The path that `--raw` takes: files of a data set, written into a new folder there."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    return FILES[name](place) or place
