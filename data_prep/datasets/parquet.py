"""Parquet and Arrow files of the user's own, also as Hugging Face's datasets save and publish them, streamed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep.datasets.arrays import token_names, with_targets
from data_prep.datasets.base import TEXT_OPTIONS, DataSet, ReadOptions, Tally
from data_prep.datasets.columns import ColumnFiles, blocks, column_files, listed
from data_prep.datasets.imagefolder import common_form
from data_prep.datasets.labels import LabelRule, classes_of
from data_prep.datasets.parquet_features import Images, Kind, Numbers, Places, Texts, Tokens
from data_prep.datasets.parquet_targets import Targets
from data_prep.datasets.raw_files import Names, stored
from data_prep.datasets.texts import natural_clients, text_data_set
from data_prep.holdout import holding_out
from data_prep.raw import RawDataset, measured
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.data.schema import Modality

HINT = "a .parquet or .arrow file, or a folder of them (train and test by their names), as Hugging Face's datasets"
STATISTICS_ROWS = 2000
USER_COLUMN = "user"
EVERY_TOKEN = 1 << 30
"""Tokens kept where --length does not say: of lists all, of texts `ReadOptions.length`."""
Features = Numbers | Tokens | Images | Texts
STORED: dict[Kind, tuple[Modality, Literal["uint8", "int32", "float32"]]] = {
    "image": ("image", "uint8"),
    "text": ("text", "int32"),
    "tokens": ("text", "int32"),
    "vector": ("vector", "float32"),
}
"""Task and dtype of samples of each kind."""


@dataclass(frozen=True)
class _Roles:
    """Which columns are what; `valued`: the targets are numbers or lists of them, not classes."""

    labels: tuple[str, ...]
    valued: bool
    user: str | None
    features: tuple[str, ...]
    kind: Kind

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys((*self.features, *self.labels, *([self.user] if self.user else []))))


@dataclass
class _Table:
    """What is kept of every readable row beside its features."""

    targets: Targets | None
    labels: list[Any] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    places: Places = field(default_factory=Places)

    def wrong(self, labels: list[Any]) -> str | None:
        """Why a row has no targets; None where it has."""
        return None if self.targets is None else self.targets.wrong(labels)

    def add(self, labels: list[Any], user: Any, row: int) -> None:
        """Append a row, which is the one of that number in the file that `places` has last."""
        if self.targets is None:
            self.labels.append(labels[0])
        else:
            self.targets.add(labels)
        nobody = user is None or user != user or not str(user).strip()
        self.users.append(-1 if nobody else self.names.code(str(user)))
        self.places.add(row)


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """One or several label columns and, of the others: images, texts, token ids or numbers, streamed block by block.

    One column of images (Hugging Face's Image, or their bytes) is the samples; else columns of texts, joined; else all
    columns of numbers and of lists of numbers, a vector. `features` says which where that is not meant, `task` "image"
    that texts are the paths of images, "text" that lists of whole numbers are token ids. A part named test, else one
    named validation, tests.
    """
    files = column_files(raw, tally)
    roles = _roles(raw, files, options)
    if options.features is None and (left := _left_out(files, roles)):
        tally.note(f"columns that no sample can be made of are left out: {left}")
    if roles.kind == "text" and options.length == EVERY_TOKEN:
        options = replace(options, length=ReadOptions.length)
    names = files.class_names.get(roles.labels[0], ())
    types = {name: files.columns[name] for name in roles.labels}
    table = _Table(Targets(types, options.targets, names) if roles.valued else None)
    features, ends = _features(raw, roles, options), []
    for part in (files.train, files.test):
        for path in part:
            _add_file(path, roles, features, table, tally)
        ends.append(len(table.users))
    if not table.users:
        raise UserError(f"{raw} holds no readable row{f': {tally.first}' if tally.first else ''}")
    readable = np.arange(len(table.users))
    train, test = readable[: ends[0]], readable[ends[0] :]
    if table.targets is None:
        labels, names = _labels(raw, files, roles, table, options, tally)
        usable = labels >= 0
    else:
        kind, y, usable = table.targets.result(raw, options, tally, table.places)
        labels, content = np.zeros(len(readable), np.int64), {"y": y, "target_names": np.array(names or roles.labels)}
        if kind == "tokens" and roles.kind == "text":
            raise UserError(f"{raw}: targets that are tokens need samples that are: name lists of them with --features")
    if isinstance(features, Images):
        form = common_form(raw, [features.found()], options, tally)
        usable &= features.fits(form)
    train, test = train[usable[train]], test[usable[test]]
    for rows, which in ((train, "training"), (test, "test")):
        if not len(rows) and (files.test or which == "training"):
            first = f": the first that is none: {tally.first}" if tally.first else ""
            raise UserError(f"{raw} holds no usable {which} row{first}")
    if isinstance(features, Texts):
        texts = features.collected(table.users, table.names)
        data = text_data_set(PARQUET, texts, labels, names, (train, test), options, tally)
        return data if table.targets is None else with_targets(data, kind, content, train, test)
    x = features.reader(form, table.places) if isinstance(features, Images) else features.reader()
    users, user_names = natural_clients(table.users, table.names, train, tally)
    task, dtype = STORED[roles.kind]
    shape = form.shape if isinstance(features, Images) else features.shape
    test_x = stored(x, test, shape, dtype)
    data = RawDataset(
        name=PARQUET.name,
        task=task,
        classes=len(names),
        class_names=names,
        feature_shape=shape,
        dtype=dtype,
        mean=(),
        std=(),
        labels=labels[train],
        users=users,
        user_names=user_names,
        read=lambda index: x(train[index]),
        test_x=test_x,
        test_y=labels[test],
        skipped=tally.unreadable,
        licence=PARQUET.licence,
        citation=PARQUET.citation,
        vocabulary=token_names(raw, features.ids()) if isinstance(features, Tokens) else (),
        notes=tuple(tally.notes),
        feature_names=features.names if isinstance(features, Numbers) else (),
    )
    if table.targets is not None:
        data = with_targets(data, kind, content, train, test)
    if roles.kind == "tokens":
        return data
    return measured(data, at_most=STATISTICS_ROWS) if roles.kind == "image" else measured(data)


def _roles(raw: Path, files: ColumnFiles, options: ReadOptions) -> _Roles:
    columns = files.columns
    column_list = ", ".join(f"{name}: {kind}" for name, kind in list(columns.items())[:12])
    labels = (options.label,) if options.label in columns else tuple(options.label.split(","))
    for name in labels:
        if name not in columns:
            raise UserError(f"{raw} has no column {name!r} ({column_list}); name the label column with --label")
    if len(set(labels)) < len(labels):
        raise UserError(f"--label {options.label} names a column twice; name each once")
    user = options.user or (USER_COLUMN if USER_COLUMN in columns else None)
    if user is not None and user not in columns:
        raise UserError(
            f"{raw} has no column {user!r} ({column_list}); name the column of users with --user, or leave it out"
        )
    kinds = {name: _kind(kind, options.task) for name, kind in columns.items()}
    wanted = options.features
    if wanted is None:
        others = [name for name in columns if name not in (*labels, user)]
        by_kind = {kind: tuple(name for name in others if kinds[name] == kind) for kind in STORED}
        wanted = by_kind["image"] or by_kind["text"] or by_kind["tokens"] or by_kind["vector"]
    for name in wanted:
        if name not in columns:
            raise UserError(f"{raw} has no column {name!r} ({column_list}); name those of the samples with --features")
        if name in labels:
            raise UserError(
                f"{raw}: {name!r} is the label column, which no sample is made of; leave it out of --features"
            )
    if len(set(wanted)) < len(wanted):
        raise UserError(f"--features {','.join(wanted)} names a column twice; name each once")
    found = {kinds[name] for name in wanted}
    if len(found) != 1 or None in found or (found <= {"image", "tokens"} and len(wanted) > 1):
        chosen = ", ".join(f"{name}: {columns[name]}" for name in wanted) or column_list
        raise UserError(
            f"{raw}: samples are one column of images or of token ids, or columns of texts, or columns of numbers, not "
            f"{chosen}; name them with --features"
        )
    return _Roles(labels, _valued(raw, columns, labels, options), user, tuple(wanted), found.pop())  # type: ignore[arg-type]


def _valued(raw: Path, columns: dict[str, str], labels: tuple[str, ...], options: ReadOptions) -> bool:
    """Whether targets are no classes, from the types of their columns and what the user says."""
    lists = [name for name in labels if listed(columns[name])]
    numbers = all(_kind(columns[name], None) == "vector" for name in labels)
    types = ", ".join(f"{name}: {columns[name]}" for name in labels)
    if (len(labels) > 1 or lists or options.targets not in (None, "classification")) and not numbers:
        raise UserError(f"{raw}: targets that are no classes are numbers, not {types}; name columns of numbers")
    if len(labels) > 1 and lists:
        raise UserError(f"{raw}: targets are some columns of numbers or one of lists, not {types}; name those")
    if (len(labels) > 1 or lists) and options.targets == "classification":
        raise UserError(f"{raw}: {types} has several values a row, but a class is one; leave --targets out")
    if options.targets == "tokens" and not lists:
        raise UserError(f"{raw}: tokens are lists of whole numbers, not {types}; name the column of lists with --label")
    if options.targets == "multilabel" and len(labels) == 1 and not lists:
        raise UserError(f"{raw}: labels that hold together are several columns, or a list, not {types}; name them all")
    return bool(lists) or len(labels) > 1 or options.targets == "regression"


def _kind(kind: str, task: str | None) -> Kind | None:
    """What a column of a pyarrow type holds where the samples are of some task; None for what no sample is made of."""
    if kind in ("binary", "large_binary") or (kind.startswith("struct<") and "bytes: " in kind):
        return "image" if task in (None, "image") else None
    if kind in ("string", "large_string", "string_view"):
        return "image" if task == "image" else "text" if task != "vector" else None
    number = listed(kind) or kind
    whole = number.startswith(("int", "uint"))
    if task == "text":
        return "tokens" if whole and number != kind else None
    scalar = number in ("float", "double", "halffloat", "bool") or whole or number.startswith("decimal")
    return "vector" if scalar and task != "image" else None


def _left_out(files: ColumnFiles, roles: _Roles) -> str:
    """Columns of no kind that samples are made of, with their types."""
    unknown = {name: kind for name, kind in files.columns.items() if _kind(kind, None) is None}
    return ", ".join(f"{name}: {kind}" for name, kind in unknown.items() if name not in roles.columns)


def _features(raw: Path, roles: _Roles, options: ReadOptions) -> Features:
    if roles.kind == "image":
        return Images(raw if raw.is_dir() else raw.parent)
    if roles.kind == "tokens":
        return Tokens(options.length)
    return Texts(options.length) if roles.kind == "text" else Numbers(roles.features)


def _add_file(path: Path, roles: _Roles, features: Features, table: _Table, tally: Tally) -> None:
    row = 0
    table.places.begin(path)
    for block in blocks(path, roles.columns):
        labels = zip(*(block[name] for name in roles.labels), strict=True)
        samples = zip(*(block[name] for name in roles.features), strict=True)
        users = block[roles.user] if roles.user else [None] * len(block[roles.labels[0]])
        for values, label, user in zip(samples, labels, users, strict=True):
            where = f"{path}, row {row}"
            if why := table.wrong(list(label)):
                tally.bad(where, why)
            elif features.add(list(values), where, tally):
                table.add(list(label), user, row)
            row += 1


def _labels(
    raw: Path, files: ColumnFiles, roles: _Roles, table: _Table, options: ReadOptions, tally: Tally
) -> tuple[Ints, tuple[str, ...]]:
    """Labels of all rows, -1 where there is none, and the names of the classes."""
    label, values = roles.labels[0], table.labels
    where, names = f"{raw}, column {label}", files.class_names.get(label)
    if any(not isinstance(value, str | int | float | None) for value in values):
        raise UserError(f"{where} holds {files.columns[label]}; labels must be whole numbers or texts")
    if any(isinstance(value, str | bool) for value in values):
        column = np.array(["" if value is None else str(value) for value in values])
    elif any(value is None or isinstance(value, float) for value in values) or names:
        column = np.array([np.nan if value is None or (names and value < 0) else value for value in values], np.float64)
    else:
        column = np.array(values)
    rule = LabelRule(options.skip_unlabelled, options.numbers_are_classes)
    (labels,), found = classes_of([(where, column)], rule, tally, table.places)
    if names is None:
        return labels, found
    given = np.array([int(name) for name in found])
    if len(given) and given.max() >= len(names):
        raise UserError(f"{where}: the label {given.max()} is beyond the {len(names)} names of its classes")
    return np.where(labels >= 0, given[labels], -1), names


PARQUET = DataSet(
    name="parquet",
    samples="yours",
    classes="yours",
    licence="yours",
    citation="yours",
    page="",
    files=HINT,
    read=holding_out(read),
    options=TEXT_OPTIONS
    | frozenset(
        {"label", "user", "features", "image_size", "skip_odd_sizes", "skip_unlabelled", "numbers_are_classes"}
        | {"task", "targets", "split"}
    ),
    raw="file",
    defaults={"length": EVERY_TOKEN},
)
