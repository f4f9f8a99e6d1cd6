"""Tables of users as blocks of columns: CSV files, and Parquet and Arrow files by pyarrow.

Python's csv module splits the rows, and gives the line and the number of fields of each. pandas.read_csv fills short
rows with missing values, and takes the first field of rows with one too many for an index, both without a word.
"""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.raw_files import files_below, lines, open_bytes, part_of
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.types import AnyArray, Ints

TEXTS = (".csv", ".tsv", ".tab", ".txt")
ARROWS = (".parquet", ".arrow")
# How files that are no text begin, whatever their name says.
FOREIGN = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\x93NUMPY": ".npy", b"PK\x03\x04": "zip (.npz, .xlsx)"}
FOREIGN[b"\x89HDF"] = "HDF5"
DELIMITERS = ",;\t|"
NAMED_DELIMITERS = {"tab": "\t", "\\t": "\t", "space": " "}
SAMPLE_LINES = 100
REMEDY = "Save it as UTF-8, or give its encoding, e.g. --encoding cp1252 or --encoding utf-16."
BLOCK_ROWS = 4096
DECIMAL_COMMA, DECIMAL_POINT = re.compile(r"\s*[+-]?\d+,\d+\s*"), re.compile(r"\s*[+-]?\d+\.\d+\s*")
THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2},\d{3}\s*")

Kind = Literal["cell", "truth", "whole", "number", "text", "image", "list", "nested", "other"]
"""Of a column: cell is text of a CSV file, of which its values say what it is; list and nested hold numbers."""


@dataclass(frozen=True)
class Column:
    """A column as its file declares it."""

    kind: Kind
    type: str
    whole: bool = False
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ColumnBlock:
    """Some rows of a file: where each is, and the values of its columns, one array (r,) each."""

    path: Path
    places: Ints
    columns: dict[str, AnyArray]
    unit: str

    def where(self, row: int) -> str:
        """The place of a row of the block, in words."""
        return f"{self.path}, {self.unit} {self.places[row]}"

    def take(self, rows: AnyArray) -> ColumnBlock:
        """The block of some of its rows."""
        if rows.all():
            return self
        return ColumnBlock(self.path, self.places[rows], {name: x[rows] for name, x in self.columns.items()}, self.unit)


@dataclass(frozen=True)
class ColumnTable:
    """Files of the same columns."""

    raw: Path
    columns: dict[str, Column]
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    index: frozenset[str] = frozenset()
    delimiter: str = ","
    decimal: str = "."
    encoding: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether the files are CSV."""
        return not is_arrow(self.train[0])

    @property
    def listed(self) -> str:
        """The columns, for messages."""
        named = [name if self.is_text else f"{name}: {column.type}" for name, column in self.columns.items()]
        return ", ".join(named[:12]) + (f" and {len(named) - 12} more" if len(named) > 12 else "")

    def blocks(self, path: Path, names: list[str], tally: Tally | None = None) -> Iterator[ColumnBlock]:
        """Some columns of a file, block by block.

        Rows that are none are left out, and counted where there is a tally.
        """
        if not self.is_text:
            yield from _arrow_blocks(path, names)
            return
        places, rows = [], []
        taken = [list(self.columns).index(name) for name in names]
        stream = csv_rows(path, lines(path, self.encoding, remedy=REMEDY), tally, self.delimiter)
        next(row for _, row in stream if row)  # the header
        for line, row in stream:
            if len(row) != len(self.columns):
                if row and tally is not None:
                    tally.bad(f"{path}, line {line}", f"{len(row)} fields where the header names {len(self.columns)}")
                continue
            places.append(line)
            rows.append([row[column] for column in taken])
            if len(rows) == BLOCK_ROWS:
                yield _text_block(path, places, rows, names)
                places, rows = [], []
        if rows:
            yield _text_block(path, places, rows, names)


def open_table(raw: Path, options: ReadOptions) -> ColumnTable:
    """The table of one file, or of the files below a folder, whose names say which part they are.

    A validation part is left out where there is a test part, else it is the test part; files whose names mean no part
    are training files.
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
        parts = {"train": found, "test": [], "valid": []}  # a single file is to be trained on, whatever its name
    if not parts["train"]:
        raise UserError(f"{raw} holds no training file, only test or validation files. Name one of them train.")
    if parts["valid"] and parts["test"]:
        notes.append(f"{len(parts['valid'])} files of a validation part are not used")
    train, test = tuple(parts["train"]), tuple(parts["test"] or parts["valid"])
    read = _arrow_table if is_arrow(train[0]) else _csv_table
    table = read(raw, train, test, options, notes)
    for path in (*train[1:], *test):
        other = read(raw, (path,), (), options, [])
        types = [{name: column.type for name, column in one.columns.items()} for one in (table, other)]
        if types[0] != types[1]:
            raise UserError(
                f"The columns of {path} ({other.listed}) differ from those of {train[0]} ({table.listed}). Name one "
                "file, or a folder of files with the same columns."
            )
        if other.delimiter != table.delimiter:
            raise UserError(
                f"{path} separates columns by {other.delimiter!r}, but {train[0]} by {table.delimiter!r}. Save both "
                "alike."
            )
        for name, column in table.columns.items():
            if column.class_names and other.columns[name].class_names not in ((), column.class_names):
                raise UserError(
                    f"{path} names the classes of column {name!r} differently from {train[0]}. Save both with the same "
                    "names in the same order."
                )
    return table


