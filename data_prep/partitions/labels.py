"""Partitions by label: IID, Dirichlet, label shards, class draws, and blocks of the label-sorted data."""

from __future__ import annotations

from typing import Literal

import numpy as np

from data_prep.partitions import Count, CountOrZero, Partition, Positive, Request
from fedmpi.common.apportionment import offsets_of
from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.common.types import Ints
from fedmpi.data.assignment import (
    REDRAWS,
    dirichlet_by_class,
    dirichlet_by_client,
    even_sizes,
    iid,
    level_down,
    take_counts,
)

_MIXING_PASSES = 40  # per class of a client; a table of 100 clients forgets its start after about ten
_CLIENTS_AT_ONCE = 1 << 16  # bounds the memory of the draws


@register("partition", "iid")
def draw_iid(request: Request) -> Partition:
    """Assign samples at random to N clients whose sizes differ by at most one."""
    sizes = even_sizes(len(request.labels), request.enough)
    return Partition(*iid(len(request.labels), sizes, request.generator))


@register("partition", "dirichlet", by_label=True)
def draw_dirichlet(
    request: Request,
    *,
    alpha: Positive,
    by: Literal["class", "client"] = "class",
    empty: Literal["fill", "keep"] = "fill",
    redraws: CountOrZero = REDRAWS,
    min_samples: CountOrZero = 0,
) -> Partition:
    """By class: the clients' shares of each class ~ Dir(alpha); by client: each client's mix ~ Dir(alpha), equal sizes.

    By class: the class's rows are cut in the shares, rounded at random without bias, so sizes vary. By client: sizes
    differ by at most one, and clients draw from their mixes. If a class runs out, the remaining requests are redrawn
    from the client's mix over the classes left (`fedmpi.data.assignment.fill_by_mix`), so every row is used.

    Parameters
    ----------
    alpha : float
        Concentration α; a small α gives few classes per client.
    by : {"class", "client"}
        Draw the clients' shares of each class (class), or the class mix of each client (client).
    empty : {"fill", "keep"}
        Clients without samples: move one random sample of the largest clients to each (fill), or keep them empty.
    redraws : int
        Largest number of new draws while a client is empty, or has fewer than `min_samples` samples.
    min_samples : int
        Smallest number of samples of a client, reached by new draws alone; 0: `empty` decides.
    """
    samples, clients = len(request.labels), request.clients or 1
    if min_samples * clients > samples:
        raise UserError(
            f"{samples} samples are too few for {clients} clients with {min_samples} each. Lower --min-samples or "
            "--clients"
        )
    if by == "client":
        sizes = even_sizes(samples, request.enough)
        return Partition(*dirichlet_by_client(request.labels, request.classes, sizes, alpha, request.generator))
    rows, offsets, filled = dirichlet_by_class(
        request.labels, request.classes, clients, alpha, request.generator, empty == "fill", redraws, min_samples
    )
    if (least := int(np.diff(offsets).min())) < min_samples:
        raise UserError(
            f"the smallest client of each of {1 + redraws} draws has fewer than {min_samples} samples ({least} in the "
            "last draw). Raise --redraws or --alpha, or lower --min-samples or --clients"
        )
    notes = (f"{filled} clients drew no sample and were given one of the largest clients' samples",) if filled else ()
    return Partition(rows, offsets, notes=notes)


@register("partition", "shards", by_label=True)
def draw_label_shards(
    request: Request, *, classes_per_client: Count = 2, surplus: Literal["drop", "keep"] = "drop"
) -> Partition:
    """Give every client exactly c random classes with equal numbers of samples.

    The data of every class are cut into shards of s samples, where s is the largest size that gives N c shards with at
    most N of one class. If there are more, the classes with the most shards lose some. The N c shards are assigned
    uniformly at random among all ways that give every client c different classes (a Markov chain of class swaps between
    clients). Compare McMahan et al. (2017), whose shards may mix or repeat classes.

    Parameters
    ----------
    classes_per_client : int
        Number c of classes of a client.
    surplus : {"drop", "keep"}
        Samples that fill no shard: drop them, or share them among the shards of their class (slightly uneven sizes).
    """
    clients, present = request.enough, request.stock
    if classes_per_client > np.count_nonzero(present):
        raise UserError(
            f"--classes-per-client {classes_per_client} is too large. The data set has {np.count_nonzero(present)} "
            "classes"
        )
    slots, size = _shards_per_class(present, clients, classes_per_client)
    table = _class_table(slots, clients, classes_per_client, request.generator)
    holds = np.zeros((clients, request.classes), np.int64)
    np.put_along_axis(holds, table, 1, axis=1)
    counts = holds * size if surplus == "drop" else share_out(holds, present, slots, request.generator)
    return Partition(*take_counts(request.labels, counts, request.generator))


