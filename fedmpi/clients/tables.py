"""Tables of the clients' devices and availability in files: columns of Parquet, NPZ or CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError, raised
from fedmpi.common.types import Floats, Ints

SUFFIXES = (".parquet", ".npz", ".csv")


def read_columns(file: str, needed: Sequence[str], offered: Sequence[str] = ()) -> dict[str, Floats]:
    """Return the needed columns of a file, and the offered ones that it has, by name, float64 (r,) each."""
    path = Path(file)
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{file} is no table: its name must end in one of {', '.join(SUFFIXES)}")
    try:
        names, load = _opened(path)
    except Exception as error:  # pyarrow's errors have no common class
        raise UserError(
            f"the table {file} cannot be read ({raised(error)}). Check the path, relative to the working directory"
        ) from None
    if missing := [name for name in needed if name not in names]:
        raise UserError(f"{file} has no column {missing[0]!r}. Its columns are {', '.join(names) or 'none'}")
    found = {}
    for name in (*needed, *(name for name in offered if name in names)):
        try:
            values = load(name)
            if values.dtype.kind in "mM":  # NumPy would count nanoseconds
                raise TypeError(f"their type is {values.dtype}")
            found[name] = np.asarray(values, np.float64)
        except (TypeError, ValueError) as error:
            raise UserError(f"column {name!r} of {file} holds values that are no numbers ({error})") from None
        if found[name].ndim != 1 or len(found[name]) != len(found[needed[0]]):
            raise UserError(f"column {name!r} of {file} has the shape {found[name].shape}. Give one number per row")
    return found


def _opened(path: Path) -> tuple[list[str], Any]:
    """Return the names of a table's columns, and a function that loads a column."""
    if path.suffix.lower() == ".npz":
        with np.load(path) as arrays:
            table = dict(arrays)
        return [*table], table.__getitem__
    from pyarrow import csv, parquet  # slow to import, and most runs have no tables

    columns = parquet.read_table(path) if path.suffix.lower() == ".parquet" else csv.read_csv(path)
    return columns.column_names, lambda name: columns[name].to_numpy()


def client_numbers(file: str, column: Floats, clients: int) -> Ints:
    """Return a column of clients, int64 (r,); reject all except whole numbers from 0 to N − 1."""
    wrong = ~((column >= 0) & (column < clients) & (column == np.floor(column)))
    if wrong.any():
        raise UserError(
            f"column 'client' of {file} holds {column[wrong][0]:g}. The {clients:,} clients are 0 to {clients - 1:,}"
        )
    return column.astype(np.int64)


def per_client(file: str, name: str, clients: int) -> Floats:
    """Return a column of numbers above 0, float64 (N,): row k, or the row with k in a column `client`."""
    found = read_columns(file, (name,), ("client",))
    values = found[name]
    if len(values) != clients:
        raise UserError(f"{file} has {len(values):,} rows for {clients:,} clients. Give one row per client")
    if "client" in found:
        order = client_numbers(file, found["client"], clients)
        if len(np.unique(order)) < clients:
            twice = np.flatnonzero(np.bincount(order) > 1)[0]
            raise UserError(f"{file} has several rows of client {twice}. Give one row per client")
        values = values[np.argsort(order)]
    wrong = ~((values > 0) & np.isfinite(values))
    if wrong.any():
        client = wrong.argmax()
        raise UserError(f"{name} of client {client} is {values[client]:g} in {file}. Give finite numbers above 0")
    return values
