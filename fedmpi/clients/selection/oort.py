"""Oort: guided selection by utility and speed (Lai et al. 2021), and its statistical part alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi import Cohort, client_sampler, draw_without_replacement

Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def at_share(values: Floats, share: float) -> float:
    """Return the value (k,) above a share of the others, rounded upwards as in the authors' code."""
    return float(np.sort(values)[min(int(share * len(values)), len(values) - 1)])


@client_sampler(name="oort-loss", needs=("loss_rms",))
@dataclass(kw_only=True, eq=False)
class OortByLoss:
    """Explore unseen clients, and exploit those with high statistical utility ("Oort w/o Sys", Lai et al. 2021, OSDI).

    Algorithm 1 without the preferred round duration, for runs without simulated devices. In round R, from 1:

    - U_i = n_i √(mean of the squared losses of client i's n_i samples), when it was last selected (§4.2).
    - u_i = (min(U_i, cap) − min U) / (max U − min U) + √(stale · ln R / L_i). L_i is the round of its last selection,
      and cap the 95th percentile of U (§4.4). The second term is the temporal uncertainty.
    - Of K clients, ⌊ε K⌋ are unseen ones, with ε = max(0.2, 0.9 · 0.98^(R−1)). The others are drawn one by one in
      proportion to u_i among the seen clients with at least c times the utility of the last that fits.
    - Clients that were selected often are excluded (§4.4).

    Deviations
    ----------
    The scaling of U_i to [0, 1] is that of the authors' code (with min U taken 0.1 % lower); the paper adds U_i itself.
    Losses are measured in evaluation mode on the model that the client received; the paper takes them from training.
    Unseen clients are drawn uniformly. If one of the two groups is too small, the other fills the cohort. ε K is
    rounded down; the paper leaves this open, and the authors' code rounds it up. Clients without samples are never
    selected. Noise for privacy (§4.2) is left to `privacy`.

    Parameters
    ----------
    explore : float
        ε of the first round, the share of unseen clients in the cohort.
    explore_decay : float
        Factor of ε from round to round.
    explore_least : float
        Lower bound of ε.
    cutoff : float
        c, the share of the cut-off utility from which on clients are exploited.
    clip : float
        Share of the utilities that are below the cap.
    stale : float
        Factor of the temporal uncertainty, 0.1 in the paper.
    exclude_after : int, optional
        Selections of a client after which it is excluded: 10 in the paper; by default never, as in the authors' code.
    exclude_most : float
        Largest share of all clients that are excluded, those selected most often.
    """

    explore: Share = 0.9
    explore_decay: Share = 0.98
    explore_least: Share = 0.2
    cutoff: Share = 0.95
    clip: Share = 0.95
    stale: Factor = 0.1
    exclude_after: Count | None = None
    exclude_most: Share = 0.3
    picked: Ints = field(default_factory=lambda: np.zeros(0, np.int64), init=False)  # (N,): selections of each client
    state: ClassVar[tuple[str, ...]] = ("picked",)

    def draw(self, view: Any) -> Cohort:
        """Select unseen clients, and seen ones by utility."""
        if not len(self.picked):
            self.picked = np.zeros(len(view.sizes), np.int64)
        fit = view.eligible
        if self.exclude_after is not None:
            often = np.argsort(-self.picked, kind="stable")[: int(self.exclude_most * len(self.picked))]
            fit = np.setdiff1d(fit, often[self.picked[often] > self.exclude_after])
        seen = view.age("loss_rms")[fit] >= 0
        known, unknown, count = fit[seen], fit[~seen], min(view.count, len(fit))
        share = max(self.explore_least, self.explore * self.explore_decay**view.round)
        unseen = min(len(unknown), max(int(share * count), count - len(known)))
        exploited = self._exploited(view, known, count - unseen)
        explored = unknown[draw_without_replacement(view.generator, self.speed(view, unknown), unseen)]
        chosen = np.sort(np.concatenate([exploited, explored]))
        self.picked[chosen] += 1
        return Cohort(chosen)

    def _exploited(self, view: Any, known: Ints, count: int) -> Ints:
        if not count:
            return known[:0]
        utility = self.utility(view, known)
        high = utility >= self.cutoff * np.partition(utility, len(utility) - count)[len(utility) - count]
        return np.asarray(known[high][draw_without_replacement(view.generator, utility[high], count)])

    def utility(self, view: Any, clients: Ints) -> Floats:
        """Return u_i of clients (k,) that have been seen, float64 (k,)."""
        value, now = view.sizes[clients] * view.last("loss_rms")[clients], view.round + 1
        least = 0.999 * value.min()  # this factor and the least range are those of the authors' code
        scaled = (np.minimum(value, at_share(value, self.clip)) - least) / max(value.max() - least, 1e-4)
        return np.asarray(scaled + np.sqrt(self.stale * math.log(now) / (now - view.age("loss_rms")[clients])))

    def speed(self, view: Any, clients: Ints) -> Floats:
        """Return weights of unseen clients (k,) for exploration, float64 (k,)."""
        return np.ones(len(clients))


