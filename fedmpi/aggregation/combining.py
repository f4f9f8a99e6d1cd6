"""Updates kept for a combiner: every rank stores and combines its share of the coordinates.

The coordinates are cut into blocks, and all ranks, including the server, are assigned neighbouring blocks. A client's
update is sent to them as soon as it is computed (`cluster.dealt_rows`). A rank stores its coordinates of all updates
(m · d/ranks values), and at most one whole update or a few small ones. At the end of a round, each rank combines its
blocks, with the rows in client order. The blocks depend only on m and d, so the result is
bit-identical for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.combiners import Combiner
from fedmpi.aggregation.exact import Accumulator, ReducedValues
from fedmpi.common.calling import refuse_result
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats, Ints
from fedmpi.mpi import Cluster

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
        self._rows = cluster.dealt_rows()
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
        self._rows.open(self._borders, np.dtype(np.float64 if self.dtype == torch.float64 else np.float32))

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        """Store a client's update (d,)."""
        self._rows.add(client, coefficient, vector.numpy(force=True))

    def reset(self) -> None:
        self.inner.reset()

    def flush(self) -> None:
        """Combine the updates of all ranks; collective."""
        self._rows.finish()
        clients, coefficients = self._rows.heads()
        self.combined = len(clients)
        if len(clients):
            self.combiner.check(len(clients), self._round)
            order = np.argsort(clients, kind="stable")
            self.inner.add(self._combined(order, coefficients[order]).to(self.device), 1.0)
        self.inner.flush()

    def to_update(self, reduced: ReducedValues) -> Tensor:
        return self.inner.to_update(reduced)

    def _combined(self, order: Ints, coefficients: Floats) -> Tensor:
        """Return this rank's coordinates of the combined update, zeros elsewhere, (d,); rows in the given order."""
        total = float(coefficients.sum())
        if self._normalize and total:
            coefficients = coefficients / total
        factors, result = torch.from_numpy(coefficients).to(self.dtype), torch.zeros(self.values, dtype=self.dtype)
        with one_thread():
            measured = self._measured(order) if self.combiner.measures else None
            for part, block in self._blocks(order):
                result[part] = self.combiner.combine(block, factors, measured, self._round)
        return result

    def _blocks(self, order: Ints) -> Iterator[tuple[slice, Tensor]]:
        """Yield this rank's coordinates, block by block, with the values of all updates, (m, s)."""
        first, last = self._borders[self.cluster.rank : self.cluster.rank + 2].tolist()
        kept = self._rows.rows()
        rows = [kept[place] for place in order.tolist()]
        for start in range(first, last, self._width):
            stop = min(start + self._width, last)
            yield slice(start, stop), torch.from_numpy(np.stack([row[start - first : stop - first] for row in rows]))

    def _measured(self, order: Ints) -> Tensor:
        """Return the sum of the combiner's measurements over all blocks of all ranks; collective.

        They are added up in the order of the blocks: each rank adds its own to the sum of the previous ranks. Until
        that arrives, it stores some of its own and then waits.
        """
        found = (self.combiner.measure(block, self._round).numpy() for _, block in self._blocks(order))
        first = next(found, None)
        running = RunningSum(self.cluster, None if first is None else first.shape)
        held = int(self._borders[self.cluster.rank + 1] - self._borders[self.cluster.rank]) * len(order)
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
        group = cluster.groups([range(cluster.size)])[0]
        assert group is not None
        self._group, self._came = group, cluster.is_server
        self._sum = np.full(self.shape, -0.0)  # the zero that changes no bit in a sum

    def add(self, terms: Floats) -> None:
        """Add float64 terms (k, …), in their order, to those of the previous ranks; the first call waits for these."""
        if not self._came:
            self._group.recv(self._sum, self.cluster.rank - 1)
            self._came = True
        for term in terms:
            self._sum += term

    def whole(self) -> Floats:
        """Return the sum of all ranks, on all ranks; collective, after each has added its terms, even if none."""
        rank, last = self.cluster.rank, self.cluster.size - 1
        if last:
            self._group.send(self._sum, (rank + 1) % self.cluster.size)
        if last and self.cluster.is_server:
            self._group.recv(self._sum, last)
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
