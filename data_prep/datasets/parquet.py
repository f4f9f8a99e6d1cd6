"""Parquet and Arrow files of the user's own, also as Hugging Face's datasets save and publish them, streamed."""

from __future__ import annotations

import io
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import TEXT_OPTIONS, DataSet, ReadOptions, Tally
from data_prep.datasets.columns import ColumnFiles, blocks, column_files
from data_prep.datasets.files import Names, Scratch, compact, hold_out
from data_prep.datasets.folders import Found, ImageForm, decode, image_facts
from data_prep.datasets.imagefolder import common_form
from data_prep.datasets.labels import LabelRule, classes_of
from data_prep.datasets.normalisation import measured
from data_prep.datasets.texts import LabelledTexts, text_data_set
from data_prep.raw import RawDataset
from fedmpi.common.errors import UserError

HINT = "a .parquet or .arrow file, or a folder of them (train and test by their names), as Hugging Face's datasets"
STATISTICS_ROWS = 2000
USER_COLUMN = "user"
LARGEST = float(np.finfo(np.float32).max)
Kind = Literal["image", "text", "vector"]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class _Roles:
    """Which columns are what."""

    label: str
    user: str | None
    features: tuple[str, ...]
    kind: Kind

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys((*self.features, self.label, *([self.user] if self.user else []))))


@dataclass
class _Table:
    """What is kept of every readable row beside its features."""

    labels: list[Any] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    names: Names = field(default_factory=Names)

    def add(self, label: Any, user: Any) -> None:
        self.labels.append(label)
        self.users.append(-1 if user is None else self.names.code(str(user)))


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """A label column and, of the others: images, texts or numbers, streamed block by block.

    One column of images (Hugging Face's Image, or their bytes) is the samples; else columns of texts, joined; else all
    columns of numbers and of lists of numbers, a vector. `features` says which where that is not meant. A part named
    test, else one named validation, tests; without either a fifth of the rows is held out.
    """
    files = column_files(raw, tally)
    roles = _roles(raw, files, options)
    table, features = _Table(), _features(roles, options)
    ends = []
    for part in (files.train, files.test):
        for path in part:
            _add_file(path, roles, features, table, tally)
        ends.append(len(table.labels))
    everyone = np.arange(len(table.labels))
    train, test = (everyone[: ends[0]], everyone[ends[0] :]) if files.test else hold_out(len(everyone))
    labels, names = _labels(raw, files, roles, table, options, tally)
    keep = labels >= 0
    if isinstance(features, _Images):
        form = common_form(raw, [features.found()], options, tally)
        keep &= features.fits(form)
    train, test = train[keep[train]], test[keep[test]]
    for rows, which in ((train, "training"), (test, "test")):
        if not len(rows):
            first = f": the first that is none: {tally.first}" if tally.first else ""
            raise UserError(f"{raw} holds no usable {which} row{first}")
    if isinstance(features, _Texts):
        return text_data_set(PARQUET, features.collected(table), labels, names, (train, test), options, tally)
    x = features.reader(form) if isinstance(features, _Images) else features.reader()
    shape = form.shape if isinstance(features, _Images) else features.shape
    users, user_names = _users(table, train, tally)
    data = RawDataset(
        name=PARQUET.name,
        task="image" if roles.kind == "image" else "vector",
        classes=len(names),
        class_names=names,
        feature_shape=shape,
        dtype="uint8" if roles.kind == "image" else "float32",
        mean=(),
        std=(),
        labels=labels[train],
        users=users,
        user_names=user_names,
        read=lambda index: x(train[index]),
        test_x=_stored(x, test, shape, np.uint8 if roles.kind == "image" else np.float32),
        test_y=labels[test],
        skipped=tally.unreadable,
        licence=PARQUET.licence,
        citation=PARQUET.citation,
        notes=tuple(tally.notes),
        feature_names=features.names if isinstance(features, _Numbers) else (),
    )
    return measured(data, at_most=STATISTICS_ROWS) if roles.kind == "image" else measured(data)


