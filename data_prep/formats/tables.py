"""Users' tables (CSV; Parquet and Arrow by pyarrow) as whole columns in memory, and the roles of the columns."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.files import csv_rows, files_below, lines, part_of
from data_prep.formats.images import SUFFIXES
from data_prep.raw import ReadOptions, Tally
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.types import AnyArray, Bools, Floats, Ints

TEXTS = (".csv", ".tsv", ".tab", ".txt")
ARROWS = (".parquet", ".arrow")
DELIMITERS = ",;\t|"
NAMED_DELIMITERS = {"tab": "\t", "\\t": "\t", "space": " "}
MISSING = frozenset(("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None", "NaN", "nan", "NAN", "-nan"))
"""Cells without a value: the marks that pandas reads as missing, and `?` of the UCI files."""
TRUTH = {"false": 0.0, "False": 0.0, "FALSE": 0.0, "true": 1.0, "True": 1.0, "TRUE": 1.0}
"""Truth values in CSV files, as pandas reads them."""
PANDAS_INDEX = re.compile(r"Unnamed: \d+(\.\d+)*|__index_level_\d+__")
IDENTIFIER = re.compile(
    r"(?i:(.*[_\W])?(id|ids|idx|index|uuid|guid|key|row|rowid|no|nr))|.*[a-z0-9](ID|Id|Idx|Index|Key)"
)
"""Names of identifier columns: id, user_id, PassengerId, index."""
USER_COLUMN = "user"
LISTED = 5
KINDS = ("image", "text", "tokens", "vector")
"""Kinds of samples in order of preference: the first kind that has columns is used."""


@dataclass(frozen=True)
class Column:
    """Column of all files of a table.

    Its kind is number, list, nested (lists of numbers, lists of lists), text, image or other.
    """

    name: str
    kind: str
    values: Any  # (n,): Numbers or objects, None if missing; an arrow array of images
    type: str = ""  # As a Parquet or Arrow file declares it
    class_names: tuple[str, ...] = ()
    semicolons: bool = False  # True if semicolons separate the columns, so that a decimal sign may be a comma

    @cached_property
    def there(self) -> Bools:
        """Mask of the values that are not missing."""
        return ~is_missing(self.values)

    @cached_property
    def numbers(self) -> Floats:
        """Its values as numbers, NaN for others."""
        if self.values.dtype.kind != "O":
            return np.asarray(self.values, np.float64)
        cells = self.values.tolist()
        return np.array([_number(cell.replace(",", ".") if self.semicolons else cell) for cell in cells], np.float64)

    @property
    def with_point(self) -> AnyArray:
        """Its values, as numbers if their decimal sign may be a comma."""
        return self.numbers if self.semicolons and self.kind == "number" else np.asarray(self.values)

    @property
    def example(self) -> str:
        """Its first text that is no number; "" if there is none."""
        texts = self.values[self.there & np.isnan(self.numbers)]
        return str(texts[0]).strip() if len(texts) else ""

    @property
    def described(self) -> str:
        """Its name and type, for messages."""
        return f"{self.name}: {self.type}" if self.type else self.name

    def unusable(self) -> str:
        """Return why the column cannot be used as a feature; "" if it can."""
        if self.kind == "other":
            return f"no sample can be made of its type {self.type}"
        if self.kind != "image" and not self.there.any():
            return "it has no value"
        if PANDAS_INDEX.fullmatch(self.name):
            return "an index that pandas wrote"
        with np.errstate(invalid="ignore"):
            if self.kind == "number" and len(self.values) > 2 and (np.diff(self.numbers) == 1).all():
                return "it counts the rows"
        if self.kind in ("number", "text") and IDENTIFIER.fullmatch(self.name) and len(self.values) > 2:
            present = self.values[self.there].tolist()
            if len(set(present)) == len(present) and not (self.numbers % 1 > 0).any():
                return "an identifier: every row has a value of its own"
        return ""


def is_missing(values: AnyArray) -> Bools:
    """Return a mask of the missing values: NaN, None, and texts that mark missing values."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind not in "OU":
        return np.zeros(len(values), bool)
    return np.array([v.strip() in MISSING if isinstance(v, str) else v is None or v is not v for v in values], bool)


def _number(cell: Any) -> float:
    """Return a number or a text cell as a float, NaN if it is none."""
    try:
        return float("?" if isinstance(cell, str) and "_" in cell else cell)
    except (TypeError, ValueError):
        return TRUTH.get(str(cell).strip(), np.nan)


