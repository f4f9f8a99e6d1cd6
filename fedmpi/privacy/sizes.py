"""Private sizes: how clients answer the size query under ε-local differential privacy, how the server estimates the
total from the answers, and what privacy a run has spent.

k-ary randomised response (FedSampling, Eq 1, 2, 21), Duchi's and the piecewise mechanism (Wang et al. 2019, "Collecting
and Analyzing Multidimensional Data with Local Differential Privacy", Algorithms 1 and 2) on sizes rescaled from
[1, M − 1] to [−1, 1]. Each knows its own likelihoods and variance in closed form.

The estimate is Ñ, and p = K/Ñ (FedSampling, Eq 2). Private answers run from 1 to M − 1, so an empty client answers 1,
and the estimate is floored at the number of clients queried, as in the authors' published code. Exact sizes are summed
as they are.

Randomised answers hide n_k from the server only if nothing else reveals it: weights made of n_k, draws by size, class
counts (whose sum is n_k).

ε adds up over the answers of a client (Dwork and Roth 2014, Theorem 3.16). A memoised answer is drawn once and
repeated, which reveals nothing new: it is paid for once. A client whose size gets known otherwise, because it answers
unclipped above M − 1 or because n_k is used openly elsewhere, has no guarantee: its ε is infinite from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fedmpi.common.apportionment import blocks
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.config.choices import chosen

SMALLEST_EPSILON, LARGEST_EPSILON = 1e-6, 500.0
CLIPPING_WORTH_A_WARNING = 0.05
EMPTY_WORTH_A_WARNING = 0.05
SEES_NO_SIZES = ("all", "uniform", "importance", "stratified")
"""The samplers that are known not to look at the clients' sizes."""
WEIGHED_BY_SIZE = ("normalised", "unbiased", "literal")


class Mechanism(Protocol):
    """A way to answer the size query; sizes lie in 1 … M − 1 (see `clip_sizes`)."""

    @property
    def epsilon(self) -> float:
        """ε of one answer; infinite for the exact answer."""

    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        """Every client's answer, float64 (N,), drawn in client order."""

    def total(self, answers: Floats) -> float:
        """The unbiased estimate of Σ sizes from the answers."""

    def likelihood(self, sizes: Ints, answers: Floats) -> Floats:
        """Probability (or density) of every answer given every size, float64 (sizes, answers)."""

    def variance(self, sizes: Ints) -> Floats:
        """What each client contributes to the variance of `total`, float64 (N,)."""


@dataclass(frozen=True)
class Exact:
    """The true size, without privacy."""

    @property
    def epsilon(self) -> float:
        return math.inf

    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        return sizes.astype(np.float64)

    def total(self, answers: Floats) -> float:
        return float(answers.sum())

    def likelihood(self, sizes: Ints, answers: Floats) -> Floats:
        equal: Floats = (sizes[:, None] == answers).astype(np.float64)
        return equal

    def variance(self, sizes: Ints) -> Floats:
        return np.zeros(sizes.size)


@dataclass(frozen=True)
class PrivateAnswer:
    """What private mechanisms have in common."""

    epsilon: float  # ε > 0 of one answer
    threshold: int  # M ≥ 3


@dataclass(frozen=True)
class RescaledAnswer(PrivateAnswer):
    """An unbiased answer to the size rescaled from [1, M − 1] to [−1, 1]."""

    def total(self, answers: Floats) -> float:
        """Σ of the answers, back in samples: N·M/2 + (M/2 − 1)·Σ answers."""
        return answers.size * self.threshold / 2 + (self.threshold / 2 - 1) * float(answers.sum())

    def rescaled(self, sizes: Ints) -> Floats:
        """Sizes 1 … M − 1 on [−1, 1]."""
        return (sizes.astype(np.float64) - self.threshold / 2) / (self.threshold / 2 - 1)