def _roles(raw: Path, files: ColumnFiles, options: ReadOptions) -> _Roles:
    columns = files.columns
    told = ", ".join(f"{name}: {kind}" for name, kind in list(columns.items())[:12])
    if options.label not in columns:
        raise UserError(f"{raw} has no column {options.label!r} ({told}); name the label column with --label")
    user = options.user or (USER_COLUMN if USER_COLUMN in columns else None)
    if user is not None and user not in columns:
        raise UserError(f"{raw} has no column {user!r} ({told}); name the column of users with --user, or leave it out")
    kinds = {name: _kind(kind) for name, kind in columns.items()}
    wanted = options.features
    if wanted is None:
        others = [name for name in columns if name not in (options.label, user)]
        by_kind = {kind: tuple(name for name in others if kinds[name] == kind) for kind in ("image", "text", "vector")}
        wanted = by_kind["image"] or by_kind["text"] or by_kind["vector"]
    for name in wanted:
        if name not in columns:
            raise UserError(f"{raw} has no column {name!r} ({told}); name those of the samples with --features")
        if name == options.label:
            raise UserError(
                f"{raw}: {name!r} is the label column, which no sample is made of; leave it out of --features"
            )
    found = {kinds[name] for name in wanted}
    if len(found) != 1 or None in found or (found == {"image"} and len(wanted) > 1):
        chosen = ", ".join(f"{name}: {columns[name]}" for name in wanted) or told
        raise UserError(
            f"{raw}: samples are one column of images, or columns of texts, or columns of numbers, not {chosen}; name "
            "them with --features"
        )
    return _Roles(options.label, user, tuple(wanted), found.pop())  # type: ignore[arg-type]


def _kind(kind: str) -> Kind | None:
    """What a column of a pyarrow type holds; None for what no sample is made of."""
    if kind in ("binary", "large_binary") or (kind.startswith("struct<") and "bytes: " in kind):
        return "image"
    if kind in ("string", "large_string", "string_view"):
        return "text"
    inner = kind.partition("<")[2].rpartition(">")[0].rpartition(": ")[2].removesuffix(" not null")
    number = inner if kind.startswith(("list<", "large_list<", "fixed_size_list<")) else kind
    scalar = number in ("float", "double", "halffloat", "bool") or number.startswith(("int", "uint"))
    return "vector" if scalar else None


class _Numbers:
    """Vectors of some columns: numbers, or lists of them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.columns = names
        self.shape: tuple[int, ...] = ()
        self._rows: Scratch | None = None
        self._block: list[list[float]] = []

    def add(self, values: list[Any], where: str, tally: Tally) -> bool:
        """Append a row; False, and counted, where it is none."""
        flat: list[Any] = []
        for value in values:
            flat.extend(value if isinstance(value, list) else [value])
        if any(not isinstance(value, int | float) or not abs(value) <= LARGEST for value in flat):
            tally.bad(where, "a value that is no finite number")
            return False
        if self._rows is None and flat:
            self.shape, self._rows = (len(flat),), Scratch((len(flat),), np.float32)
        if self._rows is None:
            tally.bad(where, "no number")
            return False
        if len(flat) != self.shape[0]:
            tally.bad(where, f"{len(flat)} numbers where the first row has {self.shape[0]}")
            return False
        self._block.append(flat)
        if len(self._block) == 1024:
            self._flush()
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers, where each is a column."""
        return self.columns if len(self.columns) == self.shape[0] else ()

    def reader(self) -> Any:
        self._flush()
        assert self._rows is not None
        rows = self._rows.rows()
        return lambda index: rows[index]

    def _flush(self) -> None:
        if self._block and self._rows is not None:
            self._rows.append(np.array(self._block, np.float32))
            self._block = []


class _Images:
    """Encoded images one behind another in a temporary file, decoded when they are asked for."""

    def __init__(self) -> None:
        self._bytes = Scratch((), np.uint8)
        self._ends = array("q", [0])
        self._sizes: list[tuple[int, int]] = []
        self._grey = True

    def add(self, values: list[Any], where: str, tally: Tally) -> bool:
        """Append an image; False, and counted, where it cannot be read."""
        content = values[0].get("bytes") if isinstance(values[0], dict) else values[0]
        if not isinstance(content, bytes) or not content:
            tally.bad(where, "no bytes of an image (a path alone is not followed)")
            return False
        facts = image_facts(io.BytesIO(content), tally, where)
        if facts is None:
            return False
        self._bytes.append(np.frombuffer(content, np.uint8))
        self._ends.append(self._bytes.length)
        self._sizes.append(facts[0])
        self._grey = self._grey and facts[1]
        return True

    def found(self) -> Found:
        return Found((), np.empty(0, np.int64), tuple(self._sizes), self._grey)

    def fits(self, form: ImageForm) -> NDArray[np.bool_]:
        return np.array([form.resize or size == (form.width, form.height) for size in self._sizes], bool)

    def reader(self, form: ImageForm) -> Any:
        content, ends = self._bytes.rows(), self._ends

        def read(rows: Rows) -> NDArray[np.uint8]:
            out = np.empty((len(rows), *form.shape), np.uint8)
            for place, row in enumerate(rows.tolist()):
                out[place] = decode(io.BytesIO(content[ends[row] : ends[row + 1]].tobytes()), form)
            return out

        return read


