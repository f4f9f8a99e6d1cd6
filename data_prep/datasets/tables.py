"""The user's own files for `arrays`: members of an .npz streamed to disk, rows of a CSV table."""

from __future__ import annotations

import csv
import math
import zipfile
import zlib
from array import array
from collections.abc import Iterator
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
    special = {header.index(name): name for name in (*targets, USER_COLUMN) if name in header}
    columns = [column for column in range(len(header)) if column not in special]
    if not columns:
        raise UserError(f"{path} has no feature column besides {', '.join(special.values())}")
    numbers = RowByRow((len(columns),), np.float32, BLOCK_ROWS)
    texts: dict[str, list[str]] = {name: [] for name in special.values()}
    values = array("d")
    unreadable = tally.unreadable
    for where, row in csv_rows(reader, path, tally):
        if not row:
            continue
        if len(row) != len(header):
            tally.bad(where, f"{len(row)} columns where the header names {len(header)}")
            continue
        if absent := [name for name in targets if is_missing(row[header.index(name)])]:
            if not skip_unlabelled:
                raise UserError(
                    f"{where}: the label ({absent[0]}) is missing; label or remove such rows, or add --skip-unlabelled "
                    "to leave them out"
                )
            tally.drop(UNLABELLED)
            continue
        if any(len(row[column]) > LONGEST_NAME for column in special):
            tally.bad(where, f"a label or user of more than {LONGEST_NAME:,} characters")
            continue
        try:
            features = [float(row[column]) for column in columns]
            several = [float(row[header.index(name)]) for name in targets] if len(targets) > 1 else []
        except ValueError as error:
            wanted = columns + [header.index(name) for name in targets if len(targets) > 1]
            tally.bad(where, f"not a number ({_not_a_number(header, row, wanted) or error})")
            continue
        numbers.add(features)
        values.extend(several)
        for column, name in special.items():
            texts[name].append(row[column].strip())
    if not len(numbers) and tally.unreadable > unreadable:
        raise UserError(
            f"{path} holds no row that can be read; the first: {tally.first}; every column but the label and "
            f'"{USER_COLUMN}" must hold numbers: leave out those of texts, or write them as numbers'
        )
    names = np.array([header[column] for column in columns])
    table: dict[str, AnyArray] = {"x": numbers.rows(), "feature_names": names}
    if len(targets) > 1:
        table["y"], table["target_names"] = np.array(values).reshape(-1, len(targets)), np.array(targets)
    else:
        table["y"] = np.array(texts[targets[0]])
    if USER_COLUMN in texts:
        table["user"] = np.array(texts[USER_COLUMN])
    return table


def _not_a_number(header: list[str], row: list[str], columns: list[int]) -> str:
    """The first column of a row that holds no number, and what it holds."""
    for column in columns:
        try:
            float(row[column])
        except ValueError:
            return f"{shown(row[column], repr)} in column {shown(header[column], repr)}"
    return ""


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
