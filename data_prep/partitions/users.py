"""Partitions by the data set's own users: one client per user, or one client per group of users."""

from __future__ import annotations

from typing import Literal

import numpy as np

from data_prep.partitions.base import Count, Partition, Request
from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.common.types import Ints
from fedmpi.data.assignment import group_by_owner


@register("partition", "user", needs="users", counts_clients=True)
def draw_by_user(request: Request, *, min_samples: Count = 1) -> Partition:
    """Every natural user of the data set is a client; with ``--clients`` N, N random users are used.

    Parameters
    ----------
    min_samples : int
        Users with fewer samples are left out.
    """
    assert request.users is not None  # the registry requires users
    held, eligible = _eligible(request.users, min_samples)
    clients = request.clients or len(eligible)
    if len(eligible) == 0 or clients > len(eligible):
        raise UserError(
            f"{len(eligible)} users hold at least {min_samples} samples: ask for at most as many --clients or lower "
            "--min-samples"
        )
    chosen = np.sort(request.generator.permutation(eligible)[:clients])
    client_of = np.full(held, -1, np.int64)
    client_of[chosen] = np.arange(clients)
    return Partition(*group_by_owner(client_of[request.users], clients, request.generator), users=chosen)


@register("partition", "user-groups", needs="users", counts_clients=True)
def draw_by_user_group(
    request: Request, *, group: Count, rest: Literal["smaller", "spread", "drop"] = "smaller", min_samples: Count = 1
) -> Partition:
    """Random groups of natural users are a client each, with all rows of its users.

    With ``--clients`` N, N groups are used and all other users are left out, so there is no rest.

    Parameters
    ----------
    group : int
        Users per client.
    rest : {"smaller", "spread", "drop"}
        Remaining users: a smaller client, distributed among the groups, or left out.
    min_samples : int
        Users with fewer samples are left out.
    """
    assert request.users is not None  # the registry requires users
    held, eligible = _eligible(request.users, min_samples)
    whole, over = divmod(len(eligible), group)
    groups = request.clients or whole + (1 if over and rest == "smaller" else 0)
    if not groups or (request.clients is not None and groups > whole) or (rest == "spread" and not whole):
        raise UserError(
            f"{len(eligible)} users with at least {min_samples} samples make {whole} groups of {group}: lower --group, "
            "--clients or --min-samples"
        )
    order = request.generator.permutation(eligible)
    place = np.arange(len(eligible)) // group
    if request.clients is not None or rest == "drop":
        place[place >= groups] = -1
    elif rest == "spread" and over:
        place[whole * group :] = request.generator.permutation(whole)[np.arange(over) % whole]
    client_of = np.full(held, -1, np.int64)
    client_of[order] = place
    left = int((place < 0).sum())
    notes = (f"{left} users are in no group",) if left else ()
    return Partition(*group_by_owner(client_of[request.users], groups, request.generator), notes=notes)


def _eligible(users: Ints, min_samples: int) -> tuple[int, Ints]:
    """Return the number of users, and the users with enough rows."""
    held = np.bincount(users)
    return len(held), np.flatnonzero(held >= min_samples)