@dataclass(frozen=True)
class UserTable:
    """All rows of the files of a table, training rows first."""

    raw: Path
    files: list[Path]
    columns: dict[str, Column]
    tested: bool  # True if there are test files
    boundary: int  # Number of training rows
    file_of: Ints  # (n,): File of each row
    places: Ints  # (n,): Line or row in that file

    def where(self, row: int) -> str:
        """Return the location of a row as text."""
        path = self.files[self.file_of[row]]
        return f"{path}, {'row' if is_arrow(path) else 'line'} {self.places[row]}"


@dataclass(frozen=True)
class _File:
    """Content of one file: its columns, and the line or number of each row."""

    columns: dict[str, Any]  # Text cells, or arrow arrays
    places: Ints
    semicolons: bool = False
    class_names: dict[str, tuple[str, ...]] | None = None

    @property
    def types(self) -> list[str]:
        """Names and declared types of its columns."""
        return [f"{name}: {getattr(values, 'type', 'text')}" for name, values in self.columns.items()]


def open_table(raw: Path, options: ReadOptions, tally: Tally) -> UserTable:
    """Read the table of one file, or of the files below a folder, assigned to parts by their names."""
    train, test = _parts(raw, tally)
    paths = [*train, *test]
    files = [_arrow_file(path) if is_arrow(path) else _csv_file(path, options, tally) for path in paths]
    first = files[0]
    for path, file in zip(paths, files, strict=True):
        if file.types != first.types:
            raise UserError(
                f"The columns of {path} ({', '.join(file.types)}) differ from those of {paths[0]} "
                f"({', '.join(first.types)}). Name one file, or a folder of files with the same columns."
            )
        if file.class_names and file.class_names != first.class_names:
            raise UserError(f"{path} names its classes differently from {paths[0]}. Save both with the same names.")
    sizes = [len(file.places) for file in files]
    if not sum(sizes):
        raise UserError(f"{raw} holds no readable row.{tally.first_bad or ' Add rows.'}")
    columns = {}
    for name in first.columns:
        held = [file.columns[name] for file in files]
        made = _arrow_column(name, held) if is_arrow(paths[0]) else _csv_column(name, held, first.semicolons)
        columns[name] = replace(made, class_names=(first.class_names or {}).get(name, ()))
    owner, places = np.repeat(np.arange(len(files)), sizes), np.concatenate([file.places for file in files])
    return UserTable(raw, paths, columns, bool(test), sum(sizes[: len(train)]), owner, places)


def _parts(raw: Path, tally: Tally) -> tuple[list[Path], list[Path]]:
    """Return training and test files; files whose names denote no part are for training.

    A validation part is skipped if there is a test part; otherwise it is the test part.
    """
    found = [raw]
    if raw.is_dir():
        below = [path for path in files_below(raw) if is_table(path) and not path.name.startswith("cache-")]
        plain = [path for path in below if not path.name.lower().endswith((".txt", ".txt.gz"))]
        found = [path for path in below if is_arrow(path)] or plain or below
        for path in set(below) - set(found):
            tally.note(f"{path} is not used")
    if not found:
        endings = ", ".join((*ARROWS, *TEXTS))
        raise UserError(f"There is no table in {raw}. --raw must name a file that ends in {endings}, or their folder.")
    parts: dict[str, list[Path]] = {"train": [], "test": [], "valid": []}
    for path in found:
        parts[(part_of(path.relative_to(raw)) if raw.is_dir() else None) or "train"].append(path)
    if not parts["train"]:
        raise UserError(f"{raw} holds no training file, only test or validation files. Name one of them train.")
    if parts["valid"] and parts["test"]:
        tally.note(f"{len(parts['valid'])} files of a validation part are not used")
    return parts["train"], parts["test"] or parts["valid"]


def is_table(path: Path) -> bool:
    """Check whether a file has the name of a table."""
    return path.name.lower().removesuffix(".gz").endswith((*TEXTS, *ARROWS))


def is_arrow(path: Path) -> bool:
    """Check whether a file has the name of a Parquet or Arrow file."""
    return path.name.lower().endswith(ARROWS)


