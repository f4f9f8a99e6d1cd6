"""Digits: scikit-learn's 1,797 images, 8 x 8, the same training and test rows as `data.shards = "digits"`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.raw import RawDataset, measured
from fedmpi.common.types import Ints
from fedmpi.data.opening import load_digits_split


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """The digits; features (1, 8, 8) uint8, pixel values 0 ... 16."""
    train_x, train_y, test_x, test_y = load_digits_split()

    def rows(index: Ints) -> NDArray[np.uint8]:
        return train_x[index]

    data = RawDataset(
        name=DIGITS.name,
        task="image",
        classes=10,
        class_names=tuple("0123456789"),
        feature_shape=(1, 8, 8),
        dtype="uint8",
        mean=(),
        std=(),
        labels=train_y,
        users=None,
        user_names=None,
        read=rows,
        test_x=test_x,
        test_y=test_y,
        skipped=tally.unreadable,
        licence=DIGITS.licence,
        citation=DIGITS.citation,
    )
    return measured(data)


DIGITS = DataSet(
    name="digits",
    samples="1,442 + 355",
    classes="10",
    licence="CC BY 4.0",
    citation="E. Alpaydin, C. Kaynak, Optical recognition of handwritten digits, UCI Machine Learning Repository, 1998",
    page="https://archive.ics.uci.edu/dataset/80",
    files="",
    read=read,
    raw="none",
)
