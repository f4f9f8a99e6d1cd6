"""Users' tables as whole columns in memory: CSV files, and Parquet and Arrow files by pyarrow."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep.formats.files import csv_rows, files_below, lines, open_bytes, part_of
from data_prep.raw import ReadOptions, Tally
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.types import AnyArray, Ints

TEXTS = (".csv", ".tsv", ".tab", ".txt")
ARROWS = (".parquet", ".arrow")
# First bytes of files that are not text, whatever their name.
FOREIGN = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\x93NUMPY": ".npy", b"PK\x03\x04": "zip (.npz, .xlsx)"}
FOREIGN[b"\x89HDF"] = "HDF5"
DELIMITERS = ",;\t|"
TAB = "\t"
NAMED_DELIMITERS = {"tab": "\t", "\\t": "\t", "space": " "}
SAMPLE_LINES = 100
REMEDY = "Save it as UTF-8, or give its encoding, e.g. --encoding cp1252 or --encoding utf-16."
BLOCK_ROWS = 4096
SHORT = 16
"""Largest number of characters for which the cells of a block are kept as an array of texts of one width."""
DECIMAL_COMMA, DECIMAL_POINT = re.compile(r"\s*[+-]?\d+,\d+\s*"), re.compile(r"\s*[+-]?\d+\.\d+\s*")
THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2},\d{3}\s*")

Kind = Literal["cell", "truth", "whole", "number", "text", "image", "list", "nested", "other"]
"""Kinds of a column: cell is text of a CSV file, typed by its values; list and nested contain numbers."""


@dataclass(frozen=True)
class Column:
    """Column as its file declares it."""

    kind: Kind
    type: str
    whole: bool = False
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Header:
    """Columns of the files of a table, known before their rows are read."""

    columns: dict[str, Column]
    index: frozenset[str] = frozenset()
    delimiter: str = ","
    decimal: str = "."
    notes: tuple[str, ...] = ()


@dataclass
class UserTable:
    """Files of the same columns, training files first."""

    raw: Path
    header: Header
    files: list[Path]
    tested: bool  # True if there are test files
    boundary: int = 0  # Number of training rows
    file_of: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # (n,): File of each row
    places: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # (n,): Line or row in that file
    held: dict[str, list[Any]] = field(default_factory=dict)  # Parts of each column, as arrays or arrow arrays

    @property
    def columns(self) -> dict[str, Column]:
        """Columns by name."""
        return self.header.columns

    @property
    def is_text(self) -> bool:
        """True if the files are CSV."""
        return not is_arrow(self.files[0])

    @property
    def listed(self) -> str:
        """The columns as text for messages."""
        return _listed(self.header, self.is_text)

    def where(self, row: int) -> str:
        """Return the location of a row as text."""
        return f"{self.files[self.file_of[row]]}, {'line' if self.is_text else 'row'} {self.places[row]}"

    def values(self, name: str) -> AnyArray:
        """Return a column (n,); missing whole numbers make it float, other missing values are None."""
        parts = [part.astype(object) if self.is_text else _numpy(part) for part in self.held[name]]
        return np.concatenate(parts)

    def contents(self, name: str) -> Callable[[int], Any]:
        """Return a function from a row to its value in a column of images, which stays in arrow's memory."""
        if self.is_text:
            cells = self.values(name)
            return lambda row: cells[row]
        import pyarrow as pa  # slow to import

        chunks = pa.chunked_array([chunk for part in self.held[name] for chunk in part.chunks])
        return lambda row: chunks[row].as_py()


def _listed(header: Header, is_text: bool) -> str:
    named = [name if is_text else f"{name}: {column.type}" for name, column in header.columns.items()]
    return ", ".join(named[:12]) + (f" and {len(named) - 12} more" if len(named) > 12 else "")