@dataclass(frozen=True)
class RandomisedResponse(PrivateAnswer):
    """The true size with probability α, else uniform on 1 … M − 1 (FedSampling, Eq 1)."""

    @property
    def truth_probability(self) -> float:
        """α = (e^ε − 1) / (e^ε + M − 2) (Eq 21), written so that a large ε does not overflow."""
        return -math.expm1(-self.epsilon) / (1 + (self.threshold - 2) * math.exp(-self.epsilon))

    @property
    def lie_probability(self) -> float:
        """1 − α = (M − 1) / (e^ε + M − 2), positive also where α rounds to 1."""
        return (self.threshold - 1) * math.exp(-self.epsilon) / (1 + (self.threshold - 2) * math.exp(-self.epsilon))

    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        truthful, answers = np.empty(sizes.size, bool), np.empty(sizes.size)
        for part in blocks(sizes.size):  # `answers` holds what is drawn first until the answers take its place
            np.less(generator.random(out=answers[part]), self.truth_probability, out=truthful[part])
        for part in blocks(sizes.size):
            answers[part] = generator.integers(1, self.threshold, part.stop - part.start)
            np.copyto(answers[part], sizes[part], where=truthful[part])
        return answers

    def total(self, answers: Floats) -> float:
        """Ñ = (R − (1 − α) M N / 2) / α (Eq 2), R the sum of the N answers."""
        alpha = self.truth_probability
        return (float(answers.sum()) - (1 - alpha) * self.threshold * answers.size / 2) / alpha

    def likelihood(self, sizes: Ints, answers: Floats) -> Floats:
        """Eq 17 and 18: α + (1 − α)/(M − 1) for the true size, (1 − α)/(M − 1) for every other."""
        alpha, others = self.truth_probability, self.threshold - 1
        possible = (answers >= 1) & (answers <= others) & (answers == np.floor(answers))
        likelihood: Floats = (alpha * (sizes[:, None] == answers) + (1 - alpha) / others) * possible
        return likelihood

    def variance(self, sizes: Ints) -> Floats:
        """Var(r)/α², r a mixture of n and of a uniform u on 1 … M − 1 with mean M/2 (Eq 5) and variance M(M − 2)/12:
        Var(r) = α(1 − α)(n − M/2)² + (1 − α)M(M − 2)/12, a sum without cancellation."""
        truth, lie, m, n = self.truth_probability, self.lie_probability, self.threshold, sizes.astype(np.float64)
        return lie * (truth * (n - m / 2) ** 2 + m * (m - 2) / 12) / truth**2


@dataclass(frozen=True)
class Duchi(RescaledAnswer):
    """One of two values ±(e^ε + 1)/(e^ε − 1), the rescaled size in the mean (Duchi et al. 2018)."""

    @property
    def magnitude(self) -> float:
        """(e^ε + 1)/(e^ε − 1) = 1/tanh(ε/2)."""
        return 1 / math.tanh(self.epsilon / 2)

    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        upper = generator.random(sizes.size) < self._upper_probability(sizes)
        return np.where(upper, self.magnitude, -self.magnitude)

    def likelihood(self, sizes: Ints, answers: Floats) -> Floats:
        upper = self._upper_probability(sizes)[:, None]
        return np.where(answers == self.magnitude, upper, np.where(answers == -self.magnitude, 1 - upper, 0.0))

    def variance(self, sizes: Ints) -> Floats:
        """((e^ε + 1)/(e^ε − 1))² − t² on [−1, 1], in squared samples (Wang et al. 2019, Eq 4), with
        ((e^ε + 1)/(e^ε − 1))² = 1 + 1/sinh²(ε/2)."""
        t = self.rescaled(sizes)
        return (1 / math.sinh(self.epsilon / 2) ** 2 + (1 - t) * (1 + t)) * (self.threshold / 2 - 1) ** 2

    def _upper_probability(self, sizes: Ints) -> Floats:
        return 0.5 + self.rescaled(sizes) / (2 * self.magnitude)


