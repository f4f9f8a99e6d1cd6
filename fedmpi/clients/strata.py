"""Stratified participation: a round's cohort from strata, allocation and a draw inside every stratum (FedSSO,
Algorithm 1, lines 4-8; FedSTaS, Algorithm 2), with the true first-order inclusion probability of every participant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedmpi.clients.allocation import Allocation, Rule, allocate
from fedmpi.clients.cohort import Cohort, StrataSummary
from fedmpi.clients.draws import Design, draw_by_norm, draw_uniformly, inclusion_by_norm
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

Draw = Literal["uniform", "importance"]


@dataclass(frozen=True, eq=False)
class Strata:
    """A partition of the clients."""

    labels: Ints  # (N,): Stratum of each client, −1 for clients left out
    sizes: Ints  # (H,): N_h
    spreads: Floats  # (H,): S_h; zeros where the allocation does not use it
    # (N,), or None: Norm of each client's (compressed) gradient; None where no importance draw uses it
    norms: Floats | None


def make_strata(labels: Ints, spreads: Floats | None = None, norms: Floats | None = None) -> Strata:
    """Strata from labels 0 … H − 1 (−1: left out), which must have no gaps."""
    sizes = np.bincount(labels[labels >= 0]).astype(np.int64)
    if (sizes == 0).any():
        raise ValueError("stratum labels must be numbered without gaps")
    spreads = np.zeros(len(sizes)) if spreads is None else np.asarray(spreads, np.float64)
    if len(spreads) != len(sizes) or (norms is not None and len(norms) != len(labels)):
        raise ValueError("labels, spreads and norms do not describe the same strata")
    return Strata(labels, sizes, spreads, norms)


def stratified(
    strata: Strata,
    available: Ints | int,
    count: int,
    streams: Streams,
    round: int,
    *,
    allocation: Rule = "proportional",
    every_stratum: bool = True,
    draw: Draw = "uniform",
    design: Design = "systematic",
    over_selection: float = 1.0,
) -> Cohort:
    """Draw a round's participants stratum by stratum.

    Quotas m_h follow from all clients of a stratum, participants come from its available ones: the rest of a cluster
    stands in for those who are away (FedSSO, §2.2). Only what a stratum cannot supply at all goes to other strata.

    Parameters
    ----------
    strata : Strata
        The partition.
    available : ndarray of int64 (a,) or int
        Clients that may be drawn, sorted; or N for all of 0 … N−1.
    count : int
        m, participants wanted.
    streams, round
        Purpose.ALLOCATION and Purpose.STRATUM_DRAW of the round are used.
    allocation, every_stratum, draw, design
        See `allocation.allocate` and `draws.draw_by_norm`.
    over_selection : float
        >= 1: ⌈m_h · over_selection⌉ clients are asked in every stratum, of which the server takes the first m_h to
        arrive (`system_model.first_to_arrive`).

    Returns
    -------
    Cohort
        Its `inclusion` is the probability, over allocation and draw and given who is available, of counting among the
        m_h that are taken, if arrival within a stratum is independent of the draw. `strata.draws` is m_h.
    """
    if draw == "importance" and strata.norms is None:
        raise ValueError("importance draws need the norms of the clients' gradients")
    if over_selection < 1:
        raise ValueError(f"over-selection must be at least 1, not {over_selection}")
    candidates = np.arange(available, dtype=np.int64) if isinstance(available, int) else available
    candidates = candidates[strata.labels[candidates] >= 0]
    members = _by_stratum(candidates, strata.labels[candidates], len(strata.sizes))
    split = allocate(
        allocation,
        strata.sizes,
        strata.spreads,
        count,
        streams.generator(Purpose.ALLOCATION, round),
        np.array([len(part) for part in members], np.int64),
        every_stratum,
    )
    generator = streams.generator(Purpose.STRATUM_DRAW, round)
    norms = strata.norms if draw == "importance" else None
    clients, inclusion = [np.empty(0, np.int64)], [np.empty(0)]
    for present, draws, expected in zip(members, split.draws.tolist(), split.expected.tolist(), strict=True):
        if draws:
            own = None if norms is None else norms[present]
            places, chances = _draw_within(len(present), own, draws, expected, over_selection, design, generator)
            clients.append(present[places])
            inclusion.append(chances)
    return _cohort(np.concatenate(clients), np.concatenate(inclusion), strata, split)


def _draw_within(
    present: int,
    norms: Floats | None,
    draws: int,
    expected: float,
    over_selection: float,
    design: Design,
    generator: np.random.Generator,
) -> tuple[Ints, Floats]:
    """The draw inside one stratum, of its clients that are there.

    Parameters
    ----------
    present : int
        How many there are.
    norms : float64 (present,) or None
        What they are drawn by; None for a uniform draw.
    draws : int
        m_h, those that will be taken.
    expected : float
        E[m_h] over the allocation.
    over_selection, design, generator
        See `stratified`.

    Returns
    -------
    int64 (asked,), float64 (asked,)
        The places of those asked, and their inclusion probabilities.
    """
    asked = _asked(draws, over_selection, present)
    if norms is None:
        return draw_uniformly(present, asked, generator), np.full(asked, expected / present)
    places = draw_by_norm(norms, asked, generator, design)
    return places, _expected_inclusion(norms, expected, over_selection, design)[places]


def _cohort(clients: Ints, inclusion: Floats, strata: Strata, split: Allocation) -> Cohort:
    order = np.argsort(clients)
    clients = clients[order]
    represented = np.where(split.expected > 1 - 1e-9, 1.0, split.expected)  # m_h is E[m_h] rounded down or up
    summary = StrataSummary(strata.sizes, split.draws, strata.spreads, represented)
    return Cohort(clients, inclusion[order], stratum=strata.labels[clients], strata=summary)


def _by_stratum(candidates: Ints, labels: Ints, strata: int) -> list[Ints]:
    """The candidates of each stratum, sorted."""
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels, minlength=strata))[:-1]
    return list(np.split(candidates[order], ends))


def _asked(draws: int, over_selection: float, present: int) -> int:
    return min(present, math.ceil(draws * over_selection - 1e-9))


def _expected_inclusion(norms: Floats, expected: float, over_selection: float, design: Design) -> Floats:
    """Inclusion probabilities under importance draws, over the random rounding of m_h: it is ⌊E m_h⌋ or ⌈E m_h⌉."""
    fewer = math.floor(expected + 1e-12)
    chance_of_more = max(expected - fewer, 0.0)
    total = np.zeros(len(norms))
    for draws, chance in ((fewer, 1.0 - chance_of_more), (fewer + 1, chance_of_more)):
        if draws > 0 and chance > 1e-12:
            asked = _asked(draws, over_selection, len(norms))
            total += chance * (draws / asked) * inclusion_by_norm(norms, asked, design)
    return total
