"""Users' files: arrays of an .npz file, or a table (`data_prep.formats.samples`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from data_prep.formats.columns import LARGEST, LEAST_ROWS, beyond_float32
from data_prep.formats.samples import LARGEST_TOKEN, OwnSamples, read_table
from data_prep.formats.tables import is_arrow, is_table
from data_prep.formats.targets import LabelSource, groups_of, labeled, uniform
from data_prep.holdout import hold_out_test
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally, Understood
from fedmpi.common.errors import UserError, raised
from fedmpi.common.types import AnyArray, Bools, Ints
from fedmpi.data.arrays import CHANNELS, one_column, truth_values
from fedmpi.data.schema import Modality

MEMBERS = ("x", "y", "user", "x_test", "y_test")
ROWS_AT_ONCE = 1024
Arrays = dict[str, AnyArray]
Dtype = Literal["uint8", "float32", "int32"]


def read_own_files(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read the user's arrays or table.

    An array x of shape (n, h, w), (n, C, h, w) or (n, h, w, C) holds images, (n, d) vectors. uint8 stays uint8, any
    other number becomes float32. Whole numbers (n, L) wider than 8 bits need `task`: "text" makes them token ids,
    "vector" float32. "vector" also reads (n, T, C) as series.
    """
    if raw.is_dir() or is_table(raw):
        named = "parquet" if raw.is_dir() or is_arrow(raw) else "arrays"
        data = read_table(replace(data_set, name=named), raw, options, tally)
        return hold_out_test(data, options.split, tally)
    if raw.name.lower().endswith(".npz") and raw.is_file():
        data = of_arrays(replace(data_set, name="arrays"), raw, read_npz(raw, options), options, tally)
        return hold_out_test(data, options.split, tally)
    if raw.suffix.lower() == ".npy":
        raise UserError(f"{raw} is one array without labels. Write both with numpy.savez('mine.npz', x=x, y=y).")
    raise UserError(f"{raw} is of no kind that can be read. --raw must name {data_set.files}.")


def read_npz(path: Path, options: ReadOptions) -> Arrays:
    """Return the arrays x, y, user, x_test and y_test of an .npz file, and the one named by `ReadOptions.split`."""
    if not path.stat().st_size:
        raise UserError(f"{path} is empty. Write it again with numpy.savez.")
    try:
        with np.load(path) as archive:
            there = list(archive)
            arrays = {name: np.asarray(archive[name]) for name in (*MEMBERS, options.split) if name in there}
    except Exception as error:  # damaged archives raise many kinds of errors
        advice = " Convert Python objects to numbers or texts, e.g. with astype(str)." if "pickle" in str(error) else ""
        raise UserError(
            f"{path} is not a readable .npz file ({raised(error)}). Write it with numpy.savez.{advice}"
        ) from error
    if "x" not in arrays or "y" not in arrays or ("x_test" in arrays) != ("y_test" in arrays):
        raise UserError(
            f"{path} holds the arrays {', '.join(there) or 'none'}, but x and y are needed, and x_test and y_test go "
            "together. Save them under these names: numpy.savez('mine.npz', x=..., y=..., x_test=..., y_test=...)."
        )
    return arrays | {name: np.empty(0) for name in there if name not in arrays}


def of_arrays(data_set: DataSet, raw: Path | str, content: Arrays, options: ReadOptions, tally: Tally) -> RawDataset:
    """Return the data set of named arrays, as in an .npz file: x, y and optionally user, x_test, y_test."""
    unused = tuple(
        (other, "no array of this name has a meaning") for other in content if other not in (*MEMBERS, options.split)
    )
    content = _fitting(raw, content, options)
    x, y, rest = content["x"], content["y"], content.get("x_test")
    task, dtype = meaning(raw, x, options.task)
    if task == "image":
        axis = channel_axis(raw, x.shape, options.channels)
        x, rest = channels_first(x, axis), None if rest is None else channels_first(rest, axis)
    elif dtype == "float32" and x.ndim == 2:
        _check_columns(raw, x, tally)
    samples, boundary = [x] if rest is None else [x, rest], len(x)

    def place(row: int, name: str = "y") -> str:
        return f"array {name}, row {row}" if row < boundary else f"array {name}_test, row {row - boundary}"

    if options.targets is None:
        y = truth_values(y, x.shape[1] if task == "text" or (task == "vector" and x.ndim == 3) else 0)
    found = labeled(LabelSource(str(raw), place, options, tally), y)
    good = np.concatenate([_usable(part, dtype) for part in samples])
    for row in np.flatnonzero(~good & found.usable).tolist():
        why = "a token id below 0 or beyond 32 bits" if dtype == "int32" else "a number that is not finite in 32 bits"
        tally.bad(f"{raw}, {place(row, 'x')}", why)
    own = OwnSamples(raw, data_set, found, found.usable & good, boundary, rest is not None, tally)

    def read_rows(rows: Ints) -> AnyArray:
        if not len(rows) or rows.max() < boundary:
            return x[rows].astype(dtype)
        return samples[1][rows - boundary].astype(dtype)

    shape = x.shape[1:]
    words = _vocabulary(raw, samples, own) if task == "text" else ()
    groups = groups_of(content[options.split][own.train], options.split) if options.split in content else None
    understood = Understood(unused=unused)
    return own.data_set(task, dtype, shape, read_rows, understood, content.get("user"), groups, words)


