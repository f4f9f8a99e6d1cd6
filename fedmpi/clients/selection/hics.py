"""HiCS-FL: clusters of clients by the label entropy that updates of their output layers reveal."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi import Cohort, UserError, client_sampler, draw_without_replacement


@client_sampler(name="hics", needs=("head_update",))
def hics(
    view: Any,
    *,
    horizon: Annotated[int, Field(ge=1)] = 500,
    gamma: Annotated[float, Field(ge=0)] = 4.0,
    temperature: Annotated[float, Field(gt=0)] = 0.0025,
    entropy_weight: Annotated[float, Field(ge=0)] = 10.0,
    groups: Annotated[int, Field(ge=1)] | None = None,
    pool: Annotated[int, Field(ge=2)] = 1000,
    layers: tuple[str, ...] = ("*bias",),
) -> Cohort:
    """Prefer groups of clients with balanced labels, estimated from their updates (Chen and Vikalo 2024, HiCS-FL).

    Clients without a known update come first, drawn uniformly (Algorithm 1, lines 3-4). Then, with Δb_k the last update
    of the output layer's bias by client k and C classes:

    - Label entropy: Ĥ_k = H(softmax(Δb_k / T)) (Eq. 7), from 0 (one class) to ln C (balanced).
    - Distance of clients u and k: arccos(Δb_u · Δb_k / (‖Δb_u‖ ‖Δb_k‖)) + λ |Ĥ_u − Ĥ_k| (Eq. 9).
    - Ward's method makes M groups, with the rows of the matrix of distances as points (line 6; the text leaves this
      open, and the paper's public code decides). H̄ is the mean entropy of a group.
    - Until m clients are selected, draw a group in proportion to exp(γ_t H̄), and from it client k in proportion to n_k
      (Eq. 10, lines 8-12). Line 11 makes a set: clients drawn again are ignored.
    - γ_t = γ_0 (1 − t/T_max) in round t, counted from 1, favours balanced clients at first.

    Line 17 averages the models equally: `server.weights = "uniform"`.

    Deviations from the paper:

    - Clients that become available later come first too (Section 4.4 has no rule for several of them). If those without
      a known update are fewer than m, draws by group fill the cohort, which the paper leaves smaller.
    - Only available clients with samples are grouped.
    - The public code contradicts the paper: Ĥ from the output layer's weights, whole layers in Eq. 9, uniform draws
      within a group, t counted from 0, clustered sampling if the variance of Ĥ is at least 0.1, and updates of the
      first rounds only if the clients' data differ in heterogeneity. None of this is done here.
    - With more than `pool` clients, groups are made of that many, drawn uniformly, and each of the others joins the
      group of the client at the smallest distance: the matrix needs memory in proportion to the square of `pool`.

    Parameters
    ----------
    horizon : int
        T_max, the rounds after which all groups are equally probable; set it to the number of rounds.
    gamma : float
        γ_0, the preference for balanced clients at first.
    temperature : float
        T: larger updates (a higher learning rate, more steps) need a larger one.
    entropy_weight : float
        λ.
    groups : int
        M; m by default.
    pool : int
        Largest number of clients that are compared with each other.
    layers : tuple of str
        Patterns of the parameters whose updates are kept; the last C values must be the output layer's bias.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # slow to import
    from scipy.spatial.distance import squareform

    update, classes = view.last("head_update"), view.class_counts.shape[1]
    if update.shape[1] < classes:
        found = f"clients.sampler.layers = {list(layers)} match {update.shape[1]} parameters"
        raise UserError(
            f"{found}, but the bias of the output layer has {classes}. Choose other layers or another model"
        )
    unseen, count = view.age("head_update")[view.eligible] < 0, min(view.count, len(view.eligible))
    first = view.generator.choice(view.eligible[unseen], min(count, unseen.sum()), replace=False)
    seen, more = view.eligible[~unseen], count - len(first)
    if not more:
        return Cohort(np.sort(first))
    bias = update[seen, -classes:].astype(np.float64)
    share = np.exp((bias - bias.max(1, keepdims=True)) / temperature)
    share /= share.sum(1, keepdims=True)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1)
    length = np.sqrt((bias**2).sum(1))
    unit = bias / np.where(length > 0, length, 1)[:, None]

    def distances(some: Any, others: Any) -> Any:
        angle = np.arccos(np.clip(unit[some] @ unit[others].T, -1, 1)) * np.outer(length[some] > 0, length[others] > 0)
        return angle + entropy_weight * np.abs(entropy[some, None] - entropy[others])

    group, core = np.zeros(len(seen), np.int64), np.arange(len(seen))
    core = core if len(seen) <= pool else np.sort(view.generator.choice(core, pool, replace=False))
    if len(core) > 1:
        rows = distances(core, core)
        square = (rows**2).sum(1)
        apart = np.sqrt(np.maximum(square[:, None] + square - 2 * rows @ rows.T, 0))
        group[core] = fcluster(linkage(squareform(apart, checks=False), "ward"), groups or view.count, "maxclust") - 1
    rest = np.setdiff1d(np.arange(len(seen)), core)
    for block in np.array_split(rest, -(-len(rest) // pool) or 1):
        group[block] = group[core[distances(block, core).argmin(1)]]
    mean = np.bincount(group, entropy) / np.maximum(np.bincount(group), 1)
    gamma_t = gamma * max(0.0, 1 - (view.round + 1) / horizon)
    sizes = view.sizes[seen]
    chance = np.exp(gamma_t * (mean - mean.max()))[group] * sizes / np.bincount(group, sizes)[group]
    drawn = seen[draw_without_replacement(view.generator, chance, more)]
    return Cohort(np.sort(np.concatenate([first, drawn])))
