"""The idx format (a big-endian header, then unsigned bytes; plain or gzipped): MNIST, Fashion-MNIST and EMNIST."""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.formats.files import open_bytes, require
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally, measure, not_official, rows_of
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints

UNSIGNED_BYTE = 0x08
MNIST_CONTENT = "06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16"
"""SHA-256 of the values of MNIST's four files."""
GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
"""Classes of Fashion-MNIST, in the order of their labels."""


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, plain or gzipped."""
    magic = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    with open_bytes(path) as stream:
        try:
            head = stream.read(4 + 4 * dimensions)
            if len(head) < 4 + 4 * dimensions or head[:4] != magic:
                raise UserError(
                    f"{path} is not an idx file of unsigned bytes in {dimensions} dimension(s): it begins with "
                    f"{head[:4].hex() or 'nothing'} instead of {magic.hex()}. Fetch it again"
                )
            shape = struct.unpack(f">{dimensions}I", head[4:])
            values = stream.read(math.prod(shape) + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} is damaged or cut short ({error}). Fetch it again") from error
    if len(values) != math.prod(shape):
        raise UserError(
            f"{path} does not hold the {math.prod(shape)} bytes of data ({' x '.join(map(str, shape))}) of its header; "
            "fetch it again"
        )
    return np.frombuffer(values, np.uint8).reshape(shape)


def _pair(raw: Path, stem: str, classes: int, hint: str) -> tuple[NDArray[np.uint8], Ints, Path]:
    """Read matching images (n, height, width) uint8 and labels (n,) int64 of two idx files; also return the label file.

    Plain files are preferred. File names with the dash or the dot of some mirrors are accepted.
    """
    paths = []
    for kind in ("images-idx3", "labels-idx1"):
        dashed = f"{stem}-{kind}-ubyte"
        dotted = dashed.replace("-idx", ".idx")
        paths.append(require(raw, (dashed, dotted, f"{dashed}.gz", f"{dotted}.gz"), hint))
    images, labels = paths
    x = read_idx(images, 3)
    y = np.asarray(read_idx(labels, 1), np.int64)
    if len(x) != len(y):
        raise UserError(
            f"{images} holds {len(x)} images but {labels} holds {len(y)} labels; they do not belong together"
        )
    if not x.size:
        raise UserError(f"{images} holds no images ({' x '.join(map(str, x.shape))}). Fetch it again")
    wrong = np.flatnonzero(y >= classes)
    if len(wrong):
        raise UserError(
            f"{labels}, record {wrong[0]}: label {y[wrong[0]]} is not one of the {classes} classes. Fetch it again"
        )
    return x, y, labels


def read_mnist(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read MNIST from its idx files; features (1, 28, 28) uint8.

    Other data sets under MNIST's file names are recognized by content (`not_official`); their classes are those that
    occur.
    """
    train_x, train_y, _ = train = _pair(raw, "train", 256, data_set.files)
    test_x, test_y, _ = test = _pair(raw, "t10k", 256, data_set.files)
    distinct, labels = np.unique(np.concatenate([train_y, test_y]), return_inverse=True)
    data = data_set.images(
        tuple(map(str, distinct.tolist())),
        rows_of(train_x[:, None], test_x[:, None]),
        labels[: len(train_y)].astype(np.int64),
        labels[len(train_y) :].astype(np.int64),
        mean=(0.1307,),
        std=(0.3081,),
    )
    return data if _is_mnist(train, test) else not_official(data, tally)


def _is_mnist(*parts: tuple[NDArray[np.uint8], Ints, Path]) -> bool:
    """Check whether images and labels are those of MNIST's own files."""
    content = hashlib.sha256()
    for x, y, _ in parts:
        content.update(np.ascontiguousarray(x).data)
        content.update(y.astype(np.uint8).data)
    return content.hexdigest() == MNIST_CONTENT


def read_fashion_mnist(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read Fashion-MNIST from its idx files; features (1, 28, 28) uint8."""
    train, test = (_pair(raw, stem, len(GARMENTS), data_set.files) for stem in ("train", "t10k"))
    if _is_mnist(train, test):
        raise UserError(f"{raw} holds the files of MNIST, not of Fashion-MNIST. Prepare mnist, or fetch the others")
    return data_set.images(GARMENTS, rows_of(train[0][:, None], test[0][:, None]), train[1], test[1], fit=measure)


def read_emnist(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read one split of EMNIST from its idx files; features (1, 28, 28) uint8, transposed to be upright."""
    split, classes = data_set.name.removeprefix("emnist-"), int(data_set.classes)
    first = 1 if split == "letters" else 0
    names = _class_names(data_set, raw, first)
    parts = []
    for part in ("train", "test"):
        x, y, path = _pair(raw, f"{data_set.name}-{part}", classes + first, data_set.files)
        if len(wrong := np.flatnonzero(y < first)):
            raise UserError(
                f"{path}, record {wrong[0]}: label {y[wrong[0]]}, but the labels of {split} begin with "
                f"{first}. Fetch it again"
            )
        parts.append((x, y - first))
    (train_x, train_y), (test_x, test_y) = parts
    read = rows_of(upright(train_x), upright(test_x))
    return data_set.images(names, read, train_y, test_y, fit=measure)


def upright(images: NDArray[np.uint8]) -> AnyArray:
    """Transpose published images (n, width, height) into upright ones (n, 1, height, width)."""
    return images.transpose(0, 2, 1)[:, None]


def _class_names(data_set: DataSet, raw: Path, first: int) -> tuple[str, ...]:
    """Return the class names from the split's mapping file, whose lines are: label, then one or more ASCII codes."""
    path, classes = require(raw, (f"{data_set.name}-mapping.txt",), data_set.files), int(data_set.classes)
    names: dict[int, str] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if line.strip():
            try:
                label, *codes = (int(word) for word in line.split())
                names[label - first] = "".join(chr(code) for code in codes)
            except ValueError:
                raise UserError(f"{path}, line {number}: {line!r} is not a label and its ASCII codes") from None
    if sorted(names) != list(range(classes)):
        raise UserError(f"{path} names {len(names)} classes where {data_set.name} has {classes}. Fetch it again")
    return tuple(names[label] for label in range(classes))
