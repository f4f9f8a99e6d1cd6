"""Tables of users, CSV, Parquet or Arrow, as a data set; also as Hugging Face's datasets save them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.columns import LISTS, NUMERIC, Facts, Roles, roles_of, surveyed
from data_prep.datasets.imagefolder import common_form
from data_prep.datasets.labels import (
    Labelled,
    LabelSource,
    as_floats,
    groups_of,
    is_missing,
    labelled,
    natural_users,
    uniform,
    with_targets,
)
from data_prep.datasets.raw_files import Names, Ragged, stored
from data_prep.datasets.table_samples import Images, Numbers, Texts, Tokens
from data_prep.datasets.tables import ColumnBlock, ColumnTable, open_table
from data_prep.datasets.texts import text_data_set
from data_prep.raw import RawDataset, Understood, measured
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.statistics import STATISTICS_ROWS

IMAGE_STATISTICS_ROWS = 2000
EVERY_TOKEN = 1 << 30
"""Tokens kept where --length does not say: of lists all, of texts `ReadOptions.length`."""
NAMED = 10
"""Columns that are listed by name."""


class _Rows:
    """Facts about every readable row beside its sample: labels, user, group and place."""

    def __init__(self, table: ColumnTable, facts: dict[str, Facts], names: list[str]) -> None:
        lists = {name: Ragged(np.float64, table.columns[name].whole) for name in names if facts[name].kind == "list"}
        self.columns: dict[str, list[AnyArray] | Ragged] = {name: lists.get(name, []) for name in names}
        self._blocks: list[ColumnBlock] = []
        self._starts: list[int] = []
        self.count = 0

    def add(self, block: ColumnBlock) -> None:
        """Append the rows of a block."""
        for name, found in self.columns.items():
            if isinstance(found, Ragged):
                for value in block.columns[name].tolist():
                    known = value is not None and not np.isnan(np.asarray(value, np.float64)).any()
                    found.append(value if known and (len(value) or found.whole) else None)
            else:
                found.append(uniform(block.columns[name]))
        self._blocks.append(replace(block, columns={}))
        self._starts.append(self.count)
        self.count += len(block.places)

    def column(self, name: str) -> AnyArray:
        """A column that holds no lists."""
        found = self.columns[name]
        assert isinstance(found, list)
        return np.concatenate(found)

    def place(self, row: int) -> str:
        """Where a row is, in words."""
        number = bisect_right(self._starts, row) - 1
        return self._blocks[number].where(row - self._starts[number])


def read_table(raw: Path, options: ReadOptions, tally: Tally, data_set: DataSet) -> RawDataset:
    """The table that `raw` names: a file, or a folder of files whose names say train, test or validation."""
    table = open_table(raw, options)
    facts = surveyed(table, tally)
    roles = roles_of(table, facts, options, tally)
    _check_targets(table, facts, roles, options)
    tally.notes += table.notes
    if roles.kind == "text" and options.length == EVERY_TOKEN:
        options = replace(options, length=ReadOptions.length)
    samples = _samples(table, facts, roles, options)
    lists = facts[roles.labels[0]].kind == "list"
    numeric = roles.labels if not lists and (len(roles.labels) > 1 or options.targets == "regression") else ()
    kept = [name for name in (*roles.labels, roles.user, roles.group) if name]
    rows, ends = _Rows(table, facts, kept), []
    for part in (table.train, table.test):
        for path in part:
            for block in table.blocks(path, roles.columns):
                if not len(block.places):
                    continue
                for name in numeric:
                    block = _with_numbers(block, name, table.decimal, tally)
                rows.add(block.take(samples.add(block, tally)))
        ends.append(rows.count)
    first = f" The first: {tally.first}." if tally.first else ""
    if not rows.count:
        raise UserError(f"{raw} holds no readable row.{first or ' Add rows.'}")
    found = _labelled(
        table, roles, rows, LabelSource(f"{raw}, column {','.join(roles.labels)}", rows.place, options, tally)
    )
    if found.kind == "tokens" and roles.kind == "text":
        raise UserError(f"{raw}: targets that are tokens need samples of token ids. Name their column with --features.")
    usable = found.usable
    if isinstance(samples, Images):
        form = common_form(raw, [samples.found()], options, tally)
        usable = usable & samples.fits(form)
    said = ", ".join(roles.features[:NAMED])
    said += f" and {len(roles.features) - NAMED} more" if len(roles.features) > NAMED else ""
    own = OwnSamples(raw, data_set, found, usable, ends[0], bool(table.test), tally)
    users = rows.column(roles.user) if roles.user else None
    groups = groups_of(rows.column(roles.group)[own.train], roles.group) if roles.group else None
    understood = Understood("", f"column {', '.join(roles.labels)}", roles.unused)
    if isinstance(samples, Texts):
        known, names = natural_users(users[own.train], tally) if users is not None else (None, None)
        codes = np.full(rows.count, -1, np.int64)
        codes[own.train] = -1 if known is None else known
        samples.texts.users, samples.texts.user_names = codes.tolist(), Names(names or ())
        labels = found.y if found.kind == "classification" else np.zeros(rows.count, np.int64)
        parts = own.train, own.test
        data = text_data_set(data_set, samples.texts, labels, found.names, parts, options, tally)
        data = data if found.kind == "classification" else with_targets(data, found, *parts)
        return _with(data, replace(understood, sample=f"text of {said}"), groups)
    beside: dict[str, Any] = {"users": users, "groups": groups}
    if isinstance(samples, Images):
        kind = "gray" if form.channels == 1 else "color"
        understood = replace(understood, sample=f"{kind} image of {form.width} x {form.height} pixels: {said}")
        x, beside["at_most"] = samples.reader(form, rows.place), IMAGE_STATISTICS_ROWS
        return own.data_set("image", "uint8", form.shape, x, understood, **beside)
    if isinstance(samples, Tokens):
        understood = replace(understood, sample=f"{samples.shape[0]} token ids: {said}")
        beside["vocabulary"] = tuple(map(str, range(int(samples.ids().max(initial=0)) + 1)))
        return own.data_set("text", "int32", samples.shape, samples.reader(), understood, **beside)
    sizes = " x ".join(map(str, samples.shape))
    understood = replace(understood, sample=f"{sizes} {'numbers' if sizes != '1' else 'number'}: {said}")
    beside["names"] = samples.names
    return own.data_set("vector", "float32", samples.shape, samples.reader(), understood, **beside)


@dataclass(frozen=True)
class OwnSamples:
    """The rows of users' data, train before test, and what every data set of them has in common."""

    raw: Path | str
    source: DataSet
    found: Labelled
    usable: AnyArray
    boundary: int
    tested: bool
    tally: Tally

    def __post_init__(self) -> None:
        first = f" The first: {self.tally.first}." if self.tally.first else ""
        for rows, which in ((self.train, "training"), (self.test, "test")):
            if not len(rows) and (self.tested or which == "training"):
                raise UserError(f"{self.raw} holds no usable {which} sample.{first}")

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
        """The data set of samples that `x` gives by their rows."""
        train, test, found = self.train, self.test, self.found
        classes = found.kind == "classification"
        labels = found.y if classes else np.zeros(len(self.usable), np.int64)
        codes, user_names = natural_users(users[train], self.tally) if users is not None else (None, None)
        data = RawDataset(
            name=self.source.name,
            task=task,  # type: ignore[arg-type]
            classes=len(found.names),
            class_names=found.names,
            feature_shape=shape,
            dtype=dtype,  # type: ignore[arg-type]
            mean=(),
            std=(),
            labels=labels[train],
            users=codes,
            user_names=user_names,
            read=lambda index: x(train[index]),
            test_x=stored(x, test, shape, dtype),
            test_y=labels[test],
            skipped=self.tally.unreadable,
            licence=self.source.licence,
            citation=self.source.citation,
            vocabulary=vocabulary,
            notes=tuple(self.tally.notes),
            feature_names=names,
            understood=understood,
            groups=groups,
        )
        data = data if classes else with_targets(data, found, train, test)
        return data if task == "text" else measured(data, at_most=at_most)