@dataclass(frozen=True)
class Piecewise(RescaledAnswer):
    """A number in [−C, C], denser in a window around the rescaled size (Wang et al. 2019, Algorithm 2)."""

    @property
    def bound(self) -> float:
        """C = (e^{ε/2} + 1)/(e^{ε/2} − 1)."""
        return 1 / math.tanh(self.epsilon / 4)

    @property
    def window_probability(self) -> float:
        """The chance to answer inside the window, e^{ε/2}/(e^{ε/2} + 1)."""
        return 1 / (1 + math.exp(-self.epsilon / 2))

    def window(self, sizes: Ints) -> tuple[Floats, Floats]:
        """Ends l and r = l + C − 1 of each size's window."""
        c = self.bound
        left = (c + 1) / 2 * self.rescaled(sizes) - (c - 1) / 2
        return left, left + c - 1

    def answer(self, sizes: Ints, generator: np.random.Generator) -> Floats:
        left, right = self.window(sizes)
        inside = generator.random(sizes.size) < self.window_probability
        place = generator.random(sizes.size)
        outside = -self.bound + place * (self.bound + 1)  # the rest of [−C, C] has length C + 1, whatever the size
        outside = np.where(outside < left, outside, outside + (right - left))
        return np.where(inside, left + place * (right - left), outside)

    def likelihood(self, sizes: Ints, answers: Floats) -> Floats:
        """Density p = (e^ε − e^{ε/2})/(2e^{ε/2} + 2) inside the window, p/e^ε outside."""
        left, right = self.window(sizes)
        inside = (answers >= left[:, None]) & (answers <= right[:, None])
        density = math.exp(self.epsilon / 2) * math.tanh(self.epsilon / 4) / 2
        return density * np.where(inside, 1.0, math.exp(-self.epsilon)) * (np.abs(answers) <= self.bound)

    def variance(self, sizes: Ints) -> Floats:
        """t²/(e^{ε/2} − 1) + (e^{ε/2} + 3)/(3(e^{ε/2} − 1)²) on [−1, 1] (their Lemma 1), in squared samples."""
        s = math.exp(self.epsilon / 2)
        t = self.rescaled(sizes)
        return (t**2 / (s - 1) + (s + 3) / (3 * (s - 1) ** 2)) * (self.threshold / 2 - 1) ** 2


MECHANISMS: dict[str, Callable[[float, int], Mechanism]] = {
    "randomised-response": RandomisedResponse,
    "duchi": Duchi,
    "piecewise": Piecewise,
}


def make_mechanism(mechanism: str, epsilon: float, threshold: int) -> Mechanism:
    """The mechanism of a configuration."""
    if mechanism == "exact":
        return Exact()
    if mechanism not in MECHANISMS:
        raise UserError(f"samples.size_estimate = {mechanism!r} is unknown: choose exact, {', '.join(MECHANISMS)}")
    if not SMALLEST_EPSILON <= epsilon <= LARGEST_EPSILON:
        raise UserError(
            f"samples.epsilon must lie in [{SMALLEST_EPSILON:g}, {LARGEST_EPSILON:g}], not {epsilon}: below, answers "
            "say nothing of the sizes; without privacy: samples.size_estimate = exact"
        )
    if threshold < 3:
        raise UserError(f"samples.threshold (M) must be at least 3, not {threshold}: answers run from 1 to M - 1")
    return MECHANISMS[mechanism](epsilon, threshold)


def clip_sizes(sizes: Ints, threshold: int) -> Ints:
    """Sizes moved into 1 … M − 1, as the query asks (FedSampling §3.3: min(n, M − 1)); an empty client answers 1."""
    return np.clip(sizes, 1, threshold - 1)


@dataclass(frozen=True)
class SizeEstimate:
    """The server's estimate of the total size of the clients asked."""

    # Ñ: exact sizes as they are, private answers floored at the number of clients asked, each of whom answers as if it
    # held a sample at least
    total: float
    raw: float  # Ñ before the floor; may be negative
    true_total: int  # The sum of the true sizes: known to the simulation, not to the server
    asked: int  # Number of clients asked
    empty: int  # Clients asked that hold no sample
    clipped_fraction: float  # Share of the clients asked whose size lies above M − 1
    floored: bool  # Whether the floor was needed
    epsilon: float  # ε of one answer; infinite for exact sizes
    # Clients whose true answer gives them away: all with exact sizes, those above M − 1 when they do not clip
    unprotected: int
    law: Mechanism = field(repr=False)  # The mechanism
    answered: Ints = field(repr=False)  # (asked,): The sizes that were answered about, clipped where they were

    @property
    def standard_deviation(self) -> float:
        """Of `raw`, in samples, by the mechanism's closed form for the true sizes."""
        return math.sqrt(float(self.law.variance(self.answered).sum()))


