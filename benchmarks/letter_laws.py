"""Astraea's LTRF2 from labels alone: the clients' divergence and the storage of the copies, by law, as Markdown.

    python -m benchmarks.letter_laws               # 47 unnamed classes, the ranked curve
    python -m benchmarks.letter_laws --named       # the letters and digits of EMNIST's split bymerge
    python -m benchmarks.letter_laws --named --concentration 0.5 1 2 4 --sizes pareto even
    python -m benchmarks.letter_laws --named --concentration 1.85 --alpha 1     # divergences after that augmentation

Duan et al. 2019, Table I, Figures 7 and 9: 500 clients, 230,752 images; the classes' stock is taken as 20,000 each.
Divergences from equal classes are in nats, means over all clients, or over mediators (c = 100, γ = 20). Mean ± standard
deviation over seeds. Nothing is trained.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.mediator_balance import divergences
from data_prep.partitions.astraea_laws import draw_astraea
from data_prep.partitions.common import Request
from data_prep.sizes import SIZE_LAWS
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.data.copies.class_copies import rebalance
from fedmpi.data.divergence import kl_divergence

STOCK = 20_000
BYMERGE = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
FACTORS = (0.67, 0.83, 1.0)
READINGS = ("ratio", "ratio-minus-one")


def counts(seed: int, named: bool, total: int, clients: int, concentration: float, sizes: str) -> Ints:
    """Samples of every client and class (N, C)."""
    labels = np.repeat(np.arange(len(BYMERGE)), STOCK)
    options = {
        "variant": "LTRF2",
        "size_law": sizes,
        "shape": 1.5,
        "alpha": concentration,
        "total": total,
        "test_total": 0,
    }
    generator = Streams(seed).generator(Purpose.PARTITION)
    names = BYMERGE if named else ()
    draw = draw_astraea(Request(labels, len(BYMERGE), clients, generator, None, options, names))
    found = np.zeros((clients, len(BYMERGE)), np.int64)
    holders = np.repeat(np.arange(clients), np.diff(draw.offsets))
    np.add.at(found, (holders, labels[draw.rows]), 1)
    return found


def mediated(held: Ints, seed: int) -> float:
    """Mean divergence of mediators' pooled data under Algorithm 3, c = 100 and γ = 20, in ten rounds."""
    return float(np.mean([each.mean() for each in divergences(held, "greedy", seed, rounds=10, online=100, most=20)]))


def row(seeds: int, named: bool, total: int, clients: int, concentration: float, sizes: str, alpha: float) -> list[str]:
    """Divergence of all classes and of the clients, what augmentation takes off, mediators'; overheads."""
    found = []
    for seed in range(seeds):
        held = counts(seed, named, total, clients, concentration, sizes)
        made = [rebalance(held, alpha, kind, Streams(seed)).class_counts for kind in READINGS]
        before, after = kl_divergence(held).mean(), [kl_divergence(one).mean() for one in made]
        found.append(
            [float(kl_divergence(held.sum(axis=0))), before, *after]
            + [before - one for one in after]
            + [mediated(one, seed) for one in made]
            + [100 * rebalance(held, f, kind, Streams(seed)).overhead for kind in READINGS for f in FACTORS]
        )
    mean, spread = np.mean(found, axis=0), np.std(found, axis=0, ddof=1)
    digits = [3] * 8 + [1] * (len(mean) - 8)
    return [f"{m:.{d}f} ± {s:.{d}f}" for m, s, d in zip(mean, spread, digits, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--named", action="store_true", help="classes named after letters, with their own frequencies")
    parser.add_argument("--concentration", type=float, nargs="+", default=[1.0], help="of the clients' class mixes")
    parser.add_argument("--sizes", nargs="+", default=["pareto"], choices=SIZE_LAWS)
    parser.add_argument("--total", type=int, default=230_752)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--alpha", type=float, default=0.83, help="of the divergences after augmentation")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    heads = ["all classes", "clients"]
    heads += [
        f"{what} α = {asked.alpha:g}, {kind}" for what in ("clients,", "taken off,", "mediators,") for kind in READINGS
    ]
    heads += [f"copies, %, {kind}, α = {alpha:g}" for kind in READINGS for alpha in FACTORS]
    print(f"| n = {asked.seeds} | {' | '.join(heads)} |")
    print("|---|" + "---:|" * len(heads))
    for sizes in asked.sizes:
        for concentration in asked.concentration:
            cells = row(asked.seeds, asked.named, asked.total, asked.clients, concentration, sizes, asked.alpha)
            print(f"| {sizes}, {concentration:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
