"""Partitions: how the rows of a data set are assigned to clients, by a partition scheme and a seeded stream.

A built-in scheme is a function (request, *, options) -> `Partition`, registered in `data_prep.parts`. A custom one is a
function (labels (n,), clients, generator, *, options) that returns the client of every row, int64 (n,), -1 for
unassigned rows. Its `clients` is None if --clients was not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from data_prep.partitions.base import NEEDS, OptionValue, Partition, Request, class_count_blocks
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component, resolve
from fedmpi.common.types import Floats, Ints

__all__ = ["OptionValue", "Partition", "Request", "checked_owners", "class_count_blocks", "completed", "partition"]


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
    labeled: bool = True,
    **options: OptionValue,
) -> Partition:
    """Draw a partition."""
    scheme = resolve("partition", name)
    used = completed(scheme, clients, options)
    known = {"users": users, "superclasses": superclasses, "attributes": attribute_of}
    needs = scheme.marks.get("needs")
    if needs and known[needs] is None:
        raise UserError(
            f"the partition {name} needs a data set that {NEEDS[needs]}, and this one does not: choose another"
        )
    if scheme.marks.get("by_label") and not labeled:
        raise UserError(
            f"the partition {name} deals rows out by their classes, but the rows of this data set have none: choose "
            "iid, a law of sizes, user, or one of your own"
        )
    if len(labels) == 0:
        raise UserError("the data set has no training sample to partition: check the files given by --raw")
    labels = np.asarray(labels, np.int64)
    if scheme.foreign:
        drawn = _of_owners(scheme, options, labels, clients, generator)
    else:
        request = Request(labels, classes, clients, generator, users, class_names, superclasses, attribute_of)
        drawn = scheme.object(request, **used)
    stored = {option: value if isinstance(value, OptionValue) else str(value) for option, value in used.items()}
    return replace(drawn, law=name, options={**stored, **drawn.options})


def completed(scheme: Component, clients: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a partition scheme, as far as they can be checked without data."""
    if clients is None and not scheme.foreign and not scheme.marks.get("counts_clients"):
        raise UserError(f"the partition {scheme.name} needs the number of clients: add --clients N")
    if clients is not None and clients < 1:
        raise UserError(f"--clients {clients} is impossible: ask for at least one client")
    return {option.name: option.default for option in scheme.options} | scheme.checked(given)


def _of_owners(
    scheme: Component, options: Mapping[str, Any], labels: Ints, clients: int | None, generator: np.random.Generator
) -> Partition:
    """Return the partition that a custom scheme draws."""
    with calling(scheme):
        given = scheme.make(options)(labels.copy(), clients, generator)  # the function may change its argument
    found = checked_owners(scheme, given, len(labels), clients)
    kept = np.flatnonzero(found >= 0)
    rows = kept[np.argsort(found[kept], kind="stable")]
    clients = int(found.max(initial=-1)) + 1 if clients is None else clients
    offsets = np.concatenate([[0], np.cumsum(np.bincount(found[kept], minlength=clients))])
    return Partition(rows.astype(np.int64), offsets.astype(np.int64))


def checked_owners(part: Component, given: Any, rows: int, clients: int | None) -> Ints:
    """Check and return the client of every row as given by a custom scheme, int64 (n,)."""
    found = np.asarray(given)
    if found.shape != (rows,) or not np.issubdtype(found.dtype, np.integer):
        raise refuse_result(
            part,
            f"returned {found.dtype} of shape {found.shape}: return the client of each of the {rows} rows, -1 for rows "
            "without a client",
        )
    if clients is not None and found.max(initial=-1) >= clients:
        raise refuse_result(part, f"gave rows to client {found.max()}, but --clients {clients} was asked for")
    if not (found >= 0).any():
        raise refuse_result(part, "gave no row to anybody")
    return found.astype(np.int64)
