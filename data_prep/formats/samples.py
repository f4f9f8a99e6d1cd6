"""Samples of tables (CSV, Parquet or Arrow, also as saved by Hugging Face's datasets), and their data set."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.columns import LARGEST, LISTS, NUMERIC, Facts, Roles, facts_of, roles_of, shape_of
from data_prep.formats.files import stored
from data_prep.formats.images import Found, ImageFacts, common_form, decode, image_facts
from data_prep.formats.tables import UserTable, open_table
from data_prep.formats.targets import (
    Labeled,
    LabelSource,
    Lists,
    as_floats,
    groups_of,
    is_missing,
    labeled,
    uniform,
    value_codes,
    with_targets,
)
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally, Understood, measured, natural_clients
from data_prep.text import Texts, text_data_set
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.types import AnyArray, Bools, Ints
from fedmpi.data.statistics import STATISTICS_ROWS

IMAGE_STATISTICS_ROWS = 2000
LARGEST_TOKEN = 10_000_000
NAMED = 10
"""Largest number of columns that are listed by name."""


def read_table(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read the table that `raw` names: a file, or a folder of files whose names contain train, test or validation."""
    table = open_table(raw, options, tally)
    facts = {name: facts_of(table, name) for name in table.columns}
    roles = roles_of(table, facts, options, tally)
    _check_targets(table, facts, roles, options)
    labels = {name: table.values(name) for name in roles.labels}
    lists = facts[roles.labels[0]].kind == "list"
    rows = np.arange(len(table.places))
    if not lists and (len(labels) > 1 or options.targets == "regression"):
        for name, values in labels.items():
            labels[name] = numbers = as_floats(values, table.header.decimal)
            odd = np.isnan(numbers) & ~is_missing(values)
            for row in rows[odd[rows]].tolist():
                tally.bad(table.where(row), f"{values[row]!r} in column {name!r} is no number")
            rows = rows[~odd[rows]]
    samples = SAMPLES[roles.kind](table, facts, roles, options, rows, tally)
    rows = rows[samples.good]
    if not len(rows):
        raise UserError(f"{raw} holds no readable row.{tally.first_bad or ' Add rows.'}")

    def place(row: int) -> str:
        return table.where(int(rows[row]))

    source = LabelSource(f"{raw}, column {','.join(roles.labels)}", place, options, tally)
    name, values = roles.labels[0], labels[roles.labels[0]][rows]
    if lists:
        found = labeled(source, Lists.of(values, table.columns[name].whole), table.columns[name].class_names)
    elif len(labels) > 1:
        found = labeled(source, np.stack([uniform(x[rows]) for x in labels.values()], axis=1), roles.labels)
    else:
        decimal = table.header.decimal if table.is_text else ""
        found = labeled(source, uniform(values), table.columns[name].class_names, decimal)
    if found.kind == "tokens" and roles.kind == "text":
        raise UserError(f"{raw}: targets that are tokens need samples of token ids. Name their column with --features.")
    said = ", ".join(roles.features[:NAMED])
    said += f" and {len(roles.features) - NAMED} more" if len(roles.features) > NAMED else ""
    boundary = int(np.searchsorted(rows, table.boundary))
    own = OwnSamples(raw, data_set, found, found.usable, boundary, table.tested, tally)
    users = uniform(table.values(roles.user)[rows]) if roles.user else None
    groups = groups_of(uniform(table.values(roles.group)[rows][own.train]), roles.group) if roles.group else None
    understood = Understood(f"{samples.form}{said}", f"column {', '.join(roles.labels)}", roles.unused)
    if (texts := samples.texts) is not None:
        codes, names = natural_clients(*value_codes(users[own.train]), tally) if users is not None else (None, None)
        facts_of_all = {"users": codes, "user_names": names, "understood": understood, "groups": groups}
        classes = found.kind == "classification"
        texts_labels = found.y if classes else np.zeros(len(rows), np.int64)
        parts = own.train, own.test
        data = text_data_set(data_set, texts, texts_labels, found.names, parts, options, tally, **facts_of_all)
        return data if classes else with_targets(data, found, *parts)
    x, about = samples.read, (samples.task, samples.dtype, samples.shape)
    return own.data_set(*about, x, understood, users, groups, **samples.facts)


@dataclass(frozen=True)
class Samples:
    """Samples of some rows of a table."""

    good: Bools  # Mask of the rows that are samples; the others were counted
    shape: tuple[int, ...]
    read: Callable[[Ints], AnyArray]  # Reads samples (r, *shape) by their numbers among the good rows
    form: str  # Description of a sample, without its column names
    task: str = "vector"
    dtype: str = "float32"
    facts: dict[str, Any] = field(default_factory=dict)  # Further arguments of `OwnSamples.data_set`
    texts: Texts | None = None  # Used instead of `read`


