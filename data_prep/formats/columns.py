"""Roles of the columns of a table: label, user, index, identifier, or feature."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep.formats.images import SUFFIXES
from data_prep.formats.tables import Column, UserTable
from data_prep.formats.targets import as_floats, is_missing
from data_prep.raw import ReadOptions, Tally
from fedmpi.common.errors import UserError, shown

USER_COLUMN = "user"
LARGEST = float(np.finfo(np.float32).max)
PANDAS_INDEX = re.compile(r"Unnamed: \d+(\.\d+)*|__index_level_\d+__")
IDENTIFIER = re.compile(
    r"(?i:(.*[_\W])?(id|ids|idx|index|uuid|guid|key|row|rowid|no|nr))|.*[a-z0-9](ID|Id|Idx|Index|Key)"
)
"""Names of identifier columns: id, user_id, PassengerId, index."""
LISTED = 5
LEAST_ROWS = 3
"""Smallest number of rows at which a column that counts 0, 1, 2 … is treated as an index."""
FEWEST_LEVELS = 1e-4
"""Largest step of float32, as a share of a column's range, that leaves the column usable."""
NUMERIC, LISTS = ("number", "whole", "truth"), ("list", "nested")
KINDS = ("image", "text", "tokens", "vector")
"""Kinds of samples in order of preference: the first kind that has columns is used."""


