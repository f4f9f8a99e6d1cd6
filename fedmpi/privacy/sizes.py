"""Private sizes: private size reports under ε-local differential privacy, the server's estimate of the total, and the
privacy loss of a run.

k-ary randomized response (FedSampling, Eq 1, 2, 21), Duchi's and the piecewise mechanism (Wang et al. 2019, "Collecting
and Analyzing Multidimensional Data with Local Differential Privacy", Algorithms 1 and 2) on sizes rescaled from [1, M −
1] to [−1, 1]. Each has a closed-form variance.

The estimate is Ñ, and p = K/Ñ (FedSampling, Eq 2). Private reports range from 1 to M − 1, so an empty client reports 1,
and the estimate is floored at the number of clients queried, as in the authors' published code. Exact sizes are summed
without change.

Randomized reports hide n_k from the server only if nothing else reveals it: weights made of n_k, draws by size, class
counts (whose sum is n_k).

ε adds up over the reports of a client (Dwork and Roth 2014, Theorem 3.16). A memoized report is drawn once and
repeated, which reveals nothing new and is counted once. A client whose size is revealed otherwise, by an unclipped
report above M − 1 or by an open use of n_k elsewhere, has no guarantee: its ε is infinite from then on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fedmpi.common.apportionment import blocks
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.config.tables import Mediators, stratification

SMALLEST_EPSILON, LARGEST_EPSILON = 1e-6, 500.0
CLIPPING_WORTH_A_WARNING = 0.05
SEES_NO_SIZES = ("all", "uniform", "importance", "stratified")
"""Samplers that do not use the clients' sizes."""
WEIGHED_BY_SIZE = ("normalized", "unbiased", "literal")
WEIGHED_BY_USE = ("samples", "gradient-sum", "gradient-sum-squared")


@dataclass(frozen=True)
class Mechanism(ABC):
    """Randomized size report; sizes are in 1 … M − 1 (see `clip_sizes`)."""

    epsilon: float  # ε > 0 of one report
    threshold: int  # M ≥ 3

    @abstractmethod
    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        """Return every client's report, float64 (N,), drawn in client order."""

    @abstractmethod
    def total(self, answers: Floats) -> float:
        """Return the unbiased estimate of Σ sizes from the reports."""

    @abstractmethod
    def variance(self, sizes: Ints) -> Floats:
        """Return each client's contribution to the variance of `total`, float64 (N,)."""


class Exact(Mechanism):
    """True size, without privacy."""

    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        return sizes.astype(np.float64)

    def total(self, answers: Floats) -> float:
        return float(answers.sum())

    def variance(self, sizes: Ints) -> Floats:
        return np.zeros(sizes.size)


class RescaledAnswer(Mechanism):
    """Unbiased report of the size rescaled from [1, M − 1] to [−1, 1]."""

    def total(self, answers: Floats) -> float:
        """Return Σ of the reports, in samples: N·M/2 + (M/2 − 1)·Σ answers."""
        return answers.size * self.threshold / 2 + (self.threshold / 2 - 1) * float(answers.sum())

    def rescaled(self, sizes: Ints) -> Floats:
        """Rescale sizes 1 … M − 1 to [−1, 1]."""
        return (sizes.astype(np.float64) - self.threshold / 2) / (self.threshold / 2 - 1)


class RandomizedResponse(Mechanism):
    """True size with probability α, else uniform on 1 … M − 1 (FedSampling, Eq 1)."""

    @property
    def truth_probability(self) -> float:
        """α = (e^ε − 1) / (e^ε + M − 2) (Eq 21), written so that a large ε does not overflow."""
        return -math.expm1(-self.epsilon) / (1 + (self.threshold - 2) * math.exp(-self.epsilon))

    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        truthful, answers = np.empty(sizes.size, bool), np.empty(sizes.size)
        for part in blocks(sizes.size):  # `answers` first stores the random numbers, then the reports
            np.less(generator.random(out=answers[part]), self.truth_probability, out=truthful[part])
        for part in blocks(sizes.size):
            answers[part] = generator.integers(1, self.threshold, part.stop - part.start)
            np.copyto(answers[part], sizes[part], where=truthful[part])
        return answers

    def total(self, answers: Floats) -> float:
        """Return Ñ = (R − (1 − α) M N / 2) / α (Eq 2), R the sum of the N reports."""
        alpha = self.truth_probability
        return (float(answers.sum()) - (1 - alpha) * self.threshold * answers.size / 2) / alpha

    def variance(self, sizes: Ints) -> Floats:
        """Return Var(r)/α², r a mixture of n and of a uniform u on 1 … M − 1 with mean M/2 (Eq 5) and variance M(M −
        2)/12: Var(r) = α(1 − α)(n − M/2)² + (1 − α)M(M − 2)/12, a sum without cancellation."""
        truth, m, n = self.truth_probability, self.threshold, sizes.astype(np.float64)
        lie = (m - 1) * math.exp(-self.epsilon) / (1 + (m - 2) * math.exp(-self.epsilon))  # not 0 where α rounds to 1
        return lie * (truth * (n - m / 2) ** 2 + m * (m - 2) / 12) / truth**2


