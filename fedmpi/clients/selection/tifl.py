"""TiFL: tiers of clients with similar latencies (Chai et al. 2020)."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi import Cohort, UserError, client_sampler

Credits = Annotated[int, Field(ge=0)]


@client_sampler(name="tifl", measures=("val_accuracy", "seconds"))
class TierBased:
    """Select all clients of a round from one tier of similar speed, and tiers with low accuracy more often.

    Chai et al. 2020, "TiFL: A Tier-based Federated Learning System", §4.2 and Algorithm 2. Clients are profiled (here
    by their simulated seconds per round), sorted, and divided into T tiers of equal size. In round r = I, 2I, …, if
    the held-out accuracy of the current tier has not increased since round r − I, ChangeProbs gives the n tiers
    with credits the probability (n − k) / (1 + … + n), where k = 0, …, n − 1 counts tiers of lower accuracy. A tier is
    drawn with its probability among those with credits, at the cost of one credit, and m of its clients uniformly.

    Parameters
    ----------
    tiers : int
        T.
    interval : int
        I, rounds from one update of the probabilities to the next.
    credits : int or tuple of int
        Credits_t: how often a tier can be selected, one number for all or one per tier, the fastest first.
    timeout : float, optional
        T_max in seconds: slower clients count as dropouts and are never selected.

    Notes
    -----
    Deviations: the paper does not give ChangeProbs and the initial credits; the rule above is that of bacox/fltk and
    flgo, and fltk's credits are ⌈rounds / T⌉ (20 suit 100 rounds). If no tier with available clients has credits, all
    get their initial credits again, where the paper's loop would not end. If every tier with credits and available
    clients has probability 0, one of them is drawn uniformly. The paper divides a histogram of the clients' mean
    latencies over several rounds into tiers, and leaves open how; here each profile is one round, and tier sizes differ
    by at most one. A tier's accuracy is the mean of its available clients' held-out accuracies, weighted by n_k instead
    of by held-out samples. Accuracies are those at the start of a round, also for round 0. Clients are profiled when
    they are first available, and again every I rounds; tiers are formed anew then.
    """

    state = ("seconds", "accuracy", "probabilities", "left", "current")

    def __init__(
        self,
        *,
        tiers: Annotated[int, Field(ge=1)] = 5,
        interval: Annotated[int, Field(ge=1)] = 10,
        credits: Credits | tuple[Credits, ...] = 20,
        timeout: Annotated[float, Field(gt=0)] | None = None,
    ):
        given = np.atleast_1d(np.array(credits, np.int64))
        if len(given) not in (1, tiers):
            raise UserError(f"credits has {len(given)} values for {tiers} tiers. Give one per tier, or one number")
        self.tiers, self.interval, self.timeout = tiers, interval, timeout or np.inf
        self.credits: NDArray[np.int64] = np.broadcast_to(given, (tiers,))
        self.seconds: Any = None
        self.accuracy, self.probabilities = np.zeros(tiers), np.full(tiers, 1 / tiers)
        self.left, self.current = self.credits.copy(), 0

    def candidates(self, view: Any) -> NDArray[np.int64]:
        """Return the available clients to be profiled: every I rounds all, otherwise those never profiled."""
        if self.seconds is None:
            self.seconds = np.full(len(view.sizes), np.nan)
        new = np.isnan(self.seconds[view.eligible])
        return np.asarray(view.eligible if view.round % self.interval == 0 else view.eligible[new])

    def draw(self, view: Any) -> Cohort:
        """Draw a tier, and clients uniformly from it."""
        fresh = view.fresh("seconds")
        self.seconds = np.where(np.isnan(fresh), self.seconds, fresh)
        profiled = np.flatnonzero(self.seconds <= self.timeout)
        order = profiled[np.argsort(self.seconds[profiled], kind="stable")]
        tier_of = np.full(len(view.sizes), -1)
        tier_of[order] = np.arange(len(order)) * self.tiers // max(1, len(order))
        if view.round % self.interval == 0:
            self._change_probabilities(view, tier_of)
        here = view.available[tier_of[view.available] >= 0]
        members = np.bincount(tier_of[here], minlength=self.tiers)
        if not len(here):
            return Cohort(here)
        if not (self.left[members > 0] > 0).any():
            self.left = self.credits.copy()
        open_tiers = (members > 0) & (self.left > 0)
        chances = self.probabilities * open_tiers if (self.probabilities * open_tiers).any() else open_tiers
        self.current = int(view.generator.choice(self.tiers, p=chances / chances.sum()))
        self.left[self.current] -= 1
        tier = here[tier_of[here] == self.current]
        chosen = view.generator.choice(tier, min(view.count, len(tier)), replace=False)
        return Cohort(np.sort(chosen), numbers={"tier": self.current})

    def _change_probabilities(self, view: Any, tier_of: NDArray[np.int64]) -> None:
        """Update the tiers' accuracies, and their probabilities if the current tier has not improved."""
        before, correct = self.accuracy, view.fresh("val_accuracy") * view.sizes
        known = np.flatnonzero((tier_of >= 0) & ~np.isnan(correct))
        samples = np.bincount(tier_of[known], view.sizes[known], self.tiers)
        right = np.bincount(tier_of[known], correct[known], self.tiers)
        self.accuracy = np.where(samples > 0, right / np.maximum(samples, 1), before)
        if view.round and self.accuracy[self.current] <= before[self.current]:
            eligible = np.flatnonzero(self.left > 0)
            ascending = eligible[np.argsort(self.accuracy[eligible], kind="stable")]
            self.probabilities = np.zeros(self.tiers)
            self.probabilities[ascending] = np.arange(len(eligible), 0, -1) / (len(eligible) * (len(eligible) + 1) / 2)
