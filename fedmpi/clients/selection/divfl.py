"""DivFL: a diverse cohort that represents the updates of all clients."""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi import Cohort, client_sampler


@client_sampler(name="divfl", needs=("update_sketch",), measures=("update_sketch",))
class DivFL:
    """Select the clients whose updates represent those of all clients best (Balakrishnan et al. 2022, DivFL).

    The m clients S minimize G(S) = Σ_k min_{i ∈ S} ‖g_k − g_i‖ (Section 3); g_k is the last known update of client k.
    They are found by stochastic greedy (Eq. 5, Algorithm 1): in each of m steps some of the clients outside S are drawn
    uniformly, and the one with the smallest G(S ∪ {i}) joins S. All clients are measured before round 0, and afterwards
    the updates of the selected clients are refreshed, which costs nothing (the paper's variant without overhead).
    Algorithm 1 averages the updates equally: `server.weights = "uniform"`.

    Deviations from the paper:

    - g_k is a count sketch of the client's update with `sketch_size` values, whose distances are unbiased but noisy.
    - The public code takes a full gradient before round 0, and a client's last gradient afterwards. Here both are the
      update of a whole local training.
    - Only available clients with samples represent and are represented. A client that becomes available later is
      measured first.
    - The paper leaves the number of clients drawn per step open. Here it is ⌈N/m ln(1/ε)⌉ as in the cited stochastic
      greedy (Mirzasoleiman et al. 2015); the public code takes max(m, 0.1 N) or, by default, all.
    - More than `pool` clients are divided at random into equal groups of at most that many, each of which selects its
      share of m: distances need memory in proportion to the square of a group.

    Parameters
    ----------
    error : float
        ε: stochastic greedy covers at least 1 − 1/e − ε of the best cohort's coverage on average; with 0 each step
        tests all clients (exact greedy).
    interval : int
        Rounds from one measurement of all available clients to the next; with 1 every round as in the paper's ideal
        variant. By default each client is measured once.
    assigned : bool
        True lets each selected client count as often as it is the nearest one of a client, γ (Eq. 2), given as
        `multiplicity`.
    pool : int
        Largest number of clients that are compared with each other.
    sketch_size : int
        Values of a sketch.
    """

    state = ("known", "measured")

    def __init__(
        self,
        *,
        error: Annotated[float, Field(ge=0, lt=1)] = 0.1,
        interval: Annotated[int, Field(ge=1)] | None = None,
        assigned: bool = False,
        pool: Annotated[int, Field(ge=1)] = 1000,
        sketch_size: Annotated[int, Field(ge=1)] = 64,
    ):
        self.error, self.interval, self.assigned, self.pool = error, interval, assigned, pool
        self.known: Any = None  # (N, k): g of each client
        self.measured: Any = None  # (N,): round of its last measurement, −1 if there is none

    def candidates(self, view: Any) -> Any:
        """Return the available clients without a known update; after each interval all of them."""
        last, age = view.last("update_sketch"), view.age("update_sketch")
        if self.known is None:
            self.known, self.measured = np.full_like(last, np.nan), np.full(len(age), -1)
        newer = (age >= 0) & (view.round - age >= self.measured)
        self.known[newer] = last[newer]
        everybody = self.interval is not None and view.round % self.interval == 0
        return view.eligible if everybody else view.eligible[np.isnan(self.known[view.eligible, 0])]

    def draw(self, view: Any) -> Cohort:
        """Select by stochastic greedy, in each group of clients separately."""
        measured = ~np.isnan((fresh := view.fresh("update_sketch"))[:, 0])
        self.known[measured], self.measured[measured] = fresh[measured], view.round
        clients = view.eligible
        mixed = view.generator.permutation(clients) if len(clients) > self.pool else clients
        groups = [np.sort(group) for group in np.array_split(mixed, -(-len(clients) // self.pool) or 1)]
        shares = np.array_split(np.empty(min(view.count, len(clients))), len(groups))
        found = [self._greedy(g, len(m), view.generator) for g, m in zip(groups, shares, strict=True) if len(m)]
        clients, times = (np.concatenate(parts) for parts in zip(*found or [(clients[:0],) * 2], strict=True))
        order = np.argsort(clients)
        more: dict[str, Any] = {"multiplicity": times[order]} if self.assigned else {}
        return Cohort(clients[order], **more)

    def _greedy(self, clients: Any, count: int, generator: np.random.Generator) -> tuple[Any, Any]:
        """Return selected clients (m,), and how many clients each is the nearest one of."""
        g = self.known[clients].astype(np.float64)
        square = (g**2).sum(1)
        gap = np.sqrt(np.maximum(square[:, None] + square - 2 * g @ g.T, 0)).astype(np.float32)
        np.fill_diagonal(gap, 0)
        size = math.ceil(len(g) / count * math.log(1 / self.error)) if self.error else len(g)
        nearest, rest = np.full(len(g), np.inf, np.float32), np.arange(len(g))
        for end in range(len(g), len(g) - count, -1):  # rest[:end] are left, and rest[end:] are chosen
            tried = generator.choice(end, size, replace=False) if size < end else np.arange(end)
            cost = np.minimum(gap[rest[tried]], nearest).sum(1)
            tied = tried[cost <= cost.min() * 1.00001]  # a pair of clients can have equal costs, up to rounding
            best = tied[rest[tied].argmin()]
            np.minimum(gap[rest[best]], nearest, out=nearest)
            rest[[best, end - 1]] = rest[[end - 1, best]]
        chosen = rest[len(g) - count :]
        owner = gap[chosen].argmin(0)
        owner[chosen] = np.arange(count)  # also if another one has the same update
        return clients[chosen], np.bincount(owner, minlength=count)
