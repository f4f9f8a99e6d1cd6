"""Labels and targets of users' data: missing values, kinds of targets, and class names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_prep.raw import RawDataset, ReadOptions, Tally
from fedmpi.common.errors import UserError
from fedmpi.common.task_kinds import IGNORED
from fedmpi.common.types import AnyArray, Bools, Floats, Ints
from fedmpi.data.arrays import kept_targets, one_column, one_hot_classes

MISSING = frozenset(("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None", "NaN", "nan", "NAN", "-nan"))
"""Cells without a value: the marks that pandas reads as missing, and `?` of the UCI files."""
MARKS = "empty, ?, NA, N/A, null, None or nan"
WHOLE = 2.0**53  # larger neighboring whole numbers are equal as floats
PLAIN = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d*)?", re.ASCII)
"""Numbers that no other text equals, except for zeros after the decimal point."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
DIGITS = re.compile(r"\d{1,18}", re.ASCII)
HUGGING_FACE_IGNORED = -100
"""Label that Hugging Face's models ignore."""
MOST_LABELS = 100_000
TRUTH = {
    text: float(place) for place, kind in enumerate(("false", "true")) for text in (kind, kind.title(), kind.upper())
}
"""Truth values in CSV files, as pandas reads them."""
LONGEST_NAME = 1000
"""Largest number of characters of a label or user, since arrays of texts are as wide as the longest."""
Place = Callable[[int], str]


def is_missing(values: AnyArray) -> Bools:
    """Return a mask of the missing values: NaN, None, and texts that mark missing values."""
    if values.dtype.kind not in "OUf":
        return np.zeros(len(values), bool)
    return np.isnan(values) if values.dtype.kind == "f" else np.array([_missing(v) for v in values.tolist()], bool)


def _missing(value: Any) -> bool:
    return (
        value.strip() in MISSING
        if isinstance(value, str)
        else value is None or (isinstance(value, float) and value != value)
    )


def as_floats(values: AnyArray, decimal: str = ".") -> Floats:
    """Convert numbers or text cells to floats, NaN if missing or not a number; underscores are not accepted."""
    if values.dtype.kind not in "OU":
        return values.astype(np.float64)
    cells = values.tolist()
    try:
        if decimal != ".":
            cells = ["?" if "." in cell else cell.replace(decimal, ".") for cell in cells]
        if "_" not in "".join(cells):
            return np.array(cells, object).astype(np.float64)
    except (ValueError, TypeError, AttributeError):
        pass
    return np.array([_as_float(cell) for cell in cells], np.float64)


def _as_float(cell: Any) -> float:
    if isinstance(cell, str) and not NUMBER.fullmatch(cell.strip()):
        return TRUTH.get(cell.strip(), np.nan)
    return np.nan if cell is None else float(cell)


def uniform(values: AnyArray) -> AnyArray:
    """Return values of a column as numbers, or as stripped texts; truth values become the texts True and False."""
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8") if values.dtype.itemsize else values.astype(str)
    if values.dtype.kind == "O":
        held = ["" if value is None else value for value in values.tolist()]
        if (longest := max((len(value) for value in held if isinstance(value, str)), default=0)) > LONGEST_NAME:
            raise UserError(f"A label or user of {longest:,} characters is none. Name another column as label or user.")
        return np.array([str(v).strip() for v in held]) if all(isinstance(v, str | bool) for v in held) else values
    return values.astype(str) if values.dtype.kind == "b" else values


@dataclass(frozen=True)
class Lists:
    """Lists of numbers of different lengths, stored in one array."""

    values: Floats
    lengths: Ints  # (n,)
    known: Bools  # (n,): Mask of those that are not missing
    whole: bool  # True if they contain whole numbers

    @classmethod
    def of(cls, column: AnyArray, whole: bool) -> Lists:
        """Convert a column; a list is unknown if it is missing, contains a missing number or, for floats, is empty."""
        values, known = [], []
        for row in column.tolist():
            numbers = np.asarray([] if row is None else row, np.float64)
            known.append(row is not None and not np.isnan(numbers).any() and (whole or len(numbers) > 0))
            values.append(numbers if known[-1] else numbers[:0])
        lengths = np.array([len(numbers) for numbers in values], np.int64)
        return cls(np.concatenate([np.zeros(0), *values]), lengths, np.array(known, bool), whole)

    def padded(self, width: int, filling: float) -> Floats:
        """Return all lists (n, width), cut or padded."""
        out = np.full((len(self.lengths), width), filling)
        starts = np.cumsum(self.lengths) - self.lengths
        there = np.arange(width) < self.lengths[:, None]
        out[there] = self.values[(starts[:, None] + np.arange(width))[there]]
        return out


@dataclass(frozen=True)
class Labeled:
    """Targets of all samples: their kind, values and class names, and a mask of the samples that have one.

    `y` contains classes int64 (n,), -1 without one, or targets (n, …) as `kept_targets` returns them.
    """

    kind: str
    y: AnyArray
    names: tuple[str, ...]
    usable: Bools


