"""What every partition law shares: its result, its options, and how the command line may describe it."""

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
"""What a law may need of a data set beside labels, in words."""
CELLS = 1 << 22
"""Class counts made at once."""


@dataclass(frozen=True)
class Partition:
    """Which training rows every client holds."""

    rows: Ints  # Rows of the data set, client after client; no row occurs twice
    offsets: Ints  # (N + 1,): Client k holds ``rows[offsets[k] : offsets[k + 1]]``
    law: str  # Name of the law that drew it
    # The law's options as used, defaults included, and what the law found (`Draw.facts`)
    options: dict[str, OptionValue]
    users: Ints | None = None  # (N,): The data set's user behind every client, where clients are users
    balanced_test: bool = False  # The law asks for a test part with equal class totals
    notes: tuple[str, ...] = ()  # What the user ought to know about this draw, e.g. how many clients were filled up
    test_total: int = 0  # Samples of that test part; 0 takes as many as there are

    @property
    def clients(self) -> int:
        """Number of clients N."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """Samples of every client, int64 (N,)."""
        return np.diff(self.offsets)


def class_count_blocks(partition: Partition, labels: Ints, classes: int) -> Iterator[Ints]:
    """Class counts of the clients in blocks, int64 (m, C), of bounded size."""
    step = max(1, CELLS // classes)
    for low in range(0, partition.clients, step):
        bounds = partition.offsets[low : low + step + 1]
        held = len(bounds) - 1
        owner = np.repeat(np.arange(held), np.diff(bounds))
        counts = np.bincount(owner * classes + labels[partition.rows[bounds[0] : bounds[-1]]], minlength=held * classes)
        yield counts.reshape(held, classes)


@dataclass(frozen=True)
class LawOption:
    """One option of a law; ``--classes-per-client 2`` on the command line is ``classes_per_client=2`` here."""

    name: str  # Keyword, with underscores
    kind: type  # bool, int, float or str
    default: OptionValue | None  # None means that the user must give it
    help: str  # One line, with unit or meaning
    choices: tuple[str, ...] = ()  # The values allowed, for str
    low: float | None = None  # The smallest value allowed, for numbers


@dataclass(frozen=True)
class Request:
    """What a law is asked to partition: n rows into N clients."""

    labels: Ints  # (n,): Labels of the training rows
    classes: int  # C
    clients: int | None  # N; None lets the law decide, where it can
    generator: np.random.Generator  # The stream of the partition
    users: Ints | None  # (n,): Natural client of every row
    options: Mapping[str, OptionValue]  # The law's options, checked and complete
    class_names: tuple[str, ...] = ()  # Names of the classes, C of them; none where they are not known
    superclasses: Ints | None = None  # (C,): Superclass of every class
    attribute: Callable[[str], Floats] | None = None  # ``attribute(name)`` gives a number for every row, float64 (n,)

    def number(self, name: str) -> float:
        """A float option."""
        return float(self.options[name])

    def integer(self, name: str) -> int:
        """An int option."""
        return int(self.options[name])


@dataclass(frozen=True)
class Draw:
    """What a law gives back, before it becomes a `Partition`."""

    rows: Ints
    offsets: Ints
    users: Ints | None = None
    balanced_test: bool = False
    notes: tuple[str, ...] = ()
    test_total: int = 0
    facts: Mapping[str, OptionValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Law:
    """One entry of the registry: the function, its options, and one sentence stating the law.

    `clients` says what ``--clients`` means to it: "required", or "optional" where the law can count the clients itself;
    `needs` what it asks of the data set: a key of `NEEDS`, or "" where labels are enough;
    `by_label` that it goes by a class of each row, which only some data have;
    `checked` what makes the options given those that it takes, in place of `options`, for a law of the user's own.
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
    """The number of clients asked for; raises `UserError` when there are fewer rows than clients."""
    clients, rows = request.clients or 1, len(request.labels)
    if clients > rows:
        raise UserError(
            f"{rows} training samples cannot give {clients} clients one each: ask for at most {rows} clients"
        )
    return clients
