"""Effect of each size-estimation mechanism on given clients: bias, standard deviation and saturation risk.

Everything follows from the mechanisms' closed forms and a normal approximation of the sum of the answers; nothing is
simulated. It answers which M and ε to choose before a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from fedmpi.common.errors import UserError
from fedmpi.common.terminal import show_table
from fedmpi.common.types import Floats, Ints
from fedmpi.privacy.sizes import MECHANISMS, clip_sizes, make_mechanism


@dataclass(frozen=True)
class Assessment:
    """One mechanism on the user's clients."""

    mechanism: str  # Its name in the configuration
    clients: int  # Number of queried clients, and the total of their sizes (its mean, if not all are queried)
    samples: float
    clipped_fraction: float  # Share of the clients above M − 1
    # E[Ñ] − n before the floor, in samples: what clipping hides, plus one for every empty client, which answers 1
    bias: float
    standard_deviation: float  # Standard deviation of Ñ before the floor, in samples
    floor_probability: float  # Chance that Ñ falls below N and is floored
    saturation_probability: float  # Chance that p = K/Ñ is capped at 1, so that every sample is used
    drawn: tuple[float, float]  # 5 % and 95 % quantiles of the expected samples n·min(1, K/Ñ), with budget K

    @property
    def relative_error(self) -> float:
        """Root mean square error of Ñ before the floor, divided by n."""
        return math.hypot(self.bias, self.standard_deviation) / self.samples


def assess(
    sizes: Ints, epsilon: float, threshold: int, wanted: int, participants: int | None = None
) -> list[Assessment]:
    """Every private mechanism on given clients."""
    if sizes.size == 0 or sizes.sum() == 0:
        raise UserError("no client holds a sample, so there is nothing to estimate. Give other shards as --sizes")
    if participants is not None and not 1 <= participants <= sizes.size:
        raise UserError(f"{participants} of {sizes.size} clients cannot be asked. Choose 1 to {sizes.size}")
    if wanted < 1:
        raise UserError(f"the sample budget per round is {wanted}. Choose 1 or more")
    distinct, counts = np.unique(sizes, return_counts=True)
    weights = np.asarray(counts * (1.0 if participants is None else participants / sizes.size), np.float64)
    found = [_assess_one(name, distinct, weights, epsilon, threshold, wanted) for name in MECHANISMS]
    return sorted(found, key=lambda one: one.relative_error)


def _assess_one(
    mechanism: str, distinct: Ints, counts: Floats, epsilon: float, threshold: int, wanted: int
) -> Assessment:
    clipped = clip_sizes(distinct, threshold)
    clients, samples = round(float(counts.sum())), float(counts @ distinct)
    bias = float(counts @ (clipped - distinct))
    deviation = math.sqrt(float(counts @ make_mechanism(mechanism, epsilon, threshold).variance(clipped)))
    mean = samples + bias

    def below(value: float) -> float:
        if deviation == 0:  # ε so large that every answer is the truth
            return float(mean <= value)
        return 0.5 * (1 + math.erf((value - mean) / (deviation * math.sqrt(2))))

    low, high = (samples * min(1.0, wanted / max(mean + z * deviation, clients)) for z in (1.645, -1.645))
    hidden = float(counts[distinct >= threshold].sum() / clients)
    saturated = below(wanted) if wanted >= clients else 0.0
    return Assessment(mechanism, clients, samples, hidden, bias, deviation, below(clients), saturated, (low, high))


def print_assessments(
    assessments: list[Assessment], epsilon: float, threshold: int, wanted: int, console: Console
) -> None:
    """Print the assessments as a table, with one line of advice."""
    best = assessments[0]
    show_table(
        console,
        ("mechanism", "bias", "std", "error / n", "P(floor)", "P(p = 1)", "samples drawn, 5 % … 95 %"),
        [
            (
                one.mechanism,
                f"{one.bias:+,.0f}",
                f"{one.standard_deviation:,.0f}",
                f"{one.relative_error:.3g}",
                f"{one.floor_probability:.1%}",
                f"{one.saturation_probability:.1%}",
                " … ".join(f"{samples:,.0f}" for samples in one.drawn),
            )
            for one in assessments
        ],
        f"{best.clients:,} clients, {best.samples:,.0f} samples: ε = {epsilon:g}, M = {threshold}, K = {wanted}",
        f"clipped clients: {best.clipped_fraction:.1%}",
    )
    console.print(advice(assessments, threshold))


def advice(assessments: list[Assessment], threshold: int) -> str:
    """One sentence on what to choose: the mechanism, and the threshold when it is what goes wrong."""
    best = assessments[0]
    if best.bias > best.standard_deviation:
        return "Empty clients, which answer 1, are the larger error: leave clients without samples out of the shards."
    if -best.bias > best.standard_deviation:
        return f"Clipping is the larger error: raise samples.size.max_size above {threshold}."
    if best.relative_error > 0.5:
        return (
            "Noise drowns the total with every mechanism: raise samples.size.epsilon, lower samples.size.max_size "
            "towards the largest client, or query more clients."
        )
    return f'Set samples.size.estimate = "{best.mechanism}": the total is then known to ±{best.relative_error:.1%}.'