class Duchi(RescaledAnswer):
    """One of two values ±(e^ε + 1)/(e^ε − 1) with the rescaled size as its mean (Duchi et al. 2018)."""

    @property
    def magnitude(self) -> float:
        """(e^ε + 1)/(e^ε − 1) = 1/tanh(ε/2)."""
        return 1 / math.tanh(self.epsilon / 2)

    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        upper = generator.random(sizes.size) < 0.5 + self.rescaled(sizes) / (2 * self.magnitude)
        return np.where(upper, self.magnitude, -self.magnitude)

    def variance(self, sizes: Ints) -> Floats:
        """Return ((e^ε + 1)/(e^ε − 1))² − t² on [−1, 1], in squared samples (Wang et al. 2019, Eq 4), with ((e^ε +
        1)/(e^ε − 1))² = 1 + 1/sinh²(ε/2)."""
        t = self.rescaled(sizes)
        return (1 / math.sinh(self.epsilon / 2) ** 2 + (1 - t) * (1 + t)) * (self.threshold / 2 - 1) ** 2


class Piecewise(RescaledAnswer):
    """Number in [−C, C], denser in a window around the rescaled size (Wang et al. 2019, Algorithm 2)."""

    @property
    def bound(self) -> float:
        """C = (e^{ε/2} + 1)/(e^{ε/2} − 1)."""
        return 1 / math.tanh(self.epsilon / 4)

    def window(self, sizes: Ints) -> tuple[Floats, Floats]:
        """Return ends l and r = l + C − 1 of each size's window."""
        c = self.bound
        left = (c + 1) / 2 * self.rescaled(sizes) - (c - 1) / 2
        return left, left + c - 1

    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        left, right = self.window(sizes)
        inside = generator.random(sizes.size) < 1 / (1 + math.exp(-self.epsilon / 2))  # e^{ε/2}/(e^{ε/2} + 1)
        place = generator.random(sizes.size)
        outside = -self.bound + place * (self.bound + 1)  # the rest of [−C, C] has length C + 1 for any size
        outside = np.where(outside < left, outside, outside + (right - left))
        return np.where(inside, left + place * (right - left), outside)

    def variance(self, sizes: Ints) -> Floats:
        """Return t²/(e^{ε/2} − 1) + (e^{ε/2} + 3)/(3(e^{ε/2} − 1)²) on [−1, 1] (their Lemma 1), in squared samples."""
        s = math.exp(self.epsilon / 2)
        t = self.rescaled(sizes)
        return (t**2 / (s - 1) + (s + 3) / (3 * (s - 1) ** 2)) * (self.threshold / 2 - 1) ** 2


MECHANISMS: dict[str, Callable[[float, int], Mechanism]] = {
    "randomized-response": RandomizedResponse,
    "duchi": Duchi,
    "piecewise": Piecewise,
}


def make_mechanism(mechanism: str, epsilon: float, threshold: int) -> Mechanism:
    """Make the mechanism of a configuration."""
    if mechanism == "exact":
        return Exact(math.inf, threshold)
    if not SMALLEST_EPSILON <= epsilon <= LARGEST_EPSILON:
        raise UserError(f"samples.size.epsilon must lie in [{SMALLEST_EPSILON:g}, {LARGEST_EPSILON:g}], not {epsilon}")
    if threshold < 3:
        raise UserError(f"samples.size.max_size (M) must be at least 3, not {threshold}. Answers run from 1 to M - 1")
    return MECHANISMS[mechanism](epsilon, threshold)


