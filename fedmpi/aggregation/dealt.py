"""Updates kept one by one for a combiner, and combined by all ranks: every rank combines its share of the coordinates.

Each rank keeps the updates of the clients that it trained. When a round's work is done, the coordinates are cut into
blocks, ranks are dealt neighbouring blocks, and block after block travels to its rank, where the rows of all clients
meet in client order. A rank holds its clients' updates, one block of all updates and one of its own for every rank:
m · d over all ranks, and never m · d on one. The blocks depend on m and d alone, so that any number of ranks computes
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmpi.aggregation.combiners import Combiner
from fedmpi.aggregation.exact import Accumulator, Values
from fedmpi.cluster import Cluster
from fedmpi.common.plan import Plan
from fedmpi.common.types import Ints

BLOCK_VALUES = 1 << 22
"""Values of a block over all participants, 16 MiB as float32, where m and d allow."""
LEAST_BLOCKS = 64
"""Blocks into which a model is cut where that leaves LEAST_WIDTH coordinates each: so many ranks can have a share."""
LEAST_WIDTH, MOST_WIDTH = 256, 1 << 16
MEASURED_WIDTH = 4
"""Times m, the width of a block whose measurements (up to m × m) are kept: they then take no more than the block."""
SLAB_BYTES = 48 << 20
"""Memory for updates is asked for in pieces of at least this size, so that it lies together; what of it is not yet
written to takes no memory."""
SUMMED_AT_ONCE = 1 << 22
"""Measurements of all blocks that rank 0 adds up at once."""


class CombinedSum:
    """An accumulator that keeps every update and adds to another one what a combiner makes of all ranks' updates.

    Parameters
    ----------
    inner : Accumulator
        Receives the combined update, each rank its coordinates of it: summed over the ranks it is whole.
    combiner : Combiner
    cluster : Cluster
        The ranks; `flush` is collective.
    model : Tensor (d,)
        Gives length, type and device of the updates; they are kept in host memory.

    Attributes
    ----------
    combined : int
        m, the updates that were combined in the last round.
    """

    def __init__(self, inner: Accumulator, combiner: Combiner, cluster: Cluster, model: Tensor):
        self.inner, self.combiner, self.cluster = inner, combiner, cluster
        self.values, self.dtype, self.device = model.numel(), model.dtype, model.device
        self._round, self._normalise = 0, True
        self.combined = 0
        self._clients: list[int] = []
        self._coefficients: list[float] = []
        self._slabs: list[Tensor] = []
        self._slab_rows = max(1, -(-SLAB_BYTES // (self.dtype.itemsize * max(self.values, 1))))

    def begin(self, plan: Plan, start: Tensor) -> None:
        """Learn which round it is, and whether coefficients are to add up to 1."""
        self._round, self._normalise = plan.round, plan.normalise

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        """Keep a client's update (d,)."""
        slab, row = divmod(len(self._clients), self._slab_rows)
        if slab == len(self._slabs):
            self._slabs.append(torch.empty(self._slab_rows, self.values, dtype=self.dtype))
        self._slabs[slab][row].copy_(vector)
        self._clients.append(client)
        self._coefficients.append(coefficient)

    def reset(self) -> None:
        self.inner.reset()
        del self._slabs[-(-len(self._clients) // self._slab_rows) :]  # memory that the last round had no use for
        self._clients, self._coefficients = [], []

    def flush(self) -> None:
        """Combine the updates of all ranks; collective."""
        clients, coefficients, counts = self._everyone()
        self.combined = len(clients)
        if len(clients):
            self.inner.add(self._combined(clients, coefficients, counts).to(self.device), 1.0)
        self.inner.flush()

    def to_update(self, reduced: Values) -> Tensor:
        return self.inner.to_update(reduced)

    def _everyone(self) -> tuple[Ints, NDArray[np.float64], Ints]:
        """Clients and coefficients of all ranks, rank after rank, and how many each rank has."""
        own = [np.array(self._clients, np.int64), np.array(self._coefficients, np.float64)]
        gathered = [self.cluster.gather(part) for part in own]
        told = None
        if gathered[0] is not None and gathered[1] is not None:
            counts = np.array([len(part) for part in gathered[0]], np.int64)
            told = [np.concatenate(gathered[0]), np.concatenate(gathered[1]), counts]
        clients, coefficients, counts = self.cluster.broadcast(told)
        return clients, coefficients, counts

    def _combined(self, clients: Ints, coefficients: NDArray[np.float64], counts: Ints) -> Tensor:
        """This rank's coordinates of the combined update, zeros elsewhere, (d,)."""
        order, combiner, round = np.argsort(clients, kind="stable"), self.combiner, self._round
        rows = [row for slab in self._slabs for row in slab][: len(self._clients)]
        deal = Deal(self.cluster, rows, counts, self.values, self.dtype, combiner.measures)
        total = float(coefficients.sum())
        if self._normalise and total:
            coefficients = coefficients / total
        factors, places = torch.from_numpy(coefficients[order]).to(self.dtype), torch.from_numpy(order)
        result = torch.zeros(self.values, dtype=self.dtype)
        with one_thread():
            measured = None
            if combiner.measures:
                measured = deal.summed([combiner.measure(block[places], round) for _, block in deal.blocks()])
            for part, block in deal.blocks():
                result[part] = combiner.combine(block[places], factors, measured, round)
        return result


class Deal:
    """The coordinates of all updates, cut into blocks and dealt out to the ranks.

    Parameters
    ----------
    cluster : Cluster
    rows : list of Tensor (d,)
        This rank's updates.
    counts : int64 (ranks,)
        How many updates every rank has.
    values : int
        d.
    dtype : torch.dtype
        Of the updates.
    measuring : bool
        Whether measurements of all blocks will be kept.
    """

    def __init__(
        self,
        cluster: Cluster,
        rows: list[Tensor],
        counts: Ints,
        values: int,
        dtype: torch.dtype,
        measuring: bool,
    ):
        self.cluster, self.values = cluster, values
        self._dtype = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        self._rows = [row.numpy() for row in rows]
        self._counts = counts
        self.width = block_width(int(counts.sum()), values, measuring)
        blocks = -(-values // self.width)
        self._borders = blocks * np.arange(cluster.size + 1) // cluster.size
        self._steps = int(np.diff(self._borders).max())

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """This rank's coordinates, block after block, with the values of all updates there; collective.

        The rows (m, s) are those of rank 0, then those of rank 1, …; they are overwritten by the next block.
        """
        ranks, own = self.cluster.size, len(self._rows)
        outgoing = np.empty(own * self.width * ranks, self._dtype)
        incoming = np.empty(int(self._counts.sum()) * self.width, self._dtype)
        self.cluster.barrier()
        for step in range(self._steps):
            wanted = [self._part(rank, step) for rank in range(ranks)]
            end = 0
            for part in wanted:
                length = part.stop - part.start
                for row in self._rows:
                    outgoing[end : end + length] = row[part]
                    end += length
            widths = np.array([part.stop - part.start for part in wanted], np.int64)
            mine = wanted[self.cluster.rank]
            length = mine.stop - mine.start
            self.cluster.exchange(outgoing, own * widths, incoming, self._counts * length)
            if length:
                yield mine, torch.from_numpy(incoming[: int(self._counts.sum()) * length].reshape(-1, length))

    def summed(self, parts: list[Tensor]) -> Tensor:
        """The sum of a measurement over all blocks of all ranks, added up in their order; collective.

        Parameters
        ----------
        parts : list of Tensor, all of one shape
            This rank's, block after block.
        """
        shape = self._shape(parts)
        own = np.stack([part.numpy().ravel() for part in parts]) if parts else np.empty((0, shape.numel()))
        blocks, pieces = int(self._borders[-1]), []
        step = max(1, SUMMED_AT_ONCE // blocks)
        for first in range(0, shape.numel(), step):
            gathered = self.cluster.gather(np.ascontiguousarray(own[:, first : first + step]))
            whole = None if gathered is None else [np.add.reduce(np.concatenate(gathered), axis=0)]
            pieces += self.cluster.broadcast(whole)
        return torch.from_numpy(np.concatenate(pieces)).view(shape)

    def _shape(self, parts: list[Tensor]) -> torch.Size:
        """The shape of a measurement, which a rank without blocks learns from the others."""
        gathered = self.cluster.gather(np.array(parts[0].shape if parts else (), np.int64))
        have = self.cluster.gather(np.array([len(parts)], np.int64))
        told = None
        if gathered is not None and have is not None:
            told = [shape for shape, count in zip(gathered, have, strict=True) if count[0]][:1]
        return torch.Size(self.cluster.broadcast(told)[0].tolist())

    def _part(self, rank: int, step: int) -> slice:
        """The coordinates that a rank combines in a step; none where it has no more."""
        block = int(self._borders[rank]) + step
        if block >= self._borders[rank + 1]:
            return slice(0, 0)
        return slice(block * self.width, min((block + 1) * self.width, self.values))


def block_width(participants: int, values: int, measuring: bool) -> int:
    """s, the coordinates of a block: a function of m and d alone, so that blocks are the same for any number of ranks.

    Parameters
    ----------
    participants, values : int
        m and d.
    measuring : bool
        Whether measurements of all blocks will be kept.
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
