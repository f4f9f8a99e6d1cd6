"""Data sampler of a run: it chooses the samples of the selected clients that are used in a round.

A rule is called client by client (`RowClient`) by the rank that trains the client. A rule decorated with
`data_sampler(pooled=True)` is called for the samples of the whole cohort at once (`Pool`): they form one axis, client
after client in index order. It returns sorted positions and draws any part of the axis as in a draw of the whole, so
that a rank's cost is that of its samples: streams belong to fixed blocks of the axis. It sees no labels, and the server
can repeat its draws. Built in are pooled rules: Bernoulli(p) per sample, a fixed ratio, or exactly K of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.common.apportionment import offsets_of, places_within, united
from fedmpi.common.calling import calling, refuse_result, result_array, takes
from fedmpi.common.decorators import data_sampler
from fedmpi.common.errors import UserError
from fedmpi.common.plan import read_only
from fedmpi.common.registry import Component
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

BERNOULLI_BLOCK = 2**16
RATIO_BLOCK = 2**10


@dataclass(frozen=True)
class RowClient:
    """Input of a data sampler for one selected client.

    Attributes
    ----------
    index, round : int
    labels : int64 (n,)
        Labels of all its samples, in their order; read-only.
    generator : Generator
        Keyed by seed, purpose, round and client: the same on any rank.
    expected : float
        Requested samples: its budget in the cohort, or its share of samples.budget by its size; all n if neither is
        set.
    measured : dict of str to float64 (n,)
        Source of `fresh`.
    """

    index: int
    round: int
    labels: Ints
    generator: np.random.Generator
    expected: float
    measured: Mapping[str, Floats] = field(default_factory=dict)

    def fresh(self, name: str) -> Floats:
        """Return a number of each of its samples under the current global model, float64 (n,), read-only."""
        if name not in self.measured:
            raise UserError(
                f"client.fresh({name!r}) is not measured. Decorate the sampler with @data_sampler(needs=({name!r},))"
            )
        return read_only(self.measured[name])


@dataclass(frozen=True)
class Pool:
    """Input of a pooled data sampler: the cohort.

    Attributes
    ----------
    round : int
    sizes : int64 (m,)
        Samples of each selected client, in index order.
    start, stop : int
        The requested part [start, stop) of the axis.
    probability : float
        p, the server's sampling probability: K over the samples of all available clients (bernoulli: over their
        estimate), at most 1; 1 if samples.budget is not set.
    wanted : int or None
        K, samples.budget, the sample budget.
    streams : Streams
        The run's streams.
    """

    round: int
    sizes: Ints
    start: int
    stop: int
    probability: float
    wanted: int | None
    streams: Streams

    def generator(self, block: int) -> np.random.Generator:
        """Return a block's generator, keyed by seed, purpose, round and block: the same on any rank."""
        return self.streams.generator(Purpose.SAMPLES, self.round, block)

    def restrict(self, positions: Ints) -> Ints:
        """Return those of the sorted positions that lie in the requested part."""
        first, last = np.searchsorted(positions, [self.start, self.stop])
        return positions[first:last]


@data_sampler(name="all", pooled=True, probability="all")
def all_rows(pool: Pool) -> Ints:
    """Use all samples of every selected client."""
    return np.arange(pool.start, pool.stop)


