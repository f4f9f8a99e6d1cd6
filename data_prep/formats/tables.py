"""Users' tables as whole columns in memory (CSV; Parquet and Arrow by pyarrow), and the roles of the columns."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.files import csv_rows, files_below, lines, part_of
from data_prep.formats.images import SUFFIXES
from data_prep.formats.targets import as_floats, is_missing
from data_prep.raw import ReadOptions, Tally
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.types import Bools, Floats, Ints

TEXTS = (".csv", ".tsv", ".tab", ".txt")
ARROWS = (".parquet", ".arrow")
DELIMITERS = ",;\t|"
NAMED_DELIMITERS = {"tab": "\t", "\\t": "\t", "space": " "}
SAMPLE_LINES = 100
REMEDY = "Save it as UTF-8, or give its encoding, e.g. --encoding cp1252 or --encoding utf-16."
DECIMAL_COMMA, DECIMAL_POINT = re.compile(r"\s*[+-]?\d+,\d+\s*"), re.compile(r"\s*[+-]?\d+\.\d+\s*")
THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2},\d{3}\s*")
LARGEST = float(np.finfo(np.float32).max)
FEWEST_LEVELS = 1e-4
"""Largest step of float32, as a share of a column's range, that leaves the column usable."""
LEAST_ROWS = 3
"""Smallest number of rows at which a column that counts 0, 1, 2 … is treated as an index."""
PANDAS_INDEX = re.compile(r"Unnamed: \d+(\.\d+)*|__index_level_\d+__")
IDENTIFIER = re.compile(
    r"(?i:(.*[_\W])?(id|ids|idx|index|uuid|guid|key|row|rowid|no|nr))|.*[a-z0-9](ID|Id|Idx|Index|Key)"
)
"""Names of identifier columns: id, user_id, PassengerId, index."""
USER_COLUMN = "user"
LISTED = 5
KINDS = ("image", "text", "tokens", "vector")
"""Kinds of samples in order of preference: the first kind that has columns is used."""
NUMERIC, LISTS = ("number", "whole", "truth"), ("list", "nested")


