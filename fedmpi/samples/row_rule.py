"""Data sampler of a run: it chooses the samples of the selected clients that are used in a round.

A rule is called client by client (`RowClient`) by the rank that trains the client. A rule decorated with
`row_rule(pooled=True)` is called for the samples of the whole cohort at once (`Pool`): they form one axis, client after
client in index order. A pooled rule draws any part of the axis as in a draw of the whole, so that a rank's cost is that
of its samples. It sees no labels, and the server can repeat its draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmpi.common.calling import calling, refuse_result, result_array, takes
from fedmpi.common.registry import Component
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints


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
        Requested samples: its share of samples.budget by its size, all n if that is not set.
    """

    index: int
    round: int
    labels: Ints
    generator: np.random.Generator
    expected: float


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


class RowRule:
    """Choice of the selected clients' samples; `labels` (client) -> int64 (n,) serve rules called client by client."""

    def __init__(
        self,
        part: Component,
        options: Mapping[str, Any],
        streams: Streams,
        wanted: int | None = None,
        labels: Callable[[int], Ints] | None = None,
    ):
        with calling(part):
            self.part, self._rule = part, part.make(options)
        self.streams, self.wanted, self._labels = streams, wanted, labels
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

    def rows(self, round: int, clients: Ints, sizes: Ints, total: int) -> SampledRows:
        """Draw the samples of some clients (q,) sequentially; `total` are the samples of the whole cohort.

        The `members` returned are positions in `clients`.
        """
        drawn = [
            self._of_client(round, client, size, total)
            for client, size in zip(clients.tolist(), sizes.tolist(), strict=True)
        ]
        counts = np.fromiter(map(len, drawn), np.int64, len(drawn))
        having = np.flatnonzero(counts)
        return SampledRows(having, counts[having], np.concatenate([np.empty(0, np.int64), *drawn]))

    def _of_client(self, round: int, client: int, size: int, total: int) -> Ints:
        if not size:
            return np.empty(0, np.int64)
        assert self._labels is not None
        labels = self._labels(client)
        labels.flags.writeable = False
        share = float(size) if self.wanted is None else min(float(size), self.wanted * size / total)
        generator = self.streams.generator(Purpose.ROWS, round, client)
        with calling(self.part, round, client):
            found = self._rule(RowClient(client, round, labels, generator, share))
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
