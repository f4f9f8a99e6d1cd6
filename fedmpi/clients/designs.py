"""Sampling designs and their first-order inclusion probabilities: uniform, and in proportion to gradient norms
(FedSTaS, Algorithm 2: p_k = ‖IS(G_k)‖ / Σ ‖IS(G_k)‖).

Pure functions over arrays. Stratified draws are in `strata.py`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedmpi.clients.cohort import Cohort, full_participation
from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

Design = Literal["systematic", "sequential"]


def uniform(generator: np.random.Generator, available: Ints | int, count: int) -> Cohort:
    """Draw a simple random sample without replacement: every available client has inclusion probability count / a.

    `available` are sorted clients, or N for all of 0 … N−1. If fewer than `count` are available, all are selected.
    """
    population = available if isinstance(available, int) else available.size
    if count >= population:
        return full_participation(available)
    chosen = draw_uniformly(population, count, generator)
    return Cohort(chosen if isinstance(available, int) else available[chosen], np.full(count, count / population))


def importance(
    generator: np.random.Generator, norms: Floats, candidates: Ints, count: int, design: Design = "systematic"
) -> Cohort:
    """Draw from the candidates (a,) without replacement in proportion to their gradient norms (a,), or other weights.

    The inclusion probabilities of the design "sequential" are unknown.
    """
    wanted = min(count, len(candidates))
    members = draw_by_norm(norms, wanted, generator, design)
    known = design == "systematic"
    return Cohort(candidates[members], proportional_inclusion(norms, wanted)[members] if known else None)


def draw_uniformly(population: int, count: int, generator: np.random.Generator) -> Ints:
    """Draw `count` of 0 … population − 1 without replacement, sorted; each with probability count / population."""
    return np.sort(generator.choice(population, count, replace=False, shuffle=False)).astype(np.int64)


def draw_by_norm(norms: Floats, count: int, generator: np.random.Generator, design: Design = "systematic") -> Ints:
    """Draw `count` of the clients without replacement, those with larger gradients more often.

    Return sorted positions, int64 (count,). Clients of norm zero are drawn only if the others do not suffice,
    uniformly. "systematic" is systematic sampling in random order with the probabilities of `proportional_inclusion`
    (Madow 1949; Goodman and Kish 1950). "sequential" follows the paper's words: one client after another with p_k ∝
    norm among those left.
    """
    if not np.isfinite(norms).all() or (norms < 0).any():
        raise UserError("a client's gradient norm is not a finite number. Lower the learning rate or check its data")
    if design == "sequential":
        return draw_without_replacement(generator, norms, count)
    return systematic(proportional_inclusion(norms, count), generator.permutation(len(norms)), generator.random())


def proportional_inclusion(weights: Floats, count: int) -> Floats:
    """Return inclusion probabilities π_k = min(1, c · weight_k) with Σ π_k = count, float64 (a,).

    Clients whose share would exceed 1 are certain; the rest is divided again until none exceeds 1. If at most `count`
    clients have a positive weight, these are certain and the others share the rest equally.

    Parameters
    ----------
    weights : float64 (a,)
        Weight of each client, at least 0.
    count : int
        Expected number of clients drawn.
    """
    positive = weights > 0
    if positive.sum() <= count:
        others = len(weights) - int(positive.sum())
        return np.where(positive, 1.0, (count - positive.sum()) / max(others, 1))
    inclusion = np.where(positive, 1.0, 0.0)
    open_clients, left = np.flatnonzero(positive), count
    while True:
        scaled = weights[open_clients] / weights[open_clients].max()
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


def draw_without_replacement(generator: np.random.Generator, weights: Floats, count: int) -> Ints:
    """Draw positions sequentially, each with a probability proportional to its weight among those left.

    The first arrivals of independent exponential times with the weights as rates are such a sample (Efraimidis and
    Spirakis 2006). Weights of zero come last, in random order. The inclusion probabilities have no closed form.

    Parameters
    ----------
    generator : numpy.random.Generator
        Source of one number per weight.
    weights : float64 (a,)
        Weights, at least 0.
    count : int
        Number of positions; more than a draws all.

    Returns
    -------
    int64 (min(count, a),)
        Positions in `weights`, sorted.
    """
    arrival = generator.standard_exponential(len(weights))
    slow = weights <= 0
    times = arrival / np.where(slow, 1.0, weights)
    return np.sort(np.lexsort((times, slow))[:count]).astype(np.int64)