@dataclass(frozen=True)
class Column:
    """Column of all files of a table.

    Its kind is number, whole, truth (numbers), list, nested (lists of numbers, lists of lists), text, image or other.
    """

    name: str
    kind: str
    values: Any  # (n,): Numbers or objects, None if missing; an arrow array of images
    type: str = ""  # As the file declares it
    whole_lists: bool = False  # True if it contains lists of whole numbers
    class_names: tuple[str, ...] = ()
    is_index: bool = False  # True if pandas wrote it as an index
    decimal: str = "."
    first_rows: tuple[int, ...] = (0,)  # The first row of each file

    @cached_property
    def there(self) -> Bools:
        """Mask of the values that are not missing."""
        return ~is_missing(self.values)

    @cached_property
    def numbers(self) -> Floats:
        """Its values as numbers, NaN for others."""
        return as_floats(self.values, self.decimal)

    @cached_property
    def example(self) -> str:
        """Its first text that is no number; "" if there is none."""
        texts = self.values[self.there & (np.isnan(self.numbers) if self.decimal else True)]
        return str(texts[0]).strip() if len(texts) else ""

    @cached_property
    def shapes(self) -> Counter[tuple[int, ...]]:
        """Number of its lists by shape; (T, -1) if the inner lists differ in length."""
        return Counter(shape_of(value) for value in self.values[self.there].tolist())

    @property
    def described(self) -> str:
        """Its name and type, for messages."""
        return f"{self.name}: {self.type or self.kind}"

    @property
    def counts_rows(self) -> bool:
        """True if it counts 0, 1, 2 … or 1, 2, 3 …, perhaps in each file anew."""
        numbers = np.where(np.isfinite(self.numbers), self.numbers, np.nan)
        follows = np.diff(numbers, prepend=np.nan) == 1
        begins = np.isin(np.arange(len(follows)), self.first_rows) & np.isin(self.numbers, (0, 1))
        return bool((follows | begins).all())

    @property
    def is_identifier(self) -> bool:
        """True if it has the name of an identifier and another value in each row."""
        present = self.values[self.there].tolist()
        return IDENTIFIER.fullmatch(self.name) is not None and len(set(present)) == len(present)

    def unusable(self) -> str:
        """Return why the column cannot be used as a feature; "" if it can."""
        if self.kind == "other":
            return f"no sample can be made of its type {self.type}"
        if self.kind != "image" and not self.there.any():
            return "it has no value"
        if self.is_index or PANDAS_INDEX.fullmatch(self.name):
            return "an index that pandas wrote"
        if self.kind in ("whole", "text") and len(self.values) >= LEAST_ROWS:
            if self.kind == "whole" and self.counts_rows:
                return "it counts the rows"
            if self.is_identifier:
                return "an identifier: every row has a value of its own"
        return ""

    def rounding(self) -> tuple[str, bool]:
        """Return what float32 does to its numbers, "" if it does not matter, and whether it spoils them."""
        numbers = self.numbers[np.abs(self.numbers) <= LARGEST]
        low, high = numbers.min(initial=np.inf), numbers.max(initial=-np.inf)
        lost = np.abs(numbers - numbers.astype(np.float32)).max(initial=0)
        if high > low and lost > FEWEST_LEVELS * (high - low):
            span = f"column {self.name!r} holds numbers from {low:.10g} to {high:.10g}"
            return f"{span}, which differ by too little for float32 (rounded by up to {lost:.3g})", True
        beyond = lost and self.kind == "whole" and max(-low, high) > 2**24
        return f"column {self.name!r}: whole numbers beyond 16,777,216 are rounded to float32" * bool(beyond), False


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a list of numbers or of lists."""
    inner = {-1 if row is None else len(row) if np.ndim(row) or isinstance(row, list) else 0 for row in value}
    return (len(value),) if inner <= {0} else (len(value), inner.pop() if len(inner) == 1 else -1)


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

    @property
    def is_text(self) -> bool:
        """True if the files are CSV."""
        return not is_arrow(self.files[0])

    def where(self, row: int) -> str:
        """Return the location of a row as text."""
        return f"{self.files[self.file_of[row]]}, {'line' if self.is_text else 'row'} {self.places[row]}"


@dataclass(frozen=True)
class _File:
    """Content of one file: values and declared types of its columns, and the line or number of each row."""

    values: dict[str, Any]
    types: dict[str, Any]
    places: Ints
    decimal: str = ""
    index: frozenset[str] = frozenset()
    class_names: dict[str, tuple[str, ...]] | None = None

    @property
    def listed(self) -> str:
        """Its columns as text for messages."""
        named = [f"{name}: {kind}" if kind else name for name, kind in self.types.items()]
        return ", ".join(named[:12]) + (f" and {len(named) - 12} more" if len(named) > 12 else "")


def open_table(raw: Path, options: ReadOptions, tally: Tally) -> UserTable:
    """Read the table of one file, or of the files below a folder, assigned to parts by their names."""
    train, test = _parts(raw, tally)
    paths = [*train, *test]
    files = [(_arrow_file if is_arrow(path) else _csv_file)(path, options, tally) for path in paths]
    first, names = files[0], [file.class_names or {} for file in files]
    for path, file, other in zip(paths, files, names, strict=True):
        if file.types != first.types:
            raise UserError(
                f"The columns of {path} ({file.listed}) differ from those of {paths[0]} ({first.listed}). Name one "
                "file, or a folder of files with the same columns."
            )
        if wrong := [name for name in other if names[0].get(name, other[name]) != other[name]]:
            raise UserError(
                f"{path} names the classes of column {wrong[0]!r} differently from {paths[0]}. Save both with the same "
                "names in the same order."
            )
    sizes = [len(file.places) for file in files]
    if not sum(sizes):
        raise UserError(f"{raw} holds no readable row.{tally.first_bad or ' Add rows.'}")
    decimal = max(file.decimal for file in files)
    if decimal == "," and not options.decimal:
        tally.note(f"numbers of {paths[0].name} have a decimal comma")
    columns = {}
    for name in first.types:
        held = [file.values[name] for file in files]
        made = _arrow_column(name, held) if is_arrow(paths[0]) else _csv_column(name, held, decimal)
        known = names[0].get(name, ())
        starts = tuple((np.cumsum(sizes) - sizes).tolist())
        columns[name] = replace(made, class_names=known, is_index=name in first.index, first_rows=starts)
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
        if not path.stat().st_size:
            raise UserError(f"{path} is empty. Write or fetch it again.")
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


def _check_distinct(path: Path, names: list[str]) -> None:
    """Reject a table in which several columns have one name."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path} names several columns {twice[0]!r}. Rename or remove all except one.")


