"""Clustered sampling by size: one client from each of m distributions (Fraboni et al. 2021, Algorithm 1)."""

from __future__ import annotations

import numpy as np

from fedmpi.clients.cohort import Cohort
from fedmpi.clients.view import View
from fedmpi.common.decorators import client_sampler
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints


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
    order = by_size(sizes)
    ends = urns * np.cumsum(sizes[order])
    balls = total * np.arange(urns) + view.generator.integers(0, total, urns)
    places, times = np.unique(np.searchsorted(ends, balls, side="right"), return_counts=True)
    members = order[places]
    back = np.argsort(members)
    expected = urns * (sizes[members] / total)
    return Cohort(view.available[members[back]], expected[back], times[back].astype(np.int64))


def by_size(sizes: Ints) -> Ints:
    """Places of the clients from the largest to the smallest, equal ones in their order."""
    return np.argsort(-sizes, kind="stable")
