"""Astraea's LTRF2 from labels alone: the clients' divergence and the storage of the copies, by scheme, as Markdown.

    python -m benchmarks.studies.letter_laws               # 47 unnamed classes, the ranked curve
    python -m benchmarks.studies.letter_laws --named       # the letters and digits of EMNIST's split bymerge
    python -m benchmarks.studies.letter_laws --named --concentration 0.5 1 2 4 --sizes pareto even
    python -m benchmarks.studies.letter_laws --named --concentration 2.3 --alpha 1  # divergences after augmentation
    python -m benchmarks.studies.letter_laws --named --skew 0.5 --digit-weight 0.25 --clients-kl 0.55

Duan et al. 2019, Table I, Figures 7 and 9: 500 clients, 230,752 images. The stock of each class is a multiple of that
in bymerge's training part, so that it limits no scheme. `--clients-kl` searches the concentration at which the clients
have that divergence. Divergences from equal classes are in nats, means over all clients, or over mediators (c = 100 and
γ = 20; `--online`, `--most`). Values are mean ± standard deviation over seeds. Nothing is trained.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import numpy as np

from benchmarks.studies.mediator_balance import divergences
from data_prep.partitions import Request
from data_prep.partitions.astraea import draw_astraea
from data_prep.partitions.sizes import SIZE_LAWS
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.data.copies.class_copies import rebalance
from fedmpi.data.statistics import kl_divergence

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
READINGS = ("ratio", "ratio-minus-one")


@dataclass(frozen=True)
class Population:
    """Partition scheme of the clients: classes, clients' mixes and sizes."""

    named: bool
    total: int
    clients: int
    sizes: str
    digit_weight: float
    skew: float
    shape: float = 1.5

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

    def concentration(self, divergence: float, steps: int = 10) -> float:
        """Return the concentration of the mixes with this mean divergence at seed 0; by bisection, from 0.1 to 100."""
        low, high = np.log(0.1), np.log(100.0)
        for _ in range(steps):
            middle = (low + high) / 2
            above = kl_divergence(self.counts(0, float(np.exp(middle)))).mean() > divergence
            low, high = (middle, high) if above else (low, middle)
        return float(np.exp((low + high) / 2))


def mediated(held: Ints, seed: int, online: int, most: int) -> float:
    """Return mediators' mean divergence under Algorithm 3, c = `online` and γ = `most`, in ten rounds."""
    return float(np.mean([each.mean() for each in divergences(held, "greedy", seed, 10, online, most)]))


def row(population: Population, concentration: float, seeds: int, alpha: float, online: int, most: int) -> list[str]:
    """Return divergences of all classes, of the clients, after augmentation and of mediators, and overheads."""
    found = []
    for seed in range(seeds):
        held = population.counts(seed, concentration)
        made = [rebalance(held, alpha, kind, Streams(seed)).class_counts for kind in READINGS]
        before, after = kl_divergence(held).mean(), [kl_divergence(one).mean() for one in made]
        found.append(
            [float(kl_divergence(held.sum(axis=0))), before, *after]
            + [before - one for one in after]
            + [mediated(one, seed, online, most) for one in made]
            + [100 * rebalance(held, f, kind, Streams(seed)).overhead for kind in READINGS for f in FACTORS]
        )
    mean, spread = np.mean(found, axis=0), np.std(found, axis=0, ddof=1)
    digits = [3] * 8 + [1] * (len(mean) - 8)
    return [f"{m:.{d}f} ± {s:.{d}f}" for m, s, d in zip(mean, spread, digits, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--named", action="store_true", help="classes named after letters, with their own frequencies")
    parser.add_argument("--concentration", type=float, nargs="+", default=[1.0], help="of the clients' class mixes")
    parser.add_argument("--clients-kl", type=float, help="divergence of the clients, in place of a concentration")
    parser.add_argument("--sizes", nargs="+", default=["pareto"], choices=SIZE_LAWS)
    parser.add_argument("--shape", type=float, default=1.5, help="of the sizes: Pareto's exponent, or a lognormal's σ")
    parser.add_argument("--digit-weight", type=float, nargs="+", default=[1.0], help="a digit's frequency, of a letter")
    parser.add_argument("--skew", type=float, nargs="+", default=[1.0], help="power of the class totals")
    parser.add_argument("--total", type=int, default=230_752)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--alpha", type=float, default=0.83, help="of the divergences after augmentation")
    parser.add_argument("--online", type=int, default=100, help="c, clients a round")
    parser.add_argument("--most", type=int, default=20, help="γ, clients of a mediator")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    heads = ["all classes", "clients"]
    heads += [
        f"{what} α = {asked.alpha:g}, {kind}" for what in ("clients,", "taken off,", "mediators,") for kind in READINGS
    ]
    heads += [f"copies, %, {kind}, α = {alpha:g}" for kind in READINGS for alpha in FACTORS]
    print(f"| sizes, digits, skew, concentration; n = {asked.seeds} | {' | '.join(heads)} |")
    print("|---|" + "---:|" * len(heads))
    for sizes, weight, skew in itertools.product(asked.sizes, asked.digit_weight, asked.skew):
        population = Population(asked.named, asked.total, asked.clients, sizes, weight, skew, asked.shape)
        fitted = None if asked.clients_kl is None else [population.concentration(asked.clients_kl)]
        for concentration in fitted or asked.concentration:
            cells = row(population, concentration, asked.seeds, asked.alpha, asked.online, asked.most)
            print(f"| {sizes}, {weight:g}, {skew:g}, {concentration:.3g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