def _csv_file(path: Path, options: ReadOptions, tally: Tally) -> _File:
    """Read a CSV file; malformed rows are skipped and counted."""
    content = list(lines(path, options.encoding, remedy=REMEDY))
    delimiter = _delimiter(path, content[:SAMPLE_LINES], options.delimiter, tally)
    rows = csv_rows(path, content, tally, delimiter)
    header = [name.strip() for name in next((row for _, row in rows if row), [])]
    if not header:
        raise UserError(f"{path} holds no row. Write a header and rows below it, and end lines with a line feed.")
    names = [name or f"Unnamed: {place}" for place, name in enumerate(header)]
    names = [f"{name}.0" if not given and name in header else name for name, given in zip(names, header, strict=True)]
    if len(names) == 1:
        raise UserError(
            f"{path} has one column ({shown(names[0], repr)}), but needs labels and features. Remove "
            "lines above the header, or give --delimiter if the sign is none of comma, semicolon, tab and |."
        )
    _check_distinct(path, names)
    kept, places = [], []
    for line, row in rows:
        if len(row) == len(names):
            kept.append(row)
            places.append(line)
        elif row:
            tally.bad(f"{path}, line {line}", f"{len(row)} fields where the header names {len(names)}")
    cells = np.array(kept, object).reshape(-1, len(names)).T
    decimal = options.decimal or _decimal(path, delimiter, cells[:, :SAMPLE_LINES].ravel().tolist())
    return _File(dict(zip(names, cells, strict=True)), dict.fromkeys(names, ""), np.array(places, np.int64), decimal)


def _delimiter(path: Path, sample: list[str], given: str | None, tally: Tally) -> str:
    """Return the given delimiter, or the one that gives most rows as many fields as the header, the more the better."""
    if given is not None:
        sign = NAMED_DELIMITERS.get(given, given)
        if len(sign) != 1 or sign in '"\r\n':
            raise UserError(f"--delimiter {given!r} is not possible. Give one character, or tab or space.")
        return sign
    ranks = {}
    for sign in DELIMITERS:
        widths = [len(row) for _, row in csv_rows(path, sample, None, sign) if row]
        if widths and widths[0] > 1:
            ranks[sign] = widths.count(widths[0]), widths[0]
    best = max(ranks, key=ranks.__getitem__, default=",")
    if best != ",":
        tally.note(f"columns of {path.name} are separated by {'a tab' if best == chr(9) else repr(best)}")
    return best


def _decimal(path: Path, delimiter: str, cells: list[str]) -> str:
    """Return the decimal sign: a comma if some numbers contain one and none contains a point."""
    commas = [cell for cell in cells if DECIMAL_COMMA.fullmatch(cell)]
    if delimiter == "," or not commas or any(map(DECIMAL_POINT.fullmatch, cells)):
        return "."
    if all(map(THOUSANDS.fullmatch, commas)):
        raise UserError(
            f"{path}: the comma in {commas[0].strip()!r} may separate decimals or thousands. Say --decimal , or write "
            "numbers without separators of thousands."
        )
    return ","


def _csv_column(name: str, held: list[Any], decimal: str) -> Column:
    """Return a column of text cells: numbers if most cells are numbers."""
    column = Column(name, "text", np.concatenate(held), decimal=decimal)
    good = np.count_nonzero(~np.isnan(column.numbers))
    if 2 * good <= np.count_nonzero(column.there):
        return column
    fractions = set("".join(column.values.tolist())) & {".", decimal}
    return Column(name, "number" if fractions else "whole", column.values, decimal=decimal)


def _arrow_file(path: Path, options: ReadOptions, tally: Tally) -> _File:
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
    names, metadata = found.schema.names, found.schema.metadata or {}
    _check_distinct(path, names)
    values = {name: _plain(found.column(name)) for name in names}
    try:
        listed = json.loads(metadata[b"pandas"])["index_columns"]
        index = frozenset(name for name in listed if isinstance(name, str))
    except (KeyError, ValueError, TypeError):
        index = frozenset()
    types = {name: column.type for name, column in values.items()}
    return _File(values, types, np.arange(found.num_rows), "", index, _class_names(metadata))


