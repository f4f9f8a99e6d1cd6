"""The built-in sampling designs of `participation.clients`: everyone, simple random, by size or gradient norm,
stratified and clustered draws. Those that look at losses are in `by_loss`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedmpi.clients import draws
from fedmpi.clients.cohort import Cohort, full_participation, uniform, weighted
from fedmpi.clients.strata import stratified
from fedmpi.clients.view import View
from fedmpi.common.decorators import client_sampler
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints


@client_sampler(name="all")
def all_clients(view: View) -> Cohort:
    """Every client that is there."""
    return full_participation(view.present)


@client_sampler(name="uniform")
def uniform_clients(view: View) -> Cohort:
    """Uniformly without replacement."""
    return uniform(view.generator, view.present, view.count)


@client_sampler(name="weighted")
def weighted_clients(view: View, *, replace: bool = True) -> Cohort:
    """In proportion to the clients' samples n_k (Li et al. 2020, Scheme I).

    Parameters
    ----------
    view : View
    replace : bool
        With replacement (a client drawn twice counts twice) or without.
    """
    available = None if isinstance(view.present, int) else view.present
    return weighted(view.generator, view.sizes, available, view.count, replace)


@client_sampler(name="importance", needs=("norms",))
def importance_clients(view: View, *, design: Literal["systematic", "sequential"] = "systematic") -> Cohort:
    """In proportion to the norm of the clients' gradients.

    Parameters
    ----------
    view : View
    design : str
        Systematic PPS, whose inclusion probabilities are known, or one client after another.
    """
    if view.strata is None or view.strata.norms is None:
        raise UserError('participation.clients = "importance" needs the norms of gradients: choose other features')
    return draws.importance(view.generator, view.strata.norms, view.present, view.count, design)


@client_sampler(name="stratified", needs=("strata",))
def stratified_clients(
    view: View,
    *,
    allocation: Literal["proportional", "neyman", "equal"] = "neyman",
    every_stratum: bool = True,
    draw: Literal["uniform", "importance"] = "importance",
    design: Literal["systematic", "sequential"] = "systematic",
) -> Cohort:
    """Stratum by stratum (FedSSO, FedSTS, FedSTaS).

    Parameters
    ----------
    view : View
    allocation : str
        How m is split over the strata.
    every_stratum : bool
        Neyman: at least one participant from every stratum while m >= H.
    draw : str
        Inside a stratum: uniform, or with p_k proportional to the norm of the (compressed) gradient.
    design : str
        Importance draws: systematic PPS, whose inclusion probabilities are known, or one client after another (the
        paper's words).
    """
    strata = view.strata
    if strata is None:
        raise UserError('participation.clients = "stratified" needs strata: none are in force')
    return stratified(
        strata,
        view.present,
        view.wanted(int(strata.sizes.sum())),
        view.streams,
        view.round,
        allocation=allocation,
        every_stratum=every_stratum,
        draw=draw,
        design=design,
        over_selection=view.over_selection,
    )


@client_sampler(name="clustered-md")
def clustered_by_size(view: View) -> Cohort:
    """One client from each of m urns that hold the samples of clients alike in size (Fraboni et al. 2021, Algorithm 1).

    Clients in order of size lay down m n_k balls each, which fill m urns of n balls one after another. A client is
    drawn from every urn by its share of the balls: it is expected m n_k / n times, as with draws by size, but with less
    variance. `inclusion` is that expectation; with `aggregation.weights = "uniform"` each draw counts 1/m, so that a
    client's weight is n_k / n on average.
    """
    sizes = view.sizes[view.available]
    total, urns = int(sizes.sum()), view.count
    if not total or not urns:
        return Cohort(np.empty(0, np.int64), np.empty(0))
    if total * urns >= 2**63:
        raise UserError("participation.count times the number of samples must stay below 2**63 when drawing from urns")
    order = _by_size(sizes)
    ends = urns * np.cumsum(sizes[order])
    balls = total * np.arange(urns) + view.generator.integers(0, total, urns)
    places, times = np.unique(np.searchsorted(ends, balls, side="right"), return_counts=True)
    members = order[places]
    back = np.argsort(members)
    expected = urns * (sizes[members] / total)
    return Cohort(view.available[members[back]], expected[back], times[back].astype(np.int64))


def _by_size(sizes: Ints) -> Ints:
    """Places of the clients from the largest to the smallest, equal ones in their order."""
    return np.argsort(-sizes, kind="stable")