def _with(data: RawDataset, understood: Understood, groups: Ints | None) -> RawDataset:
    """The data set with what the reader understood, also once it is fitted to other rows."""
    refit = data.refit
    again = None if refit is None else lambda rows: _with(refit(rows), understood, groups)
    return replace(data, understood=understood, groups=groups, refit=again)


def _with_numbers(block: ColumnBlock, name: str, decimal: str, tally: Tally) -> ColumnBlock:
    """The block with a column of targets as numbers; rows whose cell is neither missing nor a number are counted."""
    values = block.columns[name]
    numbers = as_floats(values, decimal)
    odd = np.isnan(numbers) & ~is_missing(values)
    for row in np.flatnonzero(odd).tolist():
        tally.bad(block.where(row), f"{values[row]!r} in column {name!r} is no number")
    return replace(block, columns={**block.columns, name: numbers}).take(~odd)


def _samples(
    table: ColumnTable, facts: dict[str, Facts], roles: Roles, options: ReadOptions
) -> Numbers | Tokens | Images | Texts:
    if roles.kind == "image":
        return Images(roles.features[0], table.raw if table.raw.is_dir() else table.raw.parent)
    if roles.kind == "tokens":
        return Tokens(roles.features[0], options.length)
    if roles.kind == "text":
        return Texts(roles.features, options.length)
    for name in roles.features:
        found = facts[name]
        most = found.shapes[found.shape]
        if found.kind in LISTS and (2 * most <= found.present or -1 in found.shape):
            sizes = [" x ".join("?" if n < 0 else str(n) for n in shape) for shape, _ in found.shapes.most_common(5)]
            raise UserError(
                f"{table.raw}: lists of column {name!r} differ in shape ({', '.join(sizes)}). Pad or cut them to one "
                "shape (--task text pads lists of token ids)."
            )
    return Numbers(roles.features, facts, table.decimal)


def _check_targets(table: ColumnTable, facts: dict[str, Facts], roles: Roles, options: ReadOptions) -> None:
    """Reject columns that cannot hold the targets that the user declares."""
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


def _labelled(table: ColumnTable, roles: Roles, rows: _Rows, source: LabelSource) -> Labelled:
    """The targets of all rows."""
    name, names = roles.labels[0], table.columns[roles.labels[0]].class_names
    decimal = table.decimal if table.is_text else ""
    held = rows.columns[name]
    if isinstance(held, Ragged):
        return labelled(source, held, names)
    if len(roles.labels) > 1:
        return labelled(source, np.stack([rows.column(name) for name in roles.labels], axis=1), roles.labels)
    return labelled(source, rows.column(name), names, decimal)