@dataclass(frozen=True)
class LabelSource:
    """Source of labels: names of it and of single rows for messages, and the user's options for it."""

    where: str
    place: Place
    options: ReadOptions
    tally: Tally

    def check(self, there: Bools) -> None:
        """Reject samples without a label, or count them if they may be skipped."""
        absent = int((~there).sum())
        if absent and not self.options.skip_unlabeled:
            raise UserError(
                f"{self.where}: {absent:,} of {len(there):,} samples have no label ({MARKS}), the first is "
                f"{self.place(int(there.argmin()))}. Label or remove them, rename a class of such a name, or add "
                "--skip-unlabeled to leave them out."
            )
        if not there.any() and len(there):
            raise UserError(f"{self.where}: no sample has a label. Name the column of labels with --label.")
        if absent:
            self.tally.drop("samples without a label", absent)


def labeled(source: LabelSource, values: AnyArray | Lists, columns: tuple[str, ...] = (), decimal: str = "") -> Labeled:
    """Return the targets of samples from their values: (n,), numbers (n, …), or lists.

    Single values are classes, unless the user declares a regression; so are one-hot rows. Whole numbers (n, L) are
    tokens. Truth values and other zeros and ones are multiple labels. All other values are a regression.
    """
    where, declared = source.where, source.options.targets
    if isinstance(values, Lists):
        kind, y, there = _of_lists(source, values, columns)
        if kind == "multilabel":
            return Labeled(kind, kept_targets(where, y, kind), columns, there)
        columns = () if y.ndim > 1 and y.shape[1] != len(columns) else columns
    else:
        y, kind = values, ""
        if y.ndim > 1 and 0 in y.shape[1:]:
            raise UserError(f"{where} is {y.shape}: a sample has no target. Give each at least one value.")
        there = np.ones(len(y), bool)
        if y.ndim > 1 or declared == "regression":
            if y.dtype.kind not in "biufOU":
                raise UserError(f"{where} holds {y.dtype} values. Targets that are no classes must be numbers.")
            y = as_floats(y.ravel()).reshape(y.shape) if y.dtype.kind in "OU" else y
            there = np.asarray(~np.isnan(y).reshape(len(y), -1).any(axis=1))
            source.check(there)
    y = one_column(y, declared)
    if y.ndim == 1:
        if declared in ("tokens", "multilabel"):
            raise UserError(f"{where} has one value each, but --targets {declared} needs several. Leave --targets out.")
        if declared != "regression":
            return _classes(source, np.where(there, y, np.nan) if isinstance(values, Lists) else y, columns, decimal)
        kind = "regression"
    elif declared in (None, "classification") and kind != "tokens":
        codes = one_hot_classes(y[there])
        if codes is not None:
            source.tally.note(
                f"{where}: each sample has one 1 among zeros, which names its class (--targets multilabel keeps them)"
            )
            found = np.full(len(y), -1, np.int64)
            found[there] = codes
            names = columns or tuple(map(str, range(y.shape[1])))
            return Labeled("classification", found, names, there)
        if declared is not None:
            raise UserError(
                f"{where} has {y.shape[1:]} values each, but a class is one value, or one 1 among zeros. Leave "
                "--targets out, or give one column."
            )
    flags = y.dtype.kind in "biuf" and bool(np.isin(y[there], (0, 1)).all())
    tokens = y.dtype.kind in "ui" and not (flags and y.dtype == np.uint8)
    kind = declared or kind or ("tokens" if tokens else "multilabel" if flags else "regression")
    found = kept_targets(where, y[there], kind)
    kept = np.zeros((len(y), *found.shape[1:]), found.dtype)
    kept[there] = found
    return Labeled(kind, kept, columns if kind == "multilabel" else (), there)


def _of_lists(source: LabelSource, rows: Lists, names: tuple[str, ...]) -> tuple[str, AnyArray, Bools]:
    """Return targets (n, L) of lists, their kind if it is clear, and a mask of the samples that have one."""
    where, declared, there = source.where, source.options.targets, rows.known
    source.check(there)
    lengths, values, most = rows.lengths, rows.values, Counter(rows.lengths[there].tolist()).most_common(1)[0][0]
    equal, single = bool((lengths[there] == most).all()), bool((lengths[there] == 1).all())
    if not rows.whole or declared == "regression":
        if not most:
            raise UserError(f"{where}: most lists are empty. Give every sample as many targets.")
        for row in np.flatnonzero(there & (lengths != most)).tolist():
            source.tally.bad(source.place(row), f"{lengths[row]} targets where most samples have {most}")
        return "", rows.padded(most, 0.0), there & (lengths == most)
    if np.abs(values).max(initial=0) > WHOLE:
        raise UserError(f"{where} holds {np.abs(values).max():.3g}. Number classes from 0 on, without gaps.")
    if (names or declared == "multilabel") and not (single and declared is None):
        if equal and not names and np.isin(values, (0, 1)).all():
            return "multilabel", rows.padded(most, 0.0), there
        labels = len(names) or int(values.max(initial=-1)) + 1
        if values.min(initial=0) < 0 or values.max(initial=0) >= max(labels, 1) or not 0 < labels <= MOST_LABELS:
            raise UserError(
                f"{where}: labels from {values.min(initial=0):g} to {values.max(initial=-1):g} where there are "
                f"{labels or 'none'}. Number them from 0 on, below {MOST_LABELS:,}."
            )
        flags = np.zeros((len(there), labels), np.uint8)
        flags[np.repeat(np.arange(len(there)), lengths), values.astype(np.int64)] = 1
        return "multilabel", flags, there
    y = rows.padded(min(source.options.length or int(lengths.max()), int(lengths.max())), IGNORED).astype(np.int64)
    return "" if equal else "tokens", np.where(y == HUGGING_FACE_IGNORED, IGNORED, y), there