def _shards_per_class(present: Ints, clients: int, per_client: int) -> tuple[Ints, int]:
    """Return the shards of every class (C,), summing to N c with none above N, and their common size."""
    wanted = clients * per_client
    low, high = 0, int(present.max())
    while low < high:
        size = (low + high + 1) // 2
        low, high = (size, high) if np.minimum(present // size, clients).sum() >= wanted else (low, size - 1)
    if low == 0:
        raise UserError(
            f"{present.sum()} samples cannot give {clients} clients {per_client} classes each. Ask for fewer clients "
            "or a smaller --classes-per-client"
        )
    slots = np.minimum(present // low, clients)
    return slots - level_down(slots, int(slots.sum()) - wanted), low


def _class_table(slots: Ints, clients: int, per_client: int, generator: np.random.Generator) -> Ints:
    """Draw the classes of every client (N, c), distinct within a client, class y `slots[y]` times in all."""
    dealt = np.repeat(np.arange(len(slots)), slots)  # sorted by class, assigned in turn: no client twice in a class
    table = dealt.reshape(per_client, clients).T[generator.permutation(clients)]
    half = clients // 2
    places = np.arange(half)
    for _ in range(_MIXING_PASSES * per_client):
        pairs = generator.permutation(clients)
        one, other = pairs[:half], pairs[half : 2 * half]
        column, across = generator.integers(0, per_client, (2, half))
        mine, theirs = table[one, column], table[other, across]
        clash = (table[one] == theirs[:, None]).any(axis=1) | (table[other] == mine[:, None]).any(axis=1)
        free = places[~clash]
        table[one[free], column[free]] = theirs[free]
        table[other[free], across[free]] = mine[free]
    return table


def share_out(holds: Ints, present: Ints, slots: Ints, generator: np.random.Generator) -> Ints:
    """Return class counts (N, C) that share the rows of a class evenly among its holders, remainders at random."""
    counts = holds * (present // np.maximum(slots, 1))
    for label, odd in enumerate(present % np.maximum(slots, 1)):
        counts[generator.permutation(np.flatnonzero(holds[:, label]))[:odd], label] += 1
    return counts


@register("partition", "label-sorted", by_label=True, counts_clients=True)
def draw_label_sorted(request: Request, *, size: Count = 300) -> Partition:
    """Sort samples by label and cut them into clients of equal size; drop the remainder.

    Rows of one label are in random order. With ``--clients`` N, N random blocks are used.

    Parameters
    ----------
    size : int
        Samples per client.
    """
    blocks = len(request.labels) // size
    clients = request.clients or blocks
    if blocks == 0 or clients > blocks:
        raise UserError(
            f"{len(request.labels)} training samples make only {blocks} clients of {size}. Lower --size or --clients"
        )
    shuffled = request.generator.permutation(len(request.labels))
    ordered = shuffled[np.argsort(request.labels[shuffled], kind="stable")]
    chosen = np.sort(request.generator.permutation(blocks)[:clients])
    rows = ordered[: blocks * size].reshape(blocks, size)[chosen].reshape(-1)
    return Partition(rows.astype(np.int64), offsets_of(np.full(clients, size)))


@register("partition", "pathological", by_label=True)
def draw_pathological(request: Request, *, classes_per_client: Count = 2) -> Partition:
    """Every client draws c classes; the rows of a class are shared evenly among the clients that drew it.

    Q. Li, Y. Diao, Q. Chen, B. He, Federated learning on non-IID data silos (ICDE 2022), section IV-A, quantity-based
    label imbalance. All sets of c classes that have rows are equally likely. The size of a client depends on how many
    clients drew the same classes. Rows of a class that no client drew are dropped.

    Parameters
    ----------
    classes_per_client : int
        Number c of classes of a client.
    """
    clients, stock = request.enough, request.stock
    present = np.flatnonzero(stock)
    if classes_per_client > len(present):
        raise UserError(
            f"--classes-per-client {classes_per_client} is too large. The data set has {len(present)} classes"
        )
    drawn = [
        np.argsort(request.generator.random((min(_CLIENTS_AT_ONCE, clients - low), len(present))), axis=1)
        for low in range(0, clients, _CLIENTS_AT_ONCE)
    ]
    chosen = present[np.concatenate(drawn)[:, :classes_per_client]]
    holds = np.zeros((clients, request.classes), np.int64)
    np.put_along_axis(holds, chosen, 1, axis=1)
    holders = holds.sum(axis=0)
    if (short := np.flatnonzero(holders > stock)).size:
        raise UserError(
            f"{holders[short[0]]} clients drew class {short[0]}, which has {stock[short[0]]} samples. Ask for fewer "
            "clients or a smaller --classes-per-client"
        )
    unused = np.flatnonzero((holders == 0) & (stock > 0))
    notes: tuple[str, ...] = ()
    if len(unused):
        listed = ", ".join(map(str, unused[:8])) + (", ..." if len(unused) > 8 else "")
        notes = (
            f"no client drew {len(unused)} of the classes ({listed}): their {stock[unused].sum()} samples are unused",
        )
    counts = share_out(holds, stock, holders, request.generator)
    return Partition(*take_counts(request.labels, counts, request.generator), notes=notes)
