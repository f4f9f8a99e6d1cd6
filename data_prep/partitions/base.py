"""Common types of the partition schemes: results, options, and descriptions for the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

OptionValue = bool | int | float | str
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
    law: str  # Name of the scheme that drew it
    # Options of the scheme as used, defaults included, and its findings (`Draw.facts`)
    options: dict[str, OptionValue]
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
class LawOption:
    """One option of a partition scheme, e.g. ``classes_per_client=2`` for ``--classes-per-client 2``."""

    name: str  # Keyword, with underscores
    kind: type  # bool, int, float or str
    default: OptionValue | None  # None means that the user must give it
    help: str  # One line, with unit or meaning
    choices: tuple[str, ...] = ()  # The values allowed, for str
    low: float | None = None  # The smallest value allowed, for numbers


@dataclass(frozen=True)
class Request:
    """Input of a partition scheme: n rows for N clients."""

    labels: Ints  # (n,): Labels of the training rows
    classes: int  # C
    clients: int | None  # N; None lets the scheme decide, if it can
    generator: np.random.Generator  # Random stream of the partition
    users: Ints | None  # (n,): Natural client of every row
    options: Mapping[str, OptionValue]  # Options of the scheme, checked and complete
    class_names: tuple[str, ...] = ()  # Names of the C classes; empty if they are not known
    superclasses: Ints | None = None  # (C,): Superclass of every class
    attribute: Callable[[str], Floats] | None = None  # ``attribute(name)`` gives a number for every row, float64 (n,)

    def number(self, name: str) -> float:
        """Return a float option."""
        return float(self.options[name])

    def integer(self, name: str) -> int:
        """Return an int option."""
        return int(self.options[name])


@dataclass(frozen=True)
class Draw:
    """Result of a partition scheme, before it becomes a `Partition`."""

    rows: Ints
    offsets: Ints
    users: Ints | None = None
    balanced_test: bool = False
    notes: tuple[str, ...] = ()
    test_total: int = 0
    facts: Mapping[str, OptionValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Law:
    """Registry entry of a partition scheme: the function, its options, and one sentence that describes it.

    `clients` is "required" if the scheme needs ``--clients``, or "optional" if it can count the clients itself.
    `needs` is the data it needs: a key of `NEEDS`, or "" if labels are enough.
    `by_label` is true if it needs one class per row, which only some data have.
    `checked` replaces `options` for a custom scheme: it checks and completes the given options.
    """

    draw: Callable[[Request], Draw]
    sentence: str
    options: tuple[LawOption, ...] = ()
    clients: str = "required"
    needs: str = ""
    drops: bool = field(default=False)
    by_label: bool = False
    checked: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None


def enough(request: Request) -> int:
    """Return the requested number of clients; raise `UserError` if there are fewer rows than clients."""
    clients, rows = request.clients or 1, len(request.labels)
    if clients > rows:
        raise UserError(
            f"{rows} training samples cannot give {clients} clients one each: ask for at most {rows} clients"
        )
    return clients
