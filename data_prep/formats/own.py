"""Users' files: arrays of an .npz file, or a table (CSV, Parquet or Arrow, also of Hugging Face's datasets)."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.files import stored
from data_prep.formats.images import ImageFacts, common_form, decoded, image_facts
from data_prep.formats.tables import (
    LARGEST,
    LISTS,
    Column,
    Roles,
    UserTable,
    check_precision,
    is_arrow,
    is_table,
    open_table,
    roles_of,
    shape_of,
)
from data_prep.formats.targets import TargetReader, uniform, value_codes
from data_prep.formats.texts import Texts, text_data_set
from data_prep.holdout import hold_out_test
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally, Understood, measured, natural_clients
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.types import AnyArray, Bools, Ints
from fedmpi.data.arrays import CHANNELS, one_column
from fedmpi.data.statistics import STATISTICS_ROWS

IMAGE_STATISTICS_ROWS = 2000
LARGEST_TOKEN = 10_000_000
NAMED = 10
"""Largest number of columns that are listed by name."""
MEMBERS = ("x", "y", "user", "x_test", "y_test")
ROWS_AT_ONCE = 1024
Arrays = dict[str, AnyArray]


@dataclass(frozen=True)
class Samples:
    """Samples of the rows of a table or of arrays."""

    good: Bools  # (n,): Mask of the rows that are samples; the others were counted
    read: Callable[[Ints], AnyArray]  # Reads the samples (r, *shape) of some rows
    shape: tuple[int, ...]
    task: str = "vector"
    dtype: str = "float32"
    form: str = ""  # Description of a sample, without its column names
    texts: Texts | None = None  # Used instead of `read`
    at_most: int = STATISTICS_ROWS  # Rows from which mean and standard deviation are measured
    facts: dict[str, Any] = field(default_factory=dict)  # Further fields of `RawDataset`


@dataclass(frozen=True)
class OwnData:
    """Samples with the values of their targets, users and groups (n,), training rows first."""

    raw: Path | str
    samples: Samples
    y: AnyArray
    target: TargetReader  # Its `place` takes rows
    names: tuple[str, ...]  # Names of classes or labels by number
    boundary: int  # Number of training rows
    tested: bool  # True if there is a test part
    users: AnyArray | None
    groups: AnyArray | None
    understood: Understood

    def data_set(self, source: DataSet, options: ReadOptions, tally: Tally) -> RawDataset:
        """Return the data set of the rows that are samples."""
        samples, rows = self.samples, np.flatnonzero(self.samples.good)
        boundary = int(np.searchsorted(rows, self.boundary))
        for count, which in ((boundary, "training"), (len(rows) - boundary, "test")):
            if not count and (self.tested or which == "training"):
                raise UserError(f"{self.raw} holds no usable {which} sample.{tally.first_bad}")
        reader = replace(self.target, place=lambda row: self.target.place(int(rows[row])))
        positions = samples.shape[0] if samples.task == "text" or len(samples.shape) == 2 else 0
        found = reader.read(self.y[rows], self.names, positions)
        if found.kind == "tokens" and samples.texts is not None:
            raise UserError(
                f"{self.raw}: targets that are tokens need samples of token ids. Name their column with --features."
            )
        train, test = np.arange(boundary), np.arange(boundary, len(rows))
        facts = {**samples.facts, "understood": self.understood, "groups": self._groups(rows[train], options.split)}
        if self.users is not None:
            codes = value_codes(self.users[rows[train]])
            facts["users"], facts["user_names"] = natural_clients(*codes, tally)
        parts = rows[train], rows[test]
        if samples.texts is not None:
            labels = np.zeros(len(samples.good), np.int64)
            labels[rows] = found.labels
            data = text_data_set(source, samples.texts, labels, found.names, parts, options, tally, **facts)
            return found.given_to(data, train, test)
        data = source.of(
            tally,
            task=samples.task,
            classes=len(found.names),
            class_names=found.names,
            feature_shape=samples.shape,
            dtype=samples.dtype,
            labels=found.labels[train],
            read=lambda index: samples.read(rows[index]),
            test_x=stored(samples.read, rows[test], samples.shape, samples.dtype),
            test_y=found.labels[test],
            notes=tuple(tally.notes),
            **facts,
        )
        data = found.given_to(data, train, test)
        return data if samples.task == "text" else measured(data, at_most=samples.at_most)

    def _groups(self, rows: Ints, name: str) -> Ints | None:
        """Return codes of the values by which `--split` keeps samples together."""
        if self.groups is None:
            return None
        codes, _ = value_codes(uniform(self.groups[rows]))
        if absent := int((codes < 0).sum()):
            raise UserError(
                f"--split {name}: {absent:,} of {len(codes):,} samples have no value of {name}. Fill them, or choose "
                "another column."
            )
        return codes


def read_own_files(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read the user's arrays or table.

    An array x of shape (n, h, w), (n, C, h, w) or (n, h, w, C) holds images, (n, d) vectors. uint8 stays uint8, any
    other number becomes float32. Whole numbers (n, L) wider than 8 bits need `task`: "text" makes them token ids,
    "vector" float32. "vector" also reads (n, T, C) as series.
    """
    if not raw.exists():
        raise UserError(f"{raw} does not exist. Name another file, or mend the link.")
    if raw.is_dir() or is_table(raw):
        name, own = "parquet" if raw.is_dir() or is_arrow(raw) else "arrays", of_table(raw, options, tally)
    elif raw.name.lower().endswith(".npz"):
        name, own = "arrays", of_arrays(raw, read_npz(raw, options), options, tally)
    elif raw.suffix.lower() == ".npy":
        raise UserError(f"{raw} is one array without labels. Write both with numpy.savez('mine.npz', x=x, y=y).")
    else:
        raise UserError(f"{raw} has an unsupported format. --raw must name {data_set.files}.")
    return hold_out_test(own.data_set(replace(data_set, name=name), options, tally), options.split, tally)