class _Texts:
    """Texts of some columns, joined by spaces."""

    def __init__(self, length: int) -> None:
        self._texts = LabelledTexts(length)

    def add(self, values: list[Any], where: str, tally: Tally) -> bool:
        """Append a text; False, and counted, where it is empty."""
        text = " ".join(value for value in values if isinstance(value, str))
        if not text.strip():
            tally.bad(where, "the text is empty")
            return False
        self._texts.add(text, 0)
        return True

    def collected(self, table: _Table) -> LabelledTexts:
        """The texts with the users of a table."""
        self._texts.users, self._texts.user_names = table.users, table.names
        return self._texts


def _features(roles: _Roles, options: ReadOptions) -> _Numbers | _Images | _Texts:
    if roles.kind == "image":
        return _Images()
    return _Texts(options.length) if roles.kind == "text" else _Numbers(roles.features)


def _add_file(path: Path, roles: _Roles, features: _Numbers | _Images | _Texts, table: _Table, tally: Tally) -> None:
    row = 0
    for block in blocks(path, roles.columns):
        labels = block[roles.label]
        users = block[roles.user] if roles.user else [None] * len(labels)
        samples = zip(*(block[name] for name in roles.features), strict=True)
        for values, label, user in zip(samples, labels, users, strict=True):
            if features.add(list(values), f"{path}, row {row}", tally):
                table.add(label, user)
            row += 1


def _labels(
    raw: Path, files: ColumnFiles, roles: _Roles, table: _Table, options: ReadOptions, tally: Tally
) -> tuple[Rows, tuple[str, ...]]:
    """Labels of all rows, -1 where there is none, and the names of the classes."""
    values, where = table.labels, f"{raw}, column {roles.label}"
    if not values:
        raise UserError(f"{raw} holds no readable row{f': {tally.first}' if tally.first else ''}")
    names = files.class_names.get(roles.label)
    if any(not isinstance(value, str | int | float | None) for value in values):
        raise UserError(f"{where} holds {files.columns[roles.label]}; labels must be whole numbers or texts")
    if any(isinstance(value, str) for value in values):
        column = np.array(["" if value is None else str(value) for value in values])
    elif any(value is None or isinstance(value, float) for value in values) or names:
        column = np.array([np.nan if value is None or (names and value < 0) else value for value in values], np.float64)
    else:
        column = np.array(values)
    (labels,), found = classes_of(
        [(where, column)], LabelRule(options.skip_unlabelled, options.numbers_are_classes), tally
    )
    if names is None:
        return labels, found
    given = np.array([int(name) for name in found])
    if len(given) and given.max() >= len(names):
        raise UserError(f"{where}: the label {given.max()} is beyond the {len(names)} names of its classes")
    return np.where(labels >= 0, given[labels], -1), names


def _users(table: _Table, train: Rows, tally: Tally) -> tuple[Rows | None, tuple[str, ...] | None]:
    users = np.array(table.users, np.int64)[train]
    if (users < 0).all():
        return None, None
    if nobody := int((users < 0).sum()):
        tally.note(f"{nobody:,} of {len(users):,} training rows name no user, so the data have no natural clients")
        return None, None
    return compact(users, table.names.names)


def _stored(x: Any, rows: Rows, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    scratch = Scratch(shape, dtype)
    for start in range(0, len(rows), 256):
        scratch.append(x(rows[start : start + 256]))
    return scratch.rows()


PARQUET = DataSet(
    name="parquet",
    samples="yours",
    classes="yours",
    licence="yours",
    citation="yours",
    page="",
    files=HINT,
    read=read,
    options=TEXT_OPTIONS
    | frozenset(
        {"label", "user", "features", "image_size", "skip_odd_sizes", "skip_unlabelled", "numbers_are_classes"}
    ),
    raw="file",
)
