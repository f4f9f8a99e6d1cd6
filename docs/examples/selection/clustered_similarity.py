"""Clustered sampling by similarity: clients.sampler = "clustered_similarity:one_per_group"."""

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

from fedmpi import Cohort, client_sampler


@client_sampler(needs=("update_sketch",))
def one_per_group(view, *, sketch_size: int = 64) -> Cohort:
    """Cut Ward's tree into groups of at most n/m samples, fill m urns group after group, and draw a client from each.

    The paper clusters rows of arccos similarities, and puts the m largest groups whole into one urn each.

    Parameters
    ----------
    sketch_size : int
        Values that represent an update.
    """
    clients = view.eligible
    sizes, n = view.sizes[clients], view.sizes[clients].sum()
    if len(clients) < 2:
        return Cohort(clients, np.full(len(clients), view.count), np.full(len(clients), view.count))
    updates = np.nan_to_num(view.sketches[clients])
    updates /= np.maximum(np.linalg.norm(updates, axis=1, keepdims=True), 1e-12)
    tree = linkage(updates, "ward")  # points on the unit sphere, whose distances grow with the angle
    mass = list(view.count * sizes)  # m n_k balls of each client; n balls fit into an urn
    for one, other in tree[:, :2].astype(int):
        mass.append(mass[one] + mass[other])
    tree[:, 2] = mass[len(clients) :]
    group = fcluster(tree, n, "distance")
    total = np.bincount(group, view.count * sizes)
    ranked = np.lexsort((group, -total[group]))  # the largest groups first
    bounds = np.cumsum(view.count * sizes[ranked])
    balls = n * np.arange(view.count) + view.generator.integers(0, n, view.count)
    drawn, times = np.unique(ranked[np.searchsorted(bounds, balls, side="right")], return_counts=True)
    return Cohort(clients[drawn], view.count * sizes[drawn] / n, times)