def of_table(raw: Path, options: ReadOptions, tally: Tally) -> OwnData:
    """Return the data of a table: a file, or a folder of files whose names contain train, test or validation."""
    table = open_table(raw, options, tally)
    roles = roles_of(table, options, tally)
    samples = SAMPLES[roles.kind](table, roles, options, tally)
    labels = roles.labels
    names = tuple(column.name for column in labels)
    if {column.kind for column in labels} & ({"image", "nested", "other"} | ({"list"} if len(labels) > 1 else set())):
        raise UserError(
            f"{raw}: {', '.join(column.described for column in labels)} holds no labels. Labels are one column of "
            "whole numbers, texts or lists, or several columns of numbers."
        )
    if labels[0].kind == "list":
        y, good = _dense(raw, labels[0])
        y = np.where(good[:, None], y, np.nan) if not good.all() else y
        names = ()
    elif len(labels) > 1:
        y = np.stack([column.values for column in labels], axis=1)
    else:
        y, names = uniform(labels[0].values), labels[0].class_names
    decimal = labels[0].decimal if table.is_text else ""
    target = TargetReader(
        f"{raw}, column {','.join(column.name for column in labels)}", table.where, options, tally, decimal
    )
    used = [column.name for column in roles.features]
    said = ", ".join(used[:NAMED]) + (f" and {len(used) - NAMED} more" if len(used) > NAMED else "")
    understood = Understood(
        f"{samples.form}{said}", f"column {', '.join(column.name for column in labels)}", roles.unused
    )
    users, groups = (None if role is None else role.values for role in (roles.user, roles.group))
    return OwnData(raw, samples, y, target, names, table.boundary, table.tested, users, groups, understood)


def _dense(raw: Path, column: Column) -> tuple[AnyArray, Bools]:
    """Return a column of lists as one array (n, *shape), and a mask of those of the most frequent shape."""
    (shape, most), *others = column.shapes.most_common(5) or [((0,), 0)]
    if -1 in shape or (others and 2 * most <= column.shapes.total()):
        sizes = ", ".join(" x ".join("?" if n < 0 else str(n) for n in one) for one in (shape, *dict(others)))
        raise UserError(
            f"{raw}: lists of column {column.name!r} differ in shape ({sizes}). Pad or cut them to one shape (--task "
            "text pads lists of token ids)."
        )
    dtype = np.int64 if column.whole_lists and column.there.all() else np.float64
    good, out = np.zeros(len(column.values), bool), np.zeros((len(column.values), *shape), dtype)
    for row, value in enumerate(column.values.tolist()):
        if value is not None and shape_of(value) == shape:
            out[row], good[row] = np.stack(value) if len(shape) > 1 else value, True
    return out, good