def _fitting(raw: Path | str, content: Arrays, options: ReadOptions) -> Arrays:
    """Return the arrays with bytes as texts, single columns (n, 1) as (n,), and y_test appended to y."""
    found = {}
    for name in (*MEMBERS, options.split):
        if name not in content:
            continue
        values, target = content[name], name.startswith("y")
        try:
            found[name] = uniform(values) if values.dtype.kind == "S" else values
        except UnicodeDecodeError as error:
            raise UserError(
                f"{raw}, array {name}: {error.object!r} is no UTF-8 text. Store texts, not bytes."
            ) from None
        if not name.startswith("x"):
            found[name] = one_column(found[name], options.targets if target else None)
        like = found.get("x_test" if name == "y_test" else "x", values)
        if not values.ndim:
            raise UserError(f"{raw}: {name} is a single {values.dtype}. It must hold one row for each sample.")
        if name != "x_test" and (
            len(values) != len(like) or (found[name].ndim > 1 and name not in ("x", "y", "y_test"))
        ):
            raise UserError(
                f"{raw}: {name} has shape {values.shape} where x has {len(like)} rows. Make it ({len(like)},)."
            )
    for name in ("x", "y"):
        rest = found.get(f"{name}_test")
        if rest is not None and rest.shape[1:] != found[name].shape[1:]:
            raise UserError(
                f"{raw}: {name} is {content[name].shape}, but {name}_test {content[f'{name}_test'].shape}. Store both "
                "in the same form."
            )
    if "y_test" in found:
        found["y"] = np.concatenate([found["y"], found["y_test"]])
    return found


def meaning(raw: Path | str, x: AnyArray, task: Modality | None) -> tuple[Modality, Dtype]:
    """Return the modality and stored dtype of x, from its dtype, its dimensions and the user's `task`."""
    if x.dtype.kind not in "uif" or x.ndim < 2 or 0 in x.shape:
        raise UserError(f"{raw}: x is {x.dtype} {x.shape}. It must hold numbers, one row of them a sample.")
    if task is None and x.dtype.kind in "ui" and x.dtype != np.uint8 and x.ndim == 2:
        raise UserError(f"{raw}: x holds {x.dtype} numbers. Say --task text (token ids) or --task vector.")
    chosen: Modality = task or ("vector" if x.ndim == 2 else "image")
    fits = {"text": (2,), "vector": (2, 3), "image": (3, 4)}[chosen]
    if x.ndim not in fits or (chosen == "text" and x.dtype.kind == "f"):
        raise UserError(
            f"{raw}: x is {x.dtype} {x.shape}. Token ids (--task text) are whole numbers (n, L), vectors (n, d), "
            "series (--task vector) (n, T, C), images (n, h, w), (n, C, h, w) or (n, h, w, C)."
        )
    return chosen, "int32" if chosen == "text" else "uint8" if x.dtype == np.uint8 else "float32"


def _check_columns(raw: Path | str, x: AnyArray, tally: Tally) -> None:
    """Reject columns that float32 cannot represent, and note columns that count the rows."""
    for column in range(x.shape[1]):
        values = np.asarray(x[:, column], np.float64)
        values = values[np.abs(values) <= LARGEST]
        if not len(values):
            continue
        low, high = float(values.min()), float(values.max())
        problem = beyond_float32(low, high, float(np.abs(values - values.astype(np.float32)).max()))
        if problem:
            raise UserError(f"{raw}: column {column} of x {problem}. Subtract its smallest value and save x again.")
        if len(x) == len(values) >= LEAST_ROWS and values[0] in (0, 1) and (np.diff(values) == 1).all():
            tally.note(f"column {column} of x counts the rows; leave it out if it is an index")


def channel_axis(raw: Path | str, shape: tuple[int, ...], declared: Literal["first", "last"] | None) -> int | None:
    """Return the channel axis of images: the one of size 1, 3 or 4, or the declared one; None if there is none."""
    if len(shape) == 3:
        if declared is not None:
            raise UserError(f"{raw}: x is {shape}, images without an axis of channels. Leave out --channels.")
        return None
    axes = {"first": 1, "last": 3}
    if declared is not None:
        return axes[declared]
    fitting = [axis for axis in axes.values() if shape[axis] in CHANNELS]
    if len(fitting) != 1:
        raise UserError(
            f"{raw}: x is {shape}, and {'both the second and the last axis' if fitting else 'neither axis'} could hold "
            f"the channels of an image. Say --channels first for (n, C, h, w) or --channels last for (n, h, w, C)."
        )
    return fitting[0]


def channels_first(x: AnyArray, axis: int | None) -> AnyArray:
    """Return images as (n, C, H, W), given their channel axis."""
    return x[:, None] if axis is None else np.moveaxis(x, axis, 1)


def _usable(x: AnyArray, dtype: Dtype) -> Bools:
    """Check which rows the stored dtype can hold: finite numbers, token ids of at least 0."""
    good = np.ones(len(x), bool)
    low, high = (0, np.iinfo(np.int32).max) if dtype == "int32" else np.array((-LARGEST, LARGEST))
    for start in range(0, 0 if dtype == "uint8" else len(x), ROWS_AT_ONCE):
        block = x[start : start + ROWS_AT_ONCE].reshape(len(good[start : start + ROWS_AT_ONCE]), -1)
        good[start : start + ROWS_AT_ONCE] = ((block >= low) & (block <= high)).all(axis=1)
    return good


def _vocabulary(raw: Path | str, samples: list[AnyArray], own: OwnSamples) -> tuple[str, ...]:
    """Return the token ids as words, from 0 to the largest."""
    held = (samples[0][own.train], *(part[own.test - own.boundary] for part in samples[1:]))
    largest = max(int(part.max(initial=0)) for part in held)
    if largest > LARGEST_TOKEN:
        raise UserError(
            f"{raw}: the largest token id is {largest:,}, and a model keeps a vector for each id below it. Number the "
            f"words from 0 on, to {LARGEST_TOKEN:,} at most."
        )
    return tuple(map(str, range(largest + 1)))
