"""HiCS-FL: clients.sampler = "hics:balanced_first"."""

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.special import softmax
from scipy.stats import entropy

from fedmpi import Cohort, client_sampler, draw_without_replacement


@client_sampler(needs=("head_update",))
def balanced_first(view, *, horizon: int = 100, gamma: float = 4.0, temperature: float = 0.0025) -> Cohort:
    """Prefer groups of clients with balanced labels, estimated from the output layer's bias (Chen and Vikalo 2024).

    Parameters
    ----------
    horizon : int
        Rounds after which all groups are equally probable.
    gamma : float
        Preference for balanced clients at first.
    temperature : float
        Temperature of the softmax of the bias's update.
    """
    unseen = view.eligible[view.age("head_update")[view.eligible] < 0]
    first = view.generator.choice(unseen, min(view.count, len(unseen)), replace=False)
    seen = np.setdiff1d(view.eligible, unseen)
    bias = view.last("head_update")[seen, -view.class_counts.shape[1] :]  # the layer's weight comes before
    balance = entropy(softmax(bias / temperature, axis=1), axis=1)
    group = np.zeros(len(seen), int)
    if len(seen) > 1:
        direction = bias / np.linalg.norm(bias, axis=1, keepdims=True)
        tree = linkage(np.column_stack([direction, 10 * balance]), "ward")
        group = fcluster(tree, view.count, "maxclust") - 1
    mean = np.bincount(group, balance) / np.bincount(group)
    weight = np.exp(gamma * max(0, 1 - view.round / horizon) * mean)[group] / np.bincount(group)[group]
    drawn = seen[draw_without_replacement(view.generator, weight, view.count - len(first))]
    return Cohort(np.sort(np.concatenate([first, drawn])))