def _numbers(table: UserTable, roles: Roles, options: ReadOptions, tally: Tally) -> Samples:
    """Return vectors of number or list columns, or samples (T, C) of one column of lists of lists."""
    good, parts = np.ones(len(table.places), bool), []
    for column in roles.features:
        if column.kind in LISTS:
            part, fits = _dense(table.raw, column)
        else:
            part, fits = column.numbers[:, None], np.ones(len(good), bool)
        finite = (np.abs(part) <= LARGEST).reshape(len(good), -1).all(axis=1)
        for row in np.flatnonzero(good & ~(finite & fits)).tolist():
            value = column.values[row]
            why = "a list of another shape than most" if not fits[row] and value is not None else "no finite number"
            quoted = "" if isinstance(value, np.ndarray) else f" ({shown(value, repr)})"
            tally.bad(table.where(row), f"{why} in column {column.name!r}{quoted}")
        good &= finite & fits
        parts.append(np.where(finite.reshape(-1, *[1] * (part.ndim - 1)), part, 0).astype(np.float32))
    x = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    names = tuple(column.name for column in roles.features) if (len(roles.features),) == x.shape[1:] else ()
    form = f"{' x '.join(map(str, x.shape[1:]))} {'number' if x.shape[1:] == (1,) else 'numbers'}: "
    return Samples(good, lambda rows: x[rows], x.shape[1:], form=form, facts={"feature_names": names})


def _tokens(table: UserTable, roles: Roles, options: ReadOptions, tally: Tally) -> Samples:
    """Return lists of token ids, cut and padded with 0 to one length."""
    held = [np.zeros(0) if row is None else np.asarray(row, np.float64) for row in roles.features[0].values.tolist()]
    good = np.array([len(row) > 0 and bool((row >= 0).all() and (row <= LARGEST_TOKEN).all()) for row in held])
    for row in np.flatnonzero(~good).tolist():
        tally.bad(table.where(row), f"no token ids, whole numbers from 0 to {LARGEST_TOKEN:,}")
    longest = max((len(row) for row, known in zip(held, good, strict=True) if known), default=0)
    length = min(longest, options.length or longest)
    x = np.zeros((len(held), length), np.int32)
    for row in np.flatnonzero(good).tolist():
        x[row, : len(held[row])] = held[row][:length]
    words = tuple(map(str, range(int(x.max(initial=0)) + 1)))
    form = f"{length} token ids: "
    return Samples(good, lambda rows: x[rows], (length,), "text", "int32", form, facts={"vocabulary": words})


def _images(table: UserTable, roles: Roles, options: ReadOptions, tally: Tally) -> Samples:
    """Return encoded images, or images named by their paths, decoded on demand."""
    [column] = roles.features

    def content(row: int) -> io.BytesIO | Path:
        """Return the image of a row; an empty one if it has none."""
        value = column.values[row] if table.is_text or column.kind == "text" else column.values[row].as_py()
        value = value.get("bytes") or value.get("path") if isinstance(value, dict) else value
        if not isinstance(value, str):
            return io.BytesIO(value or b"")
        home = table.raw if table.raw.is_dir() else table.raw.parent
        beside = table.files[table.file_of[row]].parent / value
        return beside if beside.is_file() else home / value

    def look(row: int) -> ImageFacts | None:
        image = content(row)
        if isinstance(image, io.BytesIO) or image.is_file():
            return image_facts(image, tally, table.where(row))
        tally.bad(table.where(row), f"there is no image {shown(str(image), repr)}")
        return None

    seen = [look(row) for row in range(len(table.places))]
    good = np.array([image is not None for image in seen])
    if not good.any():
        raise UserError(f"{table.raw} holds no readable image.{tally.first_bad}")
    form = common_form(table.raw, [[image for image in seen if image is not None]], options, tally)

    def read(rows: Ints) -> AnyArray:
        return decoded([(content(row), table.where(row)) for row in rows.tolist()], form)

    kind = f"{'gray' if form.channels == 1 else 'color'} image of {form.width} x {form.height} pixels: "
    return Samples(good, read, form.shape, "image", "uint8", kind, at_most=IMAGE_STATISTICS_ROWS)


