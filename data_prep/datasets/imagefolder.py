"""Images of the user's own: one folder a class, with or without a train/ and a test/ folder above."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.files import channel_statistics, folder_of, hold_out
from data_prep.datasets.folders import ImageRows, class_folders, first_form, survey
from data_prep.raw import RawDataset

HINT = "DIR/train/CLASS/*.png and DIR/test/CLASS/*.png, or DIR/CLASS/*.png (a fifth is then held out for testing)"
STATISTICS_ROWS = 2000


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """An image folder; features (1 or 3, H, W) uint8, the form of the first image unless `image_size` is given."""
    folder = folder_of(raw)
    form = first_form(folder, options.image_size)
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        names = class_folders(folder / "train")
        train = survey([folder / "train"], names, form, tally)
        test = survey([folder / "test"], names, form, tally)
    else:
        names = class_folders(folder)
        train, test = _split(survey([folder], names, form, tally))
    mean, std = channel_statistics(_sample(train), 255.0)
    return RawDataset(
        name=IMAGEFOLDER.name,
        task="image",
        classes=len(names),
        class_names=names,
        feature_shape=form.shape,
        dtype="uint8",
        mean=mean,
        std=std,
        labels=train.labels,
        users=None,
        user_names=None,
        read=train,
        test_x=test.stored(),
        test_y=test.labels,
        skipped=tally.unreadable,
        licence=IMAGEFOLDER.licence,
        citation=IMAGEFOLDER.citation,
    )


def _split(images: ImageRows) -> tuple[ImageRows, ImageRows]:
    train, test = hold_out(len(images.paths))
    parts = [
        ImageRows(tuple(images.paths[row] for row in rows), images.labels[rows], images.form) for rows in (train, test)
    ]
    return parts[0], parts[1]


def _sample(images: ImageRows) -> NDArray[Any]:
    count = len(images.paths)
    return images(np.unique(np.linspace(0, count - 1, min(count, STATISTICS_ROWS)).astype(np.int64)))


IMAGEFOLDER = DataSet(
    name="imagefolder",
    samples="yours",
    classes="yours",
    licence="yours",
    citation="yours",
    page="",
    files=HINT,
    read=read,
    options=frozenset({"image_size"}),
)
