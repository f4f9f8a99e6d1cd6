"""What the targets of samples may be, in files and in memory."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from fedmpi.common.data_choices import ARRAYS as NAME
from fedmpi.common.errors import UserError
from fedmpi.common.task_kinds import IGNORED, TARGETS
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import DataDescription

Targets = Literal["classification", "tokens", "multilabel", "regression"]

MOST_CLASSES = 1 << 22


def wrong_target(targets: AnyArray, description: DataDescription) -> tuple[int, str] | None:
    """The first row whose target cannot be one, and what it is, in words; None where all can.

    A class lies in 0 … C − 1 (or is -1 at a position that counts nowhere), what a label is worth in 0 … 1, and a number
    is finite in single precision.
    """
    if not targets.size or targets.dtype.kind == "b":
        return None
    least, most = targets.min(), targets.max()
    if description.counted:
        first = IGNORED if description.targets == "tokens" else 0
        if first <= least and most < description.classes:
            return None
        right, what = (targets >= first) & (targets < description.classes), f"none of the {description.classes} classes"
    elif description.targets == "multilabel":
        if least >= 0 and most <= 1:
            return None
        right, what = (targets >= 0) & (targets <= 1), "which is not in 0 to 1"
    else:
        largest = np.finfo(np.float32).max
        if -largest <= least and most <= largest:
            return None
        right, what = np.abs(targets) <= largest, "which is no number of single precision"
    row = int(np.flatnonzero(~right.reshape(len(targets), -1).all(axis=1))[0])
    value = targets[row][~right[row]][0] if targets.ndim > 1 else targets[row]
    return row, f"{value}, {what}"


def targets_like(y: AnyArray, declared: str | None) -> str:
    """What targets (n, …) are: as said, or as they look."""
    if declared is not None and declared not in TARGETS:
        raise UserError(f"{NAME}: targets = {declared!r} is unknown: choose {', '.join(map(repr, TARGETS))}")
    if y.dtype.kind not in "buif" and y.size:
        raise UserError(
            f"{NAME}: y is {y.dtype} {y.shape}; it must be (n,) whole numbers, the classes from 0 on, or other "
            "numbers (targets)"
        )
    if declared is not None:
        return declared
    if y.ndim < 2:
        return "regression" if y.dtype.kind == "f" and y.size else "classification"
    return {"b": "multilabel", "f": "regression"}.get(y.dtype.kind, "tokens")


def one_column(y: AnyArray, declared: str | None) -> AnyArray:
    """Values of one column (n, 1) as (n,), unless they are said to be tokens or labels."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and declared not in ("tokens", "multilabel") else y


def truth_values(y: AnyArray, positions: int) -> AnyArray:
    """Targets (n, C) that are all 0 or 1 as truth values, unless samples have so many positions; others as they are."""
    several = y.ndim == 2 and y.dtype.kind in "iu" and 1 < y.shape[1] != positions
    return y.astype(bool) if several and np.isin(y, (0, 1)).all() else y


def one_hot_classes(y: AnyArray) -> Ints | None:
    """The class of each row of targets (n, C) that all have one 1 among zeros; None where some have not."""
    if y.ndim != 2 or y.shape[1] < 2 or not len(y) or y.dtype.kind not in "biuf":
        return None
    one_hot = np.isin(y, (0, 1)).all() and (np.count_nonzero(y, axis=1) == 1).all()
    return y.argmax(axis=1).astype(np.int64) if one_hot else None


def kept_targets(what: str, y: AnyArray, targets: str) -> AnyArray:
    """Targets as they are kept: int64 of classes and tokens, float32 of labels and numbers; `what` is told of them."""
    if targets == "classification":
        return _classes_of(what, y)
    if targets in ("tokens", "multilabel") and y.ndim != 2:
        raise UserError(f"{what} is {y.dtype} {y.shape}; {targets} have a row of values for each sample")
    if y.dtype.kind not in ("ui" if targets == "tokens" else "buif"):
        raise UserError(f"{what} is {y.dtype} {y.shape}; tokens are whole numbers, -1 where none counts")
    if y.ndim < 1 or not math.prod(y.shape[1:]):
        raise UserError(f"{what} is {y.dtype} {y.shape}: a sample has no target")
    if targets == "tokens":
        if len(y) and not IGNORED <= y.min() <= y.max() < MOST_CLASSES:
            wrong = y.min() if y.min() < IGNORED else y.max()
            raise UserError(f"{what} holds the token {wrong}: they are numbered from 0 on, -1 where none counts")
        return np.ascontiguousarray(y, np.int64)
    with np.errstate(over="ignore"):
        y = np.ascontiguousarray(y, np.float32)
    if not np.isfinite(y).all():
        raise UserError(f"{what} holds numbers that are not finite in 32 bits: take those samples out")
    if targets == "multilabel" and len(y) and not 0 <= y.min() <= y.max() <= 1:
        raise UserError(f"{what} holds a label that is neither 0 nor 1, nor between them")
    return y


def _classes_of(what: str, y: AnyArray) -> Ints:
    if y.ndim != 1 or (y.dtype.kind not in "bui" and len(y)):
        raise UserError(f"{what} is {y.dtype} {y.shape}; it must be (n,) whole numbers, the classes from 0 on")
    if len(y) and not 0 <= y.min() <= y.max() < MOST_CLASSES:
        wrong = y.min() if y.min() < 0 else y.max()
        raise UserError(f"{what} holds the label {wrong}: classes are numbered from 0 on without gaps")
    return y.astype(np.int64)
