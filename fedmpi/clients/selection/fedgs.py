"""FedGS: clients with different label distributions, all selected about equally often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi import Cohort, UserError, client_sampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_CLIENTS = 5_000
"""Most clients whose distances are computed: 200 MB, and minutes for the shortest paths."""


@client_sampler(name="fedgs")
class FedGS:
    """Select clients that are far apart on a graph of label distributions, and were selected equally often.

    Wang, Fan, Qi, Jin, Yang, Shen and Wang 2023 (AAAI, "FedGS: Federated Graph-based Sampling with Arbitrary Client
    Availability"). The Data-Distribution-Dependency Graph (3DG) has an edge between clients i and j if their similarity
    V_ij, the cosine of their label distributions divided by the largest one of two clients, exceeds ε. Its length is
    exp(−V_ij² / σ²). The distances h_ij are the lengths of the shortest paths (Floyd-Warshall) over the longest one,
    and 1 without a path. Of the available clients, a round selects the set S of M clients that maximises

        α · 2 / (M (M − 1)) · Σ_{i<j in S} h_ij − 1 / (N − 1) · Σ_{i in S} (2 (v_i − v̄ − M / N) + 1)

    where v_i counts the selections of client i so far, v̄ is their mean, and N is the number of clients. Up to a
    constant, the second term is the variance of the counts after the round.

    The N × N distances take 8 N² bytes on the server and a time of order N³ in the first round. More than 5,000 clients
    are rejected.

    Deviations:

    - The authors' code solves the problem with Gurobi for at most 5 seconds. Its result thus depends on the machine.
      Here clients are added greedily, and then swapped one for one while the objective grows. The objective is rounded
      to 12 decimals, and a random order decides between equal values.
    - Label distributions come from the class counts, the "oracle" graph of the paper. Its graphs from updates or
      outputs are left out.
    - The authors' code makes the graph with ε = 0.01 and σ² = 0.1; the defaults here are the paper's values.
    - Clients without samples are never selected.

    Parameters
    ----------
    alpha : float
        α, weight of the distances against the variance of the counts; 0 ignores the graph.
    epsilon : float
        ε, similarity up to which two clients have no edge.
    sigma2 : float
        σ², scale of the similarity in the length of an edge.
    """

    state = ("times",)

    def __init__(
        self,
        *,
        alpha: Annotated[float, Field(ge=0)] = 0.1,
        epsilon: Annotated[float, Field(ge=0, le=1)] = 0.1,
        sigma2: Annotated[float, Field(gt=0)] = 0.01,
    ):
        self.alpha, self.epsilon, self.sigma2 = alpha, epsilon, sigma2
        self.times: Any = None  # (N,): v, selections of each client
        self._distances: Any = None  # (N, N): h

    def draw(self, view: Any) -> Cohort:
        """Select the clients of a round and count them."""
        if self._distances is None:
            self._distances = self.distances(view.class_counts)
        if self.times is None:
            self.times = np.zeros(len(view.sizes), np.int64)
        order = view.generator.permutation(view.eligible)
        count = min(view.count, len(order))
        clients = len(self.times)
        growth = 2 * (self.times[order] - self.times.mean() - count / clients) + 1
        alone = -growth / max(clients - 1, 1)
        weight = 2 * self.alpha / max(count * (count - 1), 1)
        chosen = np.sort(order[_dispersed(self._distances, order, alone, weight, count)])
        self.times[chosen] += 1
        return Cohort(chosen)

    def distances(self, class_counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the scaled lengths of the shortest paths of the 3DG (N, N) from the class counts (N, C)."""
        from scipy.sparse import csgraph  # slow to import

        clients = len(class_counts)
        if clients > MOST_CLIENTS:
            raise UserError(
                f'clients.sampler = "fedgs" computes the distances of all pairs of clients, for at most '
                f"{MOST_CLIENTS:,} clients. The data have {clients:,}. Choose another sampler"
            )
        lengths = np.linalg.norm(class_counts, axis=1, keepdims=True)
        unit = class_counts / np.maximum(lengths, 1)
        similarity = unit @ unit.T
        np.fill_diagonal(similarity, 0)
        similarity /= similarity.max() or 1.0
        edges = np.where(similarity > self.epsilon, np.exp(-(similarity**2) / self.sigma2), np.inf)
        graph = csgraph.csgraph_from_dense(edges, null_value=np.inf)  # keeps lengths that are rounded to zero
        paths: NDArray[np.float64] = csgraph.floyd_warshall(graph, directed=False)
        connected = np.isfinite(paths)
        paths /= paths[connected].max() or 1.0
        paths[~connected] = 1.0
        return paths


def _dispersed(
    distances: NDArray[np.float64], order: NDArray[np.int64], alone: NDArray[np.float64], weight: float, count: int
) -> NDArray[np.int64]:
    """Return the positions in `order` of a set with a large sum of `alone` and of weighted distances of its pairs."""
    inside = np.zeros(len(order), bool)
    value = alone.copy()  # of every client with those inside
    for _ in range(count):
        best = np.argmax(np.where(inside, -np.inf, value.round(12)))
        inside[best] = True
        value += weight * distances[order, order[best]]
    while not inside.all():
        ins, outs = np.flatnonzero(inside), np.flatnonzero(~inside)
        gain = value[outs] - value[ins, None] - weight * distances[np.ix_(order[ins], order[outs])]
        place = np.argmax(gain.round(12))
        leaves, enters = ins[place // len(outs)], outs[place % len(outs)]
        if not ins.size or gain.flat[place].round(12) <= 0:
            break
        inside[leaves], inside[enters] = False, True
        value += weight * (distances[order, order[enters]] - distances[order, order[leaves]])
    return np.flatnonzero(inside)
