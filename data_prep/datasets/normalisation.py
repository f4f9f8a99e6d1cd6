"""Mean and standard deviation of a data set that publishes none, measured on its training rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data_prep.raw import RawDataset
from fedmpi.common.types import Ints
from fedmpi.data.statistics import STATISTICS_ROWS, statistics


def measured(raw: RawDataset, among: Ints | None = None, at_most: int = STATISTICS_ROWS) -> RawDataset:
    """The data set with the mean and standard deviation of each channel of its training rows.

    Parameters
    ----------
    raw : RawDataset
        Images or vectors.
    among : int64 array or None
        The training rows to take into account; None takes all.
    at_most : int
        Evenly spaced rows read of them.

    Returns
    -------
    RawDataset
        Can be measured again without some of its rows (`RawDataset.refit`).
    """
    rows = np.arange(len(raw.labels)) if among is None else among
    channels = raw.feature_shape[0] if len(raw.feature_shape) == 3 else 1
    mean, std = statistics(raw.read, rows, channels, 255.0 if raw.dtype == "uint8" else 1.0, at_most)
    return replace(raw, mean=mean, std=std, refit=lambda kept: measured(raw, kept, at_most))
