"""Assignment of samples to clients, and of clients to workers.

Pure functions over arrays, shared by data_prep's partitions and the embedded digits; no loop over clients. Every draw
returns rows, client after client, and offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmpi.common.apportionment import offsets_of, places_within
from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

Rows = tuple[Ints, Ints]

REDRAWS = 10
_NEGLIGIBLE = 1e-12


def even_sizes(total: int, clients: int) -> Ints:
    """Sizes that differ by at most one and sum to `total`, int64 (N,); the first clients get the odd samples."""
    sizes = np.full(clients, total // clients, np.int64)
    sizes[: total % clients] += 1
    return sizes


def inverse_of(permutation: Ints) -> Ints:
    """The inverse of a permutation, int64 (n,)."""
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse


def group_by_owner(owner: npt.NDArray[np.integer], clients: int, generator: np.random.Generator) -> Rows:
    """Rows of every client in random order, from the owner of each row (n,); a negative owner drops the row."""
    shuffled = generator.permutation(len(owner))
    shuffled = shuffled[owner[shuffled] >= 0]
    rows = shuffled[np.argsort(owner[shuffled], kind="stable")]
    return rows.astype(np.int64, copy=False), offsets_of(np.bincount(owner[rows], minlength=clients))


def iid(rows: int, sizes: Ints, generator: np.random.Generator) -> Rows:
    """A uniformly random choice of sum(sizes) of the rows, cut into clients of the given sizes."""
    offsets = offsets_of(sizes)
    return generator.permutation(rows)[: offsets[-1]].astype(np.int64, copy=False), offsets


def level_down(values: Ints, removed: int, floor: int = 0) -> Ints:
    """Take `removed` units from the largest values, levelling them, none below `floor`."""
    low, high = floor, int(values.max(initial=floor))
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(values - level, 0).sum() >= removed else (low, level - 1)
    taken = np.maximum(values - low, 0)
    taken[np.flatnonzero(taken)[: int(taken.sum()) - removed]] -= 1
    return taken


def fill_empty(owner: npt.NDArray[np.int32], clients: int, generator: np.random.Generator) -> int:
    """Give one random row of the largest clients to every client without rows, in place; returns how many were empty.

    The largest clients give, levelled to a common size, so that no client ends below one row.
    """
    sizes = np.bincount(owner, minlength=clients)
    empty = np.flatnonzero(sizes == 0)
    if len(empty) == 0:
        return 0
    order = generator.permutation(clients)  # random order, so that no equally large client is preferred
    given = np.empty_like(sizes)
    given[order] = level_down(sizes[order], len(empty), floor=1)
    rows, offsets = group_by_owner(owner, clients, generator)
    donors = np.flatnonzero(given)
    counts = given[donors]
    owner[rows[np.repeat(offsets[donors], counts) + places_within(counts)]] = generator.permutation(empty)
    return len(empty)


def dirichlet_by_class(
    labels: Ints,
    classes: int,
    clients: int,
    alpha: float,
    generator: np.random.Generator,
    fill: bool = True,
    redraws: int = REDRAWS,
    least: int = 0,
) -> tuple[Ints, Ints, int]:
    """Draw for every class the shares of the clients ~ Dir(alpha, ..., alpha), independently (Yurochkin et al. 2019).

    Shares become whole samples by `systematic_counts`: each client's expected count is exactly its share. A draw that
    leaves clients without samples is repeated up to `redraws` times; then, with `fill`, each empty client gets one
    random sample of the largest clients. With `least`, draws are repeated while a client has fewer samples, and none is
    filled. Returns rows, offsets, and the number of clients that were filled.
    """
    if fill and len(labels) < clients:
        raise UserError(
            f"{len(labels)} samples cannot give {clients} clients one each. Ask for at most {len(labels)} clients"
        )
    # Below this many samples a client, repeating the whole draw has no chance worth its time.
    attempts = 1 + redraws if least or (fill and len(labels) >= 2 * clients) else 1
    bits: Any = generator.bit_generator  # NumPy's own ones can jump far ahead
    rounding = np.random.Generator(bits.jumped())  # so that the shares do not depend on their rounding
    owner = np.zeros(len(labels), np.int32)
    for _ in range(attempts):
        for members in _shuffled_classes(labels, classes, generator):
            counts = systematic_counts(generator.dirichlet(np.full(clients, alpha)), len(members), rounding)
            owner[members] = np.repeat(np.arange(clients, dtype=np.int32), counts)
        if np.bincount(owner, minlength=clients).min() >= max(1, least):
            break
    filled = fill_empty(owner, clients, generator) if fill and not least else 0
    return *group_by_owner(owner, clients, generator), filled


def _shuffled_classes(labels: Ints, classes: int, generator: np.random.Generator) -> Iterator[Ints]:
    """The rows of each class in random order; every class is drawn when it is asked for."""
    by_class = np.argsort(labels, kind="stable")
    bounds = offsets_of(np.bincount(labels, minlength=classes))
    return (generator.permutation(by_class[low:high]) for low, high in pairwise(bounds))


def systematic_counts(shares: Floats, total: int, generator: np.random.Generator) -> Ints:
    """Whole counts that sum to `total`, each within one of shares * total and equal to it on average.

    Systematic rounding (Madow 1949): the shares are laid end to end on a line of length `total` in random order, and a
    client counts the points u, u + 1, u + 2, ... on its stretch, u ~ U(0, 1).
    """
    order = generator.permutation(len(shares))
    ends = np.cumsum(shares[order])
    passed = np.floor(ends / ends[-1] * total + generator.random()).astype(np.int64)
    passed[-1] = total  # as it is but for rounding in the last bit
    counts = np.empty(len(shares), np.int64)
    counts[order] = np.diff(np.minimum(passed, total), prepend=0)
    return counts


def dirichlet_by_client(labels: Ints, classes: int, sizes: Ints, alpha: float, generator: np.random.Generator) -> Rows:
    """Every client's class mix ~ Dir(alpha, ..., alpha), sizes as given; `fill_by_mix` says what if classes run out."""
    mixes = generator.dirichlet(np.full(classes, alpha), size=len(sizes))
    counts = fill_by_mix(sizes, np.bincount(labels, minlength=classes), mixes, generator)
    return take_counts(labels, counts, generator)


