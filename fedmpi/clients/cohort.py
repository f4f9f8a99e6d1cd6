"""The cohort of a round: the selected clients, and how they were selected.

A cohort contains the first-order inclusion probabilities of its sampling design (`designs.py`), so that the aggregation
weights can be unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

WORK = ("steps", "lr", "budget")
"""Fields of a cohort that set the work of each client."""


@dataclass(frozen=True, eq=False)
class StrataSummary:
    """The H strata that a cohort was drawn from."""

    sizes: Ints  # (H,): N_h, the clients in each stratum
    draws: Ints  # (H,): m_h, the clients allocated to each stratum this round
    # (H,): S_h, within-stratum standard deviation of the clustering features (zeros if the allocation does not use it)
    spread: Floats
    # (H,): Probability that a stratum has a selected client at all, given the available clients: min(1, E[m_h]), times
    # the probability that not all of its invited clients drop out; 0 for a stratum without available clients. None: all
    # surely have one
    represented: Floats | None = None


@dataclass(frozen=True, eq=False)
class Presence:
    """Availability of the clients when a cohort was drawn; weights use it to correct for unavailable clients."""

    present: Ints | int  # (p,): Clients that could be drawn, sorted; N if all of 0 … N − 1 were available
    # (N,): Known probability of each client to be available in this round, a_k; None: all surely, or not needed
    chance: Floats | None = None
    # (N,): Groups of clients with equal availability, as far as the server knows: the strata, −1 for clients in none
    groups: Ints | None = None


@dataclass(frozen=True, eq=False)
class Cohort:
    """Selected clients of one round.

    Attributes
    ----------
    clients : int64 (m,)
        Indices of the selected clients, sorted and unique.
    inclusion : float64 (m,), optional
        First-order inclusion probability of each selected client under the sampling design, given the available clients
        (see `presence`). In a cohort with a `multiplicity` it is the expected number of draws, which may exceed 1. None
        if unknown: weights that divide by it are then rejected.
    multiplicity : int64 (m,), optional
        Number of draws of each client, from a design that can draw a client more than once. Such a design gives it in
        every round, also if all draws differ. By default once each.
    stratum : int64 (m,), optional
        Stratum of each selected client, an index into `strata`.
    strata : StrataSummary, optional
        The strata of a stratified draw.
    presence : Presence, optional
        The available clients; None if all were available.
    wanted : int, optional
        K, the sample budget of all selected clients together, for weights: samples.budget, or all their samples.
    steps : int64 (m,), optional
        Local steps of each client, instead of local.epochs or local.steps.
    lr : float64 (m,), optional
        Learning rate of each client, instead of the round's.
    budget : int64 (m,), optional
        Number of its samples that each client uses in the round, at most all of them.
    numbers : mapping of str to float
        Further numbers for the record of the round, named sampler_NAME there.
    """

    clients: Ints
    inclusion: Floats | None = None
    multiplicity: Ints = cast(Ints, None)
    stratum: Ints | None = None
    strata: StrataSummary | None = None
    presence: Presence | None = None
    wanted: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    steps: Ints | None = None
    lr: Floats | None = None
    budget: Ints | None = None

    def __post_init__(self) -> None:
        for name in ("clients", "inclusion", "multiplicity", "stratum", *WORK):  # samplers may give lists
            if getattr(self, name) is not None:
                object.__setattr__(self, name, np.asarray(getattr(self, name)))
        if not np.ndim(self.multiplicity):  # not given
            object.__setattr__(self, "multiplicity", np.broadcast_to(np.int64(1), self.clients.shape))

    @property
    def counts_draws(self) -> bool:
        """True if multiplicities were given: `inclusion` then contains expected draws, else probabilities."""
        return np.asarray(self.multiplicity).strides != (0,)

    @property
    def own_work(self) -> dict[str, Any]:
        """The given fields among steps, lr and budget, (m,) each, by name."""
        return {name: getattr(self, name) for name in WORK if getattr(self, name) is not None}

    @property
    def draws(self) -> int:
        """Number of draws, the multiplicities summed (K of the papers)."""
        return int(self.multiplicity.sum())


def cohort_size(
    clients: int, count: int | None = None, fraction: float | None = None, key: str = "clients.count"
) -> int:
    """Return the number of clients to select per round, from a count (of this key) or a fraction of the clients."""
    if fraction is not None:
        return max(1, math.floor(fraction * clients + 0.5))
    if count is None or not 1 <= count <= clients:
        raise UserError(f"{key} = {count}, but the data hold {clients} clients. Choose 1 to {clients}")
    return count


def invited(wanted: int, over_selection: float, clients: int) -> int:
    """Return the number of clients invited so that `wanted` arrive: ⌈m · over-selection⌉, at most N."""
    return min(clients, math.ceil(wanted * over_selection - 1e-9))


def indices(available: Ints | int) -> Ints:
    """Return the available clients, int64 (a,), from N if all of 0 … N − 1 are."""
    return np.arange(available, dtype=np.int64) if isinstance(available, int) else available


def full_participation(available: Ints | int) -> Cohort:
    """Select every available client, once."""
    clients = indices(available)
    return Cohort(clients, np.broadcast_to(1.0, clients.shape))
