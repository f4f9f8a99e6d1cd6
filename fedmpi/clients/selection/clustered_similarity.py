"""Clustered sampling by similarity: one client from each of m distributions of clients with similar updates."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi import Cohort, client_sampler


@client_sampler(name="clustered-similarity", needs=("update_sketch",))
def clustered_by_similarity(
    view: Any, *, pool: Annotated[int, Field(ge=1)] = 1000, sketch_size: Annotated[int, Field(ge=1)] = 64
) -> Cohort:
    """Draw one client from each of m urns of clients with similar updates (Fraboni et al. 2021, Algorithm 2).

    Client k, with n_k of all n samples, has m n_k balls, and every urn holds n balls (r_{k,i} = balls of i in urn k /
    n). Ward's method builds a tree of the clients by the similarities ρ_ij = arccos(g_i · g_j / (‖g_i‖ ‖g_j‖)) of their
    last updates g; for clients without a known update g = 0 and ρ = 0. The tree is cut into the largest groups with at
    most n balls. The m groups with the most balls go into one urn each, whole; the balls of the other groups fill the
    first urn, then the next. Every draw is unbiased: `inclusion` is the expected number of draws, m n_k / n. The paper
    counts each draw 1/m: `server.weights = "uniform"`.

    The paper's public code decides where the text is open: Ward's method takes the rows of ρ as points, and urns are
    filled from the emptiest on with groups from the smallest on, whose clients are in random order.

    Deviations from the paper:

    - g is a count sketch of the update with `sketch_size` values, whose scalar products are unbiased but noisy.
    - Only available clients count, also in n.
    - A client with m n_k ≥ n balls first fills ⌊m n_k / n⌋ urns of its own, and only its other balls enter the tree.
    - If the clients without a known update have more than n balls together, they are grouped in the order of their
      indices, because their tree is arbitrary.
    - The tree has at most `pool` clients, those with the latest updates; each of the others is a group of its own. The
      memory of ρ grows with the square of `pool`.

    Parameters
    ----------
    pool : int
        Largest number of clients whose updates are compared.
    sketch_size : int
        Values of a sketch.
    """
    clients, sizes, urns = view.eligible, view.sizes[view.eligible], view.count
    if not len(clients) or not urns:
        return Cohort(clients[:0], np.empty(0), clients[:0])
    total = int(sizes.sum())
    own, balls = np.divmod(urns * sizes, total)
    urns -= int(own.sum())
    members = np.flatnonzero(balls)
    drawn = np.repeat(np.arange(len(clients)), own)
    if urns:
        group = _groups(view, clients[members], balls[members], total, pool)
        found = _one_per_urn(group, balls[members], urns, total, view.generator)
        drawn = np.concatenate([drawn, members[found]])
    chosen, times = np.unique(drawn, return_counts=True)
    return Cohort(clients[chosen], view.count * (sizes[chosen] / total), times)


def _groups(view: Any, clients: Any, balls: Any, most: int, pool: int) -> Any:
    """Return the group of each client (c,), numbered from 0 to at most c − 1."""
    from scipy.cluster.hierarchy import fcluster, linkage  # slow to import
    from scipy.spatial.distance import squareform

    age = view.age("update_sketch")[clients]
    unseen, group = age < 0, np.arange(len(clients))
    nodes = np.sort(np.lexsort((age, unseen))[:pool])  # in the tree
    g = np.where(unseen[nodes, None], 0, view.last("update_sketch")[clients[nodes]]).astype(np.float64)
    length = np.sqrt((g**2).sum(1))
    if len(nodes) > 1:
        g /= np.where(length > 0, length, 1)[:, None]
        rho = np.arccos(np.clip(g @ g.T, -1, 1)) * np.outer(length > 0, length > 0)
        np.fill_diagonal(rho, 0)
        square = (rho**2).sum(1)
        apart = np.sqrt(np.maximum(square[:, None] + square - 2 * rho @ rho.T, 0))
        tree = linkage(squareform(apart, checks=False), "ward")
        mass = np.concatenate([balls[nodes], np.empty(len(tree), np.int64)])
        for i, (one, other) in enumerate(tree[:, :2].astype(np.int64), len(nodes)):
            mass[i] = mass[one] + mass[other]
        tree[:, 2] = mass[len(nodes) :]  # heights: the tree is then cut where a group gets too many balls
        label = fcluster(tree, most, "distance")
        group[nodes] = nodes[np.unique(label, return_index=True)[1]][label - 1]
    alike = nodes[length == 0]
    if balls[alike].sum() > most:
        first, filled = -1, most
        for k in alike.tolist():
            filled += balls[k]
            if filled > most:
                first, filled = k, balls[k]
            group[k] = first
    return group


def _one_per_urn(group: Any, balls: Any, urns: int, most: int, generator: np.random.Generator) -> Any:
    """Fill the urns with `most` balls each and draw one client from each, (urns,)."""
    mass = np.bincount(group, balls, len(group)).astype(np.int64)
    ranked = np.argsort(mass, kind="stable")  # groups from the smallest to the largest
    rank = np.argsort(ranked)
    order = np.lexsort((generator.random(len(group)), rank[group]))  # clients by group
    whole = rank[group[order]] >= len(ranked) - urns  # in the largest groups
    kept, rest = order[whole], order[~whole]
    inside = mass[ranked[len(ranked) - urns :]]
    ball = generator.integers(0, most, urns)
    before, free = np.cumsum(inside) - inside, np.cumsum(most - inside) - (most - inside)
    there = np.searchsorted(np.cumsum(balls[kept]), before + ball, side="right")
    filled_in = np.searchsorted(np.cumsum(balls[rest]), free + ball - inside, side="right")
    return np.concatenate([kept, rest])[np.where(ball < inside, there, len(kept) + filled_in)]