def _plain(column: Any) -> Any:
    """Return a column without dictionaries, extension types and decimals."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        return pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], column.type.value_type)
    if hasattr(column.type, "storage_type"):
        return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    return column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Return the class names of columns, from the schema metadata of Hugging Face's datasets."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            name: tuple(map(str, entry["names"]))
            for name, entry in features.items()
            if entry.get("_type") == "ClassLabel"
        }
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
        single = "truth" if types.is_boolean(inner) else "whole" if types.is_integer(inner) else "number"
        kind = (single, *LISTS, "other")[min(depth, 3)]
    elif types.is_struct(declared):
        kind = "image" if declared.get_field_index("bytes") >= 0 else "other"
    elif types.is_binary(declared) or types.is_large_binary(declared):
        kind = "image"
    elif str(declared) in ("string", "large_string", "string_view"):
        kind = "text"
    if kind not in ("image", "other"):
        values = np.asarray(values.to_numpy())
    return Column(name, kind, values, str(declared), types.is_integer(inner))


@dataclass(frozen=True)
class Roles:
    """Columns by role, and the kind of samples: image, text, tokens or vector."""

    labels: list[Column]
    user: Column | None
    group: Column | None
    features: list[Column]
    kind: str
    unused: tuple[tuple[str, str], ...]


def roles_of(table: UserTable, options: ReadOptions, tally: Tally) -> Roles:
    """Return the role of each column."""
    columns = table.columns
    labels = [options.label] if options.label in columns else options.label.split(",")
    user = options.user or (USER_COLUMN if USER_COLUMN in columns else None)
    group = None if options.split in ("rows", "users") else options.split
    chosen = list(options.features or ())
    for flag, names in (("--label", labels), ("--user", [user]), ("--split", [group]), ("--features", chosen)):
        for name in names:
            if name is not None and name not in columns:
                listed = ", ".join(column.described if column.type else column.name for column in _first(table))
                more = f" and {len(columns) - 12} more" if len(columns) > 12 else ""
                headless = table.is_text and not np.isnan(as_floats(np.array(list(columns), object))).all()
                hint = " Does the file begin with a header?" if headless else ""
                raise UserError(f"{table.raw} has no column {name!r}, but {listed}{more}. Name it with {flag}.{hint}")
        if len(set(names)) < len(names):
            raise UserError(f"{flag} {','.join(map(str, names))} names a column twice. Name each once.")
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
    kind = _kind_of(table, features, options)
    if kind == "vector":
        check_precision(table.raw, features, bool(chosen), tally)
    of_users, of_groups = (None if name is None else columns[name] for name in (user, group))
    return Roles([columns[name] for name in labels], of_users, of_groups, features, kind, tuple(unused))


def _first(table: UserTable) -> list[Column]:
    return list(table.columns.values())[:12]


def _by_default(table: UserTable, others: list[Column], task: str | None) -> tuple[list[Column], list[tuple[str, str]]]:
    """Return the feature columns used by default, and the other columns with the reasons."""
    reasons = {column.name: column.unusable() for column in others}
    found: dict[str | None, list[Column]] = {}
    for column in others:
        if not reasons[column.name]:
            found.setdefault(sample_kind(column, task), []).append(column)
    kind = next((kind for kind in KINDS if kind in found), None)
    if kind == "text" and "vector" in found:
        text, numbers = ([column.name for column in found[kind][:LISTED]] for kind in ("text", "vector"))
        example = found["text"][0].example
        quoted = f", {shown(example, repr)} in {text[0]} is no number" if example and table.is_text else ""
        raise UserError(
            f"{table.raw} has columns of text ({', '.join(text)}{quoted}) and of numbers ({', '.join(numbers)}), but a "
            f"sample is made of one kind. Choose with --features, e.g. --features {','.join(numbers)}."
        )
    if kind == "text" and task is None:
        for column in found["text"]:
            if column.example.lower().endswith(tuple(SUFFIXES)):
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


def _kind_of(table: UserTable, features: list[Column], options: ReadOptions) -> str:
    """Return the kind of samples that some columns make; UserError if they do not fit together."""
    kinds = {sample_kind(column, options.task) for column in features}
    kind = next(iter(kinds))
    alone = kind in ("image", "tokens") or any(column.kind == "nested" for column in features)
    if len(kinds) != 1 or not kind or (len(features) > 1 and alone):
        task = f" with --task {options.task}" if options.task else ""
        raise UserError(
            f"{table.raw}: no sample can be made of {', '.join(column.described for column in features)}{task}. Name "
            "one column of images, of token ids or of lists of lists, or columns of texts, or columns of numbers, with "
            "--features."
        )
    return kind


def sample_kind(column: Column, task: str | None) -> str | None:
    """Return the kind of samples that a column contains for a task, or None."""
    if column.kind == "image":
        return "image" if task in (None, "image") else None
    if column.kind == "text":
        return "image" if task == "image" else "text" if task != "vector" else None
    if task == "text":
        return "tokens" if column.kind == "list" and column.whole_lists else None
    return "vector" if column.kind in (*NUMERIC, *LISTS) and task != "image" else None


def check_precision(raw: Path | str, columns: list[Column], chosen: bool, tally: Tally) -> None:
    """Reject columns of which float32 keeps too little precision, or note them if the user chose them."""
    for column in columns:
        if column.kind in LISTS:
            continue
        problem, spoiled = column.rounding()
        if spoiled and not chosen:
            raise UserError(
                f"{raw}: {problem}. Subtract its smallest value and store it again, or leave it out (of a table, with "
                "--features)."
            )
        if problem:
            tally.note(problem)
        if not chosen and IDENTIFIER.fullmatch(column.name) and column.name.lower().endswith("id"):
            tally.note(
                f"column {column.name!r} is a feature, though its name is that of an identifier: --user or --split can "
                "name it, --features leaves it out"
            )
