"""Arrays of the user's own: an .npz file with x, y (and user, x_test, y_test), or a CSV file with a label column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.labels import UNLABELLED, LabelRule, classes_of, not_missing
from data_prep.datasets.tables import BLOCK_ROWS, read_npz, read_table
from data_prep.holdout import holding_out
from data_prep.raw import RawDataset, measured
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import Modality
from fedmpi.data.targets import kept_targets

HINT = "an .npz file with x, y and optionally user, x_test, y_test, or a .csv file with a header and a label column"
CHANNELS = (1, 3, 4)
LARGEST_TOKEN = 10_000_000
TABLES = (".csv", ".csv.gz")
INSTEAD = {
    ".npy": "one array has no labels; write both with numpy.savez('mine.npz', x=x, y=y)",
    ".parquet": "write it as a table with pandas.read_parquet(FILE).to_csv('mine.csv', index=False)",
}
Arrays = dict[str, AnyArray]
Dtype = Literal["uint8", "float32", "int32"]


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """The user's arrays.

    x (n, h, w), (n, C, h, w) or (n, h, w, C) are images, (n, d) vectors; uint8 stays uint8, any other number becomes
    float32. Whole numbers (n, L) wider than 8 bits need `task`: "text" makes them token ids, "vector" float32. Labels
    are whole numbers or texts: the classes are the sorted distinct ones.
    """
    return of_arrays(raw, _content(raw, options, tally), options, tally)


def of_arrays(raw: Path | str, content: Arrays, options: ReadOptions, tally: Tally, name: str = "arrays") -> RawDataset:
    """The data set of some arrays by name, as an .npz file holds them: x, y and optionally user, x_test, y_test.

    Parameters
    ----------
    raw : Path or str
        Where they come from, for messages.
    content : dict of arrays
    options : ReadOptions
    tally : Tally
    name : str
        Of the data set.

    Raises
    ------
    UserError
        Arrays that do not fit together, or that no model can read.
    """
    _check_lengths(raw, content)
    kind_of_targets = targets_of(raw, content, options)
    valued = kind_of_targets != "classification"
    if valued:
        content = _valued(raw, content, kind_of_targets, options, tally)
    task, kind = meaning(raw, content["x"], options.task)
    rest = content.get("x_test")
    if rest is not None and rest.shape[1:] != content["x"].shape[1:]:
        raise UserError(f"{raw}: the rows of x are {content['x'].shape[1:]} but those of x_test {rest.shape[1:]}")
    axis = channel_axis(raw, content["x"].shape, options.channels) if task == "image" else None
    x = channels_first(content["x"], axis)
    test_source = x[:0] if rest is None else channels_first(rest, axis)
    if valued:
        y, y_test = (np.zeros(len(content.get(part, content["y"])), np.int64) for part in ("y", "y_test"))
        names: tuple[str, ...] = ()
    else:
        y, y_test, names = _classes(raw, content, options, tally)
    train, test = np.arange(len(x)), np.arange(len(test_source))
    test_y = y[:0] if rest is None else y_test
    train, test = train[y[train] >= 0], test[test_y[test] >= 0]
    train = _usable(f"{raw}, array x", x, train, kind, tally)
    test = _usable(f"{raw}, array x_test", test_source, test, kind, tally)
    if not len(train) or not (len(test) or rest is None):
        why = f": the first that is none: {tally.first}" if tally.first else ""
        raise UserError(f"{raw} holds no usable {'test' if len(train) else 'training'} row{why}")
    vocabulary = token_names(raw, x[train], test_source[test]) if task == "text" else ()
    users, user_names = _users(content, train, tally)

    def rows(index: Ints) -> AnyArray:
        return x[train[index]].astype(kind)

    data = RawDataset(
        name=name,
        task=task,
        classes=len(names),
        class_names=names,
        feature_shape=x.shape[1:],
        dtype=kind,
        mean=(),
        std=(),
        labels=y[train],
        users=users,
        user_names=user_names,
        read=rows,
        test_x=test_source[test].astype(kind),
        test_y=test_y[test],
        skipped=tally.unreadable,
        licence=ARRAYS.licence,
        citation=ARRAYS.citation,
        vocabulary=vocabulary,
        notes=tuple(tally.notes),
        feature_names=tuple(content.get("feature_names", np.empty(0, str)).tolist()),
    )
    if valued:
        data = with_targets(data, kind_of_targets, content, train, test)
    return data if task == "text" else measured(data)


def targets_of(raw: Path | str, content: Arrays, options: ReadOptions) -> str:
    """What the targets are: as the user says, classes where each row has one value, or as several values look.

    Raises
    ------
    UserError
        They cannot be what the user says.
    """
    y = content["y"]
    if 0 in y.shape[1:]:
        raise UserError(f"{raw}: y is {y.shape}: a sample has no target")
    if y.ndim < 2 or not y.size:
        if options.targets in ("tokens", "multilabel"):
            raise UserError(f"{raw}: y is {y.shape}, but targets that are {options.targets} have several values each")
        return options.targets or "classification"
    if options.targets == "classification":
        raise UserError(f"{raw}: y is {y.shape}, but a class is one value; leave --targets out, or give one column")
    if options.targets is not None:
        return options.targets
    zeros_and_ones = y.dtype.kind in "biuf" and bool(np.isin(y, (0, 1)).all())
    if y.dtype.kind in "ui" and not (zeros_and_ones and y.dtype == np.uint8):
        return "tokens"
    return "multilabel" if zeros_and_ones else "regression"


def _valued(raw: Path | str, content: Arrays, targets: str, options: ReadOptions, tally: Tally) -> Arrays:
    """The arrays with targets as they are kept; rows without a target are refused, or left out."""
    found = dict(content)
    for x, name, beside in (("x", "y", ("user",)), ("x_test", "y_test", ())):
        if name not in content:
            continue
        values, where = _numbers(f"{raw}, array {name}", content[name]), f"{raw}, array {name}"
        if values.shape[1:] != content["y"].shape[1:]:
            raise UserError(f"{raw}: a row of y has {content['y'].shape[1:]} values, one of y_test {values.shape[1:]}")
        labelled = (
            np.all(np.isfinite(values.reshape(len(values), -1)), axis=1)
            if values.dtype.kind == "f"
            else np.ones(len(values), bool)
        )
        if not labelled.all():
            if not options.skip_unlabelled:
                raise UserError(
                    f"{where}: {int((~labelled).sum()):,} of {len(labelled):,} rows lack a target, the first is row "
                    f"{int(labelled.argmin())}; give or remove them, or add --skip-unlabelled to leave them out"
                )
            tally.drop(UNLABELLED, int((~labelled).sum()))
        found[name] = kept_targets(where, values[labelled], targets)
        for other in (x, *beside):
            if other in content:
                found[other] = content[other][labelled]
    return found


def _numbers(where: str, values: AnyArray) -> AnyArray:
    """Targets as numbers, also where a table holds them as texts."""
    if values.dtype.kind in "biuf":
        return values
    try:
        if values.dtype.kind == "U":
            return np.where(np.char.strip(values) == "", "nan", values).astype(np.float64)
    except ValueError as error:
        raise UserError(f"{where}: {error}; targets that are no classes are numbers") from None
    raise UserError(f"{where} holds {values.dtype}; targets that are no classes are numbers")


def with_targets(data: RawDataset, targets: str, content: Arrays, train: Ints, test: Ints) -> RawDataset:
    """The data set with targets of several values, or of one that is no class.

    Parameters
    ----------
    data : RawDataset
    targets : str
        What they are.
    content : dict of arrays
        y of all rows, y_test where the test rows have their own, target_names.
    train, test : int64 arrays
        Which of them are which part.
    """
    y, refit = content["y"], data.refit
    held = content.get("y_test", y)[test]
    width = int(np.prod(y.shape[1:], dtype=np.int64))
    classes = width
    if targets == "tokens":
        classes = max(int(y.max(initial=0)), int(held.max(initial=0)), len(data.vocabulary) - 1) + 1
    names = tuple(content.get("target_names", np.empty(0, str)).tolist())
    return replace(
        data,
        classes=classes,
        class_names=names if targets == "multilabel" and len(names) == width else (),
        labels=np.zeros(len(train), np.int64),
        test_y=held,
        targets=targets,
        target_shape=y.shape[1:],
        read_targets=lambda index: y[train[index]],
        refit=None if refit is None else lambda rows: with_targets(refit(rows), targets, content, train, test),
    )


def _content(raw: Path, options: ReadOptions, tally: Tally) -> Arrays:
    """The arrays of a file, read by its kind; the kind is in its name."""
    if not raw.is_file():
        raise UserError(f"{raw} is not a file; --raw must name {HINT}")
    name = raw.name.lower()
    if name.endswith(".npz"):
        return read_npz(raw)
    if name.endswith(TABLES):
        return read_table(raw, options.label, options.skip_unlabelled, tally)
    kind = raw.suffix.lower()
    raise UserError(f"{raw} is not read as it is: {INSTEAD.get(kind, f'--raw must name {HINT}')}")


def meaning(raw: Path | str, x: AnyArray, task: Modality | None) -> tuple[Modality, Dtype]:
    """What x is and how it is stored, from its dtype and dimensions and the user's word.

    Raises
    ------
    UserError
        When the dtype is not a number, or the shape and the task do not fit.
    """
    if x.dtype.kind not in "uif" or x.ndim < 2 or 0 in x.shape:
        raise UserError(f"{raw}: x is {x.dtype} {x.shape}; it must hold numbers, one row of them a sample")
    wide_integers = x.dtype.kind in "ui" and x.dtype != np.uint8
    if task is None and wide_integers and x.ndim == 2:
        raise UserError(f"{raw}: x holds {x.dtype} numbers; say --task text (token ids) or --task vector")
    chosen: Modality = task or ("vector" if x.ndim == 2 else "image")
    if chosen == "text":
        if x.ndim != 2 or x.dtype.kind not in "ui":
            raise UserError(f"{raw}: x is {x.dtype} {x.shape}, but --task text needs whole numbers (n, L)")
        return "text", "int32"
    if chosen == "vector" and x.ndim != 2:
        raise UserError(f"{raw}: x is {x.shape}, but --task vector needs rows (n, d); leave it out or reshape x")
    if chosen == "image" and x.ndim not in (3, 4):
        raise UserError(f"{raw}: x is {x.shape}, but images are (n, h, w), (n, C, h, w) or (n, h, w, C)")
    return chosen, "uint8" if x.dtype == np.uint8 else "float32"


def channel_axis(raw: Path | str, shape: tuple[int, ...], declared: Literal["first", "last"] | None) -> int | None:
    """The axis of images that holds the channels: the one of 1, 3 or 4 values, or as the user says; None: no axis does.

    Raises
    ------
    UserError
        When the shape fits both readings or none, and the user does not say.
    """
    if len(shape) == 3:
        if declared is not None:
            raise UserError(f"{raw}: x is {shape}, images without an axis of channels; leave out --channels")
        return None
    axes = {"first": 1, "last": 3}
    if declared is not None:
        return axes[declared]
    fitting = [axis for axis in axes.values() if shape[axis] in CHANNELS]
    if len(fitting) != 1:
        raise UserError(
            f"{raw}: x is {shape}, and {'both the second and the last axis' if fitting else 'neither axis'} could hold "
            f"the channels of an image; say --channels first for (n, C, h, w) or --channels last for (n, h, w, C)"
        )
    return fitting[0]


def channels_first(x: AnyArray, axis: int | None) -> AnyArray:
    """Images as (n, C, H, W), from the axis of their channels; vectors, tokens (two axes) as they are."""
    if x.ndim == 2:
        return x
    return x[:, None] if axis is None else np.moveaxis(x, axis, 1)


def _check_lengths(raw: Path | str, content: Arrays) -> None:
    if ("x_test" in content) != ("y_test" in content):
        raise UserError(f"{raw} holds only one of x_test and y_test; it must hold both or neither")
    for one, other in (("x", "y"), ("x", "user"), ("x_test", "y_test")):
        if other in content:
            if not content[one].ndim:
                raise UserError(
                    f"{raw}: {one} is a single {content[one].dtype}; it must hold numbers, a row each sample"
                )
            values, expected = content[other], len(content[one])
            fits = (
                len(values.shape) > 0 and len(values) == expected
                if other.startswith("y")
                else values.shape == (expected,)
            )
            if not fits:
                raise UserError(
                    f"{raw}: {other} has shape {values.shape} where {one} has {expected} rows; make it ({expected},)"
                )


def _classes(
    raw: Path | str, content: Arrays, options: ReadOptions, tally: Tally
) -> tuple[Ints, Ints, tuple[str, ...]]:
    """Labels of the training and the test part, -1 where there is none, and the classes."""
    parts = [(f"{raw}, array {name}", content[name]) for name in ("y", "y_test") if name in content]
    labels, names = classes_of(parts, LabelRule(options.skip_unlabelled, options.numbers_are_classes), tally)
    return labels[0], labels[-1], names


def _users(content: Arrays, train: Ints, tally: Tally) -> tuple[Ints | None, tuple[str, ...] | None]:
    if "user" not in content:
        return None, None
    held = content["user"][train]
    if nobody := int((~not_missing(held)).sum()):
        tally.note(f"{nobody:,} of {len(held):,} training rows name no user, so the data have no natural clients")
        return None, None
    distinct, users = np.unique(held, return_inverse=True)
    return users.astype(np.int64), tuple(map(str, distinct.tolist()))


def _usable(where: str, x: AnyArray, rows: Ints, kind: Dtype, tally: Tally) -> Ints:
    """Those of `rows` that the stored dtype can hold: finite numbers, token ids of at least 0."""
    good = np.ones(len(rows), bool)
    if kind == "uint8":
        return rows
    limit = np.iinfo(np.int32).max if kind == "int32" else np.finfo(np.float32).max
    low = 0 if kind == "int32" else -limit
    for start in range(0, len(rows), BLOCK_ROWS):
        block = x[rows[start : start + BLOCK_ROWS]].reshape(len(good[start : start + BLOCK_ROWS]), -1)
        good[start : start + BLOCK_ROWS] = ((block >= low) & (block <= limit)).all(1)
    for row in rows[~good]:
        why = "a token id below 0 or beyond 32 bits" if kind == "int32" else "a number that is not finite in 32 bits"
        tally.bad(f"{where}, row {row}", why)
    return rows[good]


def token_names(raw: Path | str, *arrays: AnyArray) -> tuple[str, ...]:
    """The token ids as words, 0 to the largest."""
    largest = _largest(*arrays)
    if largest > LARGEST_TOKEN:
        raise UserError(
            f"{raw}: the largest token id is {largest:,}, and a model keeps a vector for each id below: number the "
            f"words from 0 on, to {LARGEST_TOKEN:,} at most"
        )
    return tuple(map(str, range(largest + 1)))


def _largest(*arrays: AnyArray) -> int:
    """The largest token id, by blocks."""
    return max(
        int(part[start : start + BLOCK_ROWS].max()) for part in arrays for start in range(0, len(part), BLOCK_ROWS)
    )


ARRAYS = DataSet(
    name="arrays",
    samples="yours",
    classes="yours",
    licence="yours",
    citation="yours",
    page="",
    files=HINT,
    read=holding_out(read),
    options=frozenset({"label", "targets", "task", "channels", "skip_unlabelled", "numbers_are_classes", "split"}),
    raw="file",
)