def is_table(path: Path) -> bool:
    """Whether a file's name is that of a table."""
    return path.name.lower().removesuffix(".gz").endswith((*TEXTS, *ARROWS))


def is_arrow(path: Path) -> bool:
    """Whether a file's name is that of a Parquet or Arrow file."""
    return path.name.lower().endswith(ARROWS)


def csv_rows(
    path: Path, content: Iterable[str], tally: Tally | None, delimiter: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """First line and fields of each row; a blank line has no fields, and `tally` gets the lines that are no row.

    Quotation marks may be signs of a text, except where they join lines.
    """
    held: list[str] = []
    form: dict[str, Any] = {"delimiter": delimiter, "skipinitialspace": True}

    def kept() -> Iterator[str]:
        for line in content:
            held.append(line)
            yield line

    reader = csv.reader(kept(), **form)
    while True:
        held.clear()
        line = reader.line_num + 1
        try:
            row = next(reader)
            if len(held) > 1:
                next(csv.reader(held, **form, strict=True))
        except StopIteration:
            return
        except csv.Error as error:
            joined = f"; a quotation mark joins {len(held):,} lines" if len(held) > 1 else ""
            if tally is not None:
                tally.bad(f"{path}, line {line}", f"not a CSV row ({error}{joined})", len(held))
            continue
        yield line, row


def _text_block(path: Path, places: list[int], rows: list[list[str]], names: list[str]) -> ColumnBlock:
    columns = {name: np.array(cells, object) for name, cells in zip(names, zip(*rows, strict=True), strict=True)}
    return ColumnBlock(path, np.array(places), columns, "line")


def _csv_table(
    raw: Path, train: tuple[Path, ...], test: tuple[Path, ...], options: ReadOptions, notes: list[str]
) -> ColumnTable:
    path = train[0]
    with open_bytes(path) as stream:
        try:
            begin = stream.read(1 << 16)
        except (OSError, EOFError, zlib.error):
            begin = b""  # reported with its line by what reads on
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
    if options.delimiter is None and delimiter != ",":
        sign = "a tab" if delimiter == "\t" else repr(delimiter)
        notes = [*notes, f"columns of {path.name} are separated by {sign}"]
    decimal = options.decimal or _decimal(path, delimiter, cells[1:])
    if options.decimal is None and decimal != ".":
        notes = [*notes, f"numbers of {path.name} have a decimal comma"]
    columns = {name: Column("cell", "text") for name in names}
    return ColumnTable(raw, columns, train, test, frozenset(), delimiter, decimal, options.encoding, tuple(notes))


def _given_delimiter(given: str | None) -> str | None:
    if given is None:
        return None
    sign = NAMED_DELIMITERS.get(given, given)
    if len(sign) != 1 or sign in '"\r\n':
        raise UserError(f"--delimiter {given!r} is not possible. Give one character, or tab or space.")
    return sign


def _delimiter(path: Path, sample: list[str]) -> str:
    """The sign that gives most rows as many fields as the header; among several, that of most fields."""
    ranks = {}
    for sign in DELIMITERS:
        widths = [len(row) for _, row in csv_rows(path, sample, None, sign) if row]
        if widths and widths[0] > 1:
            ranks[sign] = widths.count(widths[0]), widths[0]
    return max(ranks, key=ranks.__getitem__, default=",")


def _decimal(path: Path, delimiter: str, rows: list[list[str]]) -> str:
    """The decimal sign: a comma where some numbers have one and none has a point."""
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


def _arrow_table(
    raw: Path, train: tuple[Path, ...], test: tuple[Path, ...], options: ReadOptions, notes: list[str]
) -> ColumnTable:
    with _opened(train[0]) as (schema, _):
        names = _class_names(schema.metadata or {})
        columns = {field.name: _column(field.type, names.get(field.name, ())) for field in schema}
        if len(columns) < len(schema):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise UserError(f"{train[0]} names several columns {twice!r}. Rename or remove all except one.")
        try:
            listed = json.loads((schema.metadata or {})[b"pandas"])["index_columns"]
            index = frozenset(name for name in listed if isinstance(name, str))
        except (KeyError, ValueError, TypeError):
            index = frozenset()
    return ColumnTable(raw, columns, train, test, index, notes=tuple(notes))


def _column(kind: Any, class_names: tuple[str, ...]) -> Column:
    """What a pyarrow type says."""
    types = _pyarrow()[0].types
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


def _arrow_blocks(path: Path, names: list[str]) -> Iterator[ColumnBlock]:
    pa, row = _pyarrow()[0], 0
    with _opened(path) as (_, batches):
        for batch in batches(names):
            columns = {name: _values(pa, batch.column(name)) for name in names}
            yield ColumnBlock(path, np.arange(row, row + batch.num_rows), columns, "row")
            row += batch.num_rows


def _values(pa: Any, values: Any) -> AnyArray:
    """A column of a batch as an array; missing whole numbers make it floats, other missing values are None."""
    types = pa.types
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if types.is_decimal(values.type):
        values = values.cast(pa.float64())
    return np.asarray(values.to_numpy(zero_copy_only=False))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The schema of a file, and a function from names of columns to its batches of these."""
    pa, pq = _pyarrow()
    try:
        if path.name.lower().endswith(".parquet"):
            with pq.ParquetFile(path) as file:
                yield file.schema_arrow, lambda names: file.iter_batches(BLOCK_ROWS, columns=names)
            return
        with pa.memory_map(str(path)) as source:
            try:  # a stream, as Hugging Face's datasets write it, or a file with a footer
                reader = pa.ipc.open_stream(source)
                whole = iter(reader)
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
                whole = (reader.get_batch(number) for number in range(reader.num_record_batches))

            def batches(names: list[str]) -> Iterator[Any]:
                for batch in whole:
                    batch.validate(full=True)  # offsets that lead beyond a column would be followed into foreign memory
                    for low in range(0, batch.num_rows, BLOCK_ROWS):
                        yield batch.select(names).slice(low, BLOCK_ROWS)

            yield reader.schema, batches
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({raised(error)}). Fetch or write it again.") from error


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Names of the classes of columns, or in their lists, from what Hugging Face's datasets write beside the schema."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        inner = {name: entry.get("feature", entry) for name, entry in features.items()}
        labels = {name: entry for name, entry in inner.items() if entry.get("_type") == "ClassLabel"}
        return {name: tuple(map(str, entry["names"])) for name, entry in labels.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("Parquet and Arrow files need pyarrow, which is missing. Run pip install pyarrow.") from None
    return pyarrow, pyarrow.parquet
