"""Data sets that a reader of the user's own reads, chosen by "package.module:function"."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.datasets.arrays import of_arrays
from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.holdout import hold_out_test
from data_prep.raw import RawDataset
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Part, resolve

NAMES = ("x", "y", "user", "x_test", "y_test")
"""Of the arrays that a reader can give."""
OF_ARRAYS = frozenset({"targets", "task", "channels", "skip_unlabelled", "numbers_are_classes", "split"})
"""Fields of ReadOptions that say what arrays mean."""


def own_data_set(name: str) -> DataSet:
    """The data set of a reader, a function (raw, *, options) -> arrays by name, or a `RawDataset`.

    `raw` is the path that --raw names; a reader without it reads no files. The arrays are those of an .npz file that
    the data set `arrays` reads: x, y and optionally user, x_test, y_test.
    """
    part = resolve("data set", name)
    option_fields = OF_ARRAYS - {option.name for option in part.options}
    return DataSet(
        name=name,
        samples="",
        classes="",
        licence="not stated",
        citation="not stated",
        page="",
        files="what your reader reads",
        read=lambda raw, options, tally: read_own(part, {}, raw, options, tally),
        options=frozenset(option_fields),
        raw="folder" if reads_files(part) else "none",
        own=part,
    )


def reads_files(part: Part) -> bool:
    """Whether a reader is called with the path that --raw names."""
    parameters = list(inspect.signature(part.object).parameters.values())
    return bool(parameters) and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def read_own(part: Part, given: Mapping[str, Any], raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """What a reader of the user's own reads."""
    reader = part.make(given)
    with calling(part):
        found = reader(raw) if reads_files(part) else reader()
    if isinstance(found, RawDataset):
        if replace(options, split="rows") != ReadOptions():
            raise UserError(f"{part.name} gives a RawDataset: --task and what else says what arrays mean do nothing")
        return hold_out_test(found, options.split, tally)
    if not isinstance(found, Mapping):
        problem = f"returned a {type(found).__name__}: return a dictionary of arrays, {{'x': ..., 'y': ...}}"
        raise refuse_result(part, f"{problem}, or a data_prep.raw.RawDataset")
    if unknown := sorted(set(map(str, found)) - {*NAMES, options.split}):
        raise refuse_result(part, f"returned an array {unknown[0]!r}: those that have a meaning are {', '.join(NAMES)}")
    if missing := [name for name in ("x", "y") if name not in found]:
        raise refuse_result(part, f"returned no array {missing[0]!r}: x and y are needed")
    with calling(part):  # what it gives may fail to become an array, as a tensor of another device does
        arrays = {str(name): np.asarray(values) for name, values in found.items()}
    return hold_out_test(of_arrays(part.name, arrays, options, tally, part.name), options.split, tally)