def open_table(raw: Path, options: ReadOptions, tally: Tally) -> UserTable:
    """Open the table of one file, or of the files below a folder, assigned to parts by their names.

    A validation part is skipped if there is a test part; otherwise it is the test part. Files whose names denote no
    part are training files.
    """
    if raw.is_dir():
        found = [path for path in files_below(raw) if is_table(path) and not path.name.startswith("cache-")]
        plain = [path for path in found if not path.name.lower().endswith((".txt", ".txt.gz"))]
        tables = [path for path in found if is_arrow(path)] or plain or found
        notes = [f"{path} is not used" for path in found if path not in tables]
        found = tables
    else:
        found, notes = [raw], []
    if not found:
        endings = ", ".join((*ARROWS, *TEXTS))
        raise UserError(f"There is no table in {raw}. --raw must name a file that ends in {endings}, or their folder.")
    parts: dict[str, list[Path]] = {"train": [], "test": [], "valid": []}
    for path in found:
        if not path.exists():
            raise UserError(f"{path} does not exist. Name another file, or mend the link.")
        if not path.stat().st_size:
            raise UserError(f"{path} is empty. Write or fetch it again.")
        parts[part_of(path.relative_to(raw) if raw.is_dir() else Path(path.name)) or "train"].append(path)
    if not raw.is_dir():
        parts = {"train": found, "test": [], "valid": []}  # a single file is for training, whatever its name
    if not parts["train"]:
        raise UserError(f"{raw} holds no training file, only test or validation files. Name one of them train.")
    if parts["valid"] and parts["test"]:
        notes.append(f"{len(parts['valid'])} files of a validation part are not used")
    files = [*parts["train"], *(parts["test"] or parts["valid"])]
    is_text = not is_arrow(files[0])
    header_of = _csv_header if is_text else _arrow_header
    header = header_of(files[0], options)
    for path in files[1:]:
        other = header_of(path, options)
        types = [{name: column.type for name, column in one.columns.items()} for one in (header, other)]
        if types[0] != types[1]:
            raise UserError(
                f"The columns of {path} ({_listed(other, is_text)}) differ from those of {files[0]} "
                f"({_listed(header, is_text)}). Name one file, or a folder of files with the same columns."
            )
        if other.delimiter != header.delimiter:
            raise UserError(
                f"{path} separates columns by {other.delimiter!r}, but {files[0]} by {header.delimiter!r}. Save both "
                "alike."
            )
        for name, column in header.columns.items():
            if column.class_names and other.columns[name].class_names not in ((), column.class_names):
                raise UserError(
                    f"{path} names the classes of column {name!r} differently from {files[0]}. Save both with the same "
                    "names in the same order."
                )
    tally.notes += [*notes, *header.notes]
    table = UserTable(raw, header, files, len(files) > len(parts["train"]), held={name: [] for name in header.columns})
    places = []
    for path in files:
        read = _csv_values if is_text else _arrow_values
        places.append(read(path, table, options, tally))
    sizes = [len(rows) for rows in places]
    table.boundary = sum(sizes[: len(parts["train"])])
    table.file_of, table.places = np.repeat(np.arange(len(files)), sizes), np.concatenate(places)
    if not sum(sizes):
        raise UserError(f"{raw} holds no readable row.{tally.first_bad or ' Add rows.'}")
    return table


def is_table(path: Path) -> bool:
    """Check whether a file has the name of a table."""
    return path.name.lower().removesuffix(".gz").endswith((*TEXTS, *ARROWS))


def is_arrow(path: Path) -> bool:
    """Check whether a file has the name of a Parquet or Arrow file."""
    return path.name.lower().endswith(ARROWS)


def _csv_header(path: Path, options: ReadOptions) -> Header:
    with open_bytes(path) as stream:
        try:
            begin = stream.read(1 << 16)
        except (OSError, EOFError, zlib.error):
            begin = b""  # the code that reads on reports it with its line
    kind = next((name for magic, name in FOREIGN.items() if begin.startswith(magic)), None)
    if kind is not None or (
        b"\0" in begin and not begin.startswith((b"\xff\xfe", b"\xfe\xff")) and not options.encoding
    ):
        raise UserError(f"{path} is a {kind or 'binary'} file, not a CSV table. Give it its own ending, or write CSV.")
    sample = []
    for line in lines(path, options.encoding, remedy=REMEDY):
        sample.append(line)
        if len(sample) == SAMPLE_LINES:
            break
    delimiter = _given_delimiter(options.delimiter) or _delimiter(path, sample)
    cells = [row for _, row in csv_rows(path, sample, None, delimiter) if row]
    if not cells:
        raise UserError(f"{path} holds no row. Write a header and rows below it, and end lines with a line feed.")
    header = [name.strip() for name in cells[0]]
    unnamed = [f"Unnamed: {place}" for place in range(len(header))]
    names = [name or (f"{other}.0" if other in header else other) for name, other in zip(header, unnamed, strict=True)]
    if len(names) == 1:
        raise UserError(
            f"{path} has one column ({shown(names[0], repr)}), but a table needs a label column and others. Remove "
            "lines above the header, or give --delimiter if the sign is none of comma, semicolon, tab and |."
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path} names several columns {twice[0]!r}. Rename or remove all except one.")
    notes = []
    if options.delimiter is None and delimiter != ",":
        notes.append(f"columns of {path.name} are separated by {'a tab' if delimiter == TAB else repr(delimiter)}")
    decimal = options.decimal or _decimal(path, delimiter, cells[1:])
    if options.decimal is None and decimal != ".":
        notes.append(f"numbers of {path.name} have a decimal comma")
    return Header({name: Column("cell", "text") for name in names}, frozenset(), delimiter, decimal, tuple(notes))


def _csv_values(path: Path, table: UserTable, options: ReadOptions, tally: Tally) -> Ints:
    """Read the rows of a CSV file into a table and return their lines. Malformed rows are skipped and counted."""
    places: list[int] = []
    waiting: list[list[str]] = []

    def flush() -> None:
        for name, cells in zip(table.columns, zip(*waiting, strict=True), strict=bool(waiting)):
            kind = str if max(map(len, cells)) <= SHORT else object
            table.held[name].append(np.array(cells, kind))
        waiting.clear()

    stream = csv_rows(path, lines(path, options.encoding, remedy=REMEDY), tally, table.header.delimiter)
    next(row for _, row in stream if row)  # the header
    for line, row in stream:
        if len(row) == len(table.columns):
            places.append(line)
            waiting.append(row)
            if len(waiting) == BLOCK_ROWS:
                flush()
        elif row:
            tally.bad(f"{path}, line {line}", f"{len(row)} fields where the header names {len(table.columns)}")
    flush()
    return np.array(places, np.int64)