def _texts(table: UserTable, roles: Roles, options: ReadOptions, tally: Tally) -> Samples:
    """Return the texts of some columns, joined by spaces."""
    texts, good = Texts(options.tokens), np.any([column.there for column in roles.features], axis=0)
    for row in range(len(good)):
        texts.add(" ".join(column.values[row] for column in roles.features if column.there[row]))
        if not good[row]:
            tally.bad(table.where(row), "the text is empty")
    return Samples(good, lambda rows: rows, (options.tokens,), "text", "int32", "text of ", texts)


SAMPLES = {"vector": _numbers, "tokens": _tokens, "image": _images, "text": _texts}


def read_npz(path: Path, options: ReadOptions) -> Arrays:
    """Return the arrays of an .npz file; those without a meaning are left empty."""
    if not path.stat().st_size:
        raise UserError(f"{path} is empty. Write it again with numpy.savez.")
    try:
        with np.load(path) as archive:
            meant = (*MEMBERS, options.split)
            arrays = {name: np.asarray(archive[name]) if name in meant else np.empty(0) for name in archive}
    except Exception as error:  # damaged archives raise many kinds of errors
        advice = " Convert Python objects to numbers or texts, e.g. with astype(str)." if "pickle" in str(error) else ""
        raise UserError(
            f"{path} is not a readable .npz file ({raised(error)}). Write it with numpy.savez.{advice}"
        ) from error
    if "x" not in arrays or "y" not in arrays or ("x_test" in arrays) != ("y_test" in arrays):
        raise UserError(
            f"{path} holds the arrays {', '.join(arrays) or 'none'}, but x and y are needed, and x_test and y_test go "
            "together. Save them under these names: numpy.savez('mine.npz', x=..., y=..., x_test=..., y_test=...)."
        )
    return arrays


def of_arrays(raw: Path | str, content: Arrays, options: ReadOptions, tally: Tally) -> OwnData:
    """Return the data of named arrays, as in an .npz file: x, y and optionally user, x_test, y_test."""
    unused = tuple(
        (other, "no array of this name has a meaning") for other in content if other not in (*MEMBERS, options.split)
    )
    found = _fitting(raw, content, options)
    parts, y = [found[name] for name in ("x", "x_test") if name in found], found["y"]
    if "y_test" in found:
        y = np.concatenate([y, found["y_test"]])
    boundary, samples = len(parts[0]), _of_arrays(raw, parts, options, tally)

    def place(row: int) -> str:
        return f"array y, row {row}" if row < boundary else f"array y_test, row {row - boundary}"

    target = TargetReader(str(raw), place, options, tally)
    users, groups = found.get("user"), found.get(options.split)
    return OwnData(raw, samples, y, target, (), boundary, len(parts) > 1, users, groups, Understood(unused=unused))


def _fitting(raw: Path | str, content: Arrays, options: ReadOptions) -> Arrays:
    """Return the arrays with bytes as texts and single columns (n, 1) as (n,), if their shapes fit together."""
    found: Arrays = {}
    for name in (*MEMBERS, options.split):
        if name not in content:
            continue
        values, like = content[name], found.get("x_test" if name == "y_test" else "x", content[name])
        try:
            found[name] = uniform(values) if values.dtype.kind == "S" else values
        except UnicodeDecodeError as error:
            raise UserError(
                f"{raw}, array {name}: {error.object!r} is no UTF-8 text. Store texts, not bytes."
            ) from None
        if not values.ndim:
            raise UserError(f"{raw}: {name} is a single {values.dtype}. It must hold one row for each sample.")
        if not name.startswith("x"):
            found[name] = one_column(found[name], options.targets if name.startswith("y") else None)
        if (name != "x_test" and len(values) != len(like)) or (found[name].ndim > 1 and name[0] not in "xy"):
            raise UserError(
                f"{raw}: {name} has shape {values.shape} where x has {len(like)} rows. Make it ({len(like)},)."
            )
        first = found.get(name.removesuffix("_test"), values)
        if name.endswith("_test") and found[name].shape[1:] != first.shape[1:]:
            raise UserError(
                f"{raw}: {name.removesuffix('_test')} is {first.shape}, but {name} {values.shape}. Store both in the "
                "same form."
            )
    return found


