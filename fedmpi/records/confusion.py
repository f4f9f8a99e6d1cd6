"""Confusion matrix of the final model on the test part: RUN/confusion.csv and RUN/classes.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmpi.common.types import Ints

CONFUSION, CLASSES = "confusion.csv", "classes.csv"
MEASURES = ("samples", "predicted", "precision", "recall", "f1")


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix and the names of its classes."""

    counts: Ints  # (C, C): Rows are true classes, columns predicted ones
    names: tuple[str, ...]  # C names

    def classes(self) -> list[dict[str, Any]]:
        """Return the samples, predictions, precision, recall and F1 of each class. Undefined values are 0."""
        right, held, guessed = np.diag(self.counts), self.counts.sum(1), self.counts.sum(0)
        numbers = {
            "samples": held,
            "predicted": guessed,
            "precision": right / np.maximum(guessed, 1),
            "recall": right / np.maximum(held, 1),
            "f1": 2 * right / np.maximum(held + guessed, 1),
        }
        return [
            {"class": name, **{key: values[place].item() for key, values in numbers.items()}}
            for place, name in enumerate(self.names)
        ]

    def files(self) -> dict[str, bytes]:
        """The contents of the two files by name."""
        matrix = [["true \\ predicted", *self.names]]
        matrix += [[name, *map(str, row)] for name, row in zip(self.names, self.counts.tolist(), strict=True)]
        by_class = self.classes()
        classes = [["class", *MEASURES], *([str(value) for value in one.values()] for one in by_class)]
        return {CONFUSION: _as_csv(matrix), CLASSES: _as_csv(classes)}


def _as_csv(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
