"""Which clients of one population (a stratum, or everybody) take part: uniformly, or in proportion to the norm of
their gradient (FedSTaS, Algorithm 2: p_k = ‖IS(G_k)‖ / Σ ‖IS(G_k)‖), always with known inclusion probabilities.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedmpi.clients.cohort import Cohort
from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

Design = Literal["systematic", "sequential"]

SEQUENTIAL_UP_TO = 1000  # clients of one population: the inclusion probabilities cost O(N²)


def importance(
    generator: np.random.Generator,
    norms: Floats,
    available: Ints | int,
    count: int,
    design: Design = "systematic",
) -> Cohort:
    """Clients of the whole population drawn without replacement in proportion to their gradient norms."""
    candidates = np.arange(available, dtype=np.int64) if isinstance(available, int) else available
    wanted = min(count, len(candidates))
    inclusion = inclusion_by_norm(norms[candidates], wanted, design)
    members = draw_by_norm(norms[candidates], wanted, generator, design)
    return Cohort(candidates[members], inclusion[members])


def draw_uniformly(population: int, count: int, generator: np.random.Generator) -> Ints:
    """`count` of 0 … population − 1 without replacement, sorted; each with probability count / population."""
    return np.sort(generator.choice(population, count, replace=False, shuffle=False)).astype(np.int64)


def draw_by_norm(norms: Floats, count: int, generator: np.random.Generator, design: Design = "systematic") -> Ints:
    """`count` of the clients without replacement, those with larger gradients more often.

    Parameters
    ----------
    norms : ndarray of float64, shape (k,)
        Non-negative. Clients of norm zero are drawn only when the others do not suffice, uniformly.
    count : int
        Clients to draw, at most k.
    generator : numpy.random.Generator
        Purpose.STRATUM_DRAW of the round.
    design : str
        "systematic": systematic sampling in random order, whose inclusion probabilities are proportional to the norms
        (Madow 1949; Goodman and Kish 1950); "sequential": the paper's words, one client after another with p_k ∝ norm
        among those left, whose inclusion probabilities are not proportional.

    Returns
    -------
    ndarray of int64, shape (count,)
        Sorted positions.
    """
    _check(norms, count)
    if design == "sequential":
        return _one_after_another(norms, count, generator)
    inclusion = proportional_inclusion(norms, count)
    return systematic(inclusion, generator.permutation(len(norms)), generator.random())


def inclusion_by_norm(norms: Floats, count: int, design: Design = "systematic") -> Floats:
    """First-order inclusion probabilities (k,) of `draw_by_norm`, summing to `count`."""
    _check(norms, count)
    if design == "systematic":
        return proportional_inclusion(norms, count)
    return sequential_inclusion(norms, count)


def proportional_inclusion(norms: Floats, count: int) -> Floats:
    """π_k = min(1, c · norm_k) with Σ π_k = count.

    Clients whose share would exceed 1 are certain; the rest is shared again until none exceeds 1. If at most `count`
    clients have a positive norm, these are certain and the others share what is left equally.
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
    """The systematic sample with given inclusion probabilities, order and start in [0, 1); sorted positions.

    Probabilities are laid end to end in the given order; whoever covers start, start + 1, … is drawn. With a uniform
    start each is drawn with its probability, whatever the order; their sum must be a whole number.
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
    """Inclusion probabilities of drawing one after another with p_k ∝ norm (successive sampling; Rosén 1972).

    The first m of independent exponential arrival times with rates norm_k are such a sample, so that
    π_k = ∫ f_k(t) P(fewer than m others arrived before t) dt; the integral is a trapezoidal sum over log t, which
    converges exponentially fast for such functions, the counts have their exact (Poisson binomial) distribution.
    """
    positive = norms > 0
    candidates = int(positive.sum())
    if candidates <= count:
        return proportional_inclusion(norms, count)
    if candidates > SEQUENTIAL_UP_TO:
        raise UserError(
            f'participation.design = "sequential" allows for at most {SEQUENTIAL_UP_TO} clients '
            f'in a stratum, not {candidates}: use design = "systematic"'
        )
    inclusion = np.zeros(len(norms))
    inclusion[positive] = _exponential_race(norms[positive] / norms[positive].mean(), count)
    return inclusion


def _exponential_race(rates: Floats, count: int) -> Floats:
    """P(k is among the first `count` of exponential arrivals), (k,)."""
    step = min(0.2, 0.5 / np.sqrt(count))  # well below the width of the moment that decides the race, in log time
    log_times = np.arange(np.log(1e-14 / rates.max()), np.log(40.0 / rates.min()), step)
    hazards = np.outer(np.exp(log_times), rates)
    arrived = -np.expm1(-hazards)
    inclusion = step * (hazards * np.exp(-hazards) * _at_most_others(arrived, count - 1)).sum(axis=0)
    return np.asarray(np.clip(inclusion * count / inclusion.sum(), 0.0, 1.0))


def _at_most_others(arrived: Floats, most: int) -> Floats:
    """P(at most `most` of the others have arrived), (nodes, k), from each client's own probabilities (nodes, k).

    The distribution of everybody's count is divided by each client's own: from below where its probability is at most
    one half, from above elsewhere, which keeps the recursion stable.
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


def _one_after_another(norms: Floats, count: int, generator: np.random.Generator) -> Ints:
    """The first `count` of an exponential race; whoever has norm zero arrives after all others, in random order."""
    arrival = generator.standard_exponential(len(norms))
    slow = norms <= 0
    times = arrival / np.where(slow, 1.0, norms)
    return np.sort(np.lexsort((times, slow))[:count]).astype(np.int64)


def _check(norms: Floats, count: int) -> None:
    if not np.isfinite(norms).all() or (norms < 0).any():
        raise UserError("a client's gradient norm is not a finite number: lower the learning rate or check its data")
    if not 0 <= count <= len(norms):
        raise ValueError(f"cannot draw {count} of {len(norms)} clients")
