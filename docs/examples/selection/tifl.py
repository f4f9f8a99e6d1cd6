"""TiFL: clients.sampler = "tifl:Tiers", devices = true. The data need held-out samples (--val)."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(measures=("val_accuracy", "seconds"))
class Tiers:
    """Select clients of one speed tier, more often from tiers of low accuracy (Chai et al. 2020, Algorithm 2).

    Parameters
    ----------
    tiers : int
        Number of tiers.
    interval : int
        Rounds from one update of the tiers' probabilities to the next.
    """

    state = ("tier_of", "chances")

    def __init__(self, *, tiers: int = 3, interval: int = 2):
        self.tiers, self.interval, self.tier_of, self.chances = tiers, interval, None, np.full(tiers, 1 / tiers)

    def candidates(self, view) -> np.ndarray:
        return view.available if view.round % self.interval == 0 else view.available[:0]

    def draw(self, view) -> Cohort:
        if self.tier_of is None:  # clients that are unavailable now count as slow
            self.tier_of = np.argsort(np.argsort(view.fresh("seconds"))) * self.tiers // len(view.sizes)
        elif view.round % self.interval == 0:
            accuracy = view.fresh("val_accuracy")
            scores = [np.nanmean(accuracy[self.tier_of == tier]) for tier in range(self.tiers)]
            self.chances = (self.tiers - np.argsort(np.argsort(scores))) / (self.tiers * (self.tiers + 1) / 2)
        tier = view.generator.choice(self.tiers, p=self.chances)
        members = view.available[self.tier_of[view.available] == tier]
        return Cohort(np.sort(view.generator.choice(members, min(view.count, len(members)), replace=False)))
