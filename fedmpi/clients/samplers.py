"""The client samplers of the published systems as choices of `participation.clients`."""

from __future__ import annotations

from typing import Literal

from fedmpi.clients import draws
from fedmpi.clients.cohort import Cohort, everyone, uniform, weighted
from fedmpi.clients.strata import stratified
from fedmpi.clients.view import View
from fedmpi.common.decorators import client_sampler
from fedmpi.common.errors import UserError


@client_sampler(name="all")
def all_clients(view: View) -> Cohort:
    """Every client that is there."""
    return everyone(view.present)


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
    if view.strata is None:
        raise UserError('participation.clients = "stratified" needs strata: none are in force')
    return stratified(
        view.strata,
        view.present,
        view.wanted(int(view.strata.sizes.sum())),
        view.streams,
        view.round,
        allocation=allocation,
        every_stratum=every_stratum,
        draw=draw,
        design=design,
        over_selection=view.over_selection,
    )
