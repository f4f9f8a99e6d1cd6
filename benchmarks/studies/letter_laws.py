"""Astraea's LTRF2 from labels alone: the clients' divergence and the storage of the copies, by scheme, as Markdown.

    python -m benchmarks.studies.letter_laws

Duan et al. 2019, Table I, Figures 7 and 9: 500 clients, 230,752 images. The stock of each class is a multiple of that
in bymerge's training part, so that it limits no scheme. Divergences from equal classes are in nats, means over all
clients, or over mediators. Values are mean ± standard deviation over seeds. Nothing is trained.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from benchmarks.measure import table
from data_prep.partitions import Request
from data_prep.partitions.astraea import draw_astraea
from fedmpi.clients.designs import uniform
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.data.augmentation import rebalance
from fedmpi.data.statistics import kl_divergence, pooled_counts

BYMERGE = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
BYMERGE_STOCK = np.array(
    [34585, 38374, 34203, 35143, 33535, 31416, 34232, 35754, 33946, 33847, 6411, 3874]
    + [12948, 4562, 4934, 9182, 2517, 3152, 14671, 5658, 4959, 20394, 11647, 8237]
    + [27732, 10795, 2605, 5073, 23463, 9820, 15432, 7547, 7392, 5593, 7108, 5426]
    + [10033, 5159, 10177, 24631, 2561, 3687, 8738, 11418, 2994, 14105, 18262]
)
"""Training images of every class (Cohen et al. 2017)."""
PLENTY = 10
FACTORS = (0.67, 0.83, 1.0)
ALPHA = 0.83
"""Strength of the augmentation after which divergences are measured."""
READINGS = ("ratio", "ratio-minus-one")


def divergences(counts: Ints, seed: int, rounds: int, online: int, most: int) -> list[Floats]:
    """Return the divergence of each mediator's pooled data per round, grouped by Astraea's Algorithm 3."""
    streams, generator, found = Streams(seed), np.random.default_rng(seed), []
    for t in range(rounds):
        clients = uniform(streams.generator(Purpose.COHORT, t), len(counts), online).clients
        mediators = resolve("scheduling", "greedy").object(counts[clients], most, generator, None)
        found.append(kl_divergence(pooled_counts(counts[clients], mediators)))
    return found


@dataclass(frozen=True)
class Population:
    """Partition scheme of the clients: classes, clients' mixes and sizes."""

    named: bool = True  # Classes named after letters, with the letters' frequencies; otherwise the ranked curve
    concentration: float = 1.0  # Concentration of the clients' class mixes
    clients_kl: float | None = None  # Divergence of the clients from which the concentration is computed
    digit_weight: float = 1.0  # Frequency of a digit in units of a mean letter's
    skew: float = 1.0  # Power of the class totals
    sizes: str = "pareto"
    shape: float = 1.5  # Pareto's exponent, or a lognormal's σ
    online: int = 100  # c, clients per round
    most: int = 20  # γ, clients of a mediator
    total: int = 230_752
    clients: int = 500

    def counts(self, seed: int, concentration: float) -> Ints:
        """Return the samples of every client and class (N, C)."""
        labels = np.repeat(np.arange(len(BYMERGE)), PLENTY * BYMERGE_STOCK)
        options = {
            "variant": "LTRF2",
            "size_law": self.sizes,
            "shape": self.shape,
            "alpha": concentration,
            "total": self.total,
            "test_total": 0,
            "digit_weight": self.digit_weight,
            "skew": self.skew,
        }
        generator = Streams(seed).generator(Purpose.PARTITION)
        names = BYMERGE if self.named else ()
        draw = draw_astraea(Request(labels, len(BYMERGE), self.clients, generator, class_names=names), **options)
        found = np.zeros((self.clients, len(BYMERGE)), np.int64)
        holders = np.repeat(np.arange(self.clients), np.diff(draw.offsets))
        np.add.at(found, (holders, labels[draw.rows]), 1)
        return found

    def fitted(self, steps: int = 10) -> float:
        """Return the concentration with the divergence `clients_kl` at seed 0; by bisection, from 0.1 to 100."""
        if self.clients_kl is None:
            return self.concentration
        low, high = np.log(0.1), np.log(100.0)
        for _ in range(steps):
            middle = (low + high) / 2
            above = kl_divergence(self.counts(0, float(np.exp(middle)))).mean() > self.clients_kl
            low, high = (middle, high) if above else (low, middle)
        return float(np.exp((low + high) / 2))


POPULATIONS = {
    "47 classes on the ranked curve": Population(named=False),
    "each class with its own letter's frequency": Population(),
    "also concentration 2.3": Population(concentration=2.3),
    "digits a quarter as frequent": Population(digit_weight=0.25),
    **{
        f"digit weight {weight:g}, power {skew:g}": Population(digit_weight=weight, skew=skew, clients_kl=0.55)
        for weight in (1.0, 0.25)
        for skew in (1.0, 0.75, 0.6, 0.5, 0.4)
    },
    "digits a quarter as frequent, power 0.45, c = 50, γ = 5": Population(
        digit_weight=0.25, skew=0.45, clients_kl=0.55, online=50, most=5
    ),
    "lognormal sizes, σ = 1.25": Population(sizes="lognormal", shape=1.25),
}


def row(population: Population, seeds: int) -> list[str]:
    """Return divergences of all classes, of the clients, after augmentation and of mediators, and overheads."""
    found, concentration = [], population.fitted()
    for seed in range(seeds):
        held = population.counts(seed, concentration)
        made = [rebalance(held, ALPHA, kind, Streams(seed)).class_counts for kind in READINGS]
        grouped = [divergences(one, seed, 10, population.online, population.most) for one in made]
        found.append(
            [float(kl_divergence(held.sum(axis=0))), kl_divergence(held).mean()]
            + [kl_divergence(one).mean() for one in made]
            + [float(np.mean([each.mean() for each in rounds])) for rounds in grouped]
            + [100 * rebalance(held, f, kind, Streams(seed)).overhead for kind in READINGS for f in FACTORS]
        )
    digits = [3] * 6 + [1] * 6
    means = zip(np.mean(found, axis=0), np.std(found, axis=0, ddof=1), digits, strict=True)
    return [f"{mean:.{d}f} ± {deviation:.{d}f}" for mean, deviation, d in means]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    heads = [f"population, n = {seeds}", "all classes", "clients"]
    heads += [f"{what}, {kind}" for what in ("augmented", "mediators") for kind in READINGS]
    heads += [f"copies, %, {kind}, α = {alpha:g}" for kind in READINGS for alpha in FACTORS]
    print(table(heads, ([name, *row(population, seeds)] for name, population in POPULATIONS.items())))


if __name__ == "__main__":
    main()
