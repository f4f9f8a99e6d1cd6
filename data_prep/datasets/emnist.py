"""EMNIST: handwritten letters and digits of NIST SD 19, 28 x 28 (Cohen et al. 2017), in its six splits.

byclass has 62 classes; bymerge 47, both cases of 15 letters in one; balanced equally many of these 47; letters 26, both
cases in one; digits and mnist the ten digits. The published idx files hold every image transposed; the readers give
them upright.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets import idx
from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.raw_files import find, require
from data_prep.raw import RawDataset, measured
from data_prep.sources import Source
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints

ARCHIVE = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
ARCHIVE_CHECKSUM = "md5:58c8d27c78d21e728a6bc7b3cc06412e"


def read_split(raw: Path, split: str, classes: int, tally: Tally) -> RawDataset:
    """One split of EMNIST from its idx files; features (1, 28, 28) uint8, upright.

    A file `emnist-SPLIT-train-writers.npy` (the writer of each row, as in the published .mat files), where there is
    one, names the natural clients.
    """
    first_label = 1 if split == "letters" else 0
    names = _class_names(raw, split, classes, first_label)
    train_x, train_y = _part(raw, split, "train", classes, first_label)
    test_x, test_y = _part(raw, split, "test", classes, first_label)
    users, user_names = _writers(raw, split, len(train_y))

    def rows(index: Ints) -> NDArray[np.uint8]:
        return upright(train_x[index])

    data = RawDataset(
        name=f"emnist-{split}",
        task="image",
        classes=classes,
        class_names=names,
        feature_shape=(1, *train_x.shape[:0:-1]),
        dtype="uint8",
        mean=(),
        std=(),
        labels=train_y,
        users=users,
        user_names=user_names,
        read=rows,
        test_x=upright(test_x),
        test_y=test_y,
        skipped=tally.unreadable,
        licence=LICENCE,
        citation=CITATION,
    )
    return measured(data)


def upright(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Transpose published images (n, width, height) into upright ones (n, 1, height, width)."""
    return images.transpose(0, 2, 1)[:, None]


def _part(raw: Path, split: str, part: str, classes: int, first: int) -> tuple[NDArray[np.uint8], Ints]:
    stem = f"emnist-{split}-{part}"
    images = require(raw, idx.patterns(f"{stem}-images-idx3-ubyte"), _hint(split))
    labels = require(raw, idx.patterns(f"{stem}-labels-idx1-ubyte"), _hint(split))
    x, y = idx.read_pair(images, labels, classes + first)
    wrong = np.flatnonzero(y < first)
    if len(wrong):
        raise UserError(
            f"{labels}, record {wrong[0]}: label {y[wrong[0]]}, but the labels of {split} begin with {first}"
        )
    return x, y - first


def _class_names(raw: Path, split: str, classes: int, first: int) -> tuple[str, ...]:
    """Characters of the classes from the split's mapping file, whose lines are: label, then one or more ASCII codes."""
    path = require(raw, (f"emnist-{split}-mapping.txt",), _hint(split))
    names: dict[int, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                label, *codes = (int(word) for word in line.split())
                names[label - first] = "".join(chr(code) for code in codes)
            except ValueError:
                raise UserError(f"{path}, line {number}: {line!r} is not a label and its ASCII codes") from None
    if sorted(names) != list(range(classes)):
        raise UserError(f"{path} names {len(names)} classes where emnist-{split} has {classes}; fetch it again")
    return tuple(names[label] for label in range(classes))


def _writers(raw: Path, split: str, n: int) -> tuple[Ints | None, tuple[str, ...] | None]:
    path = find(raw, (f"emnist-{split}-train-writers.npy",))
    if path is None:
        return None, None
    try:
        writers = np.load(path, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not a readable .npy file ({error})") from error
    if writers.shape != (n,):
        raise UserError(f"{path} holds {writers.shape} writers for {n} images; it does not belong to these files")
    known, users = np.unique(writers, return_inverse=True)
    return users.astype(np.int64), tuple(str(writer) for writer in known)


def _hint(split: str) -> str:
    return f"the emnist-{split}-* files (idx, plain or .gz, and the mapping)"


def _reader(split: str, classes: int) -> Callable[[Path, ReadOptions, Tally], RawDataset]:
    def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
        return read_split(raw, split, classes, tally)

    return read


def _data_set(split: str, samples: str, classes: int) -> DataSet:
    members = tuple(
        f"gzip/emnist-{split}-{part}-{kind}-ubyte.gz"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    )
    return DataSet(
        name=f"emnist-{split}",
        samples=samples,
        classes=str(classes),
        licence=LICENCE,
        citation=CITATION,
        page="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        files=_hint(split),
        read=_reader(split, classes),
        sources=(Source(ARCHIVE, ARCHIVE_CHECKSUM, (*members, f"gzip/emnist-{split}-mapping.txt")),),
    )


LICENCE = "no formal licence (from NIST Special Database 19, a US government work); cite the paper"
CITATION = "G. Cohen, S. Afshar, J. Tapson, A. van Schaik, EMNIST: an extension of MNIST to handwritten letters, 2017"
SPLITS = {
    "balanced": ("112,800 + 18,800", 47),
    "byclass": ("697,932 + 116,323", 62),
    "bymerge": ("697,932 + 116,323", 47),
    "letters": ("124,800 + 20,800", 26),
    "digits": ("240,000 + 40,000", 10),
    "mnist": ("60,000 + 10,000", 10),
}
EMNIST = tuple(_data_set(split, samples, classes) for split, (samples, classes) in SPLITS.items())
