"""LEAF's synthetic set: vectors of clusters of users, from LEAF's own generator (Caldas et al. 2018, appendix)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.leaf import CITATION, HINT, PAGE, leaf_users, require_leaf
from data_prep.datasets.raw_files import Names, Scratch, compact, folder_of
from data_prep.raw import RawDataset, measured
from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

MOST_CLASSES = 1 << 16


@dataclass
class _Part:
    """Rows of one part; their width is known with the first user."""

    rows: Scratch | None = None
    labels: list[Ints] = field(default_factory=list)
    users: list[Ints] = field(default_factory=list)


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Vectors of float32, the user is the natural client; classes are 0 ... the largest label.

    Rows with a number that is not finite and labels that are no whole numbers from 0 on are left out.
    """
    names, parts = Names(), []
    for files in require_leaf(folder_of(raw)):
        part = _Part()
        for path in files:
            for name, x, y in leaf_users(path, _arrays):
                _add(part, x, y, names.code(name), f"{path}, user {name}", tally)
        parts.append(part)
    train, test = parts
    if train.rows is None or test.rows is None or train.rows.shape != test.rows.shape:
        raise UserError(f"{raw}: the training and the test part do not both hold readable rows of one width")
    labels, test_y = np.concatenate(train.labels), np.concatenate(test.labels)
    classes = int(max(labels.max(), test_y.max())) + 1
    users, user_names = compact(np.concatenate(train.users), names.names)
    rows = train.rows.rows()
    return measured(
        RawDataset(
            name=SYNTHETIC.name,
            task="vector",
            classes=classes,
            class_names=tuple(map(str, range(classes))),
            feature_shape=train.rows.shape,
            dtype="float32",
            mean=(),
            std=(),
            labels=labels,
            users=users,
            user_names=user_names,
            read=lambda index: rows[index],
            test_x=test.rows.rows(),
            test_y=test_y,
            skipped=tally.unreadable,
            licence=SYNTHETIC.licence,
            citation=CITATION,
        ),
        together=True,
    )


def _arrays(name: str, x: Any, y: Any) -> tuple[str, Floats, Floats]:
    return name, np.asarray(x, np.float64), np.asarray(y, np.float64)


def _add(part: _Part, x: Floats, y: Floats, user: int, where: str, tally: Tally) -> None:
    if not len(y):
        return
    if part.rows is None and x.ndim == 2 and x.shape[1]:
        part.rows = Scratch(x.shape[1:], np.float32)
    if part.rows is None or x.shape != (len(y), *part.rows.shape) or y.ndim != 1:
        tally.bad(where, f"samples {x.shape} and labels {y.shape} instead of (n, d) and (n,)", len(y))
        return
    finite = (np.abs(x) <= np.finfo(np.float32).max).all(1)
    known = (y >= 0) & (y < MOST_CLASSES) & (y == np.rint(y))
    for row in np.flatnonzero(~(finite & known)):
        why = f"the label {y[row]:g}" if not known[row] else "a number that is not finite"
        tally.bad(f"{where}, record {row}", why)
    good = finite & known
    if good.any():
        part.rows.append(x[good].astype(np.float32))
        part.labels.append(y[good].astype(np.int64))
        part.users.append(np.full(int(good.sum()), user))


SYNTHETIC = DataSet(
    name="synthetic",
    samples="as generated",
    classes="as generated",
    licence="LEAF: BSD 2-clause",
    citation=CITATION,
    page=PAGE,
    files=f"{HINT}, as LEAF's synthetic generator makes them",
    read=read,
)
