"""Evaluations of single clients: RUN/clients.parquet, one row per client and evaluation.

The file is written atomically and has the evaluations up to the last checkpoint. New rows stay in memory until then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.files import whole_file
from fedmpi.common.types import AnyArray

Columns = dict[str, AnyArray]
"""Columns of one length by name: int64 "round", "client", "samples" (evaluated), "training_samples", "times_used" (in
how many rounds the client was selected), float64 "label_distance", "loss", "accuracy", "tuned_loss",
"tuned_accuracy", as far as there are such numbers."""

FILE = "clients.parquet"
GROUP_ROWS = 1 << 20
"""Rows of a row group of the file, which are in memory at once when it is rewritten."""


class ClientTable:
    """Writer of a run's file."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / FILE
        self.rows = 0
        self._in_file = 0
        self._fresh: list[Columns] = []

    def add(self, table: Columns) -> None:
        """Add the rows of an evaluation."""
        self._fresh.append(table)
        self.rows += len(table["round"])

    def take(self) -> list[Columns]:
        """Return the rows that are not in the file yet; the caller writes them."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def write(self, fresh: list[Columns]) -> None:
        """Append these rows to the file."""
        if not fresh:
            return
        try:
            held = 0
            if os.path.lexists(self.path):
                with _opened(self.path) as file:
                    held = int(file.metadata.num_rows)
            if held != self._in_file:
                raise UserError(
                    f"{self.path} holds {held} rows where this run has written {self._in_file}; put the file back"
                )
            self._replace(fresh)
        except UserError as error:
            raise RunFailure(f"{error}, then continue with --resume --out {self.folder}") from None
        self._in_file += sum(len(table["round"]) for table in fresh)

    def go_on(self, next_round: int, rows: int) -> None:
        """Remove the rows of later rounds."""
        self.rows, self._in_file = rows, rows
        if not rows:
            self.path.unlink(missing_ok=True)
            return
        held = read_clients(self.folder)
        kept = held["round"] < next_round if held else np.empty(0, bool)
        if int(kept.sum()) != rows:
            raise UserError(
                f"{self.path} holds {int(kept.sum())} rows of the rounds before {next_round} where "
                f"the checkpoint counts on {rows}: put the file back, or choose another --out"
            )
        if not kept.all():
            self._replace([], next_round)

    def _replace(self, fresh: list[Columns], next_round: int | None = None) -> None:
        """Rewrite the file: its rows of rounds before `next_round`, then the fresh ones."""
        from pyarrow import concat_tables, parquet

        held: list[Any] = []
        writer = None
        with whole_file(self.path) as file:
            for piece in chain(_pieces(self.path, fresh, next_round), [None]):
                if held and (piece is None or sum(map(len, held)) + len(piece) > GROUP_ROWS):
                    group, held = concat_tables(held), []
                    writer = writer or parquet.ParquetWriter(file, group.schema, write_page_checksum=True)
                    writer.write_table(group, row_group_size=max(1, len(group)))
                held.append(piece)
            if writer is not None:
                writer.close()


def _pieces(path: Path, fresh: list[Columns], next_round: int | None) -> Iterator[Any]:
    import pyarrow

    if os.path.lexists(path):
        with _opened(path) as file:
            for number in range(file.num_row_groups):
                group = file.read_row_group(number)
                if next_round is not None:
                    group = group.filter(pyarrow.array(group["round"].to_numpy() < next_round))
                yield group
    yield from map(pyarrow.table, fresh)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open the Parquet file; any error of pyarrow becomes a UserError."""
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read ({why}): it is damaged; put a whole copy back") from None


def read_clients(folder: Path) -> Columns:
    """Return the table of a run folder; empty if there is none."""
    path = folder / FILE
    if not os.path.lexists(path):
        return {}
    with _opened(path) as file:
        table = file.read()
        columns = {name: table[name].to_numpy() for name in table.column_names}
    if not {"round", "client", "samples"} <= columns.keys():
        raise UserError(f"{path} holds no rows about clients: it is damaged")
    return columns


def concatenated(tables: Sequence[Columns]) -> Columns:
    """Concatenate tables with the same columns."""
    return {name: np.concatenate([table[name] for table in tables]) for name in (tables[0] if tables else ())}


def last_evaluation(table: Columns) -> Columns:
    """Return the rows of the last evaluation."""
    last = table["round"] == table["round"].max()
    return {name: column[last] for name, column in table.items()}
