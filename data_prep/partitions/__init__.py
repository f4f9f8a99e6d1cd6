"""Partitions: how the rows of a data set are assigned to clients, by a partition scheme and a seeded stream.

A built-in scheme is a function (request, *, options) -> `Partition`, registered in `data_prep.parts`. A custom one is a
function (labels (n,), clients, generator, *, options) that returns the client of every row, int64 (n,), -1 for
unassigned rows. Its `clients` is None if --clients was not given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.common.apportionment import offsets_of
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component, resolve
from fedmpi.common.types import Ints

OptionValue = bool | int | float | str
Positive = Annotated[float, Field(ge=1e-4, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
CELLS = 1 << 22
"""Number of class counts computed at once."""


@dataclass(frozen=True)
class Partition:
    """Assignment of training rows to clients."""

    rows: Ints  # Rows of the data set, client after client; no row occurs twice
    offsets: Ints  # (N + 1,): Client k has ``rows[offsets[k] : offsets[k + 1]]``
    law: str = ""  # Name of the scheme that drew it
    # Options of the scheme as used, defaults included, and its findings such as a realized mean
    options: dict[str, OptionValue] = field(default_factory=dict)
    users: Ints | None = None  # (N,): The data set's user behind every client, where clients are users
    balanced_test: bool = False  # The scheme requests a test part with equal class totals
    notes: tuple[str, ...] = ()  # Notes for the user about this draw, e.g. how many clients were filled up
    test_total: int = 0  # Samples of that test part; 0 uses as many as there are

    @property
    def clients(self) -> int:
        """Number of clients N."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """Samples of every client, int64 (N,)."""
        return np.diff(self.offsets)

    def owners(self, rows: int) -> Ints:
        """Return the client of every row, int64 (n,); -1 for unassigned rows."""
        owners = np.full(rows, -1, np.int64)
        owners[self.rows] = np.repeat(np.arange(self.clients), self.sizes)
        return owners


def class_count_blocks(partition: Partition, labels: Ints, classes: int) -> Iterator[Ints]:
    """Yield the class counts of the clients in blocks, int64 (m, C), of bounded size."""
    step = max(1, CELLS // classes)
    for low in range(0, partition.clients, step):
        bounds = partition.offsets[low : low + step + 1]
        held = len(bounds) - 1
        owner = np.repeat(np.arange(held), np.diff(bounds))
        counts = np.bincount(owner * classes + labels[partition.rows[bounds[0] : bounds[-1]]], minlength=held * classes)
        yield counts.reshape(held, classes)


@dataclass(frozen=True)
class Request:
    """Input of a partition scheme: n rows for N clients."""

    labels: Ints  # (n,): Labels of the training rows
    classes: int  # C
    clients: int | None  # N; None lets the scheme decide, if it can
    generator: np.random.Generator  # Random stream of the partition
    users: Ints | None = None  # (n,): Natural client of every row
    class_names: tuple[str, ...] = ()  # Names of the C classes; empty if they are not known

    @property
    def stock(self) -> Ints:
        """Samples of every class, int64 (C,)."""
        return np.bincount(self.labels, minlength=self.classes)

    @property
    def enough(self) -> int:
        """Requested number of clients; raises `UserError` if there are fewer rows than clients."""
        clients, rows = self.clients or 1, len(self.labels)
        if clients > rows:
            raise UserError(
                f"{rows} training samples cannot give {clients} clients one each. Ask for at most {rows} clients"
            )
        return clients


def partition(name: str, request: Request, labeled: bool = True, **options: OptionValue) -> Partition:
    """Draw a partition; `labeled` is False if rows have no classes."""
    scheme = resolve("partition", name)
    used = completed(scheme, request.clients, options)
    if scheme.marks.get("by_user") and request.users is None:
        raise UserError(
            f"the partition {name} needs a data set that names its users, one for every sample (--user COLUMN for "
            "tables), and this one does not. Choose another"
        )
    if scheme.marks.get("by_label") and not labeled:
        raise UserError(
            f"the partition {name} assigns samples by class, but the samples of this data set have no classes. Choose "
            "iid, a partition by size, user, or a custom scheme"
        )
    if len(request.labels) == 0:
        raise UserError("the data set has no training sample to partition. Check the files given by --raw")
    drawn = _of_owners(scheme, options, request) if scheme.foreign else scheme.object(request, **used)
    stored = {option: value if isinstance(value, OptionValue) else str(value) for option, value in used.items()}
    return replace(drawn, law=name, options={**stored, **drawn.options})


def completed(scheme: Component, clients: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a partition scheme, as far as they can be checked without data."""
    if clients is None and not scheme.foreign and not scheme.marks.get("counts_clients"):
        raise UserError(f"the partition {scheme.name} needs the number of clients. Add --clients N")
    if clients is not None and clients < 1:
        raise UserError(f"--clients {clients} is impossible. Ask for at least one client")
    return {name: field.default for name, field in scheme.fields.items()} | scheme.checked(given)


def _of_owners(scheme: Component, options: Mapping[str, Any], request: Request) -> Partition:
    """Return the partition that a custom scheme draws."""
    labels, clients = request.labels.copy(), request.clients  # the function may change its argument
    with calling(scheme):
        given = scheme.make(options)(labels, clients, request.generator)
    found = checked_owners(scheme, given, len(labels), clients)
    kept = np.flatnonzero(found >= 0)
    rows = kept[np.argsort(found[kept], kind="stable")]
    clients = int(found.max(initial=-1)) + 1 if clients is None else clients
    return Partition(rows.astype(np.int64), offsets_of(np.bincount(found[kept], minlength=clients)))


def checked_owners(part: Component, given: Any, rows: int, clients: int | None) -> Ints:
    """Check and return the client of every row as given by a custom scheme, int64 (n,)."""
    found = np.asarray(given)
    if found.shape != (rows,) or not np.issubdtype(found.dtype, np.integer):
        raise refuse_result(
            part,
            f"returned {found.dtype} of shape {found.shape}. Return the client of each of the {rows} rows, -1 for rows "
            "without a client",
        )
    if clients is not None and found.max(initial=-1) >= clients:
        raise refuse_result(part, f"gave rows to client {found.max()}, but --clients {clients} was asked for")
    if not (found >= 0).any():
        raise refuse_result(part, "gave no row to anybody")
    return found.astype(np.int64)