def _numbers(
    table: UserTable, facts: dict[str, Facts], roles: Roles, options: ReadOptions, rows: Ints, tally: Tally
) -> Samples:
    """Return vectors of number or list columns, or samples (T, C) of one column of lists of lists."""
    columns = {name: facts[name] for name in roles.features}
    for name, found in columns.items():
        if found.kind in LISTS and (2 * found.shapes[found.shape] <= found.present or -1 in found.shape):
            sizes = [" x ".join("?" if n < 0 else str(n) for n in one) for one, _ in found.shapes.most_common(5)]
            raise UserError(
                f"{table.raw}: lists of column {name!r} differ in shape ({', '.join(sizes)}). Pad or cut them to one "
                "shape (--task text pads lists of token ids)."
            )
    good, parts = np.ones(len(rows), bool), []
    for name, found in columns.items():
        values, nested, lists = table.values(name)[rows], found.kind == "nested", found.kind in LISTS
        if lists:
            part = np.full((len(rows), *found.shape), np.nan)
            for row, value in enumerate(values.tolist()):
                if value is not None and shape_of(value, nested) == found.shape:
                    part[row] = np.stack(value) if nested else value
        else:
            part = as_floats(values, table.header.decimal)[:, None]
        finite = (np.abs(part) <= LARGEST).reshape(len(rows), -1).all(axis=1)
        for row in np.flatnonzero(good & ~finite).tolist():
            value, where = values[row], table.where(rows[row])
            if lists and value is not None and shape_of(value, nested) != found.shape:
                sizes = [" x ".join(map(str, shape)) for shape in (shape_of(value, nested), found.shape)]
                tally.bad(where, f"{sizes[0]} numbers in column {name!r} where most rows have {sizes[1]}")
            else:
                quoted = "" if isinstance(value, np.ndarray | list) else f" ({shown(value, repr)})"
                tally.bad(where, f"no finite number in column {name!r}{quoted}")
        good &= finite
        part[~finite] = 0
        parts.append(part.astype(np.float32))
    x = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))[good]
    names = roles.features if (len(roles.features),) == x.shape[1:] else ()
    form = f"{' x '.join(map(str, x.shape[1:]))} {'number' if x.shape[1:] == (1,) else 'numbers'}: "
    return Samples(good, x.shape[1:], lambda index: x[index], form, facts={"names": names})


def _tokens(
    table: UserTable, facts: dict[str, Facts], roles: Roles, options: ReadOptions, rows: Ints, tally: Tally
) -> Samples:
    """Return lists of token ids, cut and padded with 0 to one length."""
    found = Lists.of(table.values(roles.features[0])[rows], whole=False)
    owner = np.repeat(np.arange(len(rows)), found.lengths)
    wrong = np.bincount(owner[(found.values < 0) | (found.values > LARGEST_TOKEN)], minlength=len(rows))
    good = found.known & (found.lengths > 0) & (wrong == 0)
    for row in np.flatnonzero(~good).tolist():
        tally.bad(table.where(rows[row]), f"no token ids, whole numbers from 0 to {LARGEST_TOKEN:,}")
    longest = int(found.lengths[good].max(initial=0))
    length = min(longest, options.length or longest)
    x = found.padded(length, 0)[good].astype(np.int32)
    words = {"vocabulary": tuple(map(str, range(int(x.max(initial=0)) + 1)))}
    return Samples(good, (length,), lambda index: x[index], f"{length} token ids: ", "text", "int32", words)


def _images(
    table: UserTable, facts: dict[str, Facts], roles: Roles, options: ReadOptions, rows: Ints, tally: Tally
) -> Samples:
    """Return encoded images, or paths of images, decoded on demand."""
    content = table.contents(roles.features[0])
    home = table.raw if table.raw.is_dir() else table.raw.parent

    def given(row: int) -> Any:
        value = content(row)
        return (value.get("bytes") or value.get("path")) if isinstance(value, dict) else value

    def source(row: int) -> Any:
        """Return the bytes or the file of an image; the folder if the path leaves it or cannot be a file name."""
        named = given(row)
        if not isinstance(named, str) or not named:
            return named
        folder = os.path.abspath(home)
        try:
            for start in (table.files[table.file_of[row]].parent, home):
                path = Path(os.path.abspath(start / named))
                if path.is_relative_to(folder) and path.is_file():
                    return path
        except (OSError, ValueError):
            pass
        return home

    def look(row: int) -> ImageFacts | None:
        image, where = source(row), table.where(row)
        if isinstance(image, Path) and not image.is_file():
            tally.bad(where, f"there is no image {shown(given(row), repr)} in {home} or beside the file")
        elif not isinstance(image, Path | bytes) or not image:
            tally.bad(where, "neither the bytes nor the path of an image")
        else:
            return image_facts(io.BytesIO(image) if isinstance(image, bytes) else image, tally, where)
        return None

    seen = [look(row) for row in rows.tolist()]
    readable = [image for image in seen if image is not None]
    if not readable:
        return Samples(np.zeros(len(rows), bool), (), lambda index: index, "")
    form = common_form(table.raw, [Found((), np.empty(0, np.int64), tuple(readable))], options, tally)
    size = form.width, form.height
    good = np.array([image is not None and (form.resize or image.size == size) for image in seen])
    kept = rows[good]

    def read(index: Ints) -> AnyArray:
        out = np.empty((len(index), *form.shape), np.uint8)
        for place, row in enumerate(kept[index].tolist()):
            image = source(row)
            try:
                out[place] = decode(io.BytesIO(image) if isinstance(image, bytes) else image, form)
            except Exception as error:  # decoders raise many kinds of errors
                raise UserError(
                    f"{table.where(row)}: the image cannot be decoded ({raised(error)}); remove it and run again"
                ) from error
        return out

    kind = f"{'gray' if form.channels == 1 else 'color'} image of {form.width} x {form.height} pixels: "
    return Samples(good, form.shape, read, kind, "image", "uint8", {"at_most": IMAGE_STATISTICS_ROWS})


