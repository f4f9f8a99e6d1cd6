"""The data that a configuration names, as a shard store: a folder, data in memory, or the embedded digits.

scikit-learn's 1,797 real 8 x 8 images of digits need no preparation: Alpaydin and Kaynak, Optical Recognition of
Handwritten Digits, UCI Machine Learning Repository (CC BY 4.0). What needs h5py is imported when data are opened, since
commands that list options import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.registry import ARRAYS, DIGITS, SOURCE, Component, in_memory, is_digits, register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints

if TYPE_CHECKING:
    from fedmpi.data.arrays import ClientArrays
    from fedmpi.data.shards import ShardStore

CLASSES = 10
TEST_EVERY = 5


@register("data source", name=DIGITS)
@dataclass(frozen=True, kw_only=True)
class DigitsOptions:
    """The 1,797 handwritten digits of scikit-learn, assigned to clients; needs no file.

    `data.source` may also name a folder that `python -m data_prep` wrote. Options may be written in the name as well,
    "digits:clients=50,partition=iid".

    Parameters
    ----------
    clients : int
        N, at most the 1,442 training images.
    partition : {"dirichlet", "iid"}
        Dirichlet(alpha) shares of the clients for every class, or equal random parts.
    alpha : float
        Concentration of the Dirichlet distribution; the default is mildly heterogeneous.
    seed : int
        Seed of the partition, independent of a run's seed.
    """

    clients: Annotated[int, Field(ge=1)] = 20
    partition: Literal["dirichlet", "iid"] = "dirichlet"
    alpha: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0


def open_store(where: Any, options: Mapping[str, Any] | None = None, verify: bool = False) -> ShardStore:
    """Open the data that ``data.source`` names."""
    from fedmpi.data.arrays import arrays_of
    from fedmpi.data.shards import open_folder

    if is_digits(where):
        return open_digits(Component.read(SOURCE, {"name": where, **(options or {})}, DIGITS).make())
    if in_memory(where):
        return arrays_of(where, options or {}).store
    if options:
        raise UserError(f"data.{next(iter(options))} has no effect on the shard folder {where}. Remove it")
    return open_folder(Path(where), verify)


def open_digits(options: DigitsOptions) -> ShardStore:
    """The embedded digits as a store."""
    from fedmpi.data.arrays import ClientArrays

    x, y, *test = load_digits_split()
    # The schema scales uint8 by 1 / 255; mean and std are on that scale though pixels end at 16.
    mean, std = (round(float(value), 6) for value in ((x / 255.0).mean(), (x / 255.0).std()))
    arrays = ClientArrays(x, y, np.zeros(len(y), np.int64), test=test, mean=mean, std=std, name=DIGITS)
    store = assigned(arrays, options).store
    store.manifest = replace(
        store.manifest,
        partition=options.partition,
        partition_options={"alpha": options.alpha} if options.partition == "dirichlet" else {},
        seed=options.seed,
        licence="CC BY 4.0",
        citation="E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI ML Repository, 1998",
        command="embedded",
    )
    return store


def assigned(arrays: ClientArrays, options: DigitsOptions) -> ClientArrays:
    """Assign the samples of a single client to the number of clients in the options."""
    from fedmpi.data.assignment import dirichlet_by_class, even_sizes, iid

    y, classes, clients = arrays.y, arrays.description.classes, options.clients
    if clients > len(y):
        raise UserError(f"the data have {len(y)} training samples. Set data.source.clients to at most {len(y)}")
    generator = Streams(options.seed).generator(Purpose.PARTITION)
    if options.partition == "iid":
        rows, arrays.offsets = iid(len(y), even_sizes(len(y), clients), generator)
    elif arrays.description.labeled:
        rows, arrays.offsets, _ = dirichlet_by_class(y, classes, clients, options.alpha, generator)
    else:
        raise UserError('partition = "dirichlet" needs samples with classes. Set data.source.partition = "iid"')
    arrays.x, arrays.y, arrays.client_ids = arrays.x[rows], y[rows], np.arange(clients)
    return arrays


def of_datasets(splits: Mapping[str, Any]) -> Any:
    """Return the client arrays of datasets by split; without a column user, a component that assigns their samples."""
    from fedmpi.data.arrays import ClientArrays
    from fedmpi.data.inputs import refuse_others

    train: Any
    train, test, val = map(splits.get, ("train", "test", "validation"))
    refuse_others(f"{ARRAYS}: train", train)
    if len(train) and isinstance(first := train[0], Mapping) and "user" in first:
        return ClientArrays.from_datasets(train, "user", test=test, val=val)

    @dataclass(frozen=True, kw_only=True)
    class Datasets(DigitsOptions):
        def __call__(self) -> ClientArrays:
            single = np.zeros(len(train), np.int64)
            return assigned(ClientArrays.from_datasets(train, single, test=test, val=val), self)

    return Datasets


@cache
def load_digits_split() -> tuple[npt.NDArray[np.uint8], Ints, npt.NDArray[np.uint8], Ints]:
    """Training and test features and labels: every fifth image of a class, in the data set's order, is for testing.

    They are read from the file that comes with scikit-learn, which is slow to import.
    """
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None
    table = np.loadtxt(Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz", np.uint8, delimiter=",")
    features, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    test = np.zeros(len(labels), bool)
    for label in range(CLASSES):
        test[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return features[~test], labels[~test], features[test], labels[test]
