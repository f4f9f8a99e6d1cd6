"""Partitions: how the rows of a data set are assigned to clients, by a partition scheme and a seeded stream.

`PARTITIONS` names the schemes; `partition` checks the options and draws.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from data_prep.partitions.astraea import ASTRAEA
from data_prep.partitions.base import (
    NEEDS,
    Draw,
    Law,
    LawOption,
    OptionValue,
    Partition,
    Request,
    class_count_blocks,
)
from data_prep.partitions.labels import DIRICHLET, IID, LABEL_SORTED, PATHOLOGICAL, SHARDS
from data_prep.partitions.mixes import INNER_DIRICHLET, PACHINKO
from data_prep.partitions.sizes import ATTRIBUTE, LOGNORMAL, SIZES
from data_prep.partitions.users import USER, USER_GROUPS
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.options import REQUIRED
from fedmpi.common.registry import Component, resolve
from fedmpi.common.types import Floats, Ints

__all__ = [
    "PARTITIONS",
    "Draw",
    "Law",
    "LawOption",
    "OptionValue",
    "Partition",
    "Request",
    "checked_owners",
    "class_count_blocks",
    "completed",
    "law_of",
    "flag",
    "partition",
]

PARTITIONS: dict[str, Law] = {
    "iid": IID,
    "dirichlet": DIRICHLET,
    "inner-dirichlet": INNER_DIRICHLET,
    "shards": SHARDS,
    "pathological": PATHOLOGICAL,
    "label-sorted": LABEL_SORTED,
    "pachinko": PACHINKO,
    "lognormal": LOGNORMAL,
    "sizes": SIZES,
    "attribute": ATTRIBUTE,
    "user": USER,
    "user-groups": USER_GROUPS,
    "astraea": ASTRAEA,
}


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
    law = law_of(name)
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
    """Return all options of a partition scheme, as far as they can be checked without data."""
    if clients is None and law.clients == "required":
        raise UserError(f"the partition {name} needs the number of clients: add --clients N")
    if clients is not None and clients < 1:
        raise UserError(f"--clients {clients} is impossible: ask for at least one client")
    if law.checked is not None:
        return law.checked({key: value for key, value in given.items() if value is not None})
    known = {option.name: option for option in law.options}
    for key, value in given.items():
        if value is not None and key not in known:
            accepted = ", ".join(flag(option) for option in known) or "none"
            raise UserError(f"the partition {name} has no option {flag(key)}: its options are {accepted}")
    values = {option.name: given.get(option.name) for option in law.options}
    return {key: _checked(name, known[key], value) for key, value in values.items()}


def _checked(name: str, option: LawOption, value: OptionValue | None) -> OptionValue:
    if value is None:
        value = option.default
    if value is None:
        raise UserError(f"the partition {name} needs {flag(option.name)}: {option.help}")
    try:
        checked: OptionValue = option.kind(value)
    except (TypeError, ValueError):
        raise UserError(f"{flag(option.name)} {value!r} is not a {option.kind.__name__}: {option.help}") from None
    if option.choices and checked not in option.choices:
        raise UserError(f"{flag(option.name)} {checked!r} is unknown: choose one of {', '.join(option.choices)}")
    # "not >=" also rejects nan
    if option.low is not None and not (float(checked) >= option.low and float(checked) < float("inf")):
        raise UserError(f"{flag(option.name)} {checked} is impossible: give a number of at least {option.low:g}")
    return checked


def flag(name: str) -> str:
    """Return the command-line form of an option: classes_per_client is --classes-per-client."""
    return "--" + name.replace("_", "-")


def law_of(name: str) -> Law:
    """Return the built-in partition scheme of this name, or the one of a custom function.

    A custom function is called as function(labels (n,), clients, generator, **options). It returns the client of every
    row, int64 (n,), −1 for unassigned rows. `clients` is None if --clients was not given.
    """
    if ":" not in name:
        if name not in PARTITIONS:
            close = difflib.get_close_matches(name, PARTITIONS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PARTITIONS)}"
            raise UserError(f"there is no partition {name!r}; {hint}")
        return PARTITIONS[name]
    part = resolve("partition", name)
    options = tuple(
        LawOption(
            option.name,
            bool if option.annotation is bool else str,
            None if option.default is REQUIRED else _option_value(option.default),
            option.doc or "an option of your own",
        )
        for option in part.options
    )
    return Law(
        lambda request: _draw(part, request), part.title or name, options, clients="optional", checked=part.checked
    )


def _option_value(value: Any) -> OptionValue:
    """Return an option's value as stored in the manifest."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def _draw(part: Component, request: Request) -> Draw:
    with calling(part):
        law = part.make(request.options)
        given = law(request.labels.copy(), request.clients, request.generator)  # the function may change its argument
    found = checked_owners(part, given, len(request.labels), request.clients)
    kept = np.flatnonzero(found >= 0)
    rows = kept[np.argsort(found[kept], kind="stable")]
    clients = int(found.max(initial=-1)) + 1 if request.clients is None else request.clients
    offsets = np.concatenate([[0], np.cumsum(np.bincount(found[kept], minlength=clients))])
    defaults = {option.name: option.default for option in part.options}
    facts = {name: _option_value(value) for name, value in {**defaults, **request.options}.items()}
    return Draw(rows.astype(np.int64), offsets.astype(np.int64), facts=facts)


def checked_owners(part: Component, given: Any, rows: int, clients: int | None) -> Ints:
    """Check and return the client of every row as given by a custom scheme, int64 (n,)."""
    found = np.asarray(given)
    if found.shape != (rows,) or not np.issubdtype(found.dtype, np.integer):
        raise refuse_result(
            part,
            f"returned {found.dtype} of shape {found.shape}: return the client of each of the {rows} rows, -1 for rows "
            "that nobody gets",
        )
    if clients is not None and found.max(initial=-1) >= clients:
        raise refuse_result(part, f"gave rows to client {found.max()}, but --clients {clients} was asked for")
    if not (found >= 0).any():
        raise refuse_result(part, "gave no row to anybody")
    return found.astype(np.int64)