def clip_sizes(sizes: Ints, threshold: int) -> Ints:
    """Clip sizes to 1 … M − 1 (FedSampling §3.3: min(n, M − 1)); an empty client reports 1."""
    return np.clip(sizes, 1, threshold - 1)


@dataclass(frozen=True)
class SizeEstimate:
    """Server's estimate of the total size of the queried clients."""

    # Ñ: exact sizes without change; private reports floored at the number of queried clients, because each reports at
    # least one sample
    total: float
    raw: float  # Ñ before the floor; may be negative
    true_total: int  # Sum of the true sizes: known to the simulation, not to the server
    asked: int  # Number of clients queried
    clipped_fraction: float  # Share of the queried clients whose size is above M − 1
    epsilon: float  # ε of one report; infinite for exact sizes
    # Clients whose report reveals their size: all with exact sizes, those above M − 1 if they do not clip
    unprotected: int
    law: Mechanism = field(repr=False)  # The mechanism
    answered: Ints = field(repr=False)  # (asked,): Reported sizes, after clipping

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of `raw`, in samples, by the mechanism's closed form for the true sizes."""
        return math.sqrt(float(self.law.variance(self.answered).sum()))


def answer_stream(streams: Streams, round: int, memoize: bool) -> np.random.Generator:
    """Return the generator of a round's reports; with `memoize` that of round 0, so every report is permanent."""
    return streams.generator(Purpose.SIZE_ANSWER, 0 if memoize else round)


def estimate_total(
    mechanism: str,
    sizes: Ints,
    epsilon: float,
    threshold: int,
    generator: np.random.Generator,
    clip: bool = True,
    asked: Ints | None = None,
) -> SizeEstimate:
    """Query the clients' sizes and estimate the total.

    Reports are drawn for all clients in index order, so a client's report does not depend on the others queried.
    """
    law = make_mechanism(mechanism, epsilon, threshold)
    exact = isinstance(law, Exact)
    answered = sizes if exact else clip_sizes(sizes, threshold) if clip else np.maximum(sizes, 1)
    answers = law.answer(answered, generator)
    if asked is not None:
        sizes, answered, answers = sizes[asked], answered[asked], answers[asked]
    above = 0 if exact else int(np.count_nonzero(sizes >= threshold))
    raw = law.total(answers)
    return SizeEstimate(
        total=raw if exact else max(raw, float(sizes.size)),
        raw=raw,
        true_total=int(sizes.sum()),
        asked=sizes.size,
        clipped_fraction=above / max(sizes.size, 1),
        epsilon=law.epsilon,
        unprotected=sizes.size if exact else 0 if clip else above,
        law=law,
        answered=answered,
    )


def sampling_probability(wanted: int, total: float) -> float:
    """Return p = min(1, K/Ñ) (FedSampling, Eq 8, capped)."""
    return min(1.0, wanted / total) if total > 0 else 1.0


def saturations(found: SizeEstimate, wanted: int, threshold: int) -> dict[str, str]:
    """Return reasons why this round's data-level sampling is ineffective or biased, and the setting to change.

    The keys are "probability", "clipping" and "unclipped"; a run warns once of each.
    """
    reasons, raised = {}, f"raise samples.size.max_size (now {threshold})"
    if found.true_total and wanted >= found.total:  # otherwise there are no clients to sample from
        reasons["probability"] = (
            f"the sampling probability is 1, so every sample is used: samples.budget = {wanted} is not below the "
            f"{found.total:.0f} samples that the server estimates from the reports of {found.asked} clients. Lower it, "
            f"{raised} if sizes are clipped, or raise samples.size.epsilon"
        )
    if math.isfinite(found.epsilon) and found.unprotected:
        reasons["unclipped"] = (
            f"samples.size.clip = false: {found.unprotected} of the {found.asked} clients have more than M - 1 = "
            f"{threshold - 1} samples and report them without privacy, so that their size_epsilon is infinite. Set "
            f"samples.size.clip = true, or {raised}"
        )
    elif found.clipped_fraction > CLIPPING_WORTH_A_WARNING:
        reasons["clipping"] = (
            f"{found.clipped_fraction:.0%} of the queried clients hold more than M - 1 = {threshold - 1} samples and "
            f"are counted as if they held that many: {raised}"
        )
    return reasons


