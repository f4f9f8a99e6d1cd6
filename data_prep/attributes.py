"""Numbers of the rows of a data set that the partition `attribute` can go by."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import numpy as np

from data_prep.raw import RawDataset
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Floats

_CHUNK_BYTES = 8 << 20

MEASURES: dict[str, Callable[[AnyArray], Floats]] = {
    "mean": lambda x: np.asarray(x.mean(axis=1, dtype=np.float64)),
    "std": lambda x: np.asarray(x.std(axis=1, dtype=np.float64)),
    "length": lambda x: np.asarray((x != 0).sum(axis=1), np.float64),
}
"""From flattened features (r, k) to a number a row."""


def attribute(raw: RawDataset, name: str) -> Floats:
    """A number for every training row, float64 (n,)."""
    if name in raw.attributes:
        return np.asarray(raw.attributes[name], np.float64)
    if name in raw.feature_names:
        column = raw.feature_names.index(name)
        return _measured(raw, lambda x: np.asarray(x[:, column], np.float64))
    measures = ["length"] if raw.task == "text" else ["mean", "std"]
    if name in measures:
        return _measured(raw, MEASURES[name])
    known = [*raw.attributes, *measures, *raw.feature_names]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known[:12])}"
    raise UserError(f"{raw.name} has no attribute {name!r}: {hint}")


def _measured(raw: RawDataset, measure: Callable[[AnyArray], Floats]) -> Floats:
    rows = len(raw.labels)
    row_bytes = int(np.prod(raw.feature_shape, dtype=np.int64)) * np.dtype(raw.dtype).itemsize
    step = max(1, _CHUNK_BYTES // row_bytes)
    found = np.empty(rows)
    for low in range(0, rows, step):
        index = np.arange(low, min(low + step, rows))
        found[index] = measure(np.asarray(raw.read(index)).reshape(len(index), -1))
    return found
