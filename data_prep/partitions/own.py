"""Partition laws of the user's own: a function from labels to the owner of every row, by "package.module:function"."""

from __future__ import annotations

from typing import Any

import numpy as np

from data_prep.partitions.common import Draw, Law, LawOption, OptionValue, Request
from data_prep.partitions.registry import PARTITIONS
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.options import REQUIRED
from fedmpi.common.registry import Part, resolve
from fedmpi.common.types import Ints


def law_named(name: str) -> Law | None:
    """The built-in law of a name, or that of the user's own function; None where there is neither.

    A function of the user's own is called as function(labels (n,), clients, generator, **options) and gives the client
    of every row, int64 (n,), −1 for rows that nobody gets. `clients` is None where --clients was left out.
    """
    if ":" not in name:
        return PARTITIONS.get(name)
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
    """An option's value as the manifest keeps it."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def _draw(part: Part, request: Request) -> Draw:
    with calling(part):
        law = part.make(request.options)
        given = law(request.labels.copy(), request.clients, request.generator)  # which may change what it is given
    found = checked_owners(part, given, len(request.labels), request.clients)
    kept = np.flatnonzero(found >= 0)
    rows = kept[np.argsort(found[kept], kind="stable")]
    clients = int(found.max(initial=-1)) + 1 if request.clients is None else request.clients
    offsets = np.concatenate([[0], np.cumsum(np.bincount(found[kept], minlength=clients))])
    defaults = {option.name: option.default for option in part.options}
    facts = {name: _option_value(value) for name, value in {**defaults, **request.options}.items()}
    return Draw(rows.astype(np.int64), offsets.astype(np.int64), facts=facts)


def checked_owners(part: Part, given: Any, rows: int, clients: int | None) -> Ints:
    """What a law gave as the client of every row, int64 (n,)."""
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