@data_sampler(name="bernoulli", pooled=True, probability="estimate")
def bernoulli(pool: Pool) -> Ints:
    """Draw each sample with the same probability K/Ñ (FedSampling, Algorithm 1, z_i ~ Bernoulli(K/Ñ)).

    The gaps between drawn positions are geometric, drawn block by block from the stream (SAMPLES, round, block):
    samples that are not drawn cost nothing.
    """
    if pool.start == pool.stop or pool.probability == 0:
        return np.zeros(0, np.int64)
    if pool.probability == 1:
        return np.arange(pool.start, pool.stop)
    total, drawn = int(pool.sizes.sum()), []
    for block in range(pool.start // BERNOULLI_BLOCK, (pool.stop - 1) // BERNOULLI_BLOCK + 1):
        begin = block * BERNOULLI_BLOCK
        length = min(BERNOULLI_BLOCK, total - begin)
        drawn.append(begin + _kept(pool.generator(block), pool.probability, length))
    return pool.restrict(np.concatenate(drawn))


@data_sampler(name="ratio", pooled=True, probability="ratio")
def ratio(pool: Pool, *, ratio: Annotated[float, Field(gt=0, le=1)]) -> Ints:
    """Draw a fixed share of every selected client's samples (FedSampling §3.3, the naive method).

    A client of n samples uses r·n distinct ones, chosen uniformly; r·n is rounded down or up at random so that its mean
    is exact. Hence every sample is used with probability exactly r, and a client with r·n < 1 sometimes uses none.
    Streams are (SAMPLES, round, b) for the b-th 1024 selected clients.

    Parameters
    ----------
    ratio : float
        r, the share.
    """
    if pool.start == pool.stop:
        return np.zeros(0, np.int64)
    offsets, drawn = offsets_of(pool.sizes), []
    first, last = np.searchsorted(offsets, [pool.start, pool.stop - 1], side="right") - 1
    for block in range(first // RATIO_BLOCK, last // RATIO_BLOCK + 1):
        members = slice(block * RATIO_BLOCK, (block + 1) * RATIO_BLOCK)
        generator = pool.generator(block)
        counts = _round_at_random(generator, pool.sizes[members], ratio)
        drawn.append(offsets[members.start] + _distinct(generator, pool.sizes[members], counts))
    return pool.restrict(np.concatenate(drawn))


@data_sampler(name="exact", pooled=True, probability="cohort")
def exact(pool: Pool) -> Ints:
    """Draw exactly K distinct samples, uniformly from the pool: the batch of centralized training."""
    assert pool.wanted is not None
    total = int(pool.sizes.sum())
    return pool.restrict(_distinct(pool.generator(0), np.array([total]), np.array([min(pool.wanted, total)])))


def used_counts(positions: Ints, offsets: Ints) -> Ints:
    """Count the used samples of each client, int64 (m,): sorted `positions` between successive `offsets`."""
    return np.diff(np.searchsorted(positions, offsets))


def holders(positions: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """Return the clients with any of the sorted `positions`, at the cost of the positions, not of the clients."""
    places = np.searchsorted(offsets, positions, side="right") - 1
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    return places[starts], np.diff(starts, append=len(places))


def _kept(generator: np.random.Generator, probability: float, length: int) -> Ints:
    """Draw sorted positions of 0 … length − 1, each independently."""
    expected = probability * length
    draws = int(expected + 4 * np.sqrt(expected)) + 8
    parts, last = [], -1
    while last < length:
        gaps = np.minimum(generator.geometric(probability, draws), length + 1)
        parts.append(last + np.cumsum(gaps))
        last = int(parts[-1][-1])
    kept = np.concatenate(parts)
    return kept[: np.searchsorted(kept, length)]


def _distinct(generator: np.random.Generator, sizes: Ints, counts: Ints) -> Ints:
    """Draw simple random samples without replacement for many clients, as sorted positions on their common axis.

    Draws with replacement, drops repeats and tops up: by symmetry every set of the right size is equally likely. If
    more than half is requested, the complement is drawn instead, so the cost stays proportional to the result.
    """
    offsets = offsets_of(sizes)
    inverted = 2 * counts > sizes
    targets = np.where(inverted, sizes - counts, counts)
    drawn = np.zeros(0, np.int64)
    missing = targets
    while missing.any():
        local = generator.integers(0, np.repeat(sizes, missing))
        drawn = united(drawn, np.repeat(offsets[:-1], missing) + local)
        missing = targets - used_counts(drawn, offsets)
    if not inverted.any():
        return drawn
    candidates = np.repeat(offsets[:-1][inverted], sizes[inverted]) + places_within(sizes[inverted])
    from_inverted = inverted[np.searchsorted(offsets, drawn, side="right") - 1]
    kept = np.setdiff1d(candidates, drawn[from_inverted], assume_unique=True)
    return np.sort(np.concatenate([drawn[~from_inverted], kept]))


def _round_at_random(generator: np.random.Generator, sizes: Ints, ratio: float) -> Ints:
    """Round ratio · sizes down or up, each with the probability that keeps its mean."""
    wanted = ratio * sizes
    counts: Ints = np.floor(wanted).astype(np.int64)
    counts += generator.random(sizes.size) < wanted - counts
    return counts


class RowRule:
    """Choice of the selected clients' samples.

    Rules called client by client see `labels` (client) -> int64 (n,) and the numbers of the samples that `measure`
    (round, client, names) returns, name -> float64 (n,).
    """

    def __init__(
        self,
        part: Component,
        options: Mapping[str, Any],
        streams: Streams,
        wanted: int | None = None,
        labels: Callable[[int], Ints] | None = None,
        measure: Callable[[int, int, Sequence[str]], dict[str, Floats]] | None = None,
    ):
        with calling(part):
            self.part, self._rule = part, part.make(options)
        self.streams, self.wanted, self._labels = streams, wanted, labels
        self.needs, self._measure = tuple(part.marks.get("needs", ())), measure
        self.pooled = bool(part.marks.get("pooled", False))
        self.probability = str(part.marks.get("probability", ""))  # see `fedmpi.data_sampler`; "" if it is not pooled
        takes(part, self._rule, "pool" if self.pooled else "client")

    @property
    def uses_all(self) -> bool:
        """True if every sample of every selected client is used."""
        return self.probability == "all"

    def positions(
        self, round: int, sizes: Ints, probability: float = 1.0, start: int = 0, stop: int | None = None
    ) -> Ints:
        """Return the sorted positions on the cohort's axis that a pooled rule draws in [start, stop), int64 (r,)."""
        stop = int(sizes.sum()) if stop is None else stop
        pool = Pool(round, sizes, start, stop, probability, self.wanted, self.streams)
        with calling(self.part, round):
            found = self._rule(pool)
        return self._checked(found, start, stop, round, None) if self.part.foreign else found

    def rows(self, round: int, clients: Ints, sizes: Ints, total: int, budgets: Ints | None = None) -> SampledRows:
        """Draw the samples of some clients (q,) sequentially; `total` are the samples of the whole cohort.

        `budgets` (q,) replace the clients' shares of samples.budget; a rule that uses all samples then draws so many
        uniformly without replacement. The `members` returned are positions in `clients`.
        """
        shares = sizes if self.wanted is None else self.wanted * sizes / max(total, 1)
        shares = np.minimum(sizes, shares if budgets is None else budgets)
        drawn = [
            self._of_client(round, client, size, share)
            for client, size, share in zip(clients.tolist(), sizes.tolist(), shares.tolist(), strict=True)
        ]
        counts = np.fromiter(map(len, drawn), np.int64, len(drawn))
        having = np.flatnonzero(counts)
        return SampledRows(having, counts[having], np.concatenate([np.empty(0, np.int64), *drawn]))

    def _of_client(self, round: int, client: int, size: int, share: float) -> Ints:
        if not size:
            return np.empty(0, np.int64)
        generator = self.streams.generator(Purpose.ROWS, round, client)
        if self.uses_all:
            return np.sort(generator.choice(size, int(share), replace=False, shuffle=False))
        assert self._labels is not None
        labels = self._labels(client)
        labels.flags.writeable = False
        measured = self._measure(round, client, self.needs) if self._measure is not None else {}
        with calling(self.part, round, client):
            found = self._rule(RowClient(client, round, labels, generator, float(share), measured))
        return self._checked(found, 0, size, round, client)

    def _checked(self, found: Any, start: int, stop: int, round: int, client: int | None) -> Ints:
        what = "positions" if client is None else "rows"
        rows: Ints = result_array(self.part, found, None, what, round, client, whole=True)
        if not rows.size:
            return rows
        if (np.diff(rows) <= 0).any():
            problem = f"returned {what} that are not sorted, or one of them twice: return np.unique(…) of them"
        elif rows[0] < start or rows[-1] >= stop:
            problem = f"returned {what} from {rows[0]} to {rows[-1]}, outside {start} … {stop - 1}"
        else:
            return rows
        raise refuse_result(self.part, problem, round, client)


@dataclass(frozen=True)
class SampledRows:
    """Drawn samples of a rank's clients, without clients that have none."""

    members: Ints  # (q,): Cohort positions of the clients that have samples
    counts: Ints  # (q,): Number of samples of each, at least one
    rows: Ints  # (r,): Local rows, client after client

    @property
    def largest(self) -> int:
        """Largest number of samples of one client."""
        return int(self.counts.max(initial=0))

    def per_client(self) -> list[Ints]:
        """Return the rows of each client, views of `rows`."""
        ends = np.cumsum(self.counts).tolist()
        return [self.rows[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def below(self, limits: Ints) -> Ints:
        """Count the rows of each client below its limit (q,); int64 (q,)."""
        rows = self.rows < np.repeat(limits, self.counts)
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        return np.bincount(owners, weights=rows, minlength=len(self.counts)).astype(np.int64)