def _given_delimiter(given: str | None) -> str | None:
    if given is None:
        return None
    sign = NAMED_DELIMITERS.get(given, given)
    if len(sign) != 1 or sign in '"\r\n':
        raise UserError(f"--delimiter {given!r} is not possible. Give one character, or tab or space.")
    return sign


def _delimiter(path: Path, sample: list[str]) -> str:
    """Return the delimiter that gives most rows as many fields as the header, preferring more fields."""
    ranks = {}
    for sign in DELIMITERS:
        widths = [len(row) for _, row in csv_rows(path, sample, None, sign) if row]
        if widths and widths[0] > 1:
            ranks[sign] = widths.count(widths[0]), widths[0]
    return max(ranks, key=ranks.__getitem__, default=",")


def _decimal(path: Path, delimiter: str, rows: list[list[str]]) -> str:
    """Return the decimal sign: a comma if some numbers contain one and none contains a point."""
    cells = [cell for row in rows for cell in row]
    commas = [cell for cell in cells if DECIMAL_COMMA.fullmatch(cell)]
    if delimiter == "," or not commas or any(map(DECIMAL_POINT.fullmatch, cells)):
        return "."
    if all(map(THOUSANDS.fullmatch, commas)):
        raise UserError(
            f"{path}: the comma in {commas[0].strip()!r} may separate decimals or thousands. Say --decimal , or write "
            "numbers without separators of thousands."
        )
    return ","


def _arrow_header(path: Path, options: ReadOptions) -> Header:
    schema = _read_arrow(path, schema=True)
    names = _class_names(schema.metadata or {})
    columns = {field.name: _column(field.type, names.get(field.name, ())) for field in schema}
    if len(columns) < len(schema):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise UserError(f"{path} names several columns {twice!r}. Rename or remove all except one.")
    try:
        listed = json.loads((schema.metadata or {})[b"pandas"])["index_columns"]
        index = frozenset(name for name in listed if isinstance(name, str))
    except (KeyError, ValueError, TypeError):
        index = frozenset()
    return Header(columns, index)


def _arrow_values(path: Path, table: UserTable, options: ReadOptions, tally: Tally) -> Ints:
    """Read the rows of a Parquet or Arrow file into a table and return their numbers."""
    found = _read_arrow(path)
    for name in table.columns:
        table.held[name].append(found.column(name))
    return np.arange(found.num_rows)


def _column(kind: Any, class_names: tuple[str, ...]) -> Column:
    """Return the column that a pyarrow type declares."""
    from pyarrow import types

    name = str(kind)
    if types.is_dictionary(kind):
        return _column(kind.value_type, class_names)
    if hasattr(kind, "storage_type"):
        kind = kind.storage_type
    depth, inner = 0, kind
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        depth, inner = depth + 1, inner.value_type
    whole = types.is_integer(inner)
    numeric = whole or types.is_floating(inner) or types.is_boolean(inner) or types.is_decimal(inner)
    found: Kind = "other"
    if depth:
        found = ("list", "nested")[depth - 1] if numeric and depth < 3 else "other"
    elif numeric:
        found = "truth" if types.is_boolean(inner) else "whole" if whole else "number"
    elif types.is_binary(kind) or types.is_large_binary(kind):
        found = "image"
    elif types.is_struct(kind):
        found = "image" if kind.get_field_index("bytes") >= 0 else "other"
    elif name in ("string", "large_string", "string_view"):
        found = "text"
    return Column(found, name, whole, class_names)


def _numpy(column: Any) -> AnyArray:
    """Convert a column of a file to an array."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        decoded = [chunk.dictionary_decode() for chunk in column.chunks]
        column = pa.chunked_array(decoded, column.type.value_type)
    if hasattr(column.type, "storage_type"):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    return np.asarray(column.to_numpy())


def _read_arrow(path: Path, schema: bool = False) -> Any:
    """Read a file as a pyarrow table, or only its schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.name.lower().endswith(".parquet"):
            with pq.ParquetFile(path) as file:
                return file.schema_arrow if schema else file.read()
        source = pa.memory_map(str(path))
        try:  # a stream, as Hugging Face's datasets write it, or a file with a footer
            reader = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_file(source)
        if schema:
            return reader.schema
        found = reader.read_all()
        found.validate(full=True)  # offsets beyond a column would read outside its memory
        return found
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({raised(error)}). Fetch or write it again.") from error


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Return the class names of columns or of their lists, from the schema metadata of Hugging Face's datasets."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        inner = {name: entry.get("feature", entry) for name, entry in features.items()}
        labels = {name: entry for name, entry in inner.items() if entry.get("_type") == "ClassLabel"}
        return {name: tuple(map(str, entry["names"])) for name, entry in labels.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