@dataclass(frozen=True)
class Saturation:
    """A reason why data-level sampling does not do what was asked, and the setting to change."""

    kind: str  # "probability", "clipping", "unclipped" or "empty"; a run warns once per kind
    message: str  # One sentence for the log


def answer_stream(streams: Streams, round: int, memoise: bool) -> np.random.Generator:
    """The generator of a round's answers; with `memoise` that of round 0 always, so that every answer is permanent."""
    return streams.generator(Purpose.SIZE_ANSWER, 0 if memoise else round)


def estimate_total(
    mechanism: str,
    sizes: Ints,
    epsilon: float,
    threshold: int,
    generator: np.random.Generator,
    clip: bool = True,
    asked: Ints | None = None,
) -> SizeEstimate:
    """Ask the clients for their sizes and estimate the total.

    Answers are drawn for all clients in index order, so that a client's answer does not depend on who else is asked.
    """
    if not clip and mechanism in ("duchi", "piecewise"):
        raise UserError(f"samples.clip = false is defined for randomised-response only; {mechanism} answers within M")
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
        empty=int(np.count_nonzero(sizes == 0)),
        clipped_fraction=above / max(sizes.size, 1),
        floored=not exact and raw < sizes.size,
        epsilon=law.epsilon,
        unprotected=sizes.size if exact else 0 if clip else above,
        law=law,
        answered=answered,
    )


def sampling_probability(wanted: int, total: float) -> float:
    """p = min(1, K/Ñ) (FedSampling, Eq 8, capped)."""
    return min(1.0, wanted / total) if total > 0 else 1.0


def saturations(size_estimate: SizeEstimate, wanted: int, threshold: int) -> tuple[Saturation, ...]:
    """Why this round's data-level sampling is off or biased; empty when all is well."""
    found = []
    if size_estimate.true_total and wanted >= size_estimate.total:  # else nobody is there who could be sampled
        found.append(
            Saturation(
                "probability",
                f"the sampling probability is 1: samples.wanted = {wanted} is not below the estimated total of "
                f"{size_estimate.total:.0f}, so every sample is used; {_cause(size_estimate, wanted, threshold)}",
            )
        )
    private = math.isfinite(size_estimate.epsilon)
    if private and size_estimate.unprotected:
        found.append(
            Saturation(
                "unclipped",
                f"samples.clip = false: {size_estimate.unprotected} of the {size_estimate.asked} clients asked hold "
                f"more than M - 1 = {threshold - 1} samples and answer without privacy, so that their size_epsilon is "
                "infinite; set samples.clip = true or raise samples.threshold",
            )
        )
    elif size_estimate.clipped_fraction > CLIPPING_WORTH_A_WARNING:
        found.append(
            Saturation(
                "clipping",
                f"{size_estimate.clipped_fraction:.0%} of the clients asked hold more than M - 1 = {threshold - 1} "
                "samples and are counted as if they held that many; raise samples.threshold",
            )
        )
    if private and size_estimate.empty > EMPTY_WORTH_A_WARNING * max(size_estimate.true_total, 1):
        found.append(
            Saturation(
                "empty",
                f"{size_estimate.empty} of the {size_estimate.asked} clients asked hold no sample and answer 1 as "
                "private answers do, so the total is estimated too high; leave them out of the shards",
            )
        )
    return tuple(found)


def _cause(size_estimate: SizeEstimate, wanted: int, threshold: int) -> str:
    """Why the estimate is not above K, and what helps: too many wanted, too many clipped, or mostly noise."""
    answered_total = float(size_estimate.answered.sum())
    if wanted >= size_estimate.true_total:
        return f"the {size_estimate.asked} clients asked hold no more: lower samples.wanted"
    if wanted >= answered_total:
        return f"sizes above {threshold - 1} count as that: raise samples.threshold (now {threshold})"
    deviation = size_estimate.standard_deviation
    share = 0.5 * math.erfc((answered_total - wanted) / (deviation * math.sqrt(2)))
    return (
        f"the answers of {size_estimate.asked} clients at samples.epsilon = {size_estimate.epsilon:g} leave the total "
        f"uncertain by {deviation:.0f} samples, so that this happens in about {share:.0%} of the rounds: raise "
        "samples.epsilon, ask more clients, or lower samples.wanted"
    )


