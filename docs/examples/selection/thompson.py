"""Thompson sampling on the global loss: clients.sampler = "thompson:thompson"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(needs=("history",))
def thompson(view, *, metric: str = "train_loss", deviation: float = 1.0) -> Cohort:
    """Select the highest draws from Gaussian posteriors of the mean decrease of a metric (Agrawal and Goyal 2013).

    Parameters
    ----------
    metric : str
        Number in the records of the rounds that should decrease.
    deviation : float
        Standard deviation of the posterior of a client that was never selected.
    """
    history = [past for past in view.history if metric in past.metrics]  # others had no clients
    value = np.array([past.metrics[metric] for past in history])
    reward = -np.diff(value)
    reward = (reward - reward.min(initial=0)) / (np.ptp(reward) if len(reward) > 1 else 1)
    times, total = np.zeros(len(view.sizes)), np.zeros(len(view.sizes))
    for past, earned in zip(history[1:], reward, strict=False):
        times[past.arrived] += 1
        total[past.arrived] += earned
    drawn = view.generator.normal(total / (times + 1), deviation / np.sqrt(times + 1))
    best = view.available[np.argsort(-drawn[view.available])[: view.count]]
    return Cohort(np.sort(best))
