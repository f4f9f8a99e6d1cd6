"""Built-in samplers of `clients.sampler`: all, simple random, by size or gradient norm, stratified and clustered
draws, and power of choice. Samplers of further papers are in `selection/`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedmpi.clients.cohort import Cohort, StrataSummary, full_participation, invited
from fedmpi.clients.designs import (
    Design,
    draw_by_norm,
    draw_uniformly,
    draw_without_replacement,
    importance,
    proportional_inclusion,
    uniform,
)
from fedmpi.clients.sampler import View
from fedmpi.clients.strata import Rule, allocate
from fedmpi.common.decorators import client_sampler
from fedmpi.common.errors import UserError
from fedmpi.common.options import only_with
from fedmpi.common.streams import Purpose
from fedmpi.common.types import Floats, Ints


@client_sampler(name="all")
def all_clients(view: View) -> Cohort:
    """Select every available client."""
    return full_participation(view.present)


@client_sampler(name="uniform")
def uniform_clients(view: View) -> Cohort:
    """Draw uniformly without replacement."""
    return uniform(view.generator, view.present, view.count)


@client_sampler(name="shuffled")
def shuffled_clients(view: View) -> Cohort:
    """Visit the clients in a random order, which is drawn anew in each epoch of ⌊N/m⌋ rounds.

    No client is selected twice in an epoch. Unavailable clients lose their turn, and N mod m clients of each epoch are
    left out.
    """
    clients = len(view.sizes)
    epoch, turn = divmod(view.round, clients // view.count)
    order = view.streams.generator(Purpose.EPOCH, epoch).permutation(clients)
    chosen = np.intersect1d(order[turn * view.count :][: view.count], view.available)
    return Cohort(chosen, np.full(len(chosen), view.count / clients))


@client_sampler(name="weighted")
def weighted_clients(view: View, *, replace: bool = True) -> Cohort:
    """Draw in proportion to the clients' samples n_k.

    With replacement this is Scheme I of Li et al. 2020 ("On the Convergence of FedAvg on Non-IID Data"): m independent
    draws with probability n_k / n; `inclusion` is the expected number of draws, m n_k / n. Without replacement it is a
    systematic importance draw by size. Clients without samples are never drawn.

    Parameters
    ----------
    replace : bool
        With replacement (a client drawn twice counts twice) or without.
    """
    if not view.sizes.any():
        raise UserError(
            'clients.sampler = "weighted" needs a client with at least one sample, and none has any. Prepare other data'
        )
    clients, weights = view.eligible, view.sizes[view.eligible]
    if not replace or not len(clients) or not view.count:
        return importance(view.generator, weights.astype(np.float64), clients, view.count)
    total = int(weights.sum())
    positions = view.generator.integers(0, total, view.count)
    drawn = np.searchsorted(np.cumsum(weights), positions, side="right")
    chosen, multiplicity = np.unique(drawn, return_counts=True)
    return Cohort(clients[chosen], view.count * (weights[chosen] / total), multiplicity.astype(np.int64))


@client_sampler(name="importance", needs=("norms",))
def importance_clients(view: View, *, design: Design = "systematic") -> Cohort:
    """Draw in proportion to the norm of the clients' gradients.

    Parameters
    ----------
    design : str
        Systematic PPS, whose inclusion probabilities are known, or sequential drawing, whose are not.
    """
    assert view.strata is not None and view.strata.norms is not None
    return importance(view.generator, view.strata.norms[view.available], view.available, view.count, design)


@client_sampler(name="stratified", needs=("strata",))
def stratified(
    view: View,
    *,
    allocation: Rule = "neyman",
    every_stratum: Annotated[bool, only_with("clients.sampler.allocation", "neyman")] = True,
    within_stratum: Literal["uniform", "importance"] = "importance",
    design: Annotated[Design, only_with("clients.sampler.within_stratum", "importance")] = "systematic",
) -> Cohort:
    """Draw from every stratum separately (FedSSO, Algorithm 1, lines 4-8; FedSTS; FedSTaS, Algorithm 2).

    Quotas m_h follow from all clients of a stratum, but only its available clients are drawn: the rest of a cluster
    substitutes for the unavailable ones (FedSSO, §2.2). Only the places that a stratum cannot fill go to other strata.

    With over-selection, ⌈m_h · over_selection⌉ clients are invited in every stratum, and the server takes the first m_h
    to arrive. The cohort's `inclusion` is the probability, over allocation and draw and given the available clients, of
    being among these, if arrival within a stratum is independent of the draw.

    Parameters
    ----------
    allocation : str
        Division of the m draws among the strata.
    every_stratum : bool
        Neyman: at least one selected client from every stratum while m >= H.
    within_stratum : str
        Draw inside a stratum: uniform, or with p_k proportional to the norm of the (compressed) gradient.
    design : str
        Importance draws: systematic PPS, whose inclusion probabilities are known, or sequential drawing (as worded in
        the paper), whose are not.
    """
    strata, over = view.strata, view.over_selection
    assert strata is not None
    candidates = view.available[strata.labels[view.available] >= 0]
    labels = strata.labels[candidates]
    capacity = np.bincount(labels, minlength=len(strata.sizes))
    members = np.split(candidates[np.argsort(labels, kind="stable")], np.cumsum(capacity)[:-1])
    rounding = view.streams.generator(Purpose.ALLOCATION, view.round)
    count = view.wanted(int(strata.sizes.sum()))
    split = allocate(allocation, strata.sizes, strata.spreads, count, rounding, capacity, every_stratum)
    generator = view.streams.generator(Purpose.STRATUM_DRAW, view.round)
    norms = None if within_stratum == "uniform" else strata.norms
    chosen, inclusion = [np.empty(0, np.int64)], [np.empty(0)]
    for present, draws, expected in zip(members, split.draws.tolist(), split.expected.tolist(), strict=True):
        if not draws:
            continue
        asked = invited(draws, over, len(present))
        if norms is None:
            places = draw_uniformly(len(present), asked, generator)
            chances = np.full(asked, expected / len(present))
        else:
            places = draw_by_norm(norms[present], asked, generator, design)
            chances = _expected_inclusion(norms[present], expected, over)[places]
        chosen.append(present[places])
        inclusion.append(chances)
    clients = np.concatenate(chosen)
    order = np.argsort(clients)
    clients = clients[order]
    represented = np.where(split.expected > 1 - 1e-9, 1.0, split.expected)  # m_h is E[m_h] rounded down or up
    summary = StrataSummary(strata.sizes, split.draws, strata.spreads, represented)
    known = np.concatenate(inclusion)[order] if norms is None or design == "systematic" else None
    return Cohort(clients, known, stratum=strata.labels[clients], strata=summary)


def _expected_inclusion(norms: Floats, expected: float, over_selection: float) -> Floats:
    """Return inclusion probabilities of systematic draws, over the random rounding of m_h to ⌊E m_h⌋ or ⌈E m_h⌉."""
    fewer = math.floor(expected + 1e-12)
    chance_of_more = max(expected - fewer, 0.0)
    total = np.zeros(len(norms))
    for draws, chance in ((fewer, 1.0 - chance_of_more), (fewer + 1, chance_of_more)):
        if draws > 0 and chance > 1e-12:
            asked = invited(draws, over_selection, len(norms))
            total += chance * (draws / asked) * proportional_inclusion(norms, asked)
    return total


@client_sampler(name="clustered-md")
def clustered_by_size(view: View) -> Cohort:
    """Draw one client from each of m urns filled with clients of similar size (Fraboni et al. 2021, Algorithm 1).

    Clients in order of size put m n_k balls each into m urns of n balls, one urn after another. A client is drawn from
    every urn by its share of the balls: its expected number of draws is m n_k / n, as with draws by size, but with less
    variance. `inclusion` is that expectation; with `server.weights = "uniform"` each draw counts 1/m, so that a
    client's weight is n_k / n on average.
    """
    sizes = view.sizes[view.available]
    total, urns = int(sizes.sum()), view.count
    if not total or not urns:
        return Cohort(np.empty(0, np.int64), np.empty(0))
    if total * urns >= 2**63:
        raise UserError("clients.count times the number of samples must stay below 2**63 when drawing from urns")
    order = np.argsort(-sizes, kind="stable")  # from the largest to the smallest, equal ones in their order
    ends = urns * np.cumsum(sizes[order])
    balls = total * np.arange(urns) + view.generator.integers(0, total, urns)
    places, times = np.unique(np.searchsorted(ends, balls, side="right"), return_counts=True)
    members = order[places]
    back = np.argsort(members)
    expected = urns * (sizes[members] / total)
    return Cohort(view.available[members[back]], expected[back], times[back].astype(np.int64))


@client_sampler(name="power-of-choice", measures=("loss",))
class PowerOfChoice:
    """Select the highest current losses among d candidates drawn by size (Cho et al. 2020, π_pow-d).

    Inclusion probabilities depend on losses that are not known beforehand, so none are given.

    Parameters
    ----------
    candidates : int
        d, the clients measured in every round; at least the number selected, and at most the number of available
        clients with samples.
    """

    def __init__(self, *, candidates: Annotated[int, Field(ge=1)] = 30):
        self.size = candidates

    def candidates(self, view: View) -> Ints:
        """Draw d available clients sequentially without replacement, with probability n_k over the rest."""
        sizes = view.sizes[view.eligible].astype(np.float64)
        return view.eligible[draw_without_replacement(view.generator, sizes, max(self.size, view.count))]

    def draw(self, view: View) -> Cohort:
        """Select the m candidates with the highest loss; in a tie those with the lower index."""
        loss = view.fresh("loss")
        measured = np.flatnonzero(~np.isnan(loss))
        loudest = measured[np.argsort(-loss[measured], kind="stable")][: view.count]
        return Cohort(np.sort(loudest))
