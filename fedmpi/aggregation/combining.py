"""Updates kept for a combiner, and combined by all ranks: every rank holds and combines its share of the coordinates.

The coordinates are cut into blocks, and ranks, the server too, are dealt neighbouring blocks. A client's update travels
to them as soon as it is there (`cluster.dealt_rows`): a rank holds its coordinates of all updates, m · d/ranks values,
and of whole updates one, or a few small ones. When a round's work is done, each rank combines its blocks, the rows in
client order. The blocks depend on the plan's m and on d alone, so that any number of ranks computes the same bits.
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
"""Values of a block over all participants, 16 MiB as float32, where m and d allow."""
LEAST_BLOCKS = 64
"""Blocks into which a model is cut where that leaves LEAST_WIDTH coordinates each: so many ranks can have a share."""
LEAST_WIDTH, MOST_WIDTH = 256, 1 << 16
MEASURED_WIDTH = 4
"""Times m, the least width of a block that is measured: a measurement (up to m × m) is no larger than the block."""
KEPT_SHARE = 8
"""Measurements wait for those of the blocks before in at most this part of the memory that the updates take."""


class CombinedSum:
    """An accumulator that keeps every update and adds to another one what a combiner makes of all ranks' updates."""

    def __init__(self, inner: Accumulator, combiner: Combiner, cluster: Cluster, model: Tensor):
        self.inner, self.combiner, self.cluster = inner, combiner, cluster
        self.values, self.dtype, self.device = model.numel(), model.dtype, model.device
        self._rows = cluster.dealt_rows()
        self._round, self._normalise = 0, True
        self._width, self._borders = 0, np.zeros(cluster.size + 1, np.int64)
        self.combined = 0

    def begin(self, plan: Plan, start: Tensor) -> None:
        """Learn which round it is, whether coefficients are to add up to 1, and how many may take part."""
        self._round, self._normalise = plan.round, plan.normalise
        self._width = block_width(len(plan.clients), self.values, self.combiner.measures)
        blocks = -(-self.values // self._width)
        shares = blocks * np.arange(self.cluster.size + 1) // self.cluster.size
        self._borders = np.minimum(shares * self._width, self.values)
        self._rows.open(self._borders, np.dtype(np.float64 if self.dtype == torch.float64 else np.float32))

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        """Keep a client's update (d,)."""
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
        """This rank's coordinates of the combined update, zeros elsewhere, (d,); rows are taken in the given order."""
        total = float(coefficients.sum())
        if self._normalise and total:
            coefficients = coefficients / total
        factors, result = torch.from_numpy(coefficients).to(self.dtype), torch.zeros(self.values, dtype=self.dtype)
        with one_thread():
            measured = self._measured(order) if self.combiner.measures else None
            for part, block in self._blocks(order):
                result[part] = self.combiner.combine(block, factors, measured, self._round)
        return result

    def _blocks(self, order: Ints) -> Iterator[tuple[slice, Tensor]]:
        """This rank's coordinates, block after block, with the values of all updates there, (m, s)."""
        first, last = self._borders[self.cluster.rank : self.cluster.rank + 2].tolist()
        kept = self._rows.rows()
        rows = [kept[place] for place in order.tolist()]
        for start in range(first, last, self._width):
            stop = min(start + self._width, last)
            yield slice(start, stop), torch.from_numpy(np.stack([row[start - first : stop - first] for row in rows]))

    def _measured(self, order: Ints) -> Tensor:
        """The sum of the combiner's measurements over all blocks of all ranks; collective.

        They are added up in the order of the blocks: each rank adds its own to the sum of the ranks before. Until that
        has come, it keeps some of its own and then waits.
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
    """A sum that goes from rank to rank, so that its terms are added up in the order of the ranks."""

    def __init__(self, cluster: Cluster, shape: tuple[int, ...] | None):
        self.cluster = cluster
        gathered = cluster.gather(np.array([-1] if shape is None else [len(shape), *shape], np.int64))
        encoded = None if gathered is None else next(found for found in gathered if found[0] >= 0)
        self.shape = tuple(cluster.broadcast(None if encoded is None else [encoded])[0][1:].tolist())
        self.bytes = 8 * int(np.prod(self.shape))
        group = cluster.groups([range(cluster.size)])[0]
        assert group is not None
        self._group, self._came = group, cluster.is_server
        self._sum = np.full(self.shape, -0.0)  # the zero that changes no bit of what is added to it

    def add(self, terms: Floats) -> None:
        """Add float64 terms (k, …), in their order, to those of the ranks before, for which the first call waits."""
        if not self._came:
            self._group.recv(self._sum, self.cluster.rank - 1)
            self._came = True
        for term in terms:
            self._sum += term

    def whole(self) -> Floats:
        """The sum of all ranks, on all ranks; collective, and once each has added what it has, if only nothing."""
        rank, last = self.cluster.rank, self.cluster.size - 1
        if last:
            self._group.send(self._sum, (rank + 1) % self.cluster.size)
        if last and self.cluster.is_server:
            self._group.recv(self._sum, last)
        whole: Floats = self.cluster.broadcast([self._sum] if self.cluster.is_server else None)[0]
        return whole


def block_width(participants: int, values: int, measuring: bool) -> int:
    """s, the coordinates of a block: a function of m and d alone, so that blocks are the same for any number of
    ranks.
    """
    fitting = min(BLOCK_VALUES // max(participants, 1), MOST_WIDTH)
    width = max(LEAST_WIDTH, min(fitting, -(-values // LEAST_BLOCKS)))
    return max(width, MEASURED_WIDTH * participants) if measuring else width


@contextmanager
def one_thread() -> Iterator[None]:
    """Within: torch computes with one thread, so that sums have the same bits whatever the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
