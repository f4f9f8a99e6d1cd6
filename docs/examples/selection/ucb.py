"""Bandit on the global loss: clients.sampler = "ucb:ucb"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(needs=("history",))
def ucb(view, *, metric: str = "train_loss", exploration: float = 1.5) -> Cohort:
    """Select the highest upper confidence bounds of the mean decrease of a metric (Chen et al. 2013, CUCB).

    Parameters
    ----------
    metric : str
        Number in the records of the rounds that should decrease.
    exploration : float
        Factor of the logarithm in the bound.
    """
    history = [past for past in view.history if metric in past.metrics]  # others had no clients
    value = np.array([past.metrics[metric] for past in history])
    reward = -np.diff(value)
    reward = (reward - reward.min(initial=0)) / (np.ptp(reward) if len(reward) > 1 else 1)
    times, total = np.zeros(len(view.sizes)), np.zeros(len(view.sizes))
    for past, earned in zip(history[1:], reward, strict=False):
        times[past.arrived] += 1
        total[past.arrived] += earned
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = total / times + np.sqrt(exploration * np.log(view.round + 1) / times)
    order = view.generator.permutation(view.available)
    best = np.argsort(-np.where(times > 0, bound, np.inf)[order], kind="stable")[: view.count]
    return Cohort(np.sort(order[best]))
