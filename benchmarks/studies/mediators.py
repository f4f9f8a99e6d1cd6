"""Balance of the mediators' pooled data under each way of grouping clients, and cost of planning:

    python -m benchmarks.studies.mediators shards/mnist-ltrf1-0 --online 50 --most 10

Every row is the mean over random cohorts of their mean, standard deviation and largest KL divergence from equal
classes, in nats (Astraea, Fig 7). Times are CPU times; the last lines are for one plan of 1,000 online clients with 100
classes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.data.copies.class_copies import rebalance
from fedmpi.data.opening import open_store
from fedmpi.data.statistics import kl_divergence, pooled_counts, summarise
from fedmpi.mediators.scheduling import assign_mediators

KINDS = ("greedy", "exchange", "random")


def row(name: str, found: list[dict[str, Any]], seconds: float | None = None) -> str:
    """Return one line of the table."""
    means = (
        np.mean([one["kl_mean"] for one in found]),
        np.mean([one["kl_std"] for one in found]),
        np.mean([one["kl_max"] for one in found]),
    )
    cost = "" if seconds is None else f"{1e3 * seconds:.1f}"
    return f"| {name} | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.3f} | {cost} |"


def grouped(kind: str, counts: Ints, cohorts: list[Ints], most: int) -> tuple[list[dict[str, Any]], float]:
    """Return the divergences of the mediators of each cohort, and the mean CPU seconds of a plan."""
    generator = Streams(0).generator(Purpose.SCHEDULE)
    found, began = [], time.process_time()
    plans = [assign_mediators(kind, counts[cohort], most, generator) for cohort in cohorts]
    seconds = (time.process_time() - began) / len(cohorts)
    for cohort, mediators in zip(cohorts, plans, strict=True):
        found.append(summarise(kl_divergence(pooled_counts(counts[cohort], mediators)), "kl"))
    return found, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help='a prepared folder, or "digits:..."')
    parser.add_argument("--online", type=int, default=50, help="c")
    parser.add_argument("--most", type=int, default=10, help="γ")
    parser.add_argument("--alpha", type=float, default=0.67, help="α of the rows with augmentation")
    parser.add_argument("--copies", default="ratio", help="ratio or ratio-minus-one")
    parser.add_argument("--rounds", type=int, default=100, help="cohorts drawn")
    asked = parser.parse_args()
    before = open_store(asked.shards).class_counts()
    generator = Streams(0).generator(Purpose.COHORT)
    cohorts = [np.sort(generator.choice(len(before), asked.online, replace=False)) for _ in range(asked.rounds)]
    print(f"c = {asked.online}, γ = {asked.most}, {asked.rounds} cohorts of {asked.shards}")
    print("| | mean KL | spread | largest | plan, ms |")
    print("|---|---:|---:|---:|---:|")
    augmented = rebalance(before, asked.alpha, asked.copies, Streams(0))
    for title, counts in (("", before), (f", α = {asked.alpha}", augmented.class_counts)):
        print(row(f"clients{title}", [summarise(kl_divergence(counts[cohort]), "kl") for cohort in cohorts]))
        for kind in KINDS:
            print(row(f"{kind}{title}", *grouped(kind, counts, cohorts, asked.most)))
    print(f"copies: {augmented.overhead:.1%} of the samples")
    large = Streams(0).generator(Purpose.PARTITION).integers(0, 30, (1000, 100))
    for kind in KINDS:
        _, seconds = grouped(kind, large, [np.arange(1000)], asked.most)
        print(f"1,000 clients x 100 classes, {kind}: {seconds:.3f} s")


if __name__ == "__main__":
    main()
