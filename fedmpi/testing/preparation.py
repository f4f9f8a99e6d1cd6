"""Contracts of components for `python -m data_prep`: partitions and readers of data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.registry import built_in_name
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.data.schema import wrong_target
from fedmpi.testing.check import CLIENTS, CheckSkipped, Contract, OtherUse, Results, Subject, cost, demand

ROWS, CLASSES, FEW_CLIENTS = 900, 10, 7
ROWS_PER_CLIENT, ROWS_PER_USER, SOME_ROWS = 100, 20, 200


def _labels(rows: int = ROWS) -> Ints:
    """Return read-only labels (n,) of unequal frequency."""
    generator = np.random.Generator(np.random.Philox(6))
    shares = np.arange(2, CLASSES + 2) / np.arange(2, CLASSES + 2).sum()
    labels = generator.choice(CLASSES, rows, p=shares).astype(np.int64)
    labels.flags.writeable = False
    return labels


def _partition(subject: Subject, labels: Ints, clients: int) -> Any:
    """Return the owners from the partition, which gets further inputs besides labels if it is built in."""
    from data_prep.partitions import Request, partition

    generator = Streams(1).generator(Purpose.PARTITION)
    if built_in_name(subject.part.object) is None:
        return subject.made()(labels, clients, generator)
    users = np.arange(len(labels)) * 7 % (len(labels) // ROWS_PER_USER)
    request = Request(labels, CLASSES, clients, generator, users)
    return partition(subject.part.name, request, **subject.options).owners(len(labels))


def _owners(subject: Subject) -> Results:
    """Return the clients of samples, -1 for samples without a client."""
    from data_prep.partitions import checked_owners

    clients = int(subject.settings.get("clients", FEW_CLIENTS))
    owners = checked_owners(subject.part, _partition(subject, _labels(), clients), ROWS, clients)
    demand(int(owners.min()) >= -1, f"client {owners.min()}: clients count from 0, and -1 means no client")
    return {"the clients of samples": owners}


def _contents(subject: Subject, order: int = 1, batch: int = SOME_ROWS) -> Results:
    """Return labels, users and the first samples of both parts, read in this order and in batches."""
    from data_prep.datasets import OF_ARRAYS, read_own, reads_files
    from data_prep.raw import ReadOptions, Tally

    if "raw" not in subject.settings and reads_files(subject.part):
        raise CheckSkipped("it reads files: name them, --set raw=PATH")
    meant = {name: subject.settings[name] for name in OF_ARRAYS if name in subject.settings.keys() - subject.options}
    raw = Path(subject.settings.get("raw", "."))
    data = read_own(subject.part, subject.options, raw, ReadOptions(**meant), Tally()).fitted()
    stated = (str(data.dtype), tuple(data.feature_shape))
    found = {"labels": data.y, "users": np.zeros(0) if data.users is None else data.users}
    for which, rows in (("training", data.train[:SOME_ROWS]), ("test", data.test[:SOME_ROWS])):
        asked = rows[::order]
        parts = [asked[start : start + batch] for start in range(0, len(asked), batch)]
        x = np.concatenate([np.asarray(data.read(part.copy())) for part in parts])
        demand(
            (str(x.dtype), x.shape[1:]) == stated,
            f"{which} samples are {x.dtype} {x.shape[1:]}, but {stated} is stated",
        )
        wrong = wrong_target(data.y[rows], data.description)
        demand(wrong is None, f"{which} targets do not suit {data.targets}: one is {wrong and wrong[1]}")
        found |= {f"{which} samples": x[::order], f"{which} rows": rows}
    return found


CONTRACTS = {
    "partition": Contract(
        _owners,
        more=(
            (
                f"cost with {CLIENTS:,} samples",
                lambda subject: cost(
                    _labels, lambda labels: _partition(subject, labels, len(labels) // ROWS_PER_CLIENT), "samples"
                ),
            ),
        ),
    ),
    "data set": Contract(
        _contents,
        OtherUse(
            "samples do not depend on the order of reading",
            {"order": -1, "batch": 17},
            "read(rows) must give the features of row i for i in rows, in any order: each rank reads other rows",
        ),
    ),
}
