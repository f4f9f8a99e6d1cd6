"""Common types of the partition schemes: what they receive, what they return, and the ranges of their options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

OptionValue = bool | int | float | str
Positive = Annotated[float, Field(ge=1e-4, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
NEEDS = {
    "users": "names its users, one for every sample (--user COLUMN for tables)",
    "superclasses": "says to which superclass each class belongs (CIFAR-100 does)",
    "attributes": "is read, since it goes by what the samples are",
}
"""Data beside labels that a partition scheme may need, in words."""
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
    superclasses: Ints | None = None  # (C,): Superclass of every class
    attribute: Callable[[str], Floats] | None = None  # ``attribute(name)`` gives a number for every row, float64 (n,)

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
                f"{rows} training samples cannot give {clients} clients one each: ask for at most {rows} clients"
            )
        return clients