def _texts(
    table: UserTable, facts: dict[str, Facts], roles: Roles, options: ReadOptions, rows: Ints, tally: Tally
) -> Samples:
    """Return the texts of some columns, joined by spaces."""
    texts = Texts(options.tokens)
    columns = [table.values(name)[rows] for name in roles.features]
    there = [~is_missing(column) for column in columns]
    good = np.asarray(np.any(there, axis=0))
    for row in range(len(rows)):
        if good[row]:
            texts.add(" ".join(column[row] for column, known in zip(columns, there, strict=True) if known[row]))
        else:
            tally.bad(table.where(rows[row]), "the text is empty")
    return Samples(good, (options.tokens,), lambda index: index, "text of ", texts=texts)


SAMPLES = {"vector": _numbers, "tokens": _tokens, "image": _images, "text": _texts}


@dataclass(frozen=True)
class OwnSamples:
    """Rows of users' data, train before test, and the facts that all data sets of them share."""

    raw: Path | str
    source: DataSet
    found: Labeled
    usable: AnyArray
    boundary: int
    tested: bool
    tally: Tally

    def __post_init__(self) -> None:
        for rows, which in ((self.train, "training"), (self.test, "test")):
            if not len(rows) and (self.tested or which == "training"):
                raise UserError(f"{self.raw} holds no usable {which} sample.{self.tally.first_bad}")

    @property
    def train(self) -> Ints:
        """Training rows."""
        return np.flatnonzero(self.usable[: self.boundary])

    @property
    def test(self) -> Ints:
        """Test rows."""
        return self.boundary + np.flatnonzero(self.usable[self.boundary :])

    def data_set(
        self,
        task: str,
        dtype: str,
        shape: tuple[int, ...],
        x: Callable[[Ints], AnyArray],
        understood: Understood,
        users: AnyArray | None = None,
        groups: Ints | None = None,
        vocabulary: tuple[str, ...] = (),
        names: tuple[str, ...] = (),
        at_most: int = STATISTICS_ROWS,
    ) -> RawDataset:
        """Return the data set of samples that `x` reads by row."""
        train, test, found = self.train, self.test, self.found
        classes = found.kind == "classification"
        labels = found.y if classes else np.zeros(len(self.usable), np.int64)
        codes, user_names = (
            natural_clients(*value_codes(users[train]), self.tally) if users is not None else (None, None)
        )
        data = self.source.of(
            self.tally,
            task=task,
            classes=len(found.names),
            class_names=found.names,
            feature_shape=shape,
            dtype=dtype,
            labels=labels[train],
            users=codes,
            user_names=user_names,
            read=lambda index: x(train[index]),
            test_x=stored(x, test, shape, dtype),
            test_y=labels[test],
            vocabulary=vocabulary,
            notes=tuple(self.tally.notes),
            feature_names=names,
            understood=understood,
            groups=groups,
        )
        data = data if classes else with_targets(data, found, train, test)
        return data if task == "text" else measured(data, at_most=at_most)


def _check_targets(table: UserTable, facts: dict[str, Facts], roles: Roles, options: ReadOptions) -> None:
    """Reject columns that cannot contain the targets that the user declares."""
    columns, declared = {name: facts[name].kind for name in roles.labels}, options.targets
    types = ", ".join(
        f"{name}: {kind if table.is_text else table.columns[name].type}" for name, kind in columns.items()
    )
    lists = [name for name in columns if columns[name] == "list"]
    problem = ""
    if set(columns.values()) & {"image", "nested", "other"}:
        problem = f"{types} holds no labels. Labels must be whole numbers or texts"
    elif (len(columns) > 1 or lists or declared == "regression") and not set(columns.values()) <= {*NUMERIC, "list"}:
        problem = f"targets that are no classes must be numbers, not {types}. Name columns of numbers"
    elif len(columns) > 1 and lists:
        problem = f"targets are columns of numbers or one column of lists, not {types}. Name those"
    elif declared == "tokens" and not lists:
        problem = f"tokens are lists of whole numbers, not {types}. Name their column with --label"
    elif declared == "multilabel" and len(columns) == 1 and not lists:
        problem = f"--targets multilabel needs several columns, or a list, not {types}. Name them all with --label"
    if problem:
        raise UserError(f"{table.raw}: {problem}.")