def _classes(source: LabelSource, values: AnyArray, given: tuple[str, ...], decimal: str) -> Labeled:
    """Return the classes of values (n,): the sorted distinct values, whole numbers in numerical order.

    Texts are distinct classes by their spelling: "10", "1e1" and "010" are three. `given` names the classes by number.
    """
    where, column = source.where, uniform(values)
    if column.dtype.kind not in "iufU":
        raise UserError(f"{where} holds {column.dtype} values. Labels must be whole numbers or texts.")
    if given and column.dtype.kind != "U":
        column = np.where(column < 0, np.nan, column.astype(np.float64))
    there = ~is_missing(column)
    source.check(there)
    kept = column[there]
    if (
        decimal
        and kept.dtype.kind == "U"
        and len(kept)
        and all(PLAIN.fullmatch(text.replace(decimal, ".")) for text in kept.tolist())
    ):
        numbers = as_floats(kept, decimal)
        kept = numbers if (np.abs(numbers) <= WHOLE).all() or decimal in "".join(kept) else kept
    numbers = kept
    if kept.dtype.kind == "U" and all(map(NUMBER.fullmatch, kept.tolist())):  # fractions as text need regression
        numbers = as_floats(kept)
    if numbers.dtype.kind == "f" and not source.options.numbers_are_classes:
        beyond = kept.dtype.kind == "f" and ~(np.abs(numbers) <= WHOLE)  # values that two classes share as floats
        odd = np.flatnonzero(beyond | (numbers != np.rint(numbers)))
        if len(odd):
            raise UserError(
                f"{where}: {numbers[odd[0]]:g} ({source.place(int(np.flatnonzero(there)[odd[0]]))}) is a number to be "
                "predicted, not a class. Add --targets regression to predict it, or --numbers-are-classes to make each "
                "number a class, or store bins as whole numbers or texts."
            )
    distinct, codes = np.unique(whole(kept), return_inverse=True)
    names = tuple(map(str, distinct.tolist()))
    if distinct.dtype.kind == "U" and all(map(DIGITS.fullmatch, names)):
        order = sorted(range(len(names)), key=lambda code: (int(names[code]), len(names[code])))
        codes, names = np.argsort(order)[codes], tuple(names[code] for code in order)
    if given:
        if len(names) and int(names[-1]) >= len(given):
            raise UserError(
                f"{where}: the label {names[-1]} is beyond its {len(given)} names. Mend the label or the names."
            )
        codes, names = np.array([int(name) for name in names], np.int64)[codes], given
    labels = np.full(len(there), -1, np.int64)
    labels[there] = codes
    return Labeled("classification", labels, names, there)


def whole(values: AnyArray) -> AnyArray:
    """Convert whole floats to int64, so that their classes are named 3 and not 3.0."""
    if values.dtype.kind == "f" and (np.abs(values) <= WHOLE).all() and (values == np.rint(values)).all():
        return values.astype(np.int64)
    return values


def value_codes(values: AnyArray) -> tuple[Ints, tuple[str, ...]]:
    """Return a code for each value, -1 if it is missing, and the values by code, in order."""
    column = uniform(values)
    codes, there = np.full(len(column), -1, np.int64), ~is_missing(column)
    distinct, codes[there] = np.unique(whole(column[there]), return_inverse=True)
    return codes, tuple(map(str, distinct.tolist()))


def groups_of(values: AnyArray, name: str) -> Ints:
    """Return codes of the values by which `--split` keeps samples together."""
    codes, _ = value_codes(values)
    if (codes < 0).any():
        raise UserError(
            f"--split {name}: {int((codes < 0).sum()):,} of {len(codes):,} samples have no value of {name}. Fill them, "
            "or choose another column."
        )
    return codes


def with_targets(data: RawDataset, found: Labeled, train: Ints, test: Ints) -> RawDataset:
    """Return the data set with targets that are not classes; `train` and `test` select the targets of each part."""
    y, held, refit = found.y, found.y[test], data.refit
    classes = int(np.prod(y.shape[1:], dtype=np.int64))
    if found.kind == "tokens":
        classes = max(int(y.max(initial=0)), len(data.vocabulary) - 1) + 1
    return replace(
        data,
        classes=classes,
        class_names=found.names if len(found.names) == classes else (),
        labels=np.zeros(len(train), np.int64),
        test_y=held,
        targets=found.kind,
        target_shape=y.shape[1:],
        read_targets=lambda index: y[train[index]],
        refit=None if refit is None else lambda rows: with_targets(refit(rows), found, train, test),
    )
