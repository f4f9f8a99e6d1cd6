"""Parquet and Arrow files as a stream of column blocks: which belong to which part, and what their columns are.

pyarrow reads them; it is asked for when such files are read, and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.datasets.base import Tally
from data_prep.datasets.raw_files import part_of
from fedmpi.common.errors import UserError, raised

SUFFIXES = (".parquet", ".arrow")
BLOCK_ROWS = 1024
LIST = re.compile(r"(?:large_|fixed_size_)?list<[^<>]*: (\w+)(?: not null)?>(?:\[\d+\])?")


@dataclass(frozen=True)
class ColumnFiles:
    """The files of a training and of a test part.

    Parameters
    ----------
    train, test : tuple of Path
        test may be none.
    class_names : dict
        Names of the values of a column, where the files give them (Hugging Face's ClassLabel).
    columns : dict
        Name of every column -> its type as pyarrow writes it, in the order of the first file; of a dictionary, that of
        its values.
    """

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    columns: dict[str, str]
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)


def column_files(raw: Path, tally: Tally) -> ColumnFiles:
    """The files that `--raw` names: one file, or those below a folder, by the part that their names mean.

    A validation part is left alone where there is a test part, else it is the test part; files whose names mean no part
    are training files.

    Raises
    ------
    UserError
        There is none, or their columns differ.
    """
    if raw.is_dir():
        found = sorted(path for path in raw.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        found = [path for path in found if not path.name.startswith("cache-")]
    else:
        found = [raw] if raw.suffix in SUFFIXES and raw.is_file() else []
    if not found:
        raise UserError(f"no {' or '.join(SUFFIXES)} file in {raw}; --raw must name such a file, or a folder of them")
    parts: dict[str, list[Path]] = {"train": [], "test": [], "valid": []}
    for path in found:
        parts[part_of(path.relative_to(raw) if raw.is_dir() else Path(path.name)) or "train"].append(path)
    if not parts["train"]:
        raise UserError(f"{raw} holds no training file; files named test or validation alone are none")
    if parts["valid"] and parts["test"]:
        tally.note(f"the validation part ({len(parts['valid'])} files) is left alone")
    columns, names = _schema(parts["train"][0])
    test = tuple(parts["test"] or parts["valid"])
    for path in (*parts["train"], *test):
        other, given = _schema(path)
        if other != columns:
            raise UserError(
                f"{path} has other columns ({_column_list(other)}) than {parts['train'][0]} ({_column_list(columns)})"
            )
        for name in names.keys() & given.keys():
            if given[name] != names[name]:
                raise UserError(
                    f"{path} names the classes of column {name!r} otherwise than {parts['train'][0]}; save both with "
                    "the same names in the same order"
                )
    return ColumnFiles(tuple(parts["train"]), test, columns, names)


def _column_list(columns: dict[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in list(columns.items())[:12])


def blocks(path: Path, columns: list[str]) -> Iterator[dict[str, list[Any]]]:
    """Some columns of a file, `BLOCK_ROWS` rows or fewer at a time, as Python values.

    Raises
    ------
    UserError
        The file is damaged.
    """
    pa, pq = _pyarrow()
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(BLOCK_ROWS, columns=columns):
                    yield {name: batch.column(name).to_pylist() for name in columns}
            return
        with pa.memory_map(str(path)) as source, _arrow(pa, source) as reader:
            for batch in reader:
                batch.validate(full=True)  # offsets that lead beyond a column would be followed into foreign memory
                for low in range(0, batch.num_rows, BLOCK_ROWS):
                    part = batch.slice(low, BLOCK_ROWS)
                    yield {name: part.column(name).to_pylist() for name in columns}
    except UserError:
        raise
    except Exception as error:  # pyarrow raises errors of many kinds
        raise UserError(f"{path} cannot be read as {path.suffix} ({raised(error)}); fetch it again") from error


def listed(kind: str) -> str | None:
    """The type of the values of a list, from pyarrow's name of its type; None of what is no list of plain values."""
    found = LIST.fullmatch(kind)
    return found.group(1) if found else None


def _schema(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Types of the columns, and the names of classes in them."""
    pa, pq = _pyarrow()
    try:
        if path.suffix == ".parquet":
            schema = pq.read_schema(path)
        else:
            with pa.memory_map(str(path)) as source, _arrow(pa, source) as reader:
                schema = reader.schema
    except Exception as error:
        raise UserError(f"{path} cannot be read as {path.suffix} ({raised(error)}); fetch it again") from error
    if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise UserError(f"{path} names several columns {twice[0]!r}; rename or remove all but one")
    kinds = {name: schema.field(name).type for name in schema.names}
    plain = {name: kind.value_type if pa.types.is_dictionary(kind) else kind for name, kind in kinds.items()}
    return {name: str(kind) for name, kind in plain.items()}, _class_names(schema.metadata or {})


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Names of the classes of columns, or in their lists, from what Hugging Face's datasets write beside the schema."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        inner = {name: entry.get("feature", entry) for name, entry in features.items()}
        labels = {name: entry for name, entry in inner.items() if entry.get("_type") == "ClassLabel"}
        return {name: tuple(map(str, entry["names"])) for name, entry in labels.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _arrow(pa: Any, source: Any) -> Any:
    """The batches of an Arrow file: a stream, as Hugging Face's datasets write it, or a file with a footer."""
    try:
        return pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        reader = pa.ipc.open_file(source)
        return _Batches(reader)


class _Batches:
    """The batches of an Arrow file with a footer, as those of a stream."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.schema = reader.schema

    def __enter__(self) -> _Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return (self._reader.get_batch(number) for number in range(self._reader.num_record_batches))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "Parquet and Arrow files are read with pyarrow, which is missing: pip install pyarrow"
        ) from None
    return pyarrow, pyarrow.parquet
