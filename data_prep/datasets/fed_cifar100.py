"""CIFAR-100 as TensorFlow Federated gives it to 500 + 100 clients by Pachinko allocation (Reddi et al. 2021)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.cifar import SHAPE
from data_prep.datasets.raw_files import Scratch, require
from data_prep.datasets.tff import tff_clients
from data_prep.raw import RawDataset
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints

CLASSES, SUPERCLASSES = 100, 20
TRAIN, TEST = "fed_cifar100_train.h5", "fed_cifar100_test.h5"
HINT = f"{TRAIN} and {TEST} of TFF"


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Features (3, 32, 32) uint8, fine labels; the clients of the training file are the natural ones."""
    family = np.arange(CLASSES) + SUPERCLASSES  # classes without a training image are superclasses of their own
    images, labels, users, names = _part(require(raw, (TRAIN,), HINT), family)
    test_x, test_y, _, _ = _part(require(raw, (TEST,), HINT), None)
    return RawDataset(
        name=FED_CIFAR100.name,
        task="image",
        classes=CLASSES,
        class_names=tuple(map(str, range(CLASSES))),
        feature_shape=SHAPE,
        dtype="uint8",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        labels=labels,
        users=users,
        user_names=names,
        read=lambda index: images[index],
        test_x=test_x,
        test_y=test_y,
        skipped=tally.unreadable,
        licence=FED_CIFAR100.licence,
        citation=FED_CIFAR100.citation,
        superclasses=family,
    )


def _part(path: Path, family: Ints | None) -> tuple[NDArray[np.uint8], Ints, Ints, tuple[str, ...]]:
    """Images, labels, client of each row and clients' names of a file; fills in the superclass of every class."""
    scratch, labels, users = Scratch(SHAPE, np.uint8), [], []
    names: list[str] = []
    for name, arrays in tff_clients(path, ("image", "label", "coarse_label")):
        image, label, coarse = arrays["image"], arrays["label"], arrays["coarse_label"]
        where = f"{path}, client {name}"
        if image.dtype != np.uint8 or image.shape != (len(label), *SHAPE[1:], SHAPE[0]) or coarse.shape != label.shape:
            raise UserError(f"{where}: images {image.dtype} {image.shape} for {len(label)} labels; fetch it again")
        for values, count in ((label, CLASSES), (coarse, SUPERCLASSES)):
            if values.dtype.kind not in "iu" or (len(values) and not 0 <= values.min() <= values.max() < count):
                raise UserError(f"{where}: a label that is not 0 to {count - 1}; fetch it again")
        if family is not None:
            earlier = family[label] < SUPERCLASSES
            changed = (family[label] != coarse) & earlier
            family[label] = coarse
            if changed.any() or (family[label] != coarse).any():
                raise UserError(f"{where}: images of one class have several coarse labels; fetch it again")
        scratch.append(image.transpose(0, 3, 1, 2))
        labels.append(label.astype(np.int64))
        users.append(np.full(len(label), len(names)))
        names.append(name)
    if not scratch.length:
        raise UserError(f"{path} holds no image; fetch it again")
    return scratch.rows(), np.concatenate(labels), np.concatenate(users).astype(np.int64), tuple(names)


FED_CIFAR100 = DataSet(
    name="fed-cifar100",
    samples="50,000 of 500 clients + 10,000",
    classes="100",
    licence="no formal licence; cite the technical report",
    citation="A. Krizhevsky, Learning multiple layers of features from tiny images, 2009; S. Reddi et al., Adaptive "
    "federated optimization, 2021",
    page="https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/cifar100",
    files=HINT,
    read=read,
)
