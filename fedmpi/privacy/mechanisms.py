"""How a client answers the size query under ε-local differential privacy, and how the server decodes the answers.

k-ary randomised response (FedSampling, Eq 1, 2, 21), Duchi's and the piecewise mechanism (Wang et al. 2019, "Collecting
and Analyzing Multidimensional Data with Local Differential Privacy", Algorithms 1 and 2) on sizes rescaled from
[1, M − 1] to [−1, 1]. Each knows its own likelihoods and variance in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints
from fedmpi.common.whole_numbers import blocks


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


SMALLEST_EPSILON, LARGEST_EPSILON = 1e-6, 500.0

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
