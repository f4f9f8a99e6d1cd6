"""What the server learns of the total size: the estimate Ñ from one round of answers, and p = K/Ñ with its warnings.

FedSampling (Eq 2). Private answers run from 1 to M − 1, so an empty client answers 1, and the estimate is floored at
the number of clients asked, as in the authors' published code. Exact sizes are summed as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.privacy.mechanisms import Exact, Mechanism, clip_sizes, make_mechanism

CLIPPING_WORTH_A_WARNING = 0.05
EMPTY_WORTH_A_WARNING = 0.05


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
