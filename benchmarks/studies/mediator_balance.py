"""Balance of mediators' pooled classes under Astraea's Algorithm 3, with exchanges, and at random, as Markdown:

    python -m benchmarks.studies.mediator_balance shards/mnist-ltrf2-0 shards/mnist-ltrf2-1 --online 50 --most 10

Every folder of shards is one seed, 0, 1, …. In each of 100 rounds the run's own uniform cohort of that seed is grouped
three times. Nothing is trained. Divergences from equal classes are in nats.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.measure import table
from fedmpi.clients.designs import uniform
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.data.opening import open_store
from fedmpi.data.statistics import kl_divergence, pooled_counts
from fedmpi.results.comparison import paired

KINDS = ("greedy", "exchange", "random")


def divergences(counts: Ints, kind: str, seed: int, rounds: int, online: int, most: int) -> list[Floats]:
    """Return the divergence of each mediator's pooled data per round, in the order in which they are made."""
    streams, generator, found = Streams(seed), np.random.default_rng(seed), []
    for t in range(rounds):
        clients = uniform(streams.generator(Purpose.COHORT, t), len(counts), online).clients
        mediators = resolve("scheduling", kind).object(counts[clients], most, generator, None)
        found.append(kl_divergence(pooled_counts(counts[clients], mediators)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+", help="folders of shards, one per seed; two or more for intervals")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--online", type=int, default=50, help="c, clients per round")
    parser.add_argument("--most", type=int, default=10, help="γ, clients of one mediator")
    asked = parser.parse_args()
    counts = [open_store(folder).class_counts() for folder in asked.shards]
    rows, means = [], []
    for kind in KINDS:
        made = [divergences(one, kind, seed, asked.rounds, asked.online, asked.most) for seed, one in enumerate(counts)]
        found = np.mean([[(each.mean(), each.std(), each.max()) for each in rounds] for rounds in made], axis=1)
        means.append(found[:, 0])
        rows.append([kind, *(f"{value:.3f}" for value in found.mean(axis=0)), ""])
        if kind != "greedy" and len(counts) > 1:
            difference = paired(means[-1], means[0])
            rows[-1][-1] = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
    heads = (f"{len(counts)} seeds", "mean", "standard deviation", "largest", "mean, difference to greedy [95 %]")
    print(table(heads, rows))


if __name__ == "__main__":
    main()
