"""The user's own files for `arrays`: members of an .npz streamed to disk, rows of a CSV table."""

from __future__ import annotations

import csv
import math
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from data_prep.datasets.base import Tally
from data_prep.datasets.labels import UNLABELLED, is_missing
from data_prep.datasets.raw_files import BLOCK, UTF_16, RowByRow, Scratch, lines, open_bytes
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.types import AnyArray

MEMBERS = ("x", "y", "user", "x_test", "y_test")
USER_COLUMN = "user"
# How files that are no tables begin, whatever their name says.
FOREIGN = {b"PAR1": "Parquet", b"\x93NUMPY": ".npy", b"PK\x03\x04": "zip (.npz, .xlsx)", b"\x89HDF": "HDF5"}
BLOCK_ROWS = 1024
LONGEST_NAME = 1000
"""Characters of a label or of a user: arrays of texts are as wide as the longest."""


def read_npz(path: Path) -> dict[str, AnyArray]:
    """The members x, y, user, x_test and y_test of an .npz file, each unzipped block by block to a temporary file.

    Raises
    ------
    UserError
        When the file is damaged, holds Python objects or lacks x or y.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            there = {name.removesuffix(".npy") for name in archive.namelist()}
            arrays = {}
            for member in MEMBERS:
                if member in there:
                    name = member if member in archive.namelist() else f"{member}.npy"
                    with archive.open(name) as stream:
                        arrays[member] = as_text(_stream_array(stream, f"{path}, array {member}"), path, member)
    except UserError:
        raise
    except Exception as error:  # damaged archives make zipfile raise errors of many kinds
        raise UserError(f"{path} is not a readable .npz file ({raised(error)}); write it with numpy.savez") from error
    for member in ("x", "y"):
        if member not in arrays:
            raise UserError(
                f"{path} holds no array {member!r}; it must hold x and y, and may hold user, x_test, y_test"
            )
    return arrays


def as_text(values: AnyArray, path: Path, member: str) -> AnyArray:
    """Arrays of bytes as texts; any other array as it is.

    Raises
    ------
    UserError
        The bytes are no UTF-8.
    """
    if values.dtype.kind != "S":
        return values
    try:
        return np.char.decode(values, "utf-8") if values.dtype.itemsize else values.astype(str)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, array {member}: {error.object!r} is no UTF-8 text; store texts, not bytes") from error


def _stream_array(stream: IO[bytes], where: str) -> AnyArray:
    try:
        version = npy_format.read_magic(stream)
        read_header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran, dtype = read_header(stream)
    except (OSError, zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:  # the header is Python text, and fails in as many ways
        raise UserError(f"{where}: not an array ({raised(error)}); write the file with numpy.savez") from error
    if not shape or min(shape) < 0 or not dtype.itemsize:
        raise UserError(f"{where}: {dtype} of shape {shape} holds no rows; write it again")
    if dtype.hasobject:
        raise UserError(f"{where}: it holds Python objects; convert it to numbers or texts, e.g. with astype(str)")
    # Bytes, not values: rows of 0 bytes and Fortran order need no special case on disk.
    scratch = Scratch((), np.uint8)
    expected = dtype.itemsize * math.prod(shape)
    while scratch.length <= expected and (block := stream.read(BLOCK)):
        scratch.append(np.frombuffer(block, np.uint8))
    if scratch.length != expected:
        more = " or more" if scratch.length > expected else ""
        raise UserError(
            f"{where}: {scratch.length} bytes{more} where its header says {shape} of {dtype}; write it again"
        )
    flat = scratch.rows().view(dtype)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def read_table(path: Path, label: str, skip_unlabelled: bool, tally: Tally) -> dict[str, AnyArray]:
    """A CSV file with a header: the column `label`, optionally a column "user", all others numbers.

    Parameters
    ----------
    path : Path
        The file, plain or .gz.
    label : str
        Name of the label column, or of several with commas between, which hold numbers.
    skip_unlabelled : bool
        Leave out rows whose label is empty or nan, instead of refusing them.
    tally : Tally
        Receives the lines that cannot be read.

    Returns
    -------
    dict
        x float32 (n, d), y str (n,) or, of several columns, float64 (n, k) with target_names str (k,), feature_names
        str (d,) and, with that column, user str (n,).

    Raises
    ------
    UserError
        The file is no text, lacks the label column or has it twice, or a row has no label.
    """
    _refuse_foreign(path)
    reader = csv.reader(lines(path))
    columns = _columns(path, reader, label)
    numbers, values = RowByRow((len(columns.features),), np.float32, BLOCK_ROWS), array("d")
    texts: dict[str, list[str]] = {name: [] for name in columns.texts.values()}
    unreadable = tally.unreadable
    for where, row in csv_rows(reader, path, tally):
        if not row:
            continue
        if problem := columns.why_no_row(row):
            tally.bad(where, problem)
            continue
        if absent := columns.missing_label(row):
            if not skip_unlabelled:
                raise UserError(
                    f"{where}: the label ({absent}) is missing; label or remove such rows, or add --skip-unlabelled "
                    "to leave them out"
                )
            tally.drop(UNLABELLED)
            continue
        try:
            columns.check_texts(row)
            features, several = columns.numbers(row, columns.features), columns.numbers(row, columns.numeric_targets)
        except ValueError as error:
            tally.bad(where, str(error))
            continue
        numbers.add(features)
        values.extend(several)
        for column, name in columns.texts.items():
            texts[name].append(row[column].strip())
    if not len(numbers) and tally.unreadable > unreadable:
        raise UserError(
            f"{path} holds no row that can be read; the first: {tally.first}; every column but the label and "
            f'"{USER_COLUMN}" must hold numbers: leave out those of texts, or write them as numbers'
        )
    names = np.array([columns.header[column] for column in columns.features])
    table: dict[str, AnyArray] = {"x": numbers.rows(), "feature_names": names}
    targets = columns.targets
    if len(targets) > 1:
        table["y"], table["target_names"] = np.array(values).reshape(-1, len(targets)), np.array(targets)
    else:
        table["y"] = np.array(texts[targets[0]])
    if USER_COLUMN in texts:
        table["user"] = np.array(texts[USER_COLUMN])
    return table


@dataclass(frozen=True)
class _Columns:
    """What the columns of a table hold.

    Attributes
    ----------
    header : list of str
    targets : list of str
        Names of the label's columns.
    texts : dict
        Names of those and of the user's column, by their places.
    features : list of int
        Places of all others.
    """

    header: list[str]
    targets: list[str]
    texts: dict[int, str]
    features: list[int]

    @property
    def numeric_targets(self) -> list[int]:
        """Places of the label's columns where there are several, which hold numbers."""
        return [self.header.index(name) for name in self.targets] if len(self.targets) > 1 else []

    def why_no_row(self, row: list[str]) -> str:
        """What is wrong with a row of another length than the header; "" of others."""
        expected = len(self.header)
        return f"{len(row)} columns where the header names {expected}" if len(row) != expected else ""

    def missing_label(self, row: list[str]) -> str:
        """The first column of the label that is empty or nan; "" where none is."""
        return next((name for name in self.targets if is_missing(row[self.header.index(name)])), "")

    def check_texts(self, row: list[str]) -> None:
        """ValueError where a label or a user is too long."""
        if any(len(row[column]) > LONGEST_NAME for column in self.texts):
            raise ValueError(f"a label or user of more than {LONGEST_NAME:,} characters")

    def numbers(self, row: list[str], columns: list[int]) -> list[float]:
        """What these columns hold; ValueError, with the first one that holds none, where one is no number."""
        try:
            return [float(row[column]) for column in columns]
        except ValueError:
            column = next(column for column in columns if not _is_number(row[column]))
            cell, name = shown(row[column], repr), shown(self.header[column], repr)
            raise ValueError(f"not a number ({cell} in column {name})") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _columns(path: Path, reader: Iterator[list[str]], label: str) -> _Columns:
    """What the header, which the reader is at, says of the columns; UserError where it is not that of such a table."""
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise UserError(
            f"{path} begins with what is no row of a CSV table ({error}); end lines with a line feed (LF or CR LF)"
        ) from error
    targets = [label] if label in header else label.split(",")
    for name in targets:
        if name not in header:
            raise UserError(
                f"{path} has no column {name!r} ({', '.join(header[:12])}); name the label column with --label"
            )
    if len(set(targets)) < len(targets):
        raise UserError(f"--label {label} names a column twice; name each once")
    for name in (*targets, USER_COLUMN):
        if header.count(name) > 1:
            raise UserError(f"{path} names {header.count(name)} columns {name!r}; rename or remove all but one")
    texts = {header.index(name): name for name in (*targets, USER_COLUMN) if name in header}
    features = [column for column in range(len(header)) if column not in texts]
    if not features:
        raise UserError(f"{path} has no feature column besides {', '.join(texts.values())}")
    return _Columns(header, targets, texts, features)


def _refuse_foreign(path: Path) -> None:
    with open_bytes(path) as stream:
        try:
            begin = stream.read(BLOCK)
        except (OSError, EOFError, zlib.error):
            return  # told with its line by whoever reads on
    kind = next((name for magic, name in FOREIGN.items() if begin.startswith(magic)), None)
    if kind is None and b"\0" in begin and not begin.startswith(UTF_16):
        kind = "some binary kind of"
    if kind is not None:
        raise UserError(f"{path} is a {kind} file, not a CSV table; give it its own ending, or write it as CSV")


def csv_rows(reader: Any, path: Path, tally: Tally) -> Iterator[tuple[str, list[str]]]:
    """Rows of a `csv.reader` with where each is; a blank line is one without fields, and `tally` has what is none."""
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            tally.bad(f"{path}, line {reader.line_num}", f"not a CSV row ({error})")
            continue
        yield f"{path}, line {reader.line_num}", row
