"""Robust aggregation rules instead of a weighted sum of updates: median, trimmed mean, Krum, norm clipping.

An aggregator receives the updates of all m selected clients of a round, in client order, one slice of s coordinates at
a time. A function (updates (m, s), coefficients (m,)) -> (s,) is enough if each coordinate is combined by itself.
Otherwise a class has two methods: `measure` (updates) -> any shape, whose results are summed over all slices in
float64, and `combine` (updates, coefficients, measured) -> (s,), which receives that sum. A parameter `clients` of
these functions gets the clients of the updates, int64 (m,), sorted.

A class may keep arrays or numbers between rounds, named in `state`. It changes them in its method `after` (clients,
measured), which rank 0 calls once the updates of a round are combined; `measured` is None without `measure`.

The coefficients are those of `server.weights`; normalized ones add up to 1. The median, the trimmed mean and Krum
ignore them and treat all clients equally.

The coordinates are cut into blocks, and all ranks, including the server, are assigned neighboring blocks. A rank keeps
the updates of its own clients. At the end of a round the ranks exchange them row by row: each receives its coordinates
of all updates (m · d/ranks values) and frees the rows that it has sent. Then it combines its blocks, with the rows in
client order. The blocks depend only on m and d, so the result is bit-identical for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi.common.calling import Remembering, calling, refuse_result, result_tensor, takes
from fedmpi.common.decorators import aggregator
from fedmpi.common.errors import UserError
from fedmpi.common.imports import Later
from fedmpi.common.plan import Plan, read_only
from fedmpi.common.registry import Component
from fedmpi.common.types import Floats, Ints

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmpi.aggregation.exact import Accumulator
    from fedmpi.mpi import Cluster
else:
    torch = Later("torch")

EXCHANGED_VALUES = 1 << 24
"""Values that a rank sends at once, unless one update is longer."""
BLOCK_WIDTH = 2048
"""Coordinates of a block that is not measured, or of which there are few updates."""
MEASURED_WIDTH = 16
"""Factor of m in the smallest width of a measured block: a measurement (up to m × m float64) takes an eighth of it."""


@aggregator(name="mean")
def mean(updates: Tensor, coefficients: Tensor) -> Tensor:
    """Compute the weighted sum Σ c_k Δ_k, which fedmpi adds up client by client without keeping any update."""
    return (coefficients.double() @ updates.double()).to(updates.dtype)


@aggregator(name="median")
def median(updates: Tensor, coefficients: Tensor) -> Tensor:
    """Compute the median of every coordinate (Yin et al. 2018, Definition 1); the middle two's mean for even m."""
    m = len(updates)
    return _ordered(updates)[:, (m - 1) // 2 : m // 2 + 1].mean(1, dtype=torch.float64).to(updates.dtype)


@aggregator(name="trimmed-mean")
def trimmed_mean(updates: Tensor, coefficients: Tensor, *, trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.1) -> Tensor:
    """Compute the mean of every coordinate without its smallest and largest values (Yin et al. 2018, Definition 2).

    Parameters
    ----------
    trim : float
        β: share of the clients that is cut off at either end, rounded up; at least one value stays.
    """
    m = len(updates)
    cut = min(math.ceil(trim * m - 1e-9), (m - 1) // 2)
    return _ordered(updates)[:, cut : m - cut].mean(1, dtype=torch.float64).to(updates.dtype)


def _ordered(updates: Tensor) -> Tensor:
    """Sort each coordinate's values, (s, m); numpy sorts short rows ten times as fast as torch."""
    return torch.from_numpy(np.sort(np.ascontiguousarray(updates.numpy().T), axis=1))


@aggregator(name="krum")
class Krum:
    """Update with the smallest summed squared distances to its nearest others (Blanchard et al. 2017).

    Krum takes the update whose m − f − 2 nearest others are nearest, Multi-Krum the mean of the first `keep` in that
    order. Ties go to the client of the smaller number.

    Parameters
    ----------
    byzantine : int
        f: largest number of Byzantine clients in a round. Needs 2f + 2 < m (their Proposition 4.2).
    keep : int
        Updates that are averaged: 1 is Krum, more is Multi-Krum; at most m − f − 2 are safe from attackers.
    """

    def __init__(self, *, byzantine: Annotated[int, Field(ge=0)], keep: Annotated[int, Field(ge=1)] = 1):
        self.byzantine, self.keep = byzantine, keep

    def measure(self, updates: Tensor) -> Tensor:
        """Compute inner products of the updates' deviations from their median, float64 (m, m), for the distances.

        A median stays near the honest updates, so small distances are not differences of huge numbers.
        """
        self.check(len(updates))
        middle = torch.from_numpy(np.partition(updates.numpy(), len(updates) // 2, axis=0)[len(updates) // 2])
        apart = updates.double() - middle
        return apart @ apart.T

    def combine(self, updates: Tensor, coefficients: Tensor, measured: Tensor) -> Tensor:
        """Return the mean of the chosen updates."""
        return updates[self.chosen(measured)].mean(0, dtype=torch.float64).to(updates.dtype)

    def chosen(self, measured: Tensor) -> Tensor:
        """Return positions of the chosen clients, sorted, int64 (keep,)."""
        m = len(measured)
        squares = measured.diagonal()
        distances = (squares[:, None] + squares[None, :] - 2 * measured).clamp_(min=0)
        distances.fill_diagonal_(math.inf)  # no update is its own neighbor
        scores = torch.sort(distances, dim=1).values[:, : m - self.byzantine - 2].sum(1)
        return torch.sort(torch.argsort(scores, stable=True)[: self.keep]).values

    def check(self, participants: int) -> None:
        """Reject a round in which the attackers could outvote the others: m ≤ 2f + 2, or keep > m − f − 2."""
        f = self.byzantine
        if participants <= 2 * f + 2:
            raise UserError(
                f'server.aggregator = "krum" with byzantine = {f} needs more than {2 * f + 2} clients that send an '
                f"update, but a round has {participants}. Select more, or lower it"
            )
        if self.keep > participants - f - 2:
            raise UserError(
                f"server.aggregator.keep = {self.keep} of {participants} participants leaves no room for "
                f"server.aggregator.byzantine = {f} of them. Keep at most {participants - f - 2}"
            )


@aggregator(name="norm-clip")
class NormClip:
    """Weighted sum of updates clipped to a largest norm, Σ c_k Δ_k min(1, bound/‖Δ_k‖) (Sun et al. 2019, §3).

    Parameters
    ----------
    bound : float
        M: Euclidean norm above which an update is scaled down.
    """

    def __init__(self, *, bound: Annotated[float, Field(gt=0, allow_inf_nan=False)]):
        self.bound = bound

    def measure(self, updates: Tensor) -> Tensor:
        """Return squared norms, float64 (m,)."""
        return updates.double().square().sum(1)

    def combine(self, updates: Tensor, coefficients: Tensor, measured: Tensor) -> Tensor:
        """Return the weighted sum of the clipped updates."""
        factors = (self.bound / measured.sqrt()).clamp_(max=1.0)
        return ((coefficients.double() * factors) @ updates.double()).to(updates.dtype)


class Aggregator(Remembering):
    """Aggregator of a run: a function, or an object with `combine` and optionally `measure` and `after`."""

    prefix = "aggregator."

    def __init__(self, part: Component, options: Mapping[str, Any], clients: int = 0):
        super().__init__(part, options, clients)
        self._combine = getattr(self._made, "combine", self._made)
        self._measure = getattr(self._made, "measure", None)
        given = ("updates", "coefficients", "measured")[: 3 if self.measures else 2]
        method = "combine" if hasattr(self._made, "combine") or not callable(self._made) else ""
        self._named = takes(part, self._combine, *given, method=method, offered=("clients",))
        if self._measure is not None:
            self._measured_with = takes(part, self._measure, "updates", method="measure", offered=("clients",))
        self._after = getattr(self._made, "after", None)
        if self._after is not None:
            takes(part, self._after, "clients", "measured", method="after")

    @property
    def measures(self) -> bool:
        """True if it first measures all coordinates."""
        return self._measure is not None

    def check(self, participants: int, round: int) -> None:
        """Let the aggregator's optional method `check` reject a round with this number of updates, on every rank."""
        if hasattr(self._made, "check"):
            with calling(self.part, round):
                self._made.check(participants)

    def measure(self, updates: Tensor, round: int, clients: Ints) -> Tensor:
        """Return its measurement of a slice (m, s), as float64, to be summed over all slices."""
        assert self._measure is not None
        with calling(self.part, round):
            found = self._measure(updates, **dict.fromkeys(self._measured_with, clients))
        return self._finite(result_tensor(self.part, found, None, round).double(), round)

    def combine(
        self, updates: Tensor, coefficients: Tensor, measured: Tensor | None, round: int, clients: Ints
    ) -> Tensor:
        """Return the combined update of a slice."""
        extra = () if measured is None else (measured.clone(),)
        with calling(self.part, round):
            named = dict.fromkeys(self._named, clients)
            found = self._combine(updates, coefficients.clone(), *extra, **named)
        found = result_tensor(self.part, found, updates.shape[1:], round).detach()
        with calling(self.part, round):  # a type that cannot be converted
            return self._finite(found.to(updates.dtype), round)

    def after(self, measured: Tensor | None, clients: Ints, round: int) -> None:
        """Let it set its state, once per round."""
        if self._after is not None:
            with calling(self.part, round):
                self._after(clients, measured)

    def _finite(self, found: Tensor, round: int) -> Tensor:
        if not bool(found.isfinite().all()):
            problem = f"returned values that are not finite as {found.dtype}, from updates that are"
            raise refuse_result(self.part, problem, round)
        return found


class CombinedSum:
    """Accumulator that keeps every update and adds the combined update of all ranks to another accumulator."""

    def __init__(self, inner: Accumulator, aggregator: Aggregator, cluster: Cluster, model: Tensor):
        self.inner, self.aggregator, self.cluster = inner, aggregator, cluster
        self.values, self.dtype, self.device = model.numel(), model.dtype, model.device
        self._own: list[tuple[int, float, NDArray[np.floating]]] = []
        self._rows: list[NDArray[np.floating]] = []  # This rank's coordinates of all updates
        self._round, self._normalize = 0, True
        self._width, self._borders = 0, np.zeros(cluster.size + 1, np.int64)
        self.combined = 0

    def begin(self, plan: Plan, start: Tensor) -> None:
        """Set the round, whether coefficients should add up to 1, and the largest number of updates."""
        self._round, self._normalize = plan.round, plan.normalize
        self._width = max(BLOCK_WIDTH, MEASURED_WIDTH * len(plan.clients) * self.aggregator.measures)
        blocks = -(-self.values // self._width)
        shares = blocks * np.arange(self.cluster.size + 1) // self.cluster.size
        self._borders = np.minimum(shares * self._width, self.values)
        self._own, self._rows = [], []
        self.aggregator.share(self.cluster.broadcast)

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
            self.aggregator.check(len(clients), self._round)
            order = np.argsort(clients, kind="stable")
            self._rows = [self._rows[place] for place in order.tolist()]
            self.inner.add(self._combined(coefficients[order], read_only(clients[order])).to(self.device), 1.0)
        self.inner.flush()

    def to_update(self, reduced: Tensor) -> Tensor:
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

    def _combined(self, coefficients: Floats, clients: Ints) -> Tensor:
        """Return this rank's coordinates of the combined update, zeros elsewhere, (d,)."""
        total = float(coefficients.sum())
        if self._normalize and total:
            coefficients = coefficients / total
        factors, result = torch.from_numpy(coefficients).to(self.dtype), torch.zeros(self.values, dtype=self.dtype)
        with one_thread():
            measured = self._measured(clients) if self.aggregator.measures else None
            for part, block in self._blocks():
                result[part] = self.aggregator.combine(block, factors, measured, self._round, clients)
            if self.cluster.is_server:
                self.aggregator.after(measured, clients, self._round)
        return result

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield this rank's coordinates, block by block, with the values of all updates, (m, s)."""
        first, last = self._borders[self.cluster.rank : self.cluster.rank + 2].tolist()
        for start in range(first, last, self._width):
            stop = min(start + self._width, last)
            block = np.stack([row[start - first : stop - first] for row in self._rows])
            yield slice(start, stop), torch.from_numpy(block)

    def _measured(self, clients: Ints) -> Tensor:
        """Return the sum of the aggregator's measurements over all blocks of all ranks, in their order; collective."""
        found = [self.aggregator.measure(block, self._round, clients).numpy() for _, block in self._blocks()]
        if len({one.shape for one in found}) > 1:
            problem = "measure() returned different shapes for slices of one round: return one shape for all"
            raise refuse_result(self.aggregator.part, problem, self._round)
        gathered = self.cluster.gather(np.array(found))
        total = None if gathered is None else [reduce(np.add, [block for blocks in gathered for block in blocks])]
        whole: Floats = self.cluster.broadcast(total)[0]
        return torch.from_numpy(whole)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one torch thread inside the context, so that sums do not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