def fill_by_mix(sizes: Ints, stock: Ints, mixes: Floats, generator: np.random.Generator) -> Ints:
    """Return the class counts of clients with different class mixes that draw samples from a finite stock.

    All clients ask at once: client k asks for ``sizes[k]`` samples, multinomial from ``mixes[k]``. A class asked for
    beyond its stock is given to a uniformly random choice of the requests; who got nothing asks again, from its mix
    restricted to the classes left (from the remaining stock's mix where its own has no mass there). Every pass
    exhausts a class or ends, so there are at most C + 1 passes.
    """
    counts = np.zeros(mixes.shape, np.int64)
    left, wanting = stock.astype(np.int64), sizes.astype(np.int64)
    while (active := np.flatnonzero(wanting)).size:
        mass = mixes[active] * (left > 0)
        mass[mass.sum(axis=1) <= _NEGLIGIBLE] = left
        asked = generator.multinomial(wanting[active], mass / mass.sum(axis=1, keepdims=True))
        for label in np.flatnonzero(asked.sum(axis=0) > left):
            asked[:, label] = generator.multivariate_hypergeometric(asked[:, label], left[label], method="marginals")
        counts[active] += asked
        left -= asked.sum(axis=0)
        wanting[active] -= asked.sum(axis=1)
    return counts


def take_counts(labels: Ints, counts: Ints, generator: np.random.Generator) -> Rows:
    """Random rows for every client with the class counts (N, C) asked for; rows of the surplus stock are left out."""
    clients, classes = counts.shape
    owner = np.full(len(labels), -1, np.int64)
    for label, members in enumerate(_shuffled_classes(labels, classes, generator)):
        owners = np.repeat(np.arange(clients), counts[:, label])
        owner[members[: len(owners)]] = owners
    return group_by_owner(owner, clients, generator)


def ownership(sizes: Ints, shard_starts: Ints, workers: int) -> Ints:
    """Boundaries of the workers' client ranges.

    With at least as many shards as workers a worker owns whole shards, else whole clients. Each boundary is the one
    nearest to an equal division of the samples that leaves every worker a shard (or client), so no worker holds more
    than its equal part plus the largest shard (or client). Workers beyond the number of clients get empty ranges.
    """
    clients = len(sizes)
    borders = shard_starts if len(shard_starts) - 1 >= workers else np.arange(clients + 1)
    units = len(borders) - 1
    busy = min(workers, units)
    before = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))[borders]
    middles = (before[1:] + before[:-1]) / 2
    nearest = np.searchsorted(middles, before[-1] * np.arange(busy + 1) / busy)
    chosen = np.zeros(busy + 1, np.int64)
    chosen[busy] = units
    for worker in range(1, busy):
        chosen[worker] = np.clip(nearest[worker], chosen[worker - 1] + 1, units - (busy - worker))
    boundaries = np.full(workers + 1, clients, np.int64)
    boundaries[: busy + 1] = borders[chosen]
    return boundaries
