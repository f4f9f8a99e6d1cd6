"""Tables of a run: evaluations of single clients, events in simulated time, confusion matrix of the final model.

RUN/clients.parquet and RUN/events.parquet are folders with one file per checkpoint, which holds the rows since the
previous one. `pandas.read_parquet` reads them all.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.files import make_inner_folder, whole_file
from fedmpi.common.types import AnyArray, Ints

Columns = dict[str, AnyArray]
"""Columns of one length by name.

Evaluations: int64 "round", "client", "samples" (evaluated), "training_samples", "times_used" (in how many rounds the
client was selected), float64 "loss", "accuracy", and the same with "tuned_" and "personal_", "joules", and int64
"bytes" and "copy", as far as there are such numbers.
Events: int64 "round", float64 "seconds", text "event" (start, arrival, lost), int64 "client", "version"."""

TABLES = CLIENTS, EVENTS = "clients.parquet", "events.parquet"


def write_tables(folder: Path, tables: Mapping[str, Columns], next_round: int) -> None:
    """Write the rows of each table before a checkpoint."""
    import pyarrow
    from pyarrow import parquet

    for name, rows in tables.items():
        if rows:
            make_inner_folder(folder / name)
            with whole_file(folder / name / f"{next_round:08d}.parquet") as file:
                parquet.write_table(pyarrow.table(rows), file, write_page_checksum=True)


def drop_tables_after(folder: Path, next_round: int) -> None:
    """Remove rows that were written after a checkpoint."""
    for path in (path for name in TABLES for path in (folder / name).glob("*.parquet")):
        if int(path.stem) > next_round:
            path.unlink()


def read_table(folder: Path, name: str = CLIENTS) -> Columns:
    """Return the rows of a table in a run folder; empty if there are none."""
    import pyarrow
    from pyarrow import parquet

    paths = sorted((folder / name).glob("*.parquet"))
    if not paths:
        return {}
    try:
        table = pyarrow.concat_tables(parquet.read_table(path, page_checksum_verification=True) for path in paths)
        return {name: table[name].to_numpy() for name in table.column_names}
    except Exception as error:  # pyarrow's errors have no common class
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{folder / name} cannot be read ({why}). It is damaged; restore it from a copy") from None


def concatenated(tables: Sequence[Columns]) -> Columns:
    """Concatenate tables with the same columns."""
    return {name: np.concatenate([table[name] for table in tables]) for name in (tables[0] if tables else ())}


def confusion_csv(counts: Ints, names: Sequence[str]) -> bytes:
    """Return a confusion matrix (C, C) as CSV: rows are true classes, columns predicted ones."""
    text = io.StringIO()
    rows = [[name, *map(str, row)] for name, row in zip(names, counts.tolist(), strict=True)]
    csv.writer(text, lineterminator="\n").writerows([["true \\ predicted", *names], *rows])
    return text.getvalue().encode()
