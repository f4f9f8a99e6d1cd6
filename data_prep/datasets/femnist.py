"""FEMNIST: EMNIST by writer, 28 x 28 (Caldas et al. 2018), from LEAF's JSON or TensorFlow Federated's HDF5 files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.leaf import leaf_users
from data_prep.datasets.raw_files import Names, Scratch, files_below, folder_of
from data_prep.datasets.tff import tff_clients
from data_prep.raw import RawDataset, measured
from data_prep.sources import Source
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints

CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
SHAPE = (1, 28, 28)
PIXELS = 784
HINT = "LEAF's train/*.json and test/*.json, or TFF's fed_emnist_train.h5 and fed_emnist_test.h5"
# A writer of one file: name, pixels in [0, 1] (n, 784), labels (n,).
Writer = tuple[str, AnyArray, AnyArray]


@dataclass
class _Part:
    images: Scratch = field(default_factory=lambda: Scratch(SHAPE, np.uint8))
    labels: list[Ints] = field(default_factory=list)
    users: list[Ints] = field(default_factory=list)


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """FEMNIST; features (1, 28, 28) uint8 as published (1.0 = white paper is 255), the writer is the natural client.

    Rows whose pixels are no multiples of 1/255 in [0, 1] or whose label is not 0 ... 61 are left out.
    """
    train_files, test_files, writers_of = _files(folder_of(raw))
    names = Names()
    train, test = (_gather(files, writers_of, names, tally) for files in (train_files, test_files))
    if not train.labels or not test.labels:
        first = f": the first that is none: {tally.first}" if tally.first else ""
        raise UserError(f"no readable image of {'training' if not train.labels else 'test'} writers in {raw}{first}")
    train_x, labels, users = train.images.rows(), np.concatenate(train.labels), np.concatenate(train.users)
    used, users = np.unique(users, return_inverse=True)

    def rows(index: Ints) -> AnyArray:
        return train_x[index]

    data = RawDataset(
        name=FEMNIST.name,
        task="image",
        classes=len(CLASSES),
        class_names=CLASSES,
        feature_shape=SHAPE,
        dtype="uint8",
        mean=(),
        std=(),
        labels=labels,
        users=users.astype(np.int64),
        user_names=tuple(names.names[user] for user in used),
        read=rows,
        test_x=test.images.rows(),
        test_y=np.concatenate(test.labels),
        skipped=tally.unreadable,
        licence=FEMNIST.licence,
        citation=FEMNIST.citation,
    )
    return measured(data)


def _files(folder: Path) -> tuple[list[Path], list[Path], Callable[[Path], Iterator[Writer]]]:
    patterns = (
        ("fed_emnist_{}.h5", _hdf5_writers),
        ("fed_emnist_digitsonly_{}.h5", _hdf5_writers),
        ("{}/*.json", _json_writers),
        ("{}/*.json.gz", _json_writers),
    )
    for pattern, writers_of in patterns:
        train, test = (files_below(folder, pattern.format(part)) for part in ("train", "test"))
        if train and test:
            return train, test, writers_of
    raise UserError(f"no FEMNIST files in {folder}; --raw must hold {HINT}")


def _json_writers(path: Path) -> Iterator[Writer]:
    """Writers of one of LEAF's files, in the order of their data; memory holds one writer."""
    return leaf_users(path, lambda name, x, y: (name, np.asarray(x, np.float64), np.asarray(y)), "writer")


def _hdf5_writers(path: Path) -> Iterator[Writer]:
    for name, arrays in tff_clients(path, ("pixels", "label"), uneven=True):
        labels = arrays["label"]
        if not len(labels) or arrays["pixels"].size % len(labels):
            raise UserError(
                f"{path}, client {name}: {arrays['pixels'].shape} pixels for {len(labels)} labels; fetch it again"
            )
        yield name, arrays["pixels"].reshape(len(labels), -1), labels


def _gather(files: list[Path], writers_of: Callable[[Path], Iterator[Writer]], names: Names, tally: Tally) -> _Part:
    part = _Part()
    for path in files:
        for name, pixels, labels in writers_of(path):
            good = _good_rows(pixels, labels, f"{path}, writer {name}", tally)
            if good.any():
                part.images.append(np.rint(pixels[good] * 255).astype(np.uint8).reshape(-1, *SHAPE))
                part.labels.append(labels[good].astype(np.int64))
                part.users.append(np.full(int(good.sum()), names.code(name)))
    return part


def _good_rows(pixels: AnyArray, labels: AnyArray, where: str, tally: Tally) -> NDArray[np.bool_]:
    if pixels.ndim != 2 or pixels.shape[1] != PIXELS or labels.shape != (len(pixels),) or labels.dtype.kind not in "iu":
        why = f"images {pixels.shape} and labels {labels.shape} instead of (n, {PIXELS}) and (n,) whole numbers"
        tally.bad(where, why, max(labels.size, 1))
        return np.zeros(0, bool)
    with np.errstate(invalid="ignore", over="ignore"):
        levels = pixels * 255
        exact = (np.abs(levels - np.rint(levels)) < 1e-2) & (pixels >= 0) & (pixels <= 1)
    known = (labels >= 0) & (labels < len(CLASSES))
    good = exact.all(1) & known
    for row in np.flatnonzero(~good):
        why = f"label {labels[row]}" if not known[row] else "a pixel that is no multiple of 1/255 in [0, 1]"
        tally.bad(f"{where}, record {row}", why)
    return np.asarray(good)


FEMNIST = DataSet(
    name="femnist",
    samples="about 800,000 of 3,500 writers",
    classes="62",
    licence="no formal licence (from NIST Special Database 19); LEAF: BSD 2-clause",
    citation="S. Caldas et al., LEAF: a benchmark for federated settings, 2018",
    page="https://leaf.cmu.edu",
    files=HINT,
    read=read,
    sources=(
        Source(
            "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",
            "sha256:fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
        ),
    ),
)
