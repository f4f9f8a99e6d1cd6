"""The data sets by name."""

from __future__ import annotations

import difflib
from dataclasses import fields
from pathlib import Path

from data_prep.datasets.amazon import AMAZON
from data_prep.datasets.arrays import ARRAYS
from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.cifar import CIFAR10, CIFAR100
from data_prep.datasets.cinic10 import CINIC10
from data_prep.datasets.digits import DIGITS
from data_prep.datasets.emnist import EMNIST
from data_prep.datasets.femnist import FEMNIST
from data_prep.datasets.imagefolder import IMAGEFOLDER
from data_prep.datasets.mind import MIND
from data_prep.datasets.mnist import MNIST
from data_prep.datasets.sentiment140 import SENTIMENT140
from data_prep.raw import RawDataset
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.registry import resolve

ALL = (MNIST, *EMNIST, CIFAR10, CIFAR100, CINIC10, SENTIMENT140, MIND, AMAZON, FEMNIST, ARRAYS, IMAGEFOLDER, DIGITS)
DATASETS: dict[str, DataSet] = {data_set.name: data_set for data_set in ALL}


def data_set(name: str) -> DataSet:
    """The data set of a name, or that which the user's own reader "package.module:function" reads.

    A reader is called as function(raw, options, tally) and gives a `RawDataset`; `raw` is what --raw names.

    Raises
    ------
    UserError
        Unknown name; names the nearest one.
    """
    if ":" in name:
        return _own(name)
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(DATASETS)} (`list` explains them)"
        raise UserError(f"there is no data set {name!r}; {hint}")
    return DATASETS[name]


def _own(name: str) -> DataSet:
    part = resolve("data set", name)

    def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
        with calling(part):
            found = part.object(raw, options, tally)
        if not isinstance(found, RawDataset):
            raise refuse_result(part, f"returned a {type(found).__name__}: return a data_prep.raw.RawDataset")
        return found

    return DataSet(
        name=name,
        samples="",
        classes="",
        licence="not stated",
        citation="not stated",
        page="",
        files="the files that your reader reads",
        read=read,
        options=frozenset(field.name for field in fields(ReadOptions)),
    )
