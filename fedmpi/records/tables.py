"""Tables of a run: evaluations of single clients (RUN/clients.parquet), and the confusion matrix of the final model.

RUN/clients.parquet is a folder with one file per checkpoint, which holds the evaluations since the previous one.
`pandas.read_parquet` reads them all.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.files import make_inner_folder, whole_file
from fedmpi.common.types import AnyArray, Ints

Columns = dict[str, AnyArray]
"""Columns of one length by name: int64 "round", "client", "samples" (evaluated), "training_samples", "times_used" (in
how many rounds the client was selected), float64 "loss", "accuracy", "tuned_loss", "tuned_accuracy", as far as there
are such numbers."""

CLIENTS = "clients.parquet"
CONFUSION, CLASSES = "confusion.csv", "classes.csv"
MEASURES = ("samples", "predicted", "precision", "recall", "f1")


def write_clients(folder: Path, rows: Columns, next_round: int) -> None:
    """Write evaluations of single clients before a checkpoint."""
    import pyarrow
    from pyarrow import parquet

    if rows:
        make_inner_folder(folder / CLIENTS)
        with whole_file(folder / CLIENTS / f"{next_round:08d}.parquet") as file:
            parquet.write_table(pyarrow.table(rows), file, write_page_checksum=True)


def drop_clients_after(folder: Path, next_round: int) -> None:
    """Remove evaluations that were written after a checkpoint."""
    for path in (folder / CLIENTS).glob("*.parquet"):
        if int(path.stem) > next_round:
            path.unlink()


def read_clients(folder: Path) -> Columns:
    """Return the evaluations of single clients in a run folder; empty if there are none."""
    import pyarrow
    from pyarrow import parquet

    paths = sorted((folder / CLIENTS).glob("*.parquet"))
    if not paths:
        return {}
    try:
        table = pyarrow.concat_tables(parquet.read_table(path, page_checksum_verification=True) for path in paths)
        return {name: table[name].to_numpy() for name in table.column_names}
    except Exception as error:  # pyarrow's errors have no common class
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{folder / CLIENTS} cannot be read ({why}). It is damaged; restore it from a copy") from None


def concatenated(tables: Sequence[Columns]) -> Columns:
    """Concatenate tables with the same columns."""
    return {name: np.concatenate([table[name] for table in tables]) for name in (tables[0] if tables else ())}


def last_evaluation(table: Columns) -> Columns:
    """Return the rows of the last evaluation."""
    last = table["round"] == table["round"].max()
    return {name: column[last] for name, column in table.items()}


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix of the test part and the names of its classes."""

    counts: Ints  # (C, C): Rows are true classes, columns predicted ones
    names: tuple[str, ...]  # C names

    def classes(self) -> list[dict[str, Any]]:
        """Return the samples, predictions, precision, recall and F1 of each class. Undefined values are 0."""
        right, held, guessed = np.diag(self.counts), self.counts.sum(1), self.counts.sum(0)
        ratios = right / np.maximum(guessed, 1), right / np.maximum(held, 1), 2 * right / np.maximum(held + guessed, 1)
        columns = (held, guessed, *ratios)
        return [
            {"class": name, **{key: column[place].item() for key, column in zip(MEASURES, columns, strict=True)}}
            for place, name in enumerate(self.names)
        ]

    def files(self) -> dict[str, bytes]:
        """Return the contents of the two files by name."""
        matrix = [["true \\ predicted", *self.names]]
        matrix += [[name, *map(str, row)] for name, row in zip(self.names, self.counts.tolist(), strict=True)]
        classes = [["class", *MEASURES], *([str(value) for value in one.values()] for one in self.classes())]
        return {CONFUSION: _as_csv(matrix), CLASSES: _as_csv(classes)}


def _as_csv(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