def _check_names(path: Path, names: list[str]) -> None:
    """Reject a table in which several columns have one name."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path} names several columns {twice[0]!r}. Rename or remove all except one.")


def _csv_file(path: Path, options: ReadOptions, tally: Tally) -> _File:
    """Read a CSV file; rows with too few or too many fields are skipped and counted."""
    content = list(lines(path, options.encoding or "utf-8-sig"))
    head = next((line for line in content if line.strip()), "")
    given = options.delimiter
    delimiter = max(DELIMITERS, key=head.count) if given is None else NAMED_DELIMITERS.get(given, given)
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise UserError(f"--delimiter {given!r} is not possible. Give one character, or tab or space.")
    if given is None and delimiter != ",":
        sign = "a tab" if delimiter == "\t" else repr(delimiter)
        tally.note(f"columns of {path.name} are separated by {sign}")
    rows = csv_rows(path, content, delimiter)
    header = [name.strip() for name in next((row for _, row in rows if row), [])]
    names = [name or f"Unnamed: {place}" for place, name in enumerate(header)]
    if len(names) < 2:
        raise UserError(
            f"{path} has one column ({shown(head.strip(), repr)}), but needs labels and features. Remove lines above "
            "the header, or give --delimiter if the sign is none of comma, semicolon, tab and |."
        )
    _check_names(path, names)
    kept, places = [], []
    for line, row in rows:
        if len(row) == len(names):
            kept.append(row)
            places.append(line)
        elif row:
            tally.bad(f"{path}, line {line}", f"{len(row)} fields where the header names {len(names)}")
    cells = np.array(kept, object).reshape(-1, len(names)).T
    return _File(dict(zip(names, cells, strict=True)), np.array(places, np.int64), delimiter == ";")


def _csv_column(name: str, held: list[Any], semicolons: bool) -> Column:
    """Return a column of text cells: numbers if most cells are numbers."""
    column = Column(name, "text", np.concatenate(held), semicolons=semicolons)
    numbers = 2 * np.count_nonzero(~np.isnan(column.numbers)) > np.count_nonzero(column.there)
    return replace(column, kind="number") if numbers else column


def _arrow_file(path: Path) -> _File:
    """Read a Parquet or Arrow file: a stream, as Hugging Face's datasets write it, or a file with a footer."""
    import pyarrow as pa  # slow to import
    import pyarrow.parquet as pq

    try:
        if path.name.lower().endswith(".parquet"):
            with pq.ParquetFile(path) as file:
                found = file.read()
        else:
            source = pa.memory_map(str(path))
            try:
                reader = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
            found = reader.read_all()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({raised(error)}). Fetch or write it again.") from error
    metadata = found.schema.metadata or {}
    _check_names(path, found.schema.names)
    try:  # pandas names the columns that were an index
        listed = json.loads(metadata[b"pandas"])["index_columns"]
        found = found.drop_columns([name for name in listed if isinstance(name, str)])
    except (KeyError, ValueError, TypeError):
        pass
    columns = {name: _plain(found.column(name)) for name in found.schema.names}
    return _File(columns, np.arange(found.num_rows), class_names=_class_names(metadata))


