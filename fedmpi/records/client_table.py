"""What a run found out about single clients: RUN/clients.parquet, or clients.npz where pyarrow is not installed.

A row a client and evaluation. The file is whole at any time and holds the evaluations up to the last checkpoint: new
rows are kept in memory until one is written, and then the whole file is written anew.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.files import whole_file
from fedmpi.common.types import AnyArray

Columns = dict[str, AnyArray]
"""Columns of one length by name: int64 "round", "client", "samples" (evaluated), "training_samples", "times_used" (in
how many rounds the client has taken part), float64 "label_distance", "loss", "accuracy", "tuned_loss",
"tuned_accuracy", as far as there are such numbers."""

PARQUET, PLAIN = "clients.parquet", "clients.npz"
FILES = (PARQUET, PLAIN)
GROUP_ROWS = 1 << 20
"""Rows of a Parquet file that lie together, and are held in memory when it is written anew."""


class ClientTable:
    """The file of a run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows = 0
        self._in_file = 0
        self._fresh: list[Columns] = []

    def add(self, table: Columns) -> None:
        """Rows of one evaluation."""
        self._fresh.append(table)
        self.rows += len(table["round"])

    def take(self) -> list[Columns]:
        """What is not in the file yet; whoever takes it writes it."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def write(self, fresh: list[Columns]) -> None:
        """Write the file anew with these rows behind the others; no rows leave it as it is."""
        if not fresh:
            return
        old = found_in(self.folder)
        try:
            held = 0 if old is None else _count(old)
            if held != self._in_file:
                named = old or self.folder / (PARQUET if _pyarrow() else PLAIN)
                raise UserError(
                    f"{named} holds {held} rows where this run has written {self._in_file}; put the file back"
                )
            self._replace(old, fresh)
        except UserError as error:
            raise RunFailure(f"{error}, then go on with --resume --out {self.folder}") from None
        self._in_file += sum(len(table["round"]) for table in fresh)

    def go_on(self, next_round: int, rows: int) -> None:
        """Drop what the file holds of later rounds."""
        path, self.rows, self._in_file = found_in(self.folder), rows, rows
        named = path or self.folder / (PARQUET if _pyarrow() else PLAIN)
        if not rows:
            for name in FILES:
                (self.folder / name).unlink(missing_ok=True)
            return
        held = {} if path is None else read_file(path)
        kept = held["round"] < next_round if held else np.empty(0, bool)
        if int(kept.sum()) != rows:
            raise UserError(
                f"{named} holds {int(kept.sum())} rows of the rounds before {next_round} where "
                f"the checkpoint counts on {rows}: put the file back, or choose another --out"
            )
        if not kept.all():
            self._replace(path, [], next_round)

    def _replace(self, old: Path | None, fresh: list[Columns], next_round: int | None = None) -> None:
        path = old or self.folder / (PARQUET if _pyarrow() else PLAIN)
        if path.name == PARQUET:
            with whole_file(path) as file:
                _write_parquet(file, old, fresh, next_round)
            return
        tables = [*([read_file(old)] if old else []), *fresh]
        whole = concatenated(tables)
        before = slice(None) if next_round is None else whole["round"] < next_round
        with whole_file(path) as file:
            kept: dict[str, Any] = {name: column[before] for name, column in whole.items()}
            np.savez(file, **kept)


def found_in(folder: Path) -> Path | None:
    """The file about clients in a run's folder; None where there is none."""
    return next((folder / name for name in FILES if os.path.lexists(folder / name)), None)


def read_clients(folder: Path) -> Columns:
    """What a run's folder tells about its clients; empty where it tells nothing."""
    path = found_in(folder)
    return {} if path is None else read_file(path)


def read_file(path: Path) -> Columns:
    """The columns of clients.parquet or clients.npz; UserError as of `read_clients`."""
    with _readable(path):
        if path.name == PLAIN:
            with np.load(path, allow_pickle=False) as held:
                columns = {name: np.asarray(held[name]) for name in held.files}
        else:
            table = _needed("pyarrow.parquet", path).read_table(path, page_checksum_verification=True)
            columns = {name: table[name].to_numpy() for name in table.column_names}
    if not {"round", "client", "samples"} <= columns.keys() or len({len(column) for column in columns.values()}) > 1:
        raise UserError(f"{path} holds no rows about clients: it is damaged")
    return columns


def _count(path: Path) -> int:
    """How many rows a file holds; UserError as of `read_clients`."""
    if path.name == PLAIN:
        return len(read_file(path)["round"])
    with _readable(path), _needed("pyarrow.parquet", path).ParquetFile(path) as held:
        return int(held.metadata.num_rows)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within: whatever a damaged file makes the libraries stumble over is a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read ({why}): it is damaged; put a whole copy back") from None


def concatenated(tables: Sequence[Columns]) -> Columns:
    """The rows of several tables with the same columns, one behind the other; no column of none."""
    return {name: np.concatenate([table[name] for table in tables]) for name in (tables[0] if tables else ())}


def last_evaluation(table: Columns) -> Columns:
    """The rows of the last round that clients were evaluated after."""
    last = table["round"] == table["round"].max()
    return {name: column[last] for name, column in table.items()}


def _write_parquet(file: BinaryIO, old: Path | None, fresh: list[Columns], next_round: int | None) -> None:
    """A Parquet file of the old one's rows, those of rounds before `next_round`, and the fresh ones behind them."""
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    pieces = _pieces(arrow, parquet, old, fresh, next_round)
    first = next(pieces)
    with parquet.ParquetWriter(file, first.schema, write_page_checksum=True) as writer:
        for group in _grouped(arrow, first, pieces):
            writer.write_table(group, row_group_size=len(group))


def _pieces(arrow: Any, parquet: Any, old: Path | None, fresh: list[Columns], next_round: int | None) -> Iterator[Any]:
    if old is not None:
        with _readable(old), parquet.ParquetFile(old, page_checksum_verification=True) as held:
            for number in range(held.num_row_groups):
                group = held.read_row_group(number)
                if next_round is not None:
                    before = group["round"].to_numpy() < next_round
                    group = group.filter(arrow.array(before))
                yield group
    for columns in fresh:
        yield arrow.table(columns)


def _grouped(arrow: Any, first: Any, others: Iterable[Any]) -> Iterator[Any]:
    """Tables joined to such of `GROUP_ROWS` rows, more or less."""
    held, rows = [first], len(first)
    for table in others:
        if rows and rows + len(table) > GROUP_ROWS:
            yield arrow.concat_tables(held)
            held, rows = [], 0
        held.append(table)
        rows += len(table)
    yield arrow.concat_tables(held)


def _pyarrow() -> bool:
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError:
        return False
    return True


def _needed(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{path} needs pyarrow, which is not installed: pip install 'fedmpi[parquet]'") from None
