"""Users' files: arrays (.npz, HDF5), or a table (CSV, Parquet or Arrow, also of Hugging Face's datasets)."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.formats.files import files_below, part_of
from data_prep.formats.images import STATISTICS_ROWS, common_form, decoded, form_of
from data_prep.formats.tables import Column, UserTable, is_missing, is_table, open_table, roles_of
from data_prep.formats.texts import Texts
from data_prep.holdout import hold_out_test
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally, Understood, measure, rows_of
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.task_kinds import IGNORED
from fedmpi.common.types import AnyArray, Bools, Ints
from fedmpi.data.arrays import CHANNELS, IGNORED_BY_TORCH, features, kept_targets, one_column
from fedmpi.data.inputs import lengths, packed, padded, stacked, unequal
from fedmpi.data.schema import Input

LARGEST = float(np.finfo(np.float32).max)
FEWEST_LEVELS = 1e-4
"""Largest step of float32, as a share of a column's range, that leaves the column usable."""
LARGEST_TOKEN = 10_000_000
WHOLE = 2.0**53  # larger neighboring whole numbers are equal as floats
NAMED = 10
"""Largest number of columns that are listed by name."""
MEMBERS = ("x", "y", "user", "x_test", "y_test")
HDF5 = (".h5", ".hdf5")
BLOCK_BYTES = 32 << 20
SEEN_ROWS = 10_000  # of an HDF5 dataset, to check the precision of its columns
Arrays = dict[str, Any]
"""Arrays by name; samples may be a dataset of HDF5 instead."""


