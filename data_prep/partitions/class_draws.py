"""Partitions by class draws: every client draws the classes that it holds (Li et al. 2022, "#C = k")."""

from __future__ import annotations

import numpy as np

from data_prep.partitions.common import Draw, Law, LawOption, Request
from data_prep.partitions.label_laws import enough, share_out
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.data.assignment import take_counts

DRAWS = ("random", "first", "rotated")
_CLIENTS_AT_ONCE = 1 << 16  # bounds the memory of the draws


def draw_pathological(request: Request) -> Draw:
    """Every client draws c classes for itself; the rows of a class are shared evenly among the clients that drew it.

    Q. Li, Y. Diao, Q. Chen, B. He, Federated learning on non-IID data silos (ICDE 2022), section IV-A, quantity-based
    label imbalance. `draws` = random: c different classes, all sets alike and independently for each client; first:
    client k has the class k mod C and draws c - 1 of the others, as in the authors' code; rotated: client k has the
    classes k, k + 1, ..., k + c - 1 mod C. C counts the classes that have rows. Sizes follow from how many clients drew
    the same class; rows of a class that nobody drew are dropped.
    """
    clients, per_client = enough(request), request.integer("classes_per_client")
    stock = np.bincount(request.labels, minlength=request.classes)
    present = np.flatnonzero(stock)
    if per_client > len(present):
        raise UserError(f"--classes-per-client {per_client} is impossible: the data set has {len(present)} classes")
    drawn = _drawn(len(present), clients, per_client, str(request.options["draws"]), request.generator)
    holds = np.zeros((clients, request.classes), np.int64)
    np.put_along_axis(holds, present[drawn], 1, axis=1)
    holders = holds.sum(axis=0)
    if (short := np.flatnonzero(holders > stock)).size:
        raise UserError(
            f"{holders[short[0]]} clients drew class {short[0]}, which has {stock[short[0]]} samples: ask for fewer "
            "clients or a smaller --classes-per-client"
        )
    unused = np.flatnonzero((holders == 0) & (stock > 0))
    notes: tuple[str, ...] = ()
    if len(unused):
        listed = ", ".join(map(str, unused[:8])) + (", ..." if len(unused) > 8 else "")
        notes = (
            f"nobody drew {len(unused)} of the classes ({listed}): their {stock[unused].sum()} samples are unused",
        )
    counts = share_out(holds, stock, holders, request.generator)
    return Draw(*take_counts(request.labels, counts, request.generator), notes=notes)


def _drawn(classes: int, clients: int, per_client: int, draws: str, generator: np.random.Generator) -> Ints:
    """Classes of every client, int64 (N, c), different within a client."""
    first = np.arange(clients)[:, None]
    if draws == "rotated":
        return (first + np.arange(per_client)) % classes
    fixed = draws == "first"
    parts = []
    for low in range(0, clients, _CLIENTS_AT_ONCE):
        some = first[low : low + _CLIENTS_AT_ONCE]
        keys = generator.random((len(some), classes))
        if fixed:
            np.put_along_axis(keys, some % classes, -1.0, axis=1)  # comes first
        parts.append(np.argsort(keys, axis=1)[:, :per_client])
    return np.concatenate(parts).astype(np.int64)


PATHOLOGICAL = Law(
    draw_pathological,
    "every client draws c classes of its own; a class's rows are shared evenly among the clients that drew it",
    (
        LawOption("classes_per_client", int, 2, "number c of classes of a client", low=1),
        LawOption("draws", str, "random", "all at random; client k's first is k mod C; or k, k + 1, ... mod C", DRAWS),
    ),
    drops=True,
    by_label=True,
)
