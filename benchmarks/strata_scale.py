"""Strata of many clients with many parameters: seconds of every step and peak memory, e.g. within 8 GiB for

    python -m benchmarks.strata_scale --clients 10000 --parameters 100000

Gradients are synthetic (ten kinds of clients plus noise) and stream by in blocks, as the probes deliver them.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from fedmpi.participation.allocation import spread
from fedmpi.participation.clustering import kmeans, optics
from fedmpi.participation.features import gradient_features, plan_features
from fedmpi.participation.strata import make_strata, stratified
from fedmpi.streams import Purpose, Streams

Result = TypeVar("Result")
KINDS = 10


def blocks(clients: int, parameters: int, block: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Gradients of `block` clients at a time."""
    kinds = np.random.default_rng(0).laplace(size=(KINDS, parameters)).astype(np.float32)
    rng = np.random.default_rng(1)
    for start in range(0, clients, block):
        members = np.arange(start, min(start + block, clients))
        noise = rng.random((len(members), parameters), dtype=np.float32)
        yield members, kinds[members % KINDS] + noise


def timed(name: str, work: Callable[[], Result]) -> Result:
    """Run, print seconds and the peak memory so far."""
    start = time.perf_counter()
    result = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{name:20s} {time.perf_counter() - start:8.2f} s   peak {peak:6.2f} GiB", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--block", type=int, default=64)
    asked = parser.parse_args()
    streams = Streams(0)
    plan = timed(
        "plan", lambda: plan_features("compressed-gradient", asked.clients, asked.parameters, streams, levels=9)
    )
    print(plan.description)
    features = timed(
        "compress, project",
        lambda: gradient_features(plan, blocks(asked.clients, asked.parameters, asked.block)),
    )
    labels = timed("k-means", lambda: kmeans(features.matrix, KINDS, streams.generator(Purpose.CLUSTERING)))
    spreads = timed("spreads", lambda: spread(features.matrix, labels))
    strata = make_strata(labels, spreads, features.norms)
    count = max(1, asked.clients // 100)
    timed("a round's cohort", lambda: stratified(strata, asked.clients, count, streams, 0, allocation="neyman"))
    found = timed("OPTICS", lambda: optics(features.matrix))
    print(f"OPTICS finds {found.max() + 1} strata")


if __name__ == "__main__":
    main()
