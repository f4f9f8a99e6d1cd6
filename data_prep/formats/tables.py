"""Users' tables (CSV, Parquet, Arrow) as whole columns in memory, and the roles of the columns."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.formats.files import csv_rows, files_below, lines, part_of
from data_prep.formats.images import SUFFIXES
from data_prep.raw import ReadOptions, Tally
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.imports import Later
from fedmpi.common.types import AnyArray, Bools, Floats, Ints

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = Later("pandas")

TEXTS = (".csv", ".tsv", ".tab", ".txt")
ARROWS = (".parquet", ".arrow")
DELIMITERS = ",;\t|"
NAMED_DELIMITERS = {"tab": "\t", "\\t": "\t", "space": " "}
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*")
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


def is_missing(values: AnyArray) -> Bools:
    """Return a mask of the missing values: NaN, None, and texts that mark missing values."""
    missing = np.asarray(pd.isna(values))
    if values.dtype.kind == "O":
        missing |= [isinstance(value, str) and value.strip() in MISSING for value in values.tolist()]
    return missing


def _number(cell: Any) -> float:
    """Return a number or a text cell as a float, NaN if it is none."""
    try:
        return float("?" if isinstance(cell, str) and "_" in cell else cell)
    except (TypeError, ValueError):
        return TRUTH.get(str(cell).strip(), np.nan)


@dataclass(frozen=True)
class Column:
    """Column of a table: numbers or objects (n,), with the names of its classes if the file has them."""

    name: str
    values: AnyArray
    class_names: tuple[str, ...] = ()

    @cached_property
    def there(self) -> Bools:
        """Mask of the values that are not missing."""
        return ~is_missing(self.values)

    @cached_property
    def numbers(self) -> Floats:
        """Its values as numbers, NaN for others."""
        if self.values.dtype.kind in "biuf":
            return self.values.astype(np.float64)
        return np.array([_number(cell) for cell in self.values.tolist()], np.float64)

    @cached_property
    def kind(self) -> str:
        """number, list, nested (lists of numbers, lists of lists), text, image or other."""
        if self.values.dtype.kind in "biuf":
            return "number"
        first = next(iter(self.values[~pd.isna(self.values)]), None)
        if isinstance(first, str):
            numbers = 2 * np.count_nonzero(~np.isnan(self.numbers)) > np.count_nonzero(self.there)
            return "number" if numbers else "text"
        if isinstance(first, np.ndarray):
            inner, kind = (first[0], "nested") if first.dtype.kind == "O" and len(first) else (first, "list")
            return kind if np.asarray(inner).dtype.kind in "biuf" else "other"
        if isinstance(first, bytes) or (isinstance(first, dict) and "bytes" in first):
            return "image"
        return "number" if isinstance(first, Number) else "other"

    def unusable(self) -> str:
        """Return why the column cannot be used as a feature; "" if it can."""
        if not self.there.any():
            return "it has no value"
        if self.kind == "other":
            return "no sample can be made of its values"
        if PANDAS_INDEX.fullmatch(self.name):
            return "an index that pandas wrote"
        if self.kind not in ("number", "text") or len(self.values) < 3:
            return ""
        present = self.values[self.there].tolist()
        identifies = len(set(present)) == len(present) and not (self.numbers % 1 > 0).any()
        if (np.diff(self.numbers) == 1).all() or (identifies and IDENTIFIER.fullmatch(self.name)):
            return "an identifier: every row has a value of its own"
        return ""


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


def open_table(raw: Path, options: ReadOptions, tally: Tally) -> UserTable:
    """Read the table of one file, or of the files below a folder, assigned to parts by their names."""
    train, test = _parts(raw, tally)
    paths = [*train, *test]
    frames = [_arrow_frame(path) if is_arrow(path) else _csv_frame(path, options, tally) for path in paths]
    names = frames[0].columns.tolist()
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{paths[0]} names several columns {twice[0]!r}. Rename or remove all except one.")
    for path, frame in zip(paths, frames, strict=True):
        if frame.columns.tolist() != names or frame.attrs != frames[0].attrs:
            raise UserError(
                f"The columns of {path} ({', '.join(frame.columns)}) or their class names differ from those of "
                f"{paths[0]} ({', '.join(names)}). Name one file, or a folder of files with the same columns."
            )
    sizes = [len(frame) for frame in frames]
    if not sum(sizes):
        raise UserError(f"{raw} holds no readable row.{tally.first_bad or ' Add rows.'}")
    table = pd.concat(frames)
    columns = {name: Column(name, np.asarray(table[name]), frames[0].attrs.get(name, ())) for name in names}
    owner = np.repeat(np.arange(len(frames)), sizes)
    return UserTable(raw, paths, columns, bool(test), sum(sizes[: len(train)]), owner, np.asarray(table.index))


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


def _csv_frame(path: Path, options: ReadOptions, tally: Tally) -> pd.DataFrame:
    """Return the cells of a CSV file by line; rows with too few or too many fields are skipped and counted."""
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
    kept, places = [], []
    for line, row in rows:
        if len(row) == len(names):
            commas = delimiter == ";"
            kept.append([cell.replace(",", ".") if commas and DECIMAL_COMMA.fullmatch(cell) else cell for cell in row])
            places.append(line)
        elif row:
            tally.bad(f"{path}, line {line}", f"{len(row)} fields where the header names {len(names)}")
    return pd.DataFrame(kept, np.array(places, np.int64), names, dtype=object)


def _arrow_frame(path: Path) -> pd.DataFrame:
    """Return a Parquet or Arrow file: a stream, as Hugging Face's datasets write it, or a file with a footer.

    The attributes of the frame are the class names of its columns.
    """
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
    frame = found.to_pandas().reset_index(drop=True)  # pandas keeps what was an index out of the columns
    frame.columns = frame.columns.map(str)
    metadata = found.schema.metadata or {}
    try:  # Hugging Face's datasets name the classes
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        frame.attrs = {name: tuple(one["names"]) for name, one in features.items() if one["_type"] == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError):
        pass
    return frame


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
    flag_of_chosen = "--inputs" if options.inputs else "--features"
    chosen = list(options.inputs or options.features or ())
    if options.inputs and options.features:
        raise UserError("--inputs and --features both name the columns of a sample. Keep one of them.")
    for flag, names in (("--label", labels), ("--user", [user]), ("--split", [group]), (flag_of_chosen, chosen)):
        for name in names:
            if name is not None and name not in columns:
                listed = ", ".join(list(columns)[:12])
                more = f" and {len(columns) - 12} more" if len(columns) > 12 else ""
                headless = not is_arrow(table.files[0]) and not np.isnan(list(map(_number, columns))).all()
                hint = " Does the file begin with a header?" if headless else ""
                raise UserError(f"{table.raw} has no column {name!r}, but {listed}{more}. Name it with {flag}.{hint}")
    if wrong := sorted({*labels} & {*chosen}):
        raise UserError(f"{table.raw}: {wrong[0]!r} is the label column. Leave it out of {flag_of_chosen}.")
    others = [column for name, column in columns.items() if name not in (*labels, user, group)]
    if chosen:
        features = [columns[name] for name in chosen]
        unused = [(column.name, f"not among {flag_of_chosen}") for column in others if column.name not in chosen]
    else:
        features, unused = _by_default(table, others, options.task)
    if group is not None and group not in chosen:
        unused.append((group, "it is what --split goes by"))
    kinds = {"inputs" if options.inputs else _sample_kind(column, options.task) for column in features}
    kind = next(iter(kinds))
    alone = kind in ("image", "tokens") or (kind == "vector" and any(column.kind == "nested" for column in features))
    if len(kinds) != 1 or not kind or (len(features) > 1 and alone):
        task = f" with --task {options.task}" if options.task else ""
        raise UserError(
            f"{table.raw}: no sample can be made of {', '.join(column.name for column in features)}{task}. Name one "
            "column of images, of token ids or of lists of lists, or columns of texts, or columns of numbers, with "
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
    if kind is None:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:LISTED] if reason)
        with_task = f" with --task {task}" if task else ""
        raise UserError(
            f"{table.raw} has no column to learn from{with_task} ({why or 'there is no other'}). Name some with "
            "--features."
        )
    if kind == "text" and "vector" in found:
        texts, numbers = (",".join(column.name for column in found[kind]) for kind in ("text", "vector"))
        raise UserError(
            f"{table.raw} has columns of text ({texts}) and of numbers ({numbers}), but a sample is made of one kind. "
            f"Choose with --features, e.g. --features {numbers}."
        )
    if kind == "text" and task is None:
        for column in found["text"]:
            if (path := str(column.values[column.there][0]).strip()).lower().endswith(SUFFIXES):
                raise UserError(
                    f"{table.raw}: column {column.name!r} names images ({path!r}). Add --task image to read them, or "
                    "--task text."
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
