"""Sampling designs and their first-order inclusion probabilities: uniform, by size, and in proportion to gradient norms
(FedSTaS, Algorithm 2: p_k = ‖IS(G_k)‖ / Σ ‖IS(G_k)‖).

Pure functions over arrays. Stratified draws are in `strata.py`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedmpi.clients.cohort import Cohort, full_participation, indices
from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

Design = Literal["systematic", "sequential"]
SEQUENTIAL_UP_TO = 1000  # clients of one population: the inclusion probabilities cost O(N²)


def uniform(generator: np.random.Generator, available: Ints | int, count: int) -> Cohort:
    """Draw a simple random sample without replacement: every available client has inclusion probability count / a.

    `available` are sorted clients, or N for all of 0 … N−1. If fewer than `count` are available, all are selected.
    """
    population = available if isinstance(available, int) else available.size
    if count >= population:
        return full_participation(available)
    chosen = draw_uniformly(population, count, generator)
    return Cohort(chosen if isinstance(available, int) else available[chosen], np.full(count, count / population))


def weighted(
    generator: np.random.Generator, sizes: Ints, available: Ints | int, count: int, replace: bool = True
) -> Cohort:
    """Draw clients in proportion to their sizes n_k.

    With replacement this is Scheme I of Li et al. 2020 ("On the Convergence of FedAvg on Non-IID Data"): `count`
    independent draws with probability n_k / n, a client drawn twice counting twice; `inclusion` is the expected count
    count · n_k / n. Without replacement it is systematic sampling in random order. The inclusion probabilities are
    proportional to size, sum to `count`, and none is above 1. They are exact because all arithmetic is on integers.

    Clients without samples are never drawn; UserError if no client of the whole population has a sample.
    """
    candidates = indices(available)
    weights = sizes[candidates]
    total = int(weights.sum())
    if not sizes.any():
        raise UserError("weighted participation needs a client with at least one sample: none has any")
    if total == 0 or count == 0:
        return full_participation(0)
    if not replace:
        return _without_replacement(generator, weights, candidates, count)
    positions = generator.integers(0, total, count)
    drawn = np.searchsorted(np.cumsum(weights), positions, side="right")
    chosen, multiplicity = np.unique(drawn, return_counts=True)
    return Cohort(candidates[chosen], count * (weights[chosen] / total), multiplicity.astype(np.int64))


def _certain(sizes: Ints, count: int) -> tuple[NDArray[np.bool_], int, int]:
    """Return the certain clients, the draws left for the others, and the others' total size.

    A client whose share exceeds 1 is certain to be drawn (probability exactly 1). The remaining draws are divided among
    the others by size, repeatedly until no share exceeds 1.
    """
    if count >= np.count_nonzero(sizes):
        return sizes > 0, 0, 0
    certain = np.zeros(sizes.size, bool)
    while True:
        rest, total = count - int(certain.sum()), int(sizes[~certain].sum())
        exceeding = ~certain & (rest * sizes >= total)
        if rest == 0 or not exceeding.any():
            return certain, rest, total
        certain |= exceeding


def _without_replacement(generator: np.random.Generator, sizes: Ints, candidates: Ints, count: int) -> Cohort:
    certain, rest, total = _certain(sizes, count)
    if rest * total >= 2**63:
        raise UserError("clients.count times the number of samples must stay below 2**63 when drawing by size")
    chosen = np.flatnonzero(certain)
    if rest:
        order = generator.permutation(np.flatnonzero(~certain))
        ticks = int(generator.integers(0, total)) + total * np.arange(rest)
        systematic = np.searchsorted(rest * np.cumsum(sizes[order]), ticks, side="right")
        chosen = np.sort(np.concatenate([chosen, order[systematic]]))
    inclusion = np.where(certain, 1.0, rest * (sizes / total) if total else 0.0)
    return Cohort(candidates[chosen], inclusion[chosen])


def importance(
    generator: np.random.Generator, norms: Floats, available: Ints | int, count: int, design: Design = "systematic"
) -> Cohort:
    """Draw clients of the whole population without replacement in proportion to their gradient norms."""
    candidates = indices(available)
    wanted = min(count, len(candidates))
    inclusion = inclusion_by_norm(norms[candidates], wanted, design)
    members = draw_by_norm(norms[candidates], wanted, generator, design)
    return Cohort(candidates[members], inclusion[members])


def draw_uniformly(population: int, count: int, generator: np.random.Generator) -> Ints:
    """Draw `count` of 0 … population − 1 without replacement, sorted; each with probability count / population."""
    return np.sort(generator.choice(population, count, replace=False, shuffle=False)).astype(np.int64)


def draw_by_norm(norms: Floats, count: int, generator: np.random.Generator, design: Design = "systematic") -> Ints:
    """Draw `count` of the clients without replacement, those with larger gradients more often.

    Return sorted positions, int64 (count,). Clients of norm zero are drawn only if the others do not suffice,
    uniformly. "systematic" is systematic sampling in random order, whose inclusion probabilities are proportional to
    the norms (Madow 1949; Goodman and Kish 1950). "sequential" follows the paper's words: one client after another with
    p_k ∝ norm among those left.
    """
    _check(norms, count)
    if design == "sequential":
        return one_after_another(norms, count, generator)
    return systematic(proportional_inclusion(norms, count), generator.permutation(len(norms)), generator.random())


def inclusion_by_norm(norms: Floats, count: int, design: Design = "systematic") -> Floats:
    """Return first-order inclusion probabilities (k,) of `draw_by_norm`, summing to `count`."""
    _check(norms, count)
    return (proportional_inclusion if design == "systematic" else sequential_inclusion)(norms, count)


def proportional_inclusion(norms: Floats, count: int) -> Floats:
    """Return π_k = min(1, c · norm_k) with Σ π_k = count.

    Clients whose share would exceed 1 are certain; the rest is divided again until none exceeds 1. If at most `count`
    clients have a positive norm, these are certain and the others share the rest equally.
    """
    positive = norms > 0
    if positive.sum() <= count:
        others = len(norms) - int(positive.sum())
        return np.where(positive, 1.0, (count - positive.sum()) / max(others, 1))
    inclusion = np.where(positive, 1.0, 0.0)
    open_clients, left = np.flatnonzero(positive), count
    while True:
        scaled = norms[open_clients] / norms[open_clients].max()
        inclusion[open_clients] = scaled * (left / scaled.sum())
        certain = inclusion[open_clients] >= 1.0
        if not certain.any():
            return inclusion
        inclusion[open_clients[certain]] = 1.0
        open_clients, left = open_clients[~certain], left - int(certain.sum())


def systematic(inclusion: Floats, order: Ints, start: float) -> Ints:
    """Draw a systematic sample with given inclusion probabilities, order and start in [0, 1); sorted positions.

    Probabilities are laid end to end in the given order; each client that covers start, start + 1, … is drawn. With a
    uniform start each client is drawn with its probability, for any order; the sum must be a whole number.
    """
    certain = inclusion >= 1.0
    count = round(float(inclusion[~certain].sum()))
    if count == 0:
        return np.flatnonzero(certain)
    order = order[~certain[order] & (inclusion[order] > 0)]
    ends = np.cumsum(inclusion[order])
    ends *= count / ends[-1]
    last = len(order) - 1  # rounding can put the last point on the very end
    drawn = order[np.minimum(np.searchsorted(ends, start + np.arange(count), side="right"), last)]
    return np.sort(np.concatenate([np.flatnonzero(certain), drawn]))


def sequential_inclusion(norms: Floats, count: int) -> Floats:
    """Return inclusion probabilities of sequential drawing with p_k ∝ norm (successive sampling; Rosén 1972).

    The first m of independent exponential arrival times with rates norm_k are such a sample, so that π_k = ∫ f_k(t)
    P(fewer than m others arrived before t) dt. The integral is a trapezoidal sum over log t, which converges
    exponentially fast for such functions; the counts have their exact (Poisson binomial) distribution.
    """
    positive = norms > 0
    candidates = int(positive.sum())
    if candidates <= count:
        return proportional_inclusion(norms, count)
    if candidates > SEQUENTIAL_UP_TO:
        raise UserError(
            f'clients.sampler.design = "sequential" allows for at most {SEQUENTIAL_UP_TO} clients '
            f'in a stratum, not {candidates}. Use design = "systematic"'
        )
    inclusion = np.zeros(len(norms))
    inclusion[positive] = _exponential_race(norms[positive] / norms[positive].mean(), count)
    return inclusion


def _exponential_race(rates: Floats, count: int) -> Floats:
    """Return P(k is among the first `count` of exponential arrivals), (k,)."""
    step = min(0.2, 0.5 / np.sqrt(count))  # well below the width of the moment that decides the race, in log time
    log_times = np.arange(np.log(1e-14 / rates.max()), np.log(40.0 / rates.min()), step)
    hazards = np.outer(np.exp(log_times), rates)
    arrived = -np.expm1(-hazards)
    inclusion = step * (hazards * np.exp(-hazards) * _at_most_others(arrived, count - 1)).sum(axis=0)
    return np.asarray(np.clip(inclusion * count / inclusion.sum(), 0.0, 1.0))


def _at_most_others(arrived: Floats, most: int) -> Floats:
    """Return P(at most `most` of the others have arrived), (nodes, k), from each client's own probabilities (nodes, k).

    The distribution of the total count is divided by each client's own: from below if its probability is at most one
    half, else from above, which keeps the recursion stable.
    """
    nodes, clients = arrived.shape
    everybody = np.zeros((nodes, clients + 1))
    everybody[:, 0] = 1.0
    for own in arrived.T:
        everybody[:, 1:] = everybody[:, 1:] * (1.0 - own[:, None]) + everybody[:, :-1] * own[:, None]
        everybody[:, 0] *= 1.0 - own
    rarely = arrived <= 0.5
    low, sure = np.where(rarely, arrived, 0.0), np.where(rarely, 1.0, arrived)
    others, below = np.zeros_like(arrived), np.zeros_like(arrived)
    for number in range(most + 1):
        others = (everybody[:, number, None] - low * others) / (1.0 - low)
        below += others
    others, above = np.zeros_like(arrived), np.zeros_like(arrived)
    for number in range(clients - 1, most, -1):
        others = (everybody[:, number + 1, None] - (1.0 - sure) * others) / sure
        above += others
    return np.clip(np.where(rarely, below, 1.0 - above), 0.0, 1.0)


def one_after_another(weights: Floats, count: int, generator: np.random.Generator) -> Ints:
    """Draw `count` positions sequentially without replacement, with probability ∝ weight over the rest, sorted.

    The first arrivals of independent exponential times with the weights as rates are such a sample. Weights of zero
    come last, in random order.
    """
    arrival = generator.standard_exponential(len(weights))
    slow = weights <= 0
    times = arrival / np.where(slow, 1.0, weights)
    return np.sort(np.lexsort((times, slow))[:count]).astype(np.int64)


def _check(norms: Floats, count: int) -> None:
    if not np.isfinite(norms).all() or (norms < 0).any():
        raise UserError("a client's gradient norm is not a finite number. Lower the learning rate or check its data")
    if not 0 <= count <= len(norms):
        raise ValueError(f"cannot draw {count} of {len(norms)} clients")
