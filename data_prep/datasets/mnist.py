"""MNIST: 60,000 + 10,000 handwritten digits, 28 x 28, in the official idx files (LeCun et al. 1998)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets import idx
from data_prep.datasets.base import DataSet, ReadOptions, Tally, not_official
from data_prep.datasets.raw_files import require
from data_prep.raw import RawDataset
from data_prep.sources import Source
from fedmpi.common.types import Ints

HINT = "the four idx files of MNIST (train-images-idx3-ubyte, ...; plain or .gz)"
MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}

CONTENT = "06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16"
"""sha256 of the values of the four files."""


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """MNIST from its idx files; features (1, 28, 28) uint8.

    Other sets under MNIST's file names are known by their content (`not_official`); their classes are those that occur.
    """
    train_x, train_y = _part(raw, "train")
    test_x, test_y = _part(raw, "t10k")
    content = hashlib.sha256()
    for values in (train_x, train_y.astype(np.uint8), test_x, test_y.astype(np.uint8)):
        content.update(np.ascontiguousarray(values).data)
    distinct, labels = np.unique(np.concatenate([train_y, test_y]), return_inverse=True)

    def rows(index: Ints) -> NDArray[np.uint8]:
        return train_x[index][:, None]

    data = RawDataset(
        name=MNIST.name,
        task="image",
        classes=len(distinct),
        class_names=tuple(map(str, distinct.tolist())),
        feature_shape=(1, *train_x.shape[1:]),
        dtype="uint8",
        mean=(0.1307,),
        std=(0.3081,),
        labels=labels[: len(train_y)].astype(np.int64),
        users=None,
        user_names=None,
        read=rows,
        test_x=test_x[:, None],
        test_y=labels[len(train_y) :].astype(np.int64),
        skipped=tally.unreadable,
        licence=MNIST.licence,
        citation=MNIST.citation,
    )
    return data if content.hexdigest() == CONTENT else not_official(data, tally)


def _part(raw: Path, part: str) -> tuple[NDArray[np.uint8], Ints]:
    images = require(raw, idx.patterns(f"{part}-images-idx3-ubyte"), HINT)
    labels = require(raw, idx.patterns(f"{part}-labels-idx1-ubyte"), HINT)
    return idx.read_pair(images, labels, 256)


MNIST = DataSet(
    name="mnist",
    samples="60,000 + 10,000",
    classes="10",
    licence="CC BY-SA 3.0 (as usually given)",
    citation="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to document recognition, "
    "Proceedings of the IEEE, 1998",
    page="http://yann.lecun.com/exdb/mnist/",
    files=HINT,
    read=read,
    sources=tuple(Source(MIRROR + name, f"sha256:{digest}") for name, digest in CHECKSUMS.items()),
)