def _plain(column: Any) -> Any:
    """Return a column without dictionaries, extension types and decimals."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    if hasattr(column.type, "storage_type"):
        return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    return column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Return the class names of columns, from the schema metadata of Hugging Face's datasets."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: tuple(map(str, one["names"])) for name, one in features.items() if one["_type"] == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _arrow_column(name: str, held: list[Any]) -> Column:
    """Return a column of arrow arrays; its type gives its kind."""
    import pyarrow as pa
    from pyarrow import types

    declared = inner = held[0].type
    values = pa.chunked_array([chunk for part in held for chunk in part.chunks], declared)
    depth = 0
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        depth, inner = depth + 1, inner.value_type
    kind = "other"
    if types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner):
        kind = ("number", "list", "nested", "other")[min(depth, 3)]
    elif types.is_struct(declared):
        kind = "image" if declared.get_field_index("bytes") >= 0 else "other"
    elif types.is_binary(declared) or types.is_large_binary(declared):
        kind = "image"
    elif str(declared) in ("string", "large_string", "string_view"):
        kind = "text"
    if kind not in ("image", "other"):
        values = np.asarray(values.to_numpy())
    return Column(name, kind, values, str(declared))


@dataclass(frozen=True)
class Roles:
    """Columns by role, and the kind of samples: image, text, tokens or vector."""

    labels: list[Column]
    user: Column | None
    group: Column | None
    features: list[Column]
    kind: str
    unused: tuple[tuple[str, str], ...]


def roles_of(table: UserTable, options: ReadOptions) -> Roles:
    """Return the role of each column."""
    columns = table.columns
    labels = [options.label] if options.label in columns else options.label.split(",")
    user = options.user or (USER_COLUMN if USER_COLUMN in columns else None)
    group = None if options.split in ("rows", "users") else options.split
    chosen = list(options.features or ())
    for flag, names in (("--label", labels), ("--user", [user]), ("--split", [group]), ("--features", chosen)):
        for name in names:
            if name is not None and name not in columns:
                listed = ", ".join(column.described for column in list(columns.values())[:12])
                more = f" and {len(columns) - 12} more" if len(columns) > 12 else ""
                headless = not is_arrow(table.files[0]) and not np.isnan(list(map(_number, columns))).all()
                hint = " Does the file begin with a header?" if headless else ""
                raise UserError(f"{table.raw} has no column {name!r}, but {listed}{more}. Name it with {flag}.{hint}")
    if wrong := sorted({*labels} & {*chosen}):
        raise UserError(f"{table.raw}: {wrong[0]!r} is the label column. Leave it out of --features.")
    others = [column for name, column in columns.items() if name not in (*labels, user, group)]
    if chosen:
        features = [columns[name] for name in chosen]
        unused = [(column.name, "not among --features") for column in others if column.name not in chosen]
    else:
        features, unused = _by_default(table, others, options.task)
    if group is not None and group not in chosen:
        unused.append((group, "it is what --split goes by"))
    kinds = {_sample_kind(column, options.task) for column in features}
    kind = next(iter(kinds))
    alone = kind in ("image", "tokens") or any(column.kind == "nested" for column in features)
    if len(kinds) != 1 or not kind or (len(features) > 1 and alone):
        task = f" with --task {options.task}" if options.task else ""
        raise UserError(
            f"{table.raw}: no sample can be made of {', '.join(column.described for column in features)}{task}. Name "
            "one column of images, of token ids or of lists of lists, or columns of texts, or columns of numbers, with "
            "--features."
        )
    of_users, of_groups = (None if name is None else columns[name] for name in (user, group))
    return Roles([columns[name] for name in labels], of_users, of_groups, features, kind, tuple(unused))


def _by_default(table: UserTable, others: list[Column], task: str | None) -> tuple[list[Column], list[tuple[str, str]]]:
    """Return the feature columns used by default, and the other columns with the reasons."""
    reasons = {column.name: column.unusable() for column in others}
    found: dict[str | None, list[Column]] = {}
    for column in others:
        if not reasons[column.name]:
            found.setdefault(_sample_kind(column, task), []).append(column)
    kind = next((kind for kind in KINDS if kind in found), None)
    if kind == "text" and "vector" in found:
        texts, numbers = (",".join(column.name for column in found[kind]) for kind in ("text", "vector"))
        raise UserError(
            f"{table.raw} has columns of text ({texts}) and of numbers ({numbers}), but a sample is made of one kind. "
            f"Choose with --features, e.g. --features {numbers}."
        )
    if kind == "text" and task is None:
        for column in found["text"]:
            if column.example.lower().endswith(SUFFIXES):
                raise UserError(
                    f"{table.raw}: column {column.name!r} names images ({column.example!r}). Add --task image to read "
                    "them, or --task text."
                )
    if kind is None:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:LISTED] if reason)
        with_task = f" with --task {task}" if task else ""
        raise UserError(
            f"{table.raw} has no column to learn from{with_task} ({why or 'there is no other'}). Name some with "
            "--features."
        )
    used = [column.name for column in found[kind]]
    reason = f"the samples are made of {', '.join(used[:LISTED])}"
    return found[kind], [(name, why or reason) for name, why in reasons.items() if name not in used]


def _sample_kind(column: Column, task: str | None) -> str | None:
    """Return the kind of samples that a column contains for a task, or None."""
    if column.kind == "image":
        return "image" if task in (None, "image") else None
    if column.kind == "text":
        return "image" if task == "image" else "text" if task != "vector" else None
    if task == "text":
        return "tokens" if column.kind == "list" else None
    return "vector" if column.kind in ("number", "list", "nested") and task != "image" else None