def _of_arrays(raw: Path | str, parts: list[AnyArray], options: ReadOptions, tally: Tally) -> Samples:
    """Return the samples of x, and of x_test if there is one."""
    x, task, boundary = parts[0], options.task, len(parts[0])
    if x.dtype.kind not in "uif" or x.ndim < 2 or 0 in x.shape:
        raise UserError(f"{raw}: x is {x.dtype} {x.shape}. It must hold numbers, one row of them a sample.")
    if task is None and x.dtype.kind in "ui" and x.dtype != np.uint8 and x.ndim == 2:
        raise UserError(f"{raw}: x holds {x.dtype} numbers. Say --task text (token ids) or --task vector.")
    task = task or ("vector" if x.ndim == 2 else "image")
    fits = {"text": (2,), "vector": (2, 3), "image": (3, 4)}[task]
    if x.ndim not in fits or (task == "text" and x.dtype.kind == "f"):
        raise UserError(
            f"{raw}: x is {x.dtype} {x.shape}. Token ids (--task text) are whole numbers (n, L), vectors (n, d), "
            "series (--task vector) (n, T, C), images (n, h, w), (n, C, h, w) or (n, h, w, C)."
        )
    dtype = "int32" if task == "text" else "uint8" if x.dtype == np.uint8 else "float32"
    if task == "image":
        axis = _channel_axis(raw, x.shape, options.channels)
        parts = [part[:, None] if axis is None else np.moveaxis(part, axis, 1) for part in parts]
    elif dtype == "float32" and x.ndim == 2:
        columns = [Column(f"{number} of x", "whole", values) for number, values in enumerate(x.T)]
        check_precision(raw, columns, False, tally)
        for column in columns:
            if len(x) > 2 and column.counts_rows:
                tally.note(f"column {column.name} counts the rows; leave it out if it is an index")
    low, high = (0, np.iinfo(np.int32).max) if dtype == "int32" else np.array((-LARGEST, LARGEST))
    why = "a token id below 0 or beyond 32 bits" if dtype == "int32" else "a number that is not finite in 32 bits"
    masks = []
    for name, part in zip(("x", "x_test"), parts, strict=False):
        masks.append(np.ones(len(part), bool))
        for start in range(0, 0 if dtype == "uint8" else len(part), ROWS_AT_ONCE):
            block = part[start : start + ROWS_AT_ONCE].reshape(len(part[start : start + ROWS_AT_ONCE]), -1)
            masks[-1][start : start + ROWS_AT_ONCE] = ((block >= low) & (block <= high)).all(axis=1)
        for row in np.flatnonzero(~masks[-1]).tolist():
            tally.bad(f"{raw}, array {name}, row {row}", why)
    words: tuple[str, ...] = ()
    if task == "text":
        largest = max(int(part[mask].max(initial=0)) for part, mask in zip(parts, masks, strict=True))
        if largest > LARGEST_TOKEN:
            raise UserError(
                f"{raw}: the largest token id is {largest:,}, and a model keeps a vector for each id below it. Number "
                f"the words from 0 on, to {LARGEST_TOKEN:,} at most."
            )
        words = tuple(map(str, range(largest + 1)))

    def read(rows: Ints) -> AnyArray:
        """Read training rows, or test rows."""
        part, first = (parts[0], 0) if not len(rows) or rows.max() < boundary else (parts[1], boundary)
        return part[rows - first].astype(dtype)

    return Samples(np.concatenate(masks), read, parts[0].shape[1:], task, dtype, facts={"vocabulary": words})


def _channel_axis(raw: Path | str, shape: tuple[int, ...], declared: str | None) -> int | None:
    """Return the channel axis of images: the declared one, or the one of size 1, 3 or 4; None if there is none."""
    if len(shape) == 3:
        if declared is not None:
            raise UserError(f"{raw}: x is {shape}, images without an axis of channels. Leave out --channels.")
        return None
    axes = {"first": 1, "last": 3}
    fitting = [axis for name, axis in axes.items() if (declared == name if declared else shape[axis] in CHANNELS)]
    if len(fitting) != 1:
        raise UserError(
            f"{raw}: x is {shape}, and {'both the second and the last axis' if fitting else 'neither axis'} could hold "
            "the channels of an image. Say --channels first for (n, C, h, w) or --channels last for (n, h, w, C)."
        )
    return fitting[0]
