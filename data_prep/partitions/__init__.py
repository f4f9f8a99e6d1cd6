"""Partitions: how the rows of a data set are given to clients, each by a stated law from a seeded stream.

`PARTITIONS` names the laws; `partition` checks the options and draws.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

import numpy as np

from data_prep.partitions.common import NEEDS, Draw, Law, LawOption, OptionValue, Partition, Request
from data_prep.partitions.own import law_named
from data_prep.partitions.registry import PARTITIONS
from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

__all__ = [
    "NEEDS",
    "PARTITIONS",
    "Draw",
    "Law",
    "LawOption",
    "Partition",
    "Request",
    "completed",
    "law_named",
    "partition",
]


def partition(
    name: str,
    labels: Ints,
    classes: int,
    clients: int | None,
    generator: np.random.Generator,
    users: Ints | None = None,
    class_names: tuple[str, ...] = (),
    superclasses: Ints | None = None,
    attribute_of: Callable[[str], Floats] | None = None,
    labelled: bool = True,
    **options: OptionValue | None,
) -> Partition:
    """Draw a partition."""
    law = law_named(name)
    if law is None:
        raise UserError(
            f"there is no partition {name!r}{_nearest(name, PARTITIONS)}; there are {', '.join(PARTITIONS)}"
        )
    complete = completed(law, name, clients, options)
    known = {"users": users, "superclasses": superclasses, "attributes": attribute_of}
    if law.needs and known[law.needs] is None:
        raise UserError(
            f"the partition {name} needs a data set that {NEEDS[law.needs]}, and this one does not: choose another"
        )
    if law.by_label and not labelled:
        raise UserError(
            f"the partition {name} deals rows out by their classes, but the rows of this data set have none: choose "
            "iid, a law of sizes, user, or one of your own"
        )
    if len(labels) == 0:
        raise UserError("the data set has no training sample to partition: check the files given by --raw")
    labels = np.asarray(labels, np.int64)
    asked = Request(labels, classes, clients, generator, users, complete, class_names, superclasses, attribute_of)
    draw = law.draw(asked)
    found: dict[str, OptionValue] = {**complete, **draw.facts}
    return Partition(draw.rows, draw.offsets, name, found, draw.users, draw.balanced_test, draw.notes, draw.test_total)


def completed(
    law: Law, name: str, clients: int | None, given: Mapping[str, OptionValue | None]
) -> dict[str, OptionValue]:
    """All options of a law of partition, as far as they can be checked without data."""
    if clients is None and law.clients == "required":
        raise UserError(f"the partition {name} needs the number of clients: add --clients N")
    if clients is not None and clients < 1:
        raise UserError(f"--clients {clients} is impossible: ask for at least one client")
    if law.checked is not None:
        return law.checked({key: value for key, value in given.items() if value is not None})
    known = {option.name: option for option in law.options}
    for key, value in given.items():
        if value is not None and key not in known:
            accepted = ", ".join(_flag(option) for option in known) or "none"
            raise UserError(f"the partition {name} has no option {_flag(key)}: its options are {accepted}")
    values = {option.name: given.get(option.name) for option in law.options}
    return {key: _checked(name, known[key], value) for key, value in values.items()}


def _checked(name: str, option: LawOption, value: OptionValue | None) -> OptionValue:
    if value is None:
        value = option.default
    if value is None:
        raise UserError(f"the partition {name} needs {_flag(option.name)}: {option.help}")
    try:
        checked: OptionValue = option.kind(value)
    except (TypeError, ValueError):
        raise UserError(f"{_flag(option.name)} {value!r} is not a {option.kind.__name__}: {option.help}") from None
    if option.choices and checked not in option.choices:
        raise UserError(f"{_flag(option.name)} {checked!r} is unknown: choose one of {', '.join(option.choices)}")
    # "not >=" also refuses nan
    if option.low is not None and not (float(checked) >= option.low and float(checked) < float("inf")):
        raise UserError(f"{_flag(option.name)} {checked} is impossible: give a number of at least {option.low:g}")
    return checked


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(name: str, names: dict[str, Law]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
