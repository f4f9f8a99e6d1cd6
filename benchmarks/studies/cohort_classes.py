"""Number of classes in a cohort of FedAvg and of FedSSO, and distance of its class shares from those of all clients:

    python -m benchmarks.studies.cohort_classes runs/fedsso-fig3-small/shards/mnist-two,seed=*

All clients have equally many samples. A stratum contains the clients with the same set of classes, which FedSSO's
clusters amount to (docs/papers/fedsso.md). Even cohorts are those of jobs/experiments/even_cohorts.py. The distance is
half the sum of absolute differences of class shares. Nothing is trained.
"""

from __future__ import annotations

import argparse

import numpy as np

from fedmpi.clients.strata import proportional
from fedmpi.clients.view import View
from fedmpi.common.streams import Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.data.opening import open_store
from jobs.experiments.even_cohorts import even


def strata_of(held: Ints) -> Ints:
    """Return the stratum of every client, int64 (N,), from its class counts (N, C)."""
    _, strata = np.unique(held > 0, axis=0, return_inverse=True)
    return strata.reshape(-1)


def cohorts(held: Ints, count: int, rounds: int, seed: int) -> Floats:
    """Return mean number of classes and mean distance, of uniform, stratified and even cohorts, float64 (3, 2)."""
    generator, streams = np.random.default_rng(seed), Streams(seed)
    strata = strata_of(held)
    sizes, total, found = np.bincount(strata), held.sum(axis=0) / held.sum(), []
    for round in range(rounds):
        uniform = generator.choice(len(held), count, replace=False)
        draws = proportional(sizes, count, generator, sizes).draws
        stratified = [generator.choice(np.flatnonzero(strata == h), m, replace=False) for h, m in enumerate(draws)]
        view = View(round, count, held.sum(axis=1), len(held), streams, counts=lambda: held)
        drawn = uniform, np.concatenate(stratified), even(view).clients
        pooled = [held[clients].sum(axis=0) for clients in drawn]
        found.append([((one > 0).sum(), np.abs(one / one.sum() - total).sum() / 2) for one in pooled])
    return np.mean(found, axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=500)
    asked = parser.parse_args()
    kinds = ("uniform", "stratified", "even")
    heads = ["strata", *(f"{what}: {kind}" for what in ("classes", "distance") for kind in kinds)]
    print(f"| shards | {' | '.join(heads)} |\n|---|" + "---:|" * len(heads))
    for seed, folder in enumerate(asked.shards):
        held = open_store(folder).class_counts()
        found = cohorts(held, asked.count, asked.rounds, seed)
        cells = [f"{value:.2f}" for value in found[:, 0]] + [f"{value:.3f}" for value in found[:, 1]]
        print(f"| {folder} | {strata_of(held).max() + 1} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
