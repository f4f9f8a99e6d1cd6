"""Bandits on the global reward: the clients of a round share its change of the global loss or accuracy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi import Cohort, UserError, client_sampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

Metric = Annotated[str, Field(pattern="^(train|test|val)_")]


@client_sampler(name="ucb", needs=("history",))
def ucb(view: Any, *, metric: Metric = "train_loss", exploration: Annotated[float, Field(ge=0)] = 1.5) -> Cohort:
    """Select the m clients with the highest upper confidence bounds of their mean reward, unrewarded ones first.

    The bound of client k in round t, counted from 1, is x̄_k + √(c ln t / T_k). T_k counts the rewards of the client and
    x̄_k is their mean. UCB1 (Auer, Cesa-Bianchi and Fischer 2002, Figure 1) has c = 2 and one arm per round. CUCB (Chen,
    Wang and Yuan 2013, Algorithm 1) has c = 3/2 and plays the best set for all bounds, here the m largest ones. Both
    play every arm once first. The reward of a round is the decrease of a loss, or the increase of another metric, and
    every client whose update arrived earns it.

    Deviations:

    - Both papers have rewards from 0 to 1, and CUCB a reward for each arm of the set. Here the rewards of all rounds so
      far are scaled so that the smallest is 0 and the largest is 1, and all clients of a round earn the same one.
    - The rounds from one value of the metric to the next share its change equally. The first round with the metric
      earns no reward, as no value precedes it.
    - Unrewarded clients, and clients with equal bounds, are taken in random order. Clients without samples are never
      selected.

    The default metric, the mean training loss of the round's clients, is in the record of every round. It depends on
    these clients, while test_loss, test_accuracy and other scores do not.

    Parameters
    ----------
    metric : str
        Number in the records of the rounds: train_loss, or a score on test or validation samples such as test_accuracy.
        A name that contains "loss" or "error" is better if it is lower.
    exploration : float
        c: 1.5 for CUCB, 2 for UCB1, 0 for no exploration.
    """
    times, sums = _rewards(view, metric)
    seen = np.maximum(times, 1)
    bound = np.where(times > 0, sums / seen + np.sqrt(exploration * math.log(view.round + 1) / seen), np.inf)
    return _highest(view, bound)


@client_sampler(name="thompson", needs=("history",))
def thompson(view: Any, *, metric: Metric = "train_loss", deviation: Annotated[float, Field(ge=0)] = 1.0) -> Cohort:
    """Select the m clients with the highest mean rewards drawn from their posteriors.

    Agrawal and Goyal 2013 ("Further Optimal Regret Bounds for Thompson Sampling", Algorithm 2, Gaussian priors): in
    every round each client k draws θ_k from the normal distribution with mean Σ r / (T_k + 1) and variance
    σ² / (T_k + 1). T_k counts the rewards r of the client. Unrewarded clients draw from mean 0 and variance σ². Rewards
    are those of the sampler `ucb`.

    Deviations: those of `ucb` in the rewards. The paper plays one arm per round, here the m largest θ_k are selected.
    The paper has σ = 1.

    Parameters
    ----------
    metric : str
        Number in the records of the rounds, as for `ucb`.
    deviation : float
        σ, standard deviation of the posterior after no reward.
    """
    times, sums = _rewards(view, metric)
    drawn = sums / (times + 1) + deviation / np.sqrt(times + 1) * view.generator.standard_normal(len(times))
    return _highest(view, drawn)


def _rewards(view: Any, metric: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the number of rewards of every client (N,) and their sum (N,), scaled to 0 … 1 over all rounds so far."""
    values = np.array([past.metrics.get(metric, np.nan) for past in view.history], float)
    known = np.flatnonzero(~np.isnan(values))
    group = {name for past in view.history for name in past.metrics if name.startswith(metric.partition("_")[0])}
    if group and not len(known):
        names = ", ".join(sorted(group))
        raise UserError(f'clients.sampler.metric = "{metric}" is not in the records of the rounds. Choose from {names}')
    clients = len(view.sizes)
    if len(known) < 2:
        return np.zeros(clients, np.int64), np.zeros(clients)
    lengths = np.diff(known)
    change = np.repeat(np.diff(values[known]) / lengths, lengths)
    reward = -change if "loss" in metric or "error" in metric else change
    scaled = (reward - reward.min()) / (np.ptp(reward) or 1.0)
    arrived = [past.arrived for past in view.history[known[0] + 1 : known[-1] + 1]]
    who, sums = np.concatenate(arrived), np.zeros(clients)
    np.add.at(sums, who, np.repeat(scaled, [len(some) for some in arrived]))
    return np.bincount(who, minlength=clients), sums


def _highest(view: Any, score: NDArray[np.float64]) -> Cohort:
    """Select the available clients with samples that score highest; equal scores in random order."""
    order = view.generator.permutation(view.eligible)
    return Cohort(np.sort(order[np.argsort(-score[order], kind="stable")[: view.count]]))
