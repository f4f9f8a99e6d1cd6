"""Targets of Parquet and Arrow files that are no classes: numbers of some columns, or lists of them in one."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.columns import listed
from data_prep.datasets.labels import UNLABELLED, WHOLE
from data_prep.datasets.parquet_features import Places, Ragged, flat
from fedmpi.common.errors import UserError
from fedmpi.common.task_kinds import IGNORED
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.targets import kept_targets

HUGGING_FACE_IGNORED = -100
"""What Hugging Face's models leave out."""
MOST_LABELS = 100_000


class Targets:
    """The targets of every readable row.

    Parameters
    ----------
    columns : dict of str
        pyarrow's type of each column.
    declared : str or None
        What the user calls them; None takes lists of whole numbers for tokens, zeros and ones for labels, and other
        numbers for a regression.
    names : tuple of str
        Of the labels whose numbers a list holds; none where they have none.
    """

    def __init__(self, columns: dict[str, str], declared: str | None, names: tuple[str, ...]) -> None:
        self._columns, self._declared, self.names = columns, declared, names
        self._inner = listed(next(iter(columns.values()))) if len(columns) == 1 else None
        self._rows = Ragged(np.float64)
        self._there = array("b")
        self._width: int | None = None

    @property
    def _whole(self) -> bool:
        """Whether a list holds whole numbers."""
        return self._inner is not None and self._inner.startswith(("int", "uint"))

    def wrong(self, values: list[Any]) -> str | None:
        """Why the values of a row are no targets; None where they are, or where there are none."""
        numbers = self._numbers(values)
        if numbers is None or self._whole:
            return None
        if self._width not in (None, len(numbers)):
            return f"{len(numbers)} targets where the first row has {self._width}"
        return None

    def add(self, values: list[Any]) -> None:
        """Append a row that is not wrong."""
        numbers = self._numbers(values)
        if numbers is not None and self._width is None:
            self._width = len(numbers)
        self._there.append(numbers is not None)
        self._rows.append(numbers or [])

    def _numbers(self, values: list[Any]) -> list[Any] | None:
        """The numbers of a row; None where some are missing."""
        numbers = flat(values)
        if any(not isinstance(number, int | float) or number != number for number in numbers):
            return None
        return numbers if numbers or self._whole and values != [None] else None

    def result(
        self, raw: Path, options: ReadOptions, tally: Tally, place: Places
    ) -> tuple[str, AnyArray, NDArray[np.bool_]]:
        """What they are, the targets of all rows (n, …), and which rows have one; `place` says where a row is.

        Raises
        ------
        UserError
            Rows without a target that are not to be left out, or values that cannot be what the user says.
        """
        where, there = f"{raw}, column {','.join(self._columns)}", np.array(self._there, bool)
        if missing := int((~there).sum()):
            if not options.skip_unlabelled:
                raise UserError(
                    f"{where}: {missing:,} of {len(there):,} rows lack a target, the first is "
                    f"{place(int(there.argmin()))}; give or remove them, or add --skip-unlabelled to leave them out"
                )
            tally.drop(UNLABELLED, missing)
        if not there.any():
            raise UserError(f"{where}: no row has a target; name the column of targets with --label")
        kind = self._kind()
        largest = float(np.abs(self._rows.values()).max(initial=0))
        if kind != "regression" and self._whole and largest > WHOLE:
            raise UserError(f"{where} holds a number of size {largest:.3g}; {kind} numbers begin at 0, without gaps")
        y: AnyArray
        if self._whole and kind == "tokens":
            y = self._tokens(options.length)
        elif self._whole and kind == "multilabel" and not self._is_flags():
            y = self._flags(where)
        else:
            lengths = self._lengths
            if lengths.min() != lengths.max():
                raise UserError(
                    f"{where}: lists of {lengths.min()} to {lengths.max()} numbers; a {kind} needs as many in every row"
                )
            y = self._rows.padded(self._rows.longest, 0.0)
            y = y[:, 0] if self._inner is None and len(self._columns) == 1 else y
        return kind, kept_targets(where, y, kind), there

    @property
    def _lengths(self) -> Ints:
        """Numbers of each row that has a target."""
        lengths: Ints = self._rows.lengths[np.array(self._there, bool)]
        return lengths

    def _kind(self) -> str:
        if self._declared is not None:
            return self._declared
        if self._whole:
            return "multilabel" if self.names else "tokens"
        return "multilabel" if self._is_flags() else "regression"

    def _is_flags(self) -> bool:
        """Whether every row that has a target holds as many zeros and ones."""
        lengths = self._lengths
        return not self.names and bool(lengths.min() == lengths.max() and np.isin(self._rows.values(), (0, 1)).all())

    def _tokens(self, length: int) -> Ints:
        """The first L of each row (n, L), -1 where nothing counts."""
        y = self._rows.padded(min(length, self._rows.longest), IGNORED).astype(np.int64)
        return np.where(y == HUGGING_FACE_IGNORED, IGNORED, y)

    def _flags(self, where: str) -> NDArray[np.uint8]:
        """The labels whose numbers each row lists, uint8 (n, C)."""
        values = self._rows.values().astype(np.int64)
        labels = len(self.names) or int(values.max(initial=-1)) + 1
        if values.min(initial=0) < 0 or values.max(initial=0) >= max(labels, 1) or not 0 < labels <= MOST_LABELS:
            raise UserError(
                f"{where}: labels from {values.min(initial=0)} to {values.max(initial=-1)} where there are "
                f"{labels or 'none'}; number them from 0 on, below {MOST_LABELS:,}"
            )
        y = np.zeros((len(self._there), labels), np.uint8)
        y[np.repeat(np.arange(len(y)), self._rows.lengths), values] = 1
        return y
