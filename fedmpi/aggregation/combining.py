"""Updates kept for an aggregator: every rank combines its share of the coordinates.

The coordinates are cut into blocks, and all ranks, including the server, are assigned neighboring blocks. A rank keeps
the updates of its own clients. At the end of a round the ranks exchange them row by row: each receives its coordinates
of all updates (m · d/ranks values) and frees the rows that it has sent. Then it combines its blocks, with the rows in
client order. The blocks depend only on m and d, so the result is bit-identical for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmpi.aggregation.combiners import Combiner
from fedmpi.aggregation.exact import Accumulator, ReducedValues
from fedmpi.common.calling import refuse_result
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats, Ints
from fedmpi.mpi import Cluster

EXCHANGED_VALUES = 1 << 24
"""Values that a rank sends at once, unless one update is longer."""
BLOCK_VALUES = 1 << 22
"""Values of a block over all selected clients, 16 MiB as float32, if m and d allow it."""
LEAST_BLOCKS = 64
"""Number of blocks of a model if each keeps LEAST_WIDTH coordinates: so many ranks can have a share."""
LEAST_WIDTH, MOST_WIDTH = 256, 1 << 16
MEASURED_WIDTH = 4
"""Factor of m in the smallest width of a measured block: a measurement (up to m × m) is no larger than the block."""
KEPT_SHARE = 8
"""Divisor of the updates' memory that limits the measurements waiting for those of earlier blocks."""