@dataclass(frozen=True)
class Exposure:
    """A setting that tells the server sizes."""

    setting: str  # The key and its value
    all_clients: bool  # Whether it tells the sizes of all clients, not only of the participants
    remedy: str  # What to set instead

    @property
    def message(self) -> str:
        """One sentence for the log."""
        whose = "every client" if self.all_clients else "every participant"
        return (
            f"{self.setting} tells the server the size of {whose} as it is, so that samples.size_estimate does not "
            f"protect them and their size_epsilon is infinite; {self.remedy}"
        )


def exposure(config: Config) -> Exposure | None:
    """The setting that tells most sizes beside a private `samples.size_estimate`; None where nothing does."""
    part, weights = config.participation, config.aggregation.weights
    by_samples = config.aggregation.population == "samples"
    if part.clients not in SEES_NO_SIZES:
        name = chosen(config, "client sampler").name
        return Exposure(f'participation.clients = "{name}"', True, 'set it to "uniform"')
    if config.rebalance.enabled:
        return Exposure("rebalance.enabled = true", True, "switch it off")
    if part.clients == "stratified" and part.features == "label-histogram":
        return Exposure('participation.features = "label-histogram"', True, "choose features made of gradients")
    if weights in WEIGHED_BY_SIZE and by_samples:
        remedy = 'set aggregation.population = "clients"'
        return Exposure(f'aggregation.weights = "{weights}" with population = "samples"', True, remedy)
    if (own := chosen(config, "weights")).foreign:
        remedy = 'set it to "uniform" or "gradient-sum"'
        return Exposure(f'aggregation.weights = "{own.name}", which sees all sizes,', True, remedy)
    if (
        part.clients == "stratified"
        and part.opening
        and weights in ("samples", "gradient-sum", "gradient-sum-squared")
        and by_samples
    ):
        return Exposure("participation.opening = true", True, "switch it off or choose equal aggregation.weights")
    if config.topology.kind == "mediators" and config.topology.scheduling != "random":
        name = chosen(config, "scheduling").name
        return Exposure(f'topology.scheduling = "{name}"', False, 'set it to "random"')
    if weights == "samples":
        return Exposure('aggregation.weights = "samples"', False, 'set it to "uniform" or "gradient-sum"')
    return None


@dataclass(frozen=True)
class LedgerEntry:
    """The ledger after a round."""

    epsilon_round: float  # The largest ε a client spent in this round (0 when all answers were repeats)
    # The largest ε a client has spent so far, and the mean over all clients; infinite once one is unprotected
    epsilon_max: float
    epsilon_mean: float
    unprotected: int = 0  # Clients whose size is known by now, whatever they answered


class PrivacyLedger:
    """What every client has spent on answering the size query."""

    def __init__(self, clients: int, epsilon: float, memoise: bool = False):
        self.epsilon = epsilon
        self.memoise = memoise
        self._answers = np.zeros(clients, np.int64)
        self._exposed = np.zeros(clients, bool)

    def record(self, asked: Ints | None, exposed: Ints | None = None) -> LedgerEntry:
        """Enter one query."""
        answering = slice(None) if asked is None else asked
        before = self._answers[answering]
        fresh = bool(before.size) and not (self.memoise and before.min() > 0)
        if self.memoise:
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

    def spent(self) -> Floats:
        """ε spent so far by every client, float64 (N,)."""
        if math.isinf(self.epsilon):
            return np.where((self._answers > 0) | self._exposed, math.inf, 0.0)
        return np.where(self._exposed, math.inf, self._answers * self.epsilon)

    def state(self) -> dict[str, Ints]:
        """The ledger as arrays, for a checkpoint."""
        return {"answers": self._answers.copy(), "exposed": np.flatnonzero(self._exposed)}

    def load(self, state: dict[str, Ints]) -> None:
        """Take over the ledger of a checkpoint."""
        self._answers = state["answers"].copy()
        self._exposed[:] = False
        self._exposed[state["exposed"]] = True