@dataclass(frozen=True)
class Facts:
    """Facts about a column."""

    name: str
    column: Column
    kind: str
    present: int  # Values that are not missing
    counts: bool = False  # True if it counts the rows, from 0 or 1 in each file or across all files
    low: float = np.inf
    high: float = -np.inf
    lost: float = 0.0  # Largest float32 rounding error of its numbers
    example: str = ""  # First text
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    distinct: bool = False  # True if it has the name of an identifier and a distinct value in each row

    def unusable(self, pandas: bool) -> str:
        """Return why the column cannot be used as a feature; "" if it can."""
        if self.kind == "other":
            return f"no sample can be made of its type {self.column.type}"
        if self.kind != "image" and not self.present:
            return "it has no value"
        if pandas or PANDAS_INDEX.fullmatch(self.name):
            return "an index that pandas wrote"
        if self.kind == "whole" and self.counts and self.present >= LEAST_ROWS:
            return "it counts the rows"
        if self.distinct and self.kind in ("whole", "text") and self.present >= LEAST_ROWS:
            return "an identifier: every row has a value of its own"
        return ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Most frequent shape of its lists; () for single numbers."""
        return self.shapes.most_common(1)[0][0] if self.shapes else () if self.kind in LISTS else (1,)


def facts_of(table: UserTable, name: str) -> Facts:
    """Return facts about a column from its training and test rows."""
    column = table.columns[name]
    if column.kind in ("image", "other"):
        return Facts(name, column, column.kind, len(table.places))
    values = table.values(name)
    there = ~is_missing(values)
    found: dict[str, Any] = {"kind": column.kind}
    if column.kind in LISTS:
        found["shapes"] = Counter(shape_of(value, column.kind == "nested") for value in values[there].tolist())
    elif column.kind == "text":
        found["example"] = str(values[there][0]).strip() if there.any() else ""
    else:
        numbers = as_floats(values, table.header.decimal)
        if column.kind == "cell":
            good = ~np.isnan(numbers)
            there |= good
            texts = values[there & ~good]
            found["example"] = str(texts[0]).strip() if len(texts) else ""
            written = "".join(values.tolist())
            whole = "." not in written and table.header.decimal not in written
            found["kind"] = "text" if 2 * good.sum() <= there.sum() else "whole" if whole else "number"
        counted = numbers[np.abs(numbers) <= LARGEST]
        if len(counted):
            found |= {"low": float(counted.min()), "high": float(counted.max())}
            found["lost"] = float(np.abs(counted - counted.astype(np.float32)).max())
        if len(counted) == len(numbers):
            begins = np.diff(table.file_of, prepend=-1) > 0
            steps = (np.diff(numbers, prepend=np.nan) == 1) | (begins & np.isin(numbers, (0, 1)))
            found["counts"] = bool(steps.all())
    if column.kind in ("cell", "whole", "text") and IDENTIFIER.fullmatch(name):
        found["distinct"] = len(set(values[there].tolist())) == there.sum()
    return Facts(name, column, present=int(there.sum()), **found)


def shape_of(value: Any, nested: bool) -> tuple[int, ...]:
    """Return the shape of a list of numbers, or of lists of them: (T, -1) if the inner ones differ in length."""
    if not nested:
        return (len(value),)
    inner = {-1 if row is None else len(row) for row in value}
    return (len(value), inner.pop() if len(inner) == 1 else -1)


@dataclass(frozen=True)
class Roles:
    """Column names by role, and the kind of samples: image, text, tokens or vector."""

    labels: tuple[str, ...]
    user: str | None
    group: str | None
    features: tuple[str, ...]
    kind: str
    unused: tuple[tuple[str, str], ...]


def roles_of(table: UserTable, facts: dict[str, Facts], options: ReadOptions, tally: Tally) -> Roles:
    """Return the role of each column."""
    labels = (options.label,) if options.label in table.columns else tuple(options.label.split(","))
    user = options.user or (USER_COLUMN if USER_COLUMN in table.columns else None)
    group = None if options.split in ("rows", "users", "texts") else options.split
    chosen = options.features
    named = [("--label", labels), ("--user", (user,)), ("--split", (group,)), ("--features", chosen or ())]
    for flag, names in named:
        for name in names:
            if name is not None and name not in table.columns:
                headless = table.is_text and not np.isnan(as_floats(np.array(list(table.columns), object))).all()
                hint = " Does the file begin with a header?" if headless else ""
                raise UserError(f"{table.raw} has no column {name!r}, but {table.listed}. Name it with {flag}.{hint}")
        if len(set(names)) < len(names):
            raise UserError(f"{flag} {','.join(map(str, names))} names a column twice. Name each once.")
    if wrong := sorted({*labels} & {*(chosen or ())}):
        raise UserError(f"{table.raw}: {wrong[0]!r} is the label column. Leave it out of --features.")
    others = [name for name in table.columns if name not in (*labels, user, group)]
    if chosen is None:
        reasons = {name: facts[name].unusable(name in table.header.index) for name in others}
        chosen, reason = _by_default(table, facts, reasons, options.task)
        unused = [(name, reasons[name] or reason) for name in others if name not in chosen]
    else:
        unused = [(name, "not among --features") for name in others if name not in chosen]
    if group is not None and group not in chosen:
        unused.append((group, "it is what --split goes by"))
    kind = _kind_of(table, facts, chosen, options)
    if kind == "vector":
        _check_precision(table, facts, chosen, options.features is not None, tally)
    return Roles(labels, user, group, chosen, kind, tuple(unused))


def _by_default(
    table: UserTable, facts: dict[str, Facts], reasons: dict[str, str], task: str | None
) -> tuple[tuple[str, ...], str]:
    """Return the feature columns used by default, and why the other usable columns are not used."""
    kinds = {name: sample_kind(facts[name], task) for name, reason in reasons.items() if not reason}
    found = {kind: tuple(name for name in kinds if kinds[name] == kind) for kind in KINDS}
    if found["text"] and found["vector"] and not found["image"]:
        text, numbers = found["text"], found["vector"]
        example = facts[text[0]].example
        quoted = f", {shown(example, repr)} in {text[0]} is no number" if example and table.is_text else ""
        raise UserError(
            f"{table.raw} has columns of text ({', '.join(text[:LISTED])}{quoted}) and of numbers "
            f"({', '.join(numbers[:LISTED])}), but a sample is made of one kind. Choose with --features, e.g. "
            f"--features {','.join(numbers[:LISTED])}."
        )
    kind = next((kind for kind, names in found.items() if names), None)
    if kind == "text" and task is None:
        for name in found["text"]:
            if facts[name].example.lower().endswith(tuple(SUFFIXES)):
                raise UserError(
                    f"{table.raw}: column {name!r} names images ({facts[name].example!r}). Add --task image to read "
                    "them, or --task text."
                )
    if kind is None:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:LISTED] if reason)
        with_task = f" with --task {task}" if task else ""
        raise UserError(
            f"{table.raw} has no column to learn from{with_task} ({why or table.listed}). Name some with --features."
        )
    return found[kind], f"the samples are made of {', '.join(found[kind][:LISTED])}"


def _kind_of(table: UserTable, facts: dict[str, Facts], names: tuple[str, ...], options: ReadOptions) -> str:
    """Return the kind of samples that some columns make; UserError if they do not fit together."""
    kinds = {sample_kind(facts[name], options.task) for name in names}
    kind = next(iter(kinds), None)
    nested = [name for name in names if facts[name].kind == "nested"]
    if len(kinds) != 1 or not kind or (len(names) > 1 and (kind in ("image", "tokens") or nested)):
        held = ", ".join(f"{name}: {facts[name].kind if table.is_text else table.columns[name].type}" for name in names)
        task = f" with --task {options.task}" if options.task else ""
        raise UserError(
            f"{table.raw}: no sample can be made of {held}{task}. Name one column of images, of token ids or of lists "
            "of lists, or columns of texts, or columns of numbers, with --features."
        )
    return kind


def sample_kind(facts: Facts, task: str | None) -> str | None:
    """Return the kind of samples that a column contains for a task, or None."""
    if facts.kind == "image":
        return "image" if task in (None, "image") else None
    if facts.kind == "text":
        return "image" if task == "image" else "text" if task != "vector" else None
    if task == "text":
        return "tokens" if facts.kind == "list" and facts.column.whole else None
    return "vector" if facts.kind in (*NUMERIC, *LISTS) and task != "image" else None


def _check_precision(
    table: UserTable, facts: dict[str, Facts], names: tuple[str, ...], chosen: bool, tally: Tally
) -> None:
    """Reject columns of which float32 keeps too little precision, or note them if the user chose them."""
    for name in names:
        problem = beyond_float32(facts[name].low, facts[name].high, facts[name].lost)
        if problem and not chosen:
            rest = ",".join(other for other in names if other != name)
            raise UserError(
                f"{table.raw}: column {name!r} {problem}. Subtract its smallest value and store it again, or choose "
                f"columns with --features{f' {rest}' if rest else ''}."
            )
        if problem:
            tally.note(f"column {name!r} {problem}")
        elif facts[name].lost and facts[name].kind == "whole" and max(-facts[name].low, facts[name].high) > 2**24:
            tally.note(f"column {name!r}: whole numbers beyond 16,777,216 are rounded to float32")
        if not chosen and IDENTIFIER.fullmatch(name) and name.lower().endswith("id"):
            tally.note(
                f"column {name!r} is a feature, though its name is that of an identifier: --user or --split can name "
                "it, --features leaves it out"
            )


def beyond_float32(low: float, high: float, lost: float) -> str:
    """Return why rounding by `lost` spoils numbers of a range; "" if it does not matter."""
    if high <= low or lost <= FEWEST_LEVELS * (high - low):
        return ""
    span = f"{low:.10g} to {high:.10g}"
    return f"holds numbers from {span}, which differ by too little for float32 (rounded by up to {lost:.3g})"
