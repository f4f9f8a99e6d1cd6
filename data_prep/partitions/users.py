"""Partitions by the data set's own users: one client per user, or one client per group of users."""

from __future__ import annotations

import numpy as np

from data_prep.partitions.base import Draw, Law, LawOption, Request
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.data.assignment import group_by_owner

REST = ("smaller", "spread", "drop")


def draw_by_user(request: Request) -> Draw:
    """Make every natural user of the data set a client.

    Users with fewer than `min_samples` rows are left out; with ``--clients`` N, N random users are used.
    """
    assert request.users is not None  # the registry requires users
    held, eligible = _eligible(request)
    clients = request.clients or len(eligible)
    if len(eligible) == 0 or clients > len(eligible):
        raise UserError(
            f"{len(eligible)} users hold at least {request.integer('min_samples')} samples: ask for at most as many "
            "--clients or lower --min-samples"
        )
    chosen = np.sort(request.generator.permutation(eligible)[:clients])
    client_of = np.full(held, -1, np.int64)
    client_of[chosen] = np.arange(clients)
    rows, offsets = group_by_owner(client_of[request.users], clients, request.generator)
    return Draw(rows, offsets, users=chosen)


def draw_by_user_group(request: Request) -> Draw:
    """Make random groups of `group` natural users one client each, with all rows of its users.

    Users in random order are cut into groups. The remaining users form a smaller client (`rest` = smaller), are
    distributed among the groups (spread), or are left out (drop). With ``--clients`` N, N groups are used and all other
    users are left out, so there is no rest.
    """
    assert request.users is not None  # the registry requires users
    held, eligible = _eligible(request)
    size, rest = request.integer("group"), str(request.options["rest"])
    whole, over = divmod(len(eligible), size)
    groups = whole + (1 if over and rest == "smaller" else 0)
    if request.clients is not None:
        groups = request.clients
    if not groups or (request.clients is not None and groups > whole) or (rest == "spread" and not whole):
        raise UserError(
            f"{len(eligible)} users with at least {request.integer('min_samples')} samples make {whole} groups of "
            f"{size}: lower --group, --clients or --min-samples"
        )
    order = request.generator.permutation(eligible)
    place = np.arange(len(eligible)) // size
    if request.clients is not None or rest == "drop":
        place[place >= groups] = -1
    elif rest == "spread" and over:
        place[whole * size :] = request.generator.permutation(whole)[np.arange(over) % whole]
    client_of = np.full(held, -1, np.int64)
    client_of[order] = place
    left = int((place < 0).sum())
    notes = (f"{left} users are in no group",) if left else ()
    return Draw(*group_by_owner(client_of[request.users], groups, request.generator), notes=notes)


def _eligible(request: Request) -> tuple[int, Ints]:
    """Return the number of users, and the users with enough rows."""
    assert request.users is not None
    held = np.bincount(request.users)
    return len(held), np.flatnonzero(held >= max(1, request.integer("min_samples")))


_MIN_SAMPLES = LawOption("min_samples", int, 1, "users with fewer samples are left out", low=1)
USER = Law(
    draw_by_user,
    "every natural user of the data set is a client",
    (_MIN_SAMPLES,),
    clients="optional",
    needs="users",
    drops=True,
)
USER_GROUPS = Law(
    draw_by_user_group,
    "random groups of natural users are a client each",
    (
        LawOption("group", int, None, "users of a client", low=1),
        LawOption("rest", str, "smaller", "users left over: a smaller client, dealt to the others, or left out", REST),
        _MIN_SAMPLES,
    ),
    clients="optional",
    needs="users",
    drops=True,
)
