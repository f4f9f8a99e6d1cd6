"""Labels of the user's own data: which rows have one, and the classes they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import Tally
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints

MISSING = ("", "nan")
WHOLE = 2.0**53  # beyond, a float cannot tell neighbouring whole numbers apart
UNLABELLED = "rows without a label"


@dataclass(frozen=True)
class LabelRule:
    """What the user said of labels.

    Parameters
    ----------
    skip_unlabelled : bool
        Leave out rows without a label instead of refusing them.
    numbers_are_classes : bool
        Every distinct number is a class, fractions too.
    """

    skip_unlabelled: bool = False
    numbers_are_classes: bool = False


def classes_of(
    parts: list[tuple[str, AnyArray]],
    rule: LabelRule,
    tally: Tally,
    place: Callable[[int], str] = "row {}".format,
) -> tuple[list[Ints], tuple[str, ...]]:
    """Labels of some arrays by their common classes, which are the sorted distinct values; numbers sort as numbers.

    Parameters
    ----------
    parts : list of (str, array (n,))
        Where the values come from, for messages, and the values: whole numbers, texts or truth values.
    rule : LabelRule
        What is allowed.
    tally : Tally
        Receives rows without a label, where they are left out.
    place : callable
        place(row) says where a row of a part is, for messages.

    Returns
    -------
    labels : list of int64 arrays (n,)
        0 ... C-1, or -1 for rows without a label.
    names : tuple of str
        The C classes.

    Raises
    ------
    UserError
        Rows without a label, fractions where classes belong, or values that are neither numbers nor texts.
    """
    present = [_present(where, values, rule, tally, place) for where, values in parts]
    kept = [values[there] for (_, values), there in zip(parts, present, strict=True)]
    numbers = [_as_numbers(values) for values in kept]
    if all(values is not None for values in numbers):
        for (where, _), values, there in zip(parts, numbers, present, strict=True):
            if not rule.numbers_are_classes:
                _refuse_fractions(where, values, there, place)
        kept = [_whole(values) for values in numbers if values is not None]
    together = _whole(np.concatenate(kept))  # unsigned and signed whole numbers meet as floats
    distinct, codes = np.unique(together, return_inverse=True)
    labels, start = [], 0
    for there in present:
        label = np.full(len(there), -1, np.int64)
        label[there] = codes[start : start + int(there.sum())]
        start += int(there.sum())
        labels.append(label)
    return labels, tuple(map(str, distinct.tolist()))


def is_missing(text: str) -> bool:
    """Whether a label's text says nothing."""
    return text.strip().lower() in MISSING


def not_missing(values: AnyArray) -> NDArray[np.bool_]:
    """Which values say something: no NaN, no text that is empty or says nan."""
    if values.dtype.kind == "f":
        return np.asarray(~np.isnan(values))
    if values.dtype.kind == "U":
        return np.asarray(~np.isin(np.char.lower(np.char.strip(values)), MISSING))
    return np.ones(len(values), bool)


def _present(
    where: str, values: AnyArray, rule: LabelRule, tally: Tally, place: Callable[[int], str]
) -> NDArray[np.bool_]:
    if values.dtype.kind not in "biufU":
        raise UserError(f"{where} holds {values.dtype}; labels must be whole numbers or texts")
    there = not_missing(values)
    absent = np.flatnonzero(~there)
    if len(absent) and not rule.skip_unlabelled:
        raise UserError(
            f"{where}: {len(absent):,} of {len(values):,} rows have no label, the first is {place(int(absent[0]))}; "
            "label or remove them, or add --skip-unlabelled to leave them out"
        )
    if len(absent):
        tally.drop(UNLABELLED, len(absent))
    return there


def _as_numbers(values: AnyArray) -> AnyArray | None:
    """The values as numbers, None unless all are; truth values and texts like "3b" are no numbers."""
    if values.dtype.kind in "iuf":
        return values
    if values.dtype.kind == "b":
        return None
    try:
        return values.astype(np.float64)
    except ValueError:
        return None


def _refuse_fractions(
    where: str, values: AnyArray | None, there: NDArray[np.bool_], place: Callable[[int], str]
) -> None:
    if values is None or values.dtype.kind != "f":
        return
    odd = np.flatnonzero(~(np.abs(values) <= WHOLE) | (values != np.rint(values)))
    if len(odd):
        raise UserError(
            f"{where}, {place(int(np.flatnonzero(there)[odd[0]]))}: {values[odd[0]]:g} is a number to be predicted, "
            "not a class; store whole numbers or texts (of a continuous target, bins), or add --numbers-are-classes "
            "or, with arrays and parquet, --targets regression"
        )


def _whole(values: AnyArray) -> AnyArray:
    """Floats that are whole as int64, so that their classes are named 3 and not 3.0."""
    if values.dtype.kind == "f" and (np.abs(values) <= WHOLE).all() and (values == np.rint(values)).all():
        return values.astype(np.int64)
    return values