class CombinedSum:
    """Accumulator that keeps every update and adds the combined update of all ranks to another accumulator."""

    def __init__(self, inner: Accumulator, combiner: Combiner, cluster: Cluster, model: Tensor):
        self.inner, self.combiner, self.cluster = inner, combiner, cluster
        self.values, self.dtype, self.device = model.numel(), model.dtype, model.device
        self._own: list[tuple[int, float, NDArray[np.floating]]] = []
        self._rows: list[NDArray[np.floating]] = []  # This rank's coordinates of all updates
        self._round, self._normalize = 0, True
        self._width, self._borders = 0, np.zeros(cluster.size + 1, np.int64)
        self.combined = 0

    def begin(self, plan: Plan, start: Tensor) -> None:
        """Set the round, whether coefficients should add up to 1, and the largest number of updates."""
        self._round, self._normalize = plan.round, plan.normalize
        self._width = block_width(len(plan.clients), self.values, self.combiner.measures)
        blocks = -(-self.values // self._width)
        shares = blocks * np.arange(self.cluster.size + 1) // self.cluster.size
        self._borders = np.minimum(shares * self._width, self.values)
        self._own, self._rows = [], []

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        """Store a client's update (d,)."""
        self._own.append((client, coefficient, vector.detach().to("cpu", copy=True).numpy()))

    def reset(self) -> None:
        self.inner.reset()

    def flush(self) -> None:
        """Combine the updates of all ranks; collective."""
        clients, coefficients = self._exchange()
        self.combined = len(clients)
        if len(clients):
            self.combiner.check(len(clients), self._round)
            order = np.argsort(clients, kind="stable")
            self._rows = [self._rows[place] for place in order.tolist()]
            self.inner.add(self._combined(coefficients[order]).to(self.device), 1.0)
        self.inner.flush()

    def to_update(self, reduced: ReducedValues) -> Tensor:
        return self.inner.to_update(reduced)

    def _exchange(self) -> tuple[Ints, Floats]:
        """Give each rank its coordinates of all updates; return their clients (m,) and coefficients (m,); collective.

        The updates of equal place on their ranks are exchanged together.
        """
        heads = np.array([head for *head, _ in self._own], np.float64).reshape(-1, 2)
        everybody = self.cluster.broadcast(self.cluster.gather(heads))
        counts, widths = np.array([len(found) for found in everybody]), np.diff(self._borders)
        own = int(widths[self.cluster.rank])
        at_once = max(1, EXCHANGED_VALUES // max(self.values, 1))
        order: list[tuple[int, int]] = []
        for first in range(0, int(counts.max()), at_once):
            leaving, self._own = self._own[:at_once], self._own[at_once:]
            parts = [row[a:b] for a, b in pairwise(self._borders.tolist()) for *_, row in leaving]
            outgoing = np.concatenate([np.empty(0, self._kind), *parts])
            coming = np.clip(counts - first, 0, at_once)
            incoming = np.empty(int(coming.sum()) * own, self._kind)
            self.cluster.exchange(outgoing, len(leaving) * widths, incoming, coming * own)
            self._rows += list(incoming.reshape(int(coming.sum()), own))
            order += [(rank, first + turn) for rank, several in enumerate(coming.tolist()) for turn in range(several)]
        whole = np.array([everybody[rank][turn] for rank, turn in order]).reshape(-1, 2)
        return whole[:, 0].astype(np.int64), whole[:, 1]

    @property
    def _kind(self) -> np.dtype[Any]:
        return np.dtype(np.float64 if self.dtype == torch.float64 else np.float32)

    def _combined(self, coefficients: Floats) -> Tensor:
        """Return this rank's coordinates of the combined update, zeros elsewhere, (d,)."""
        total = float(coefficients.sum())
        if self._normalize and total:
            coefficients = coefficients / total
        factors, result = torch.from_numpy(coefficients).to(self.dtype), torch.zeros(self.values, dtype=self.dtype)
        with one_thread():
            measured = self._measured() if self.combiner.measures else None
            for part, block in self._blocks():
                result[part] = self.combiner.combine(block, factors, measured, self._round)
        return result

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield this rank's coordinates, block by block, with the values of all updates, (m, s)."""
        first, last = self._borders[self.cluster.rank : self.cluster.rank + 2].tolist()
        for start in range(first, last, self._width):
            stop = min(start + self._width, last)
            yield (
                slice(start, stop),
                torch.from_numpy(np.stack([row[start - first : stop - first] for row in self._rows])),
            )

    def _measured(self) -> Tensor:
        """Return the sum of the aggregator's measurements over all blocks of all ranks; collective.

        They are added up in the order of the blocks: each rank adds its own to the sum of the previous ranks. Until
        that arrives, it stores some of its own and then waits.
        """
        found = (self.combiner.measure(block, self._round).numpy() for _, block in self._blocks())
        first = next(found, None)
        running = RunningSum(self.cluster, None if first is None else first.shape)
        held = int(self._borders[self.cluster.rank + 1] - self._borders[self.cluster.rank]) * len(self._rows)
        room = held * self.dtype.itemsize // (KEPT_SHARE * max(running.bytes, 1))
        kept = np.empty((min(max(room, 1), -(-self.values // self._width)), *running.shape))
        waiting = 0
        for measurement in chain([] if first is None else [first], found):
            if measurement.shape != running.shape:
                problem = (
                    f"measure() returned shape {measurement.shape} for one slice and {running.shape} for another: "
                    "return one shape for all, since they are added up"
                )
                raise refuse_result(self.combiner.part, problem, self._round)
            if waiting == len(kept):
                running.add(kept)
                waiting = 0
            kept[waiting] = measurement
            waiting += 1
        running.add(kept[:waiting])
        return torch.from_numpy(running.whole())


class RunningSum:
    """Sum passed from rank to rank, so that its terms are added up in rank order."""

    def __init__(self, cluster: Cluster, shape: tuple[int, ...] | None):
        self.cluster = cluster
        gathered = cluster.gather(np.array([-1] if shape is None else [len(shape), *shape], np.int64))
        encoded = None if gathered is None else next(found for found in gathered if found[0] >= 0)
        self.shape = tuple(cluster.broadcast(None if encoded is None else [encoded])[0][1:].tolist())
        self.bytes = 8 * int(np.prod(self.shape))
        self._messages = cluster.messages() if cluster.size > 1 else None
        self._came = cluster.is_server
        self._sum = np.full(self.shape, -0.0)  # the zero that changes no bit in a sum

    def add(self, terms: Floats) -> None:
        """Add float64 terms (k, …), in their order, to those of the previous ranks; the first call waits for these."""
        if self._messages is not None and not self._came:
            self._messages.recv(self._sum, self.cluster.rank - 1)
            self._came = True
        for term in terms:
            self._sum += term

    def whole(self) -> Floats:
        """Return the sum of all ranks, on all ranks; collective, after each has added its terms, even if none."""
        if self._messages is not None:
            self._messages.send(self._sum, (self.cluster.rank + 1) % self.cluster.size)
            if self.cluster.is_server:
                self._messages.recv(self._sum, self.cluster.size - 1)
        whole: Floats = self.cluster.broadcast([self._sum] if self.cluster.is_server else None)[0]
        return whole


def block_width(participants: int, values: int, measuring: bool) -> int:
    """Return s, the coordinates of a block: a function of m and d alone, so that blocks are equal for any number of
    ranks.
    """
    fitting = min(BLOCK_VALUES // max(participants, 1), MOST_WIDTH)
    width = max(LEAST_WIDTH, min(fitting, -(-values // LEAST_BLOCKS)))
    return max(width, MEASURED_WIDTH * participants) if measuring else width


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one torch thread inside the context, so that sums do not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
