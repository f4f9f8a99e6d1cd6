"""CIFAR-10 and CIFAR-100: colour images, 32 x 32, in the official Python pickles (Krizhevsky 2009).

A pickle can run any code when it is loaded: `cifar_pickle` reads it as data, and takes what the official files hold.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import DataSet, ReadOptions, Tally, not_official
from data_prep.datasets.cifar_pickle import read_pickle
from data_prep.datasets.raw_files import Scratch, require
from data_prep.raw import RawDataset
from data_prep.sources import Source
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints

SHAPE = (3, 32, 32)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NAMES100 = "fbe8ad23bbaf24969898a386833b49c3aaf6ad1119d43f7b41cdea1b3416d578"
"""sha256 of CIFAR-100's class names, one per line."""
HINT10 = "the unpacked folder cifar-10-batches-py (data_batch_1 ... 5, test_batch, batches.meta)"
HINT100 = "the unpacked folder cifar-100-python (train, test, meta)"


def load_batch(path: Path) -> dict[str, Any]:
    """The dictionary of one batch file, with str keys."""
    try:
        with path.open("rb") as stream:
            content = read_pickle(stream)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} is not a CIFAR batch ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a CIFAR batch (it holds a {type(content).__name__}); fetch it again")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}


def _images(path: Path, label_key: str, classes: int) -> tuple[NDArray[np.uint8], Ints]:
    batch = load_batch(path)
    for key in ("data", label_key):
        if key not in batch:
            raise UserError(f"{path} has no {key!r}; it is not a batch of this data set")
    data, listed = batch["data"], batch[label_key]
    if not isinstance(data, np.ndarray):
        raise UserError(f"{path}: 'data' is {type(data).__name__} instead of uint8 (n, 3072); fetch it again")
    if type(listed) is not list or any(type(label) is not int for label in listed):
        raise UserError(f"{path}: {label_key!r} is not a list of integers; fetch it again")
    if len(listed) != len(data):
        raise UserError(f"{path} holds {len(data)} images but {len(listed)} labels; fetch it again")
    labels = np.array(listed, np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise UserError(f"{path}, record {wrong[0]}: label {labels[wrong[0]]} is not one of the {classes} classes")
    return data.reshape(-1, *SHAPE), labels


def _class_names(path: Path, key: str, classes: int) -> tuple[str, ...]:
    names = load_batch(path).get(key, [])
    if type(names) is not list or any(type(name) is not str for name in names):
        raise UserError(f"{path}: {key!r} is not a list of names; fetch it again")
    if len(names) != classes:
        raise UserError(f"{path} names {len(names)} classes under {key!r} instead of {classes}; fetch it again")
    return tuple(names)


def _read(
    data_set: DataSet,
    train: list[Path],
    test: Path,
    names: tuple[str, ...],
    label_key: str,
    statistics: tuple[tuple[float, ...], tuple[float, ...]],
    tally: Tally,
) -> RawDataset:
    scratch = Scratch(SHAPE, np.uint8)
    labels = []
    for path in train:
        images, batch_labels = _images(path, label_key, len(names))
        scratch.append(images)
        labels.append(batch_labels)
    train_x = scratch.rows()
    test_x, test_y = _images(test, label_key, len(names))

    def rows(index: Ints) -> NDArray[np.uint8]:
        return train_x[index]

    return RawDataset(
        name=data_set.name,
        task="image",
        classes=len(names),
        class_names=names,
        feature_shape=SHAPE,
        dtype="uint8",
        mean=statistics[0],
        std=statistics[1],
        labels=np.concatenate(labels),
        users=None,
        user_names=None,
        read=rows,
        test_x=test_x,
        test_y=test_y,
        skipped=tally.unreadable,
        licence=data_set.licence,
        citation=data_set.citation,
    )


def read10(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """CIFAR-10 from its batches; features (3, 32, 32) uint8."""
    train = [require(raw, (f"data_batch_{number}",), HINT10) for number in range(1, 6)]
    names = _class_names(require(raw, ("batches.meta",), HINT10), "label_names", 10)
    statistics = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    data = _read(CIFAR10, train, require(raw, ("test_batch",), HINT10), names, "labels", statistics, tally)
    return data if names == CLASSES else not_official(data, tally)


def read100(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """CIFAR-100 with its fine labels, and their superclasses; features (3, 32, 32) uint8."""
    names = _class_names(require(raw, ("meta",), HINT100), "fine_label_names", 100)
    train, test = require(raw, ("train",), HINT100), require(raw, ("test",), HINT100)
    statistics = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    data = _read(CIFAR100, [train], test, names, "fine_labels", statistics, tally)
    data = replace(data, superclasses=_superclasses(train, data.labels))
    official = hashlib.sha256("\n".join(names).encode()).hexdigest() == NAMES100
    return data if official else not_official(data, tally)


def _superclasses(path: Path, labels: Ints) -> Ints | None:
    """The superclass of every class, int64 (100,), from the coarse labels beside the fine ones; None without any.

    A class that the file holds no image of is a superclass of its own.
    """
    listed = load_batch(path).get("coarse_labels")
    if listed is None:
        return None
    if type(listed) is not list or len(listed) != len(labels) or any(type(label) is not int for label in listed):
        raise UserError(f"{path}: 'coarse_labels' is not a list of {len(labels)} integers; fetch it again")
    coarse = np.array(listed, np.int64)
    found = int(coarse.max(initial=0)) + 1 + np.arange(100)
    found[labels] = coarse
    if (wrong := np.flatnonzero(found[labels] != coarse)).size:
        raise UserError(f"{path}: images of class {labels[wrong[0]]} have several coarse labels; fetch it again")
    return found


LICENCE = "no formal licence; cite the technical report"
CITATION = "A. Krizhevsky, Learning multiple layers of features from tiny images, University of Toronto, 2009"
PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10 = DataSet(
    name="cifar10",
    samples="50,000 + 10,000",
    classes="10",
    licence=LICENCE,
    citation=CITATION,
    page=PAGE,
    files=HINT10,
    read=read10,
    sources=(
        Source("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"),
    ),
)
CIFAR100 = DataSet(
    name="cifar100",
    samples="50,000 + 10,000",
    classes="100",
    licence=LICENCE,
    citation=CITATION,
    page=PAGE,
    files=HINT100,
    read=read100,
    sources=(
        Source("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),
    ),
)
