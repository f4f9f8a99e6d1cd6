"""The data sets by name."""

from __future__ import annotations

import difflib

from data_prep.datasets.amazon import AMAZON
from data_prep.datasets.arrays import ARRAYS, PARQUET
from data_prep.datasets.base import DataSet
from data_prep.datasets.celeba import CELEBA
from data_prep.datasets.cifar import CIFAR10, CIFAR100
from data_prep.datasets.cinic10 import CINIC10
from data_prep.datasets.digits import DIGITS
from data_prep.datasets.emnist import EMNIST
from data_prep.datasets.fed_cifar100 import FED_CIFAR100
from data_prep.datasets.fed_texts import SHAKESPEARE as FED_SHAKESPEARE
from data_prep.datasets.fed_texts import STACK_OVERFLOW
from data_prep.datasets.femnist import FEMNIST
from data_prep.datasets.imagefolder import IMAGEFOLDER
from data_prep.datasets.mind import MIND
from data_prep.datasets.mnist import MNIST
from data_prep.datasets.own import own_data_set
from data_prep.datasets.reddit import REDDIT
from data_prep.datasets.sent140 import SENT140
from data_prep.datasets.sentiment140 import SENTIMENT140
from data_prep.datasets.shakespeare import SHAKESPEARE
from data_prep.datasets.stackoverflow_tags import TAGS
from data_prep.datasets.synthetic import SYNTHETIC
from fedmpi.common.errors import UserError

ALL = (
    *(MNIST, *EMNIST, CIFAR10, CIFAR100, CINIC10, SENTIMENT140, MIND, AMAZON, FEMNIST, CELEBA, SENT140, SHAKESPEARE),
    *(SYNTHETIC, REDDIT, FED_CIFAR100, FED_SHAKESPEARE, STACK_OVERFLOW, TAGS, ARRAYS, PARQUET, IMAGEFOLDER, DIGITS),
)
DATASETS: dict[str, DataSet] = {data_set.name: data_set for data_set in ALL}


def data_set(name: str) -> DataSet:
    """The data set of a name, or that which the user's own reader reads (`data_prep.datasets.own`)."""
    if ":" in name:
        return own_data_set(name)
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(DATASETS)} (`list` explains them)"
        raise UserError(f"there is no data set {name!r}; {hint}")
    return DATASETS[name]
