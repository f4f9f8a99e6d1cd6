"""Grouping of clients into mediators: Astraea's greedy rescheduling, exchanges beyond it, random groups as control.

Duan et al. 2019 (Astraea), Algorithm 3. The components of the kind "scheduling" are pure functions.

Parameters
----------
class_counts : int64 (c, C)
    Class counts of the online clients, in the order of their ids.
most : int
    γ >= 1, the largest number of clients of one mediator.
generator : Generator
    Stream of (SCHEDULE, round); used by "random" only.
target : float64 (C,), optional
    Class distribution to approximate; uniform if None.

Returns
-------
int64 (c,)
    Mediator of every online client. Mediators are numbered 0 ... ⌈c/γ⌉ - 1 in the order in which they are made.

Raises
------
UserError
    If a client has a class that the target excludes: every divergence would be infinite.
"""

from __future__ import annotations

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.common.types import Floats, Ints
from fedmpi.data.statistics import pooled_counts, target_distribution

TIE = 1e-12  # divergences closer than this are equal up to floating-point rounding: the lower client wins
MOST_SWEEPS = 10
EXCHANGE_CELLS = 250_000_000  # c² C times sweeps: about four seconds of one core; at least one sweep


@register("scheduling", name="greedy")
def greedy(
    class_counts: Ints, most: int, generator: np.random.Generator | None = None, target: Floats | None = None
) -> Ints:
    """Fill the mediators in turn, each with the client that brings it closest to the target (Astraea, Algorithm 3).

    P_m + P_i of line 7 is read as the pooled class counts of the mediator and the client. Ties go to the client with
    the lower index. Time O(c² C); the paper states O(c²).
    """
    log_target = _log_target(class_counts, target)
    counts = np.asarray(class_counts, np.float64)
    mediators = np.full(len(counts), -1, np.int64)
    waiting = np.arange(len(counts))
    for mediator in range(-(-len(counts) // most)):
        members = _fill(counts[waiting], min(most, len(waiting)), log_target)
        mediators[waiting[members]] = mediator
        waiting = np.delete(waiting, members)
    return mediators


def _fill(counts: Floats, places: int, log_target: Floats) -> list[int]:
    """Return the rows chosen for one mediator, in the order of the choice."""
    pooled = np.zeros(counts.shape[1])
    members: list[int] = []
    taken = np.zeros(len(counts), bool)
    for _ in range(places):
        divergence = _divergence(counts + pooled, log_target)
        divergence[taken] = np.inf
        chosen = int(((divergence <= divergence.min() + TIE) & ~taken).argmax())  # the first of equal ones
        members.append(chosen)
        taken[chosen] = True
        pooled += counts[chosen]
    return members


@register("scheduling", name="exchange")
def exchanged(class_counts: Ints, most: int, generator: np.random.Generator, target: Floats | None) -> Ints:
    """Make greedy groups, then swap clients between mediators as long as this reduces the KL divergence."""
    return exchange(class_counts, greedy(class_counts, most, target=target), target)


def exchange(class_counts: Ints, mediators: Ints, target: Floats | None = None) -> Ints:
    """Swap clients of different mediators while that lowers the sum of the divergences (beyond the paper).

    The greedy pass leaves the worst clients to the last mediators; swaps reduce that. The group sizes do not change,
    and the mean divergence never rises. Every sweep visits each client once and makes its best swap, O(c² C). There are
    at most ten sweeps, fewer for large cohorts (two for 1,000 clients with 100 classes).
    """
    mediators = mediators.copy()
    if len(mediators) == 0 or np.bincount(mediators).max() == 1:
        return mediators
    log_target = _log_target(class_counts, target)
    counts = np.asarray(class_counts, np.float64)
    sweeps = int(np.clip(EXCHANGE_CELLS // (len(counts) * counts.size), 1, MOST_SWEEPS))
    pooled = pooled_counts(class_counts, mediators).astype(np.float64)
    for _ in range(sweeps):
        swapped = [_swap_best(client, counts, mediators, pooled, log_target) for client in range(len(counts))]
        if not any(swapped):
            break
    return mediators


def _swap_best(client: int, counts: Floats, mediators: Ints, pooled: Floats, log_target: Floats) -> bool:
    """Swap a client with the best client of another mediator, in place; return whether that helps."""
    own = mediators[client]
    moved = counts - counts[client]
    before = _divergence(pooled, log_target)
    after = _divergence(pooled[own] + moved, log_target) + _divergence(pooled[mediators] - moved, log_target)
    gain = np.where(mediators == own, 0.0, before[own] + before[mediators] - after)
    other = int(gain.argmax())
    if not gain[other] > TIE:
        return False
    pooled[own] += moved[other]
    pooled[mediators[other]] -= moved[other]
    mediators[client], mediators[other] = mediators[other], own
    return True


@register("scheduling", name="random")
def grouped_at_random(class_counts: Ints, most: int, generator: np.random.Generator, target: Floats | None) -> Ints:
    """Draw mediators with ≤ γ clients at random, as a control of Algorithm 3."""
    clients = len(class_counts)
    mediators = np.empty(clients, np.int64)
    mediators[generator.permutation(clients)] = np.arange(clients) // most
    return mediators


def _log_target(class_counts: Ints, target: Floats | None) -> Floats:
    """Return logarithms of the target's probabilities, 0 for classes without samples."""
    target = target_distribution(class_counts.shape[1]) if target is None else target
    held = np.asarray(class_counts).sum(axis=0) > 0
    impossible = np.flatnonzero(held & (target == 0))
    if len(impossible):
        raise UserError(
            f"the clients hold samples of class {impossible[0]}, which the target distribution of the mediators lacks. "
            'Set topology.target = "uniform"'
        )
    return np.log(np.where(target > 0, target, 1.0))


def _divergence(counts: Floats, log_target: Floats) -> Floats:
    """Return D_KL of rows of integer counts (..., C) from the target; empty rows count as the worst distribution.

    Σ p log(p/q) = (Σ s log s - Σ s log q) / T - log T with p = s/T. log(max(s, 1)) equals log s for s >= 1 and makes
    the terms of missing classes vanish; this is half the time of `xlogy`, in the loop that decides the time of a plan.
    """
    totals = counts.sum(axis=-1)
    terms = np.maximum(counts, 1.0)
    np.log(terms, out=terms)
    terms -= log_target
    sums = np.einsum("...c,...c->...", counts, terms)
    some = np.maximum(totals, 1.0)
    divergence: Floats = np.where(totals > 0, sums / some - np.log(some), -log_target.min())
    return divergence
