"""Labels and targets of users' data: missing values, kinds of targets, and class names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_prep.raw import RawDataset, ReadOptions, Tally
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Bools, Floats, Ints
from fedmpi.data.arrays import kept_targets, one_column

MISSING = frozenset(("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None", "NaN", "nan", "NAN", "-nan"))
"""Cells without a value: the marks that pandas reads as missing, and `?` of the UCI files."""
WHOLE = 2.0**53  # larger neighboring whole numbers are equal as floats
PLAIN = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d*)?", re.ASCII)
"""Numbers that no other text equals, except for zeros after the decimal point."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
DIGITS = re.compile(r"\d{1,18}", re.ASCII)
TRUTH = {"false": 0.0, "False": 0.0, "FALSE": 0.0, "true": 1.0, "True": 1.0, "TRUE": 1.0}
"""Truth values in CSV files, as pandas reads them."""
LONGEST_NAME = 1000
"""Largest number of characters of a label or user, since arrays of texts are as wide as the longest."""


def is_missing(values: AnyArray) -> Bools:
    """Return a mask of the missing values: NaN, None, and texts that mark missing values."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind not in "OU":
        return np.zeros(len(values), bool)
    return np.array([v.strip() in MISSING if isinstance(v, str) else v is None or v is not v for v in values], bool)


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


def truth_values(y: AnyArray, positions: int) -> AnyArray:
    """Return targets (n, C) that are all 0 or 1 as truth values, unless samples have so many positions."""
    several = y.ndim == 2 and y.dtype.kind in "iu" and 1 < y.shape[1] != positions
    return y.astype(bool) if several and np.isin(y, (0, 1)).all() else y


def one_hot_classes(y: AnyArray) -> Ints | None:
    """Return the class of each row of targets (n, C) that all have one 1 among zeros; None if some do not."""
    if y.ndim != 2 or y.shape[1] < 2 or not len(y) or y.dtype.kind not in "biuf":
        return None
    one_hot = np.isin(y, (0, 1)).all() and (np.count_nonzero(y, axis=1) == 1).all()
    return y.argmax(axis=1).astype(np.int64) if one_hot else None


@dataclass(frozen=True)
class Targets:
    """Targets of all samples: classes int64 (n,), or targets (n, …) as `kept_targets` returns them."""

    kind: str
    y: AnyArray
    names: tuple[str, ...] = ()

    @property
    def labels(self) -> Ints:
        """Classes (n,), or zeros if the targets are none."""
        return self.y if self.kind == "classification" else np.zeros(len(self.y), np.int64)

    def given_to(self, data: RawDataset, train: Ints, test: Ints) -> RawDataset:
        """Return the data set with these targets; `train` and `test` are the rows of each part."""
        if self.kind == "classification":
            return data
        y, refit = self.y, data.refit
        classes = int(np.prod(y.shape[1:], dtype=np.int64))
        if self.kind == "tokens":
            classes = max(int(y.max(initial=0)), len(data.vocabulary) - 1) + 1
        return replace(
            data,
            classes=classes,
            class_names=self.names if len(self.names) == classes else (),
            test_y=y[test],
            targets=self.kind,
            target_shape=y.shape[1:],
            read_targets=lambda index: y[train[index]],
            refit=None if refit is None else lambda rows: self.given_to(refit(rows), train, test),
        )


@dataclass(frozen=True)
class TargetReader:
    """Reads targets, given names of their source and of its rows for messages, and the user's options."""

    where: str
    place: Callable[[int], str]
    options: ReadOptions
    tally: Tally
    decimal: str = ""  # Decimal sign of text cells

    def read(self, y: AnyArray, names: tuple[str, ...] = (), positions: int = 0) -> Targets:
        """Return the targets of samples with so many positions from values (n,) or numbers (n, …).

        Single values are classes, unless the user declares a regression; so are one-hot rows. Whole numbers (n, L) are
        tokens. Truth values and other zeros and ones are multiple labels. All other values are a regression. `names`
        are those of classes or labels by number.
        """
        where, declared = self.where, self.options.targets
        if y.ndim > 1 and 0 in y.shape[1:]:
            raise UserError(f"{where} is {y.shape}: a sample has no target. Give each at least one value.")
        y = one_column(y, declared)
        if y.ndim == 1 and declared in ("tokens", "multilabel"):
            raise UserError(f"{where} has one value each, but --targets {declared} needs several. Leave --targets out.")
        if y.ndim == 1 and declared != "regression":
            return self._classes(y, names)
        if y.dtype.kind in "OU":
            numbers = as_floats(y.ravel(), self.decimal or ".")
            odd = np.isnan(numbers) & ~is_missing(y.ravel())
            if odd.any():
                row = int(odd.argmax()) // max(1, y[0].size)
                raise UserError(
                    f"{where}: {str(y.ravel()[odd.argmax()])!r} ({self.place(row)}) is no number. Targets that are no "
                    "classes must be numbers."
                )
            y = numbers.reshape(y.shape)
        elif y.dtype.kind not in "biuf":
            raise UserError(f"{where} holds {y.dtype} values. Targets that are no classes must be numbers.")
        self._check_present(np.asarray(~np.isnan(y).reshape(len(y), -1).any(axis=1)))
        if y.ndim > 1 and declared is None:
            y = truth_values(y, positions)
        if y.ndim > 1 and declared in (None, "classification"):
            codes = one_hot_classes(y)
            if codes is not None:
                self.tally.note(
                    f"{where}: each sample has one 1 among zeros, which names its class (--targets multilabel keeps "
                    "them)"
                )
                return Targets("classification", codes, names or tuple(map(str, range(y.shape[1]))))
            if declared is not None:
                raise UserError(
                    f"{where} has {y.shape[1:]} values each, but a class is one value, or one 1 among zeros. Leave "
                    "--targets out, or give one column."
                )
        if declared is None:
            flags = bool(np.isin(y, (0, 1)).all())
            tokens = y.dtype.kind in "ui" and not (flags and y.dtype == np.uint8)
            declared = "tokens" if tokens else "multilabel" if flags else "regression"
        return Targets(declared, kept_targets(where, y, declared), names if declared == "multilabel" else ())

    def _check_present(self, there: Bools) -> None:
        if not there.all():
            raise UserError(
                f"{self.where}: {int((~there).sum()):,} of {len(there):,} samples have no label (empty, ?, NA, N/A, "
                f"null, None or nan), the first is {self.place(int(there.argmin()))}. Label or remove them, or rename "
                "a class of such a name."
            )

    def _classes(self, y: AnyArray, given: tuple[str, ...]) -> Targets:
        """Return the classes of values (n,): the sorted distinct values, whole numbers in numerical order.

        Texts are distinct classes by their spelling: "10", "1e1" and "010" are three. `given` names the classes by
        number.
        """
        where, kept = self.where, uniform(y)
        if kept.dtype.kind not in "iufU":
            raise UserError(f"{where} holds {kept.dtype} values. Labels must be whole numbers or texts.")
        if given and kept.dtype.kind != "U":
            kept = np.where(kept < 0, np.nan, kept.astype(np.float64))  # Hugging Face's mark of no label is -1
        self._check_present(~is_missing(kept))
        if (
            self.decimal
            and kept.dtype.kind == "U"
            and all(PLAIN.fullmatch(text.replace(self.decimal, ".")) for text in kept.tolist())
        ):
            numbers = as_floats(kept, self.decimal)
            kept = numbers if (np.abs(numbers) <= WHOLE).all() or self.decimal in "".join(kept) else kept
        numbers = kept
        if kept.dtype.kind == "U" and all(map(NUMBER.fullmatch, kept.tolist())):  # fractions as text need regression
            numbers = as_floats(kept)
        if numbers.dtype.kind == "f":
            beyond = kept.dtype.kind == "f" and ~(np.abs(numbers) <= WHOLE)  # values that two classes share as floats
            odd = np.flatnonzero(beyond | (numbers != np.rint(numbers)))
            if len(odd):
                raise UserError(
                    f"{where}: {numbers[odd[0]]:g} ({self.place(int(odd[0]))}) is a number to be predicted, not a "
                    "class. Add --targets regression to predict it, or store bins as whole numbers or texts."
                )
        distinct, codes = np.unique(whole(kept), return_inverse=True)
        names = tuple(map(str, distinct.tolist()))
        if distinct.dtype.kind == "U" and all(map(DIGITS.fullmatch, names)):
            order = sorted(range(len(names)), key=lambda code: (int(names[code]), len(names[code])))
            codes, names = np.argsort(order)[codes], tuple(names[code] for code in order)
        if given:
            if int(names[-1]) >= len(given):
                raise UserError(
                    f"{where}: the label {names[-1]} is beyond its {len(given)} names. Mend the label or the names."
                )
            codes, names = np.array([int(name) for name in names], np.int64)[codes], given
        return Targets("classification", codes.astype(np.int64), names)


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
