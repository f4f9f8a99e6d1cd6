"""Strata, their spreads, and the allocation of a round's m draws among them (FedSSO, Algorithm 1, line 7; FedSTaS,
Algorithm 2): proportional, Neyman's or equal, in whole numbers within bounds, with the expected numbers known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fedmpi.clients.designs import systematic
from fedmpi.common.apportionment import TOLERANCE, largest_remainders
from fedmpi.common.types import Floats, Ints

Rule = Literal["proportional", "neyman", "equal"]
SpreadKind = Literal["std", "pairwise"]


@dataclass(frozen=True)
class Allocation:
    """Number of selected clients per stratum."""

    draws: Ints  # (H,): m_h of this round
    expected: Floats  # (H,): E[m_h]; `draws` is always this number rounded down or up


def allocate(
    rule: Rule,
    sizes: Ints,
    spreads: Floats | None,
    count: int,
    generator: np.random.Generator,
    capacity: Ints | None = None,
    every_stratum: bool = True,
) -> Allocation:
    """Split `count` participants over the strata.

    `sizes` are N_h, `spreads` S_h (for Neyman), `capacity` the available clients of each stratum. With `every_stratum`
    Neyman's allocation gives each stratum at least one client while m >= H.
    """
    room = sizes if capacity is None else np.minimum(capacity, sizes)
    total = min(count, int(room.sum()))
    if rule == "neyman":
        assert spreads is not None
        return neyman(sizes, spreads, total, generator, room, every_stratum)
    weights = sizes if rule == "proportional" else np.ones_like(sizes)
    return in_proportion(weights, total, generator, room)


def in_proportion(weights: Ints, count: int, generator: np.random.Generator, capacity: Ints) -> Allocation:
    """Return m_h ∝ integer weights within the capacities, rounded at random with Σ m_h = m and exact E[m_h].

    With the weights N_h this is m N_h / N (FedSSO, Algorithm 1, line 7): every client's inclusion probability is then
    exactly m / N if all are available. A stratum with fewer available clients than its share contributes all of them,
    and the others share the rest proportionally. All arithmetic is on integers.
    """
    numerators, denominator = _exact_shares(weights, count, capacity)
    order = generator.permutation(len(weights))
    draws = np.empty(len(weights), np.int64)
    draws[order] = systematic_rounding(numerators[order], denominator, int(generator.integers(denominator)))
    return Allocation(draws, numerators / denominator)


def neyman(
    sizes: Ints, spreads: Floats, count: int, generator: np.random.Generator, capacity: Ints, every_stratum: bool
) -> Allocation:
    """Return m_h ∝ N_h S_h (FedSTaS, Algorithm 2; Neyman 1934) in whole numbers.

    With m at least the number of non-empty strata, the real solution of 1 <= m_h <= capacity is rounded by largest
    remainders, without randomness. With fewer, or if not every stratum must have one, 0 <= m_h <= capacity is rounded
    at random, so that E[m_h] is the share. A stratum of zero standard deviation (a single client, say) then takes the
    smallest positive one; otherwise it could never be drawn. If all are zero, the weights are those of the proportional
    allocation.
    """
    open_strata, population, room = capacity > 0, sizes.astype(np.float64), capacity.astype(np.float64)
    if not (spreads[open_strata] > 0).any():
        spreads = np.ones_like(spreads)
    if (every_stratum or not count) and count >= open_strata.sum():
        lower = open_strata.astype(np.float64)
        quotas = bounded_shares(population * spreads, population, lower, room, count)
        draws = largest_remainders(quotas, count)
        return Allocation(draws, draws.astype(np.float64))
    smallest = spreads[open_strata & (spreads > 0)].min()
    weights = population * np.where(spreads > 0, spreads, smallest)
    quotas = bounded_shares(weights, population, np.zeros(len(sizes)), room, count)
    return Allocation(rounded_at_random(quotas, count, generator), quotas)


def bounded_shares(weights: Floats, fallback: Floats, lower: Floats, upper: Floats, total: float) -> Floats:
    """Return shares q_h = clip(λ weight_h, lower_h, upper_h) with Σ q_h = total, between Σ lower_h and Σ upper_h.

    Strata are fixed at a violated bound, on the side that is violated more in sum, and the rest is divided again (the
    pegging algorithm of box-constrained optimal allocation; Gabler, Ganninger and Münnich 2012). If the weights of the
    strata that can still take something are all zero, `fallback` weighs them.
    """
    shares = lower.copy()
    free = upper > lower
    while free.any():
        left = total - shares[~free].sum()
        scale = weights[free] if weights[free].sum() > 0 else fallback[free]
        wanted = left * scale / scale.sum()
        below, above = wanted < lower[free], wanted > upper[free]
        deficit = (lower[free] - wanted)[below].sum()
        excess = (wanted - upper[free])[above].sum()
        shares[free] = np.clip(wanted, lower[free], upper[free])
        if not below.any() and not above.any():
            break
        at = np.flatnonzero(free)
        free[at[above if excess >= deficit else below]] = False
    return shares


def rounded_at_random(quotas: Floats, count: int, generator: np.random.Generator) -> Ints:
    """Return whole numbers ⌊q_h⌋ or ⌈q_h⌉ with sum `count` and expectation q_h: systematic sampling of the fractions in
    random order (Madow 1949)."""
    whole = np.floor(quotas + TOLERANCE).astype(np.int64)
    fractions = np.maximum(quotas - whole, 0.0)
    missing = count - int(whole.sum())
    if missing == 0:
        return whole
    whole[systematic(fractions, generator.permutation(len(quotas)), generator.random())] += 1
    return whole


def systematic_rounding(numerators: Ints, denominator: int, start: int) -> Ints:
    """Round numerators / denominator down or up such that the sum is kept.

    For a whole number `start` uniform on 0 … denominator − 1 the expectation is numerators / denominator exactly.
    """
    ends = (np.cumsum(numerators) + start) // denominator
    return np.diff(ends, prepend=0)


def _exact_shares(weights: Ints, count: int, capacity: Ints) -> tuple[Ints, int]:
    """Return clip(λ weight_h, 0, capacity_h) with sum `count`, over one denominator; λ grows as strata fill."""
    full = (capacity == 0) | (weights == 0)
    filled = np.where(full, 0, capacity)
    taken = np.zeros(len(weights), np.int64)
    while not full.all():
        left, total = count - int(taken.sum()), int(weights[~full].sum())
        over = ~full & (left * weights > capacity * total)
        if not over.any():
            return np.where(full, taken * total, left * weights), total
        taken[over], full = filled[over], full | over
    return taken, 1


def stratum_spreads(matrix: NDArray[np.floating], labels: Ints, kind: SpreadKind = "std") -> Floats:
    """Return S_h, the distance measure of the clients within each stratum.

    "std": S_h = sqrt(1/N_h Σ_k ‖Z_k − mean_h Z‖²), the standard deviation of the vectors within the stratum (FedSTaS,
    Algorithm 2). "pairwise": the mean Euclidean distance of two different clients (similar to the authors' code, which
    divides the sum over all pairs by N_h²). 0 for a stratum of one client.
    """
    with threadpool_limits(1):
        return np.array([_spread(matrix[labels == h], kind) for h in range(int(labels.max(initial=-1)) + 1)])


def _spread(vectors: NDArray[np.floating], kind: SpreadKind) -> float:
    if len(vectors) < 2:
        return 0.0
    if kind == "std":
        centre = vectors.mean(axis=0, dtype=np.float64)
        return float(np.sqrt(np.mean([np.sum((vector - centre) ** 2) for vector in vectors])))
    from sklearn.metrics import pairwise_distances_chunked  # slow to import, and most runs need no strata

    total = sum(float(part.sum(dtype=np.float64)) for part in pairwise_distances_chunked(vectors))
    return total / (len(vectors) * (len(vectors) - 1))


@dataclass(frozen=True, eq=False)
class Strata:
    """Partition of the clients into strata."""

    labels: Ints  # (N,): Stratum of each client, −1 for clients left out
    sizes: Ints  # (H,): N_h
    spreads: Floats  # (H,): S_h; zeros if the allocation does not use it
    # (N,), or None: Norm of each client's (compressed) gradient; None unless an importance draw uses it
    norms: Floats | None


def make_strata(labels: Ints, spreads: Floats | None = None, norms: Floats | None = None) -> Strata:
    """Make strata from labels 0 … H − 1 (−1: left out), which must have no gaps."""
    sizes = np.bincount(labels[labels >= 0]).astype(np.int64)
    return Strata(labels, sizes, np.zeros(len(sizes)) if spreads is None else spreads, norms)