@dataclass(frozen=True)
class OwnData:
    """Rows of a table or of arrays, training rows first: their samples, targets, users and groups."""

    where: str  # Source of the targets, for messages
    place: Callable[[int], str]  # Location of a row, for messages
    good: Bools  # (n,): Mask of the rows that are samples; the others were counted
    facts: dict[str, Any]  # Fields of `RawDataset` about the samples
    y: AnyArray  # (n, …)
    names: tuple[str, ...]  # Names of classes or labels by number
    boundary: int  # Number of training rows
    tested: bool  # True if there is a test part
    users: AnyArray | None
    groups: AnyArray | None
    understood: Understood

    def data_set(self, source: DataSet, options: ReadOptions, tally: Tally) -> RawDataset:
        """Return the data set of the rows that are samples."""
        y, good = one_column(self.y, options.targets), self.good
        if y.ndim == 1 and options.targets != "regression":
            good = good & (y != IGNORED_BY_TORCH) & (y != str(IGNORED_BY_TORCH))
        if count := int((self.good & ~good).sum()):
            tally.drop(f"samples of label {IGNORED_BY_TORCH}", count)
        rows = np.flatnonzero(good)
        parts = {"train": rows[rows < self.boundary], "test": rows[rows >= self.boundary]}
        for which, some in parts.items():
            if not len(some) and (self.tested or which == "train"):
                raise UserError(f"{self.where} holds no usable {which} sample.{tally.first_bad}")
        found = self._targets(rows, options.targets)
        y = np.zeros((len(self.good), *found["y"].shape[1:]), found["y"].dtype)
        y[rows] = found["y"]
        facts: dict[str, Any] = {**self.facts, **found, **parts, "y": y, "understood": self.understood}
        if self.users is not None:
            codes, facts["user_names"] = value_codes(self.users)
            facts["users"] = np.append(codes, np.full(len(y) - len(codes), -1))  # arrays name those of training rows
        if self.groups is not None and not self.tested:
            facts["groups"], _ = value_codes(self.groups)
            if absent := int((facts["groups"][rows] < 0).sum()):
                raise UserError(
                    f"--split {options.split}: {absent:,} of {len(rows):,} samples have no value of {options.split}. "
                    "Fill them, or choose another column."
                )
        return source.of(y, y[:0], **facts)

    def _targets(self, rows: Ints, declared: str | None) -> dict[str, Any]:
        """Return the fields of `RawDataset` about the targets, with `y` of these rows.

        Single values are classes, unless the user declares a regression. Whole numbers (n, L) are tokens, truth values
        are multiple labels, and other values a regression.
        """
        where = self.where
        if self.y.ndim > 1 and 0 in self.y.shape[1:]:
            raise UserError(f"{where} is {self.y.shape}: a sample has no target. Give each at least one value.")
        y = one_column(self.y[rows], declared)
        if y.ndim == 1 and declared in ("tokens", "multilabel"):
            raise UserError(f"{where} has one value each, but --targets {declared} needs several. Leave --targets out.")
        if y.ndim == 1 and declared != "regression":
            return self._classes(y, rows)
        y = self._numbers(y, rows)
        if declared == "classification":
            raise UserError(f"{where} has {y.shape[1:]} values each, but a class is one value. Give one column.")
        if declared is None and y.ndim == 2 and y.dtype.kind != "b" and np.isin(y, (0, 1)).all():
            raise UserError(
                f"{where} holds zeros and ones alone. Say --targets multilabel, tokens or regression, or give classes "
                "as one column."
            )
        declared = declared or {"b": "multilabel", "f": "regression"}.get(y.dtype.kind, "tokens")
        y = kept_targets(where, y, declared)
        classes = int(np.prod(y.shape[1:], dtype=np.int64))
        if declared == "tokens":
            if "fit" in self.facts and self.facts["task"] == "text":
                raise UserError(
                    f"{where}: targets that are tokens need samples of token ids. Name their column with --features."
                )
            classes = max(int(y.max(initial=0)), len(self.facts.get("vocabulary", ())) - 1) + 1
        names = self.names if declared == "multilabel" and len(self.names) == classes else ()
        return {"targets": declared, "y": y, "classes": classes, "class_names": names}

    def _numbers(self, y: AnyArray, rows: Ints) -> AnyArray:
        """Return targets as numbers; reject others and missing ones."""
        if y.dtype.kind in "OU":
            column = Column("", y.ravel().astype(object))
            if (odd := np.isnan(column.numbers) & column.there).any():
                place = self.place(int(rows[odd.argmax() // max(1, np.size(y[0]))]))
                raise UserError(
                    f"{self.where}: {str(y.ravel()[odd.argmax()])!r} ({place}) is no number. Targets that are no "
                    "classes must be numbers."
                )
            y = column.numbers.reshape(y.shape)
        if y.dtype.kind not in "biuf":
            raise UserError(f"{self.where} holds {y.dtype} values. Targets that are no classes must be numbers.")
        self._check_present(np.asarray(~np.isnan(y).reshape(len(y), -1).any(axis=1)), rows)
        return y

    def _check_present(self, there: Bools, rows: Ints) -> None:
        if not there.all():
            raise UserError(
                f"{self.where}: {int((~there).sum()):,} of {len(there):,} samples have no label (empty, ?, NA, N/A, "
                f"null, None or nan), the first is {self.place(int(rows[there.argmin()]))}. Label or remove them, or "
                "rename a class of such a name."
            )

    def _classes(self, y: AnyArray, rows: Ints) -> dict[str, Any]:
        """Return the classes of values (n,): the sorted distinct values; texts that are all numbers are numbers."""
        if y.dtype.kind not in "biufOUS":
            raise UserError(f"{self.where} holds {y.dtype} values. Labels must be whole numbers or texts.")
        kept = plain(y)
        if self.names and kept.dtype.kind in "iuf":
            kept = np.where(kept < 0, np.nan, kept)  # Hugging Face's mark of no label is -1
        self._check_present(~is_missing(kept), rows)
        numbers = kept
        if kept.dtype.kind == "O":
            try:
                numbers = kept.astype(np.float64)
                kept = numbers if (np.abs(numbers) <= WHOLE).all() else kept
            except ValueError:
                numbers = np.zeros(0)
        if len(odd := np.flatnonzero(numbers % 1 != 0)):
            raise UserError(
                f"{self.where}: {numbers[odd[0]]:g} ({self.place(int(rows[odd[0]]))}) is a number to be predicted, not "
                "a class. Add --targets regression to predict it, or store bins as whole numbers or texts."
            )
        codes, names = value_codes(kept)
        if self.names:
            if int(names[-1]) >= len(self.names):
                raise UserError(
                    f"{self.where}: the label {names[-1]} is beyond its {len(self.names)} names. Correct one of both."
                )
            codes, names = np.array([int(name) for name in names], np.int64)[codes], self.names
        return {"y": codes, "classes": len(names), "class_names": names}


def plain(values: AnyArray) -> AnyArray:
    """Return values as numbers, or as stripped texts, None if missing."""
    if values.dtype.kind in "iuf":
        return values
    texts = [value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in values.tolist()]
    held = np.array(texts, object)
    held[:] = [None if gone else str(text).strip() for text, gone in zip(texts, is_missing(held), strict=True)]
    return held


def value_codes(values: AnyArray) -> tuple[Ints, tuple[str, ...]]:
    """Return a code for each value, -1 if it is missing, and the values by code, in order."""
    import pandas as pd  # slow to import

    codes, distinct = pd.factorize(plain(values), sort=True)
    if distinct.dtype.kind == "f" and (np.abs(distinct) <= WHOLE).all() and (distinct % 1 == 0).all():
        distinct = distinct.astype(np.int64)  # so that a class is named 3 and not 3.0
    return codes, tuple(map(str, distinct.tolist()))


def read_own_files(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read the user's arrays or table.

    An array x of shape (n, h, w), (n, C, h, w) or (n, h, w, C) holds images, (n, d) vectors. uint8 stays uint8, any
    other number becomes float32. Whole numbers (n, L) wider than 8 bits need `task`: "text" makes them token ids,
    "vector" float32. "vector" also reads (n, T, C) as series.
    """
    if raw.is_file() and not raw.stat().st_size:
        raise UserError(f"{raw} is empty. Write or fetch it again.")
    if found := hdf5_files(raw):
        own = of_arrays(raw, read_hdf5(raw, found, options), options)
    elif raw.is_dir() or is_table(raw):
        own = of_table(raw, options, tally)
    elif raw.name.lower().endswith(".npz"):
        own = of_arrays(raw, read_npz(raw, options), options)
    else:
        raise UserError(f"{raw} has an unsupported format. --raw must name {data_set.files}.")
    return hold_out_test(own.data_set(data_set, options, tally), options.split, tally)


def of_table(raw: Path, options: ReadOptions, tally: Tally) -> OwnData:
    """Return the data of a table: a file, or a folder of files whose names contain train, test or validation."""
    table = open_table(raw, options, tally)
    roles = roles_of(table, options)
    good, facts, form = SAMPLES[roles.kind](table, roles.features, options, tally)
    labels, names = roles.labels, tuple(column.name for column in roles.labels)
    where = f"{raw}, column {','.join(names)}"
    if {column.kind for column in labels} & ({"image", "nested", "other"} | ({"list"} if len(labels) > 1 else set())):
        raise UserError(f"{where} holds no labels. Labels are whole numbers, texts, lists, or columns of numbers.")
    if len(labels) > 1:
        y = np.stack([column.values.astype(object) for column in labels], axis=1)
    elif labels[0].kind == "list":
        y, names = labels[0].values, ()
        uneven = options.inputs and labels[0].there.all() and unequal(y)
        y = padded(where, y, int(lengths(y).max()), IGNORED) if uneven else _dense(table, labels[0])
    else:
        y, names = labels[0].values, labels[0].class_names
    used = [column.name for column in roles.features]
    said = ", ".join(used[:NAMED]) + (f" and {len(used) - NAMED} more" if len(used) > NAMED else "")
    target = f"column {', '.join(column.name for column in labels)}"
    users, groups = (None if role is None else role.values for role in (roles.user, roles.group))
    understood = Understood(f"{form}{said}", target, roles.unused)
    return OwnData(where, table.where, good, facts, y, names, table.boundary, table.tested, users, groups, understood)


Made = tuple[Bools, dict[str, Any], str]
"""Mask of the rows that are samples, fields of `RawDataset`, and a description of a sample without column names."""


def _dense(table: UserTable, column: Column) -> AnyArray:
    """Return a column of numbers (n, 1), or of lists or lists of lists of one shape (n, *shape), NaN if missing."""
    if column.kind == "number":
        return column.numbers[:, None]
    try:
        rows = [np.stack(list(row)) if column.kind == "nested" else row for row in column.values[column.there]]
        held = np.stack(rows)
    except ValueError:
        raise UserError(
            f"{table.raw}: lists of column {column.name!r} differ in shape. Pad or cut them to one shape (--task text "
            "pads lists of token ids)."
        ) from None
    if column.there.all():
        return held
    whole = np.full((len(column.values), *held.shape[1:]), np.nan)
    whole[column.there] = held
    return whole


def _numbers(table: UserTable, columns: list[Column], options: ReadOptions, tally: Tally) -> Made:
    """Return vectors of number or list columns, or samples (T, C) of one column of lists of lists."""
    good, parts = np.ones(len(table.places), bool), []
    for column in columns:
        part = _dense(table, column)
        finite = (np.abs(part) <= LARGEST).reshape(len(good), -1).all(axis=1)
        for row in np.flatnonzero(good & ~finite).tolist():
            quoted = f" ({shown(column.values[row], repr)})" if column.kind == "number" else ""
            tally.bad(table.where(row), f"no finite number in column {column.name!r}{quoted}")
        good &= finite
        parts.append(part)
    values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    if len(columns) == values.shape[1]:
        check_precision(table.raw, [column.name for column in columns], values[good])
    x: AnyArray = np.zeros(values.shape, np.float32)
    x[good] = values[good]
    shape = x.shape[1:]
    form = f"{' x '.join(map(str, shape))} {'number' if shape == (1,) else 'numbers'}: "
    facts = {"task": "vector", "dtype": "float32", "feature_shape": shape, "read": lambda rows: x[rows]}
    return good, {**facts, "fit": measure}, form


def check_precision(where: Path | str, names: list[str], values: AnyArray) -> None:
    """Reject columns (n, d) whose numbers differ by too little for float32, such as times in seconds."""
    if not len(values):
        return
    spread = np.ptp(values, axis=0)
    lost = np.abs(values - values.astype(np.float32)).max(axis=0)
    for place in np.flatnonzero((lost > FEWEST_LEVELS * spread) & (spread > 0)).tolist():
        raise UserError(
            f"{where}: column {names[place]!r} holds numbers around {values[0, place]:.10g}, which differ too little "
            "for float32. Subtract its smallest value, or leave it out (in a table by --features)."
        )


def _tokens(table: UserTable, columns: list[Column], options: ReadOptions, tally: Tally) -> Made:
    """Return lists of token ids, cut and padded with 0 to one length."""
    held = [np.zeros(0) if row is None else np.asarray(row, np.float64) for row in columns[0].values.tolist()]
    good = np.array(
        [len(row) > 0 and bool(((row >= 0) & (row <= LARGEST_TOKEN) & (row % 1 == 0)).all()) for row in held]
    )
    for row in np.flatnonzero(~good).tolist():
        tally.bad(table.where(row), f"no token ids, whole numbers from 0 to {LARGEST_TOKEN:,}")
    longest = max((len(row) for row, known in zip(held, good, strict=True) if known), default=0)
    length = min(longest, options.length or longest)
    x = np.zeros((len(held), length), np.int32)
    x[good] = padded(str(table.raw), [row[:length] for row, known in zip(held, good, strict=True) if known], length)
    return good, _of_token_ids(table.raw, x), f"{length} token ids: "


def _of_token_ids(raw: Path | str, *parts: AnyArray) -> dict[str, Any]:
    """Return the fields of `RawDataset` about token ids (n, L); the words of the vocabulary are their numbers."""
    largest = max(int(x.max(initial=0)) for x in parts)
    if largest > LARGEST_TOKEN:
        raise UserError(
            f"{raw}: the largest token id is {largest:,}, and a model keeps a vector for each id below it. Number the "
            f"words from 0 on, to {LARGEST_TOKEN:,} at most."
        )
    about = {"task": "text", "dtype": "int32", "feature_shape": parts[0].shape[1:], "read": rows_of(*parts)}
    return {**about, "vocabulary": tuple(map(str, range(largest + 1)))}


def _images(table: UserTable, columns: list[Column], options: ReadOptions, tally: Tally) -> Made:
    """Return encoded images, or images named by their paths, decoded on demand."""

    def content(row: int) -> io.BytesIO | Path:
        """Return the image of a row; an empty one if it has none."""
        value = columns[0].values[row]
        value = value.get("bytes") or value.get("path") if isinstance(value, dict) else value
        if not isinstance(value, str):
            return io.BytesIO(value if isinstance(value, bytes) else b"")
        beside = table.files[table.file_of[row]].parent / value
        return beside if beside.is_file() else (table.raw if table.raw.is_dir() else table.raw.parent) / value

    seen = [form_of(content(row), tally, table.where(row)) for row in range(len(table.places))]
    good = np.array([image is not None for image in seen])
    if not good.any():
        raise UserError(f"{table.raw} holds no readable image.{tally.first_bad}")
    form = common_form(table.raw, [image for image in seen if image is not None], options)

    def read(rows: Ints) -> AnyArray:
        return decoded([(content(row), table.where(row)) for row in rows.tolist()], form)

    kind = f"{'gray' if form.channels == 1 else 'color'} image of {form.width} x {form.height} pixels: "
    facts = {"task": "image", "dtype": "uint8", "feature_shape": form.shape, "read": read}
    return good, {**facts, "fit": partial(measure, at_most=STATISTICS_ROWS)}, kind


def _texts(table: UserTable, columns: list[Column], options: ReadOptions, tally: Tally) -> Made:
    """Return the texts of some columns, joined by spaces."""
    texts, good = Texts(options.tokens), np.any([column.there for column in columns], axis=0)
    for row in range(len(good)):
        texts.add(" ".join(column.values[row] for column in columns if column.there[row]))
        if not good[row]:
            tally.bad(table.where(row), "the text is empty")
    return good, texts.facts(options), "text of "


def _inputs(table: UserTable, columns: list[Column], options: ReadOptions, tally: Tally) -> Made:
    """Return columns as separate arrays: numbers, or lists of them, padded to one length."""
    good = np.all([column.there for column in columns], axis=0)
    for row in np.flatnonzero(~good).tolist():
        tally.bad(table.where(row), "no value in one of the columns of --inputs")
    if not good.any():
        raise UserError(f"{table.raw} holds no row with a value in each column of --inputs.{tally.first_bad}")
    arrays = {}
    for column in columns:
        values: Any = column.values[good]
        if column.kind == "nested":
            values = [np.stack(list(row)) for row in values]
        elif column.kind == "number" and values.dtype.kind == "O":  # cells of a CSV file
            numbers = column.numbers[good]
            values = numbers if (numbers % 1).any() else numbers.astype(np.int64)
        arrays[column.name] = stacked(f"{table.raw}, column {column.name}", values)
    words, inputs = packed("", {str(table.raw): arrays})
    x = np.zeros((len(good), words[str(table.raw)].shape[1]), np.int32)
    x[good] = words[str(table.raw)]
    return good, _of_inputs(options, inputs, x), "arrays "


def _of_inputs(options: ReadOptions, inputs: tuple[Input, ...], *parts: AnyArray) -> dict[str, Any]:
    """Return the fields of `RawDataset` about samples of several arrays, packed (n, d)."""
    if options.task:
        raise UserError("--task has no effect on samples of several arrays. Leave it out.")
    about = {"task": "inputs", "dtype": "int32", "feature_shape": parts[0].shape[1:], "read": rows_of(*parts)}
    return {**about, "inputs": inputs}


SAMPLES = {"vector": _numbers, "tokens": _tokens, "image": _images, "text": _texts, "inputs": _inputs}


def is_meant(name: str, options: ReadOptions) -> bool:
    """Check whether an array of this name has a meaning: x/NAME is one of several arrays of a sample."""
    member, several, _ = name.partition("/")
    return member in (("x", "x_test") if several else (*MEMBERS, options.split))


def read_npz(path: Path, options: ReadOptions) -> Arrays:
    """Return the arrays of an .npz file; those without a meaning are left empty."""
    try:
        with np.load(path) as archive:
            return {name: np.asarray(archive[name]) if is_meant(name, options) else np.empty(0) for name in archive}
    except Exception as error:  # damaged archives raise many kinds of errors
        advice = " Convert Python objects to numbers or texts, e.g. with astype(str)." if "pickle" in str(error) else ""
        raise UserError(
            f"{path} is not a readable .npz file ({raised(error)}). Write it with numpy.savez.{advice}"
        ) from error


def hdf5_files(raw: Path) -> list[Path]:
    """Return the HDF5 file, or those in a folder."""
    return [path for path in (files_below(raw) if raw.is_dir() else [raw]) if path.suffix.lower() in HDF5]


def read_hdf5(raw: Path, files: list[Path], options: ReadOptions) -> Arrays:
    """Return the arrays of one file, or of a file for training and one for testing; samples stay in their files."""
    endings = ["_test" if raw.is_dir() and part_of(path.relative_to(raw)) == "test" else "" for path in files]
    if len(set(endings)) < len(files):
        named = ", ".join(str(path.relative_to(raw)) for path in files[:4])
        raise UserError(
            f"{raw} holds {len(files)} HDF5 files ({named}). Give one, or one with train and one with test in its name."
        )
    arrays: Arrays = {}
    for path, ending in zip(files, endings, strict=True):
        try:
            for name, found in h5py.File(path, "r").items():  # its datasets keep the file open
                key = name + ending
                if key in ("x", "x_test") and isinstance(found, h5py.Group):
                    arrays |= {f"{key}/{own}": np.asarray(one[()]) for own, one in found.items()}
                    continue
                meant = key in (*MEMBERS, options.split) and isinstance(found, h5py.Dataset)
                arrays[key] = np.empty(0) if not meant else found if name.startswith("x") else np.asarray(found[()])
        except OSError as error:
            raise UserError(f"{path} is no readable HDF5 file ({raised(error)}). Write or fetch it again.") from error
    return arrays


def _in_blocks(where: str, source: h5py.Dataset, options: ReadOptions) -> AnyArray:
    """Return samples of a file as they are stored, read in blocks into a temporary file."""
    step = max(1, BLOCK_BYTES // max(1, source.dtype.itemsize * int(np.prod(source.shape[1:], dtype=np.int64))))
    try:
        with tempfile.TemporaryFile() as file:
            for low in range(0, max(1, len(source)), step):
                block = _in_form(where, source[low : low + step], options)
                file.write(block.tobytes())
            file.flush()
            shape = (len(source), *block.shape[1:])
            return block if len(source) <= step else np.memmap(file, block.dtype, "r", shape=shape)
    except OSError as error:
        raise UserError(
            f"{where} cannot be copied to {tempfile.gettempdir()} ({error.strerror or error}). Set TMPDIR to a folder "
            "with more room, or write the file again."
        ) from error


def of_arrays(raw: Path | str, arrays: Arrays, options: ReadOptions) -> OwnData:
    """Return the data of named arrays, as in an .npz file: x, y and optionally user, x_test, y_test.

    Several arrays per sample, x/NAME and x_test/NAME, must fit into memory.
    """
    named = {part: [name for name in arrays if name.startswith(f"{part}/")] for part in ("x", "x_test")}
    inputs: tuple[Input, ...] = ()
    if named["x"]:
        several = {part: {name.partition("/")[2]: arrays[name] for name in own} for part, own in named.items() if own}
        words, inputs = packed(f"{raw}: ", several)
        arrays = {name: values for name, values in arrays.items() if name not in sum(named.values(), [])} | words
    if "x" not in arrays or "y" not in arrays or ("x_test" in arrays) != ("y_test" in arrays):
        raise UserError(
            f"{raw} holds the arrays {', '.join(arrays) or 'none'}, but x and y are needed, and x_test and y_test go "
            "together. Save them under these names."
        )
    meant = [name for name in (*MEMBERS, options.split) if name in arrays]
    unused = tuple((other, "no array of this name has a meaning") for other in arrays if other not in meant)
    for name in meant:
        like = "x_test" if name.endswith("_test") else "x"
        if not arrays[name].ndim or len(arrays[name]) != len(arrays[like]):
            raise UserError(f"{raw}: {name} has shape {arrays[name].shape} where {like} has {arrays[like].shape}.")
    given = {name: arrays[name] for name in ("x", "x_test") if name in meant}
    parts = [x if inputs else _features(f"{raw}: {name}", x, options) for name, x in given.items()]
    y = [one_column(arrays[name], options.targets) for name in ("y", "y_test") if name in meant]
    for name, (one, *others) in (("x", parts), ("y", y)):
        if others and others[0].shape[1:] != one.shape[1:]:
            raise UserError(f"{raw}: {name} is {one.shape}, but {name}_test {others[0].shape}. Store both in one form.")
    boundary, x = len(parts[0]), parts[0]
    if inputs:
        facts = _of_inputs(options, inputs, *parts)
    elif x.dtype == np.int32:
        facts = _of_token_ids(raw, *parts)
    else:
        task = options.task or ("vector" if x.ndim == 2 else "image")
        about = {"task": task, "dtype": str(x.dtype), "feature_shape": x.shape[1:], "read": rows_of(*parts)}
        facts = {**about, "fit": measure}

    def place(row: int) -> str:
        return f"array y, row {row}" if row < boundary else f"array y_test, row {row - boundary}"

    users, groups = (one_column(arrays[name], None) if name in meant else None for name in ("user", options.split))
    return OwnData(
        where=str(raw),
        place=place,
        good=np.ones(sum(map(len, parts)), bool),
        facts=facts,
        y=np.concatenate(y),
        names=(),
        boundary=boundary,
        tested=len(parts) > 1,
        users=users,
        groups=groups,
        understood=Understood(unused=unused),
    )


def _features(where: str, x: AnyArray | h5py.Dataset, options: ReadOptions) -> AnyArray:
    """Return an array of samples as it is stored; images have the axes (n, C, h, w)."""
    stored = isinstance(x, h5py.Dataset)
    if x.ndim == 2 and x.dtype == np.float64:
        seen = x[:: len(x) // SEEN_ROWS + 1] if stored else x
        if np.isfinite(seen).all():
            check_precision(where, [str(number) for number in range(x.shape[1])], seen)
    return _in_blocks(where, x, options) if stored else _in_form(where, x, options)


def _in_form(where: str, x: AnyArray, options: ReadOptions) -> AnyArray:
    """Return samples with the axes and the type that they are stored with."""
    kind = options.task or ("vector" if x.ndim == 2 else "image")
    if x.ndim not in {"text": (2,), "vector": (2, 3), "image": (3, 4)}[kind]:
        raise UserError(
            f"{where} is {x.dtype} {x.shape}. Token ids (--task text) are whole numbers (n, L), vectors (n, d), series "
            "(--task vector) (n, T, C), images (n, h, w) or (n, C, h, w)."
        )
    if x.ndim == 3 and kind == "image":
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        x = np.moveaxis(x, 3, 1)
    return features(where, x, options.task if x.ndim == 2 else kind)