class Exposure(NamedTuple):
    """Setting that reveals sizes to the server."""

    setting: str  # The key and its value
    all_clients: bool  # True if it reveals the sizes of all clients, not only of the selected ones
    remedy: str  # Setting to use instead

    @property
    def message(self) -> str:
        """One sentence for the log."""
        whose = "every client" if self.all_clients else "every participant"
        return (
            f"{self.setting} reveals the exact size of {whose} to the server, so that samples.size.estimate does not "
            f"protect them and their size_epsilon is infinite; {self.remedy}"
        )


def exposure(config: Config) -> Exposure | None:
    """Return the setting that reveals most sizes beside a private `samples.size.estimate`; None if nothing does."""
    sampler, strata, weights = config.clients.sampler.name, stratification(config), config.server.weights
    stratified, population = sampler == "stratified", weights.options.get("population", "samples")
    scheduling = config.topology.scheduling.name if isinstance(config.topology, Mediators) else "random"
    own, remedy = f'server.weights = "{weights.name}"', 'set it to "uniform" or "gradient-sum"'
    histogram = stratified and strata.features.name == "label-histogram"
    opening = stratified and strata.initial_step and weights.name in WEIGHED_BY_USE
    of_size = weights.name in WEIGHED_BY_SIZE and population == "samples"
    by_samples = f'{own} with population = "samples"', 'set server.weights.population = "clients"'
    settings = {
        Exposure(f'clients.sampler = "{sampler}"', True, 'set it to "uniform"'): sampler not in SEES_NO_SIZES,
        Exposure("rebalance = true", True, "switch it off"): config.rebalance is not None,
        Exposure('clients.sampler.features = "label-histogram"', True, "choose features made of gradients"): histogram,
        Exposure(by_samples[0], True, by_samples[1]): of_size,
        Exposure(f"{own}, which sees all sizes,", True, remedy): weights.foreign,
        Exposure("clients.sampler.initial_step = true", True, "switch it off or choose equal weights"): opening,
        Exposure(f'topology.scheduling = "{scheduling}"', False, 'set it to "random"'): scheduling != "random",
        Exposure(own, False, remedy): weights.name == "samples",
    }
    return next((setting for setting, holds in settings.items() if holds), None)


@dataclass(frozen=True)
class LedgerEntry:
    """State of the ledger after a round."""

    epsilon_round: float  # Largest ε spent by a client in this round (0 if all reports were repeats)
    # Largest ε spent by a client so far, and the mean over all clients; infinite once one is unprotected
    epsilon_max: float
    epsilon_mean: float
    unprotected: int = 0  # Clients whose size is known by now, independently of their reports


class PrivacyLedger:
    """Privacy loss of every client through its size reports."""

    def __init__(self, clients: int, epsilon: float, memoize: bool = False):
        self.epsilon = epsilon
        self.memoize = memoize
        self._answers = np.zeros(clients, np.int64)
        self._exposed = np.zeros(clients, bool)

    def record(self, asked: Ints | None, exposed: Ints | None = None) -> LedgerEntry:
        """Add one query."""
        answering = slice(None) if asked is None else asked
        before = self._answers[answering]
        fresh = bool(before.size) and not (self.memoize and before.min() > 0)
        if self.memoize:
            self._answers[answering] = 1
        else:
            self._answers[answering] += 1
        spent = self.epsilon if fresh else 0.0
        if exposed is not None and not self._exposed[exposed].all():
            self._exposed[exposed] = True
            spent = math.inf
        unprotected = int(np.count_nonzero(self._exposed))
        if unprotected:
            return LedgerEntry(spent, math.inf, math.inf, unprotected)
        largest, mean = self._answers.max(initial=0), self._answers.mean() if self._answers.size else 0.0
        so_far = (float(self.epsilon * largest), float(self.epsilon * mean)) if largest else (0.0, 0.0)
        return LedgerEntry(spent, *so_far)

    def state(self) -> dict[str, Ints]:
        """Return the ledger as arrays, for a checkpoint."""
        return {"answers": self._answers.copy(), "exposed": np.flatnonzero(self._exposed)}

    def load(self, state: dict[str, Ints]) -> None:
        """Restore the ledger of a checkpoint."""
        self._answers = state["answers"].copy()
        self._exposed[:] = False
        self._exposed[state["exposed"]] = True