@client_sampler(name="oort", needs=("loss_rms", "seconds"), measures=("seconds",))
@dataclass(kw_only=True, eq=False)
class Oort(OortByLoss):
    """Select clients by utility of their losses and speed, with a pacer (Lai et al. 2021, OSDI, Algorithm 1).

    To the utility u_i of `oort-loss` and its other rules, this adds:

    - Global system utility (§4.3): u_i is multiplied by (T / t_i)^α if client i took t_i > T seconds.
    - Pacer (§4.3): T grows if the participants' Σ U_i over the last W rounds is below that of the W rounds before.
    - Exploration by speed: unseen clients are drawn one by one in proportion to 1 / t_i, where t_i are the
      seconds that they would take.

    Needs simulated time, `devices`. Without it, choose `oort-loss`.

    Deviations
    ----------
    Those of `oort-loss`, whose options it has, except that unseen clients are drawn by speed. T is a quantile of the
    clients' known seconds, and the pacer raises its level, as in the authors' code. The paper starts with T = Δ seconds
    and adds Δ, chosen to cover the seconds of the next W K seen clients. The pacer compares every W rounds, as in the
    authors' code, instead of in every round. The rule of that code differs: T grows if the mean utility of the
    exploited clients has changed by at most a tenth, and falls if it has become six times as high.

    Parameters
    ----------
    penalty : float
        α, exponent of the penalty of slow clients.
    preferred : float
        Share of the clients that are faster than T at the start.
    pacer : float
        Δ, added to this share by the pacer.
    window : int
        W, rounds that the pacer compares.
    """

    penalty: Factor = 2.0
    preferred: Share = 0.3
    pacer: Share = 0.05
    window: Count = 20
    relaxed: int = field(default=0, init=False)  # how often T has grown
    achieved: Floats = field(default_factory=lambda: np.zeros(0), init=False)  # (≤ 2W,): Σ U_i of the last rounds
    state: ClassVar[tuple[str, ...]] = ("picked", "relaxed", "achieved")

    def candidates(self, view: Any) -> Ints:
        """Return the unseen clients, whose seconds weigh in their draw."""
        return np.asarray(view.available[view.age("loss_rms")[view.available] < 0])

    def draw(self, view: Any) -> Cohort:
        """Set the pace, and select."""
        if view.round:
            gained = (view.sizes * view.last("loss_rms"))[view.age("loss_rms") == 1].sum()
            self.achieved = np.append(self.achieved, gained)[-2 * self.window :]
        before, after = self.achieved[: self.window], self.achieved[self.window :]
        if len(before) == len(after) and view.round % self.window == 0 and before.sum() > after.sum():
            self.relaxed += 1
        return super().draw(view)

    def utility(self, view: Any, clients: Ints) -> Floats:
        """Return u_i of clients (k,) that have been seen, with the penalty of slow ones, float64 (k,)."""
        utility, seconds = super().utility(view, clients), view.last("seconds")
        known = np.where(np.isnan(seconds), view.fresh("seconds"), seconds)
        preferred = at_share(known[~np.isnan(known)], self.preferred + self.pacer * self.relaxed)
        slow = seconds[clients] > preferred
        utility[slow] *= (preferred / seconds[clients[slow]]) ** self.penalty
        return utility

    def speed(self, view: Any, clients: Ints) -> Floats:
        """Return 1 / t_i of unseen clients (k,), float64 (k,)."""
        return np.asarray(1.0 / view.fresh("seconds")[clients])


Oort.__init__.__doc__ = OortByLoss.__doc__  # describes the inherited options
