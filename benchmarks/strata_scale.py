"""Seconds and peak memory of stratifying many clients with many parameters as in a run, e.g. within 8 GiB for

    OMP_NUM_THREADS=1 python -m benchmarks.strata_scale --clients 10000 --parameters 100000

The program's own Stratifier makes the strata of FedSTS (compressed gradients, k-means, Neyman, importance) and of
FedSSO (one-step changes, OPTICS) in one process. Gradients are synthetic (ten kinds of clients plus noise) and arrive
in blocks, as from the probes.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
from collections.abc import Iterator

import numpy as np
import torch

from fedmpi.clients.stratifier import Stratifier
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.config import load_config
from fedmpi.core.plan import Planner
from fedmpi.mpi import Cluster

KINDS = 10
SYSTEMS = ("fedsts", "fedsso")


class SyntheticClients:
    """Synthetic gradients of ten kinds of clients."""

    def __init__(self, parameters: int, block: int):
        self.kinds = np.random.default_rng(0).laplace(size=(KINDS, parameters)).astype(np.float32)
        self.block = block

    def probe(self, t: int, w: torch.Tensor, clients: Ints) -> Iterator[tuple[Ints, torch.Tensor]]:
        """Yield gradients in blocks, as `Stratifier` requests them."""
        rng = np.random.default_rng(1)
        for first in range(0, len(clients), self.block):
            members = clients[first : first + self.block]
            noise = rng.random((len(members), self.kinds.shape[1]), dtype=np.float32)
            yield members, torch.from_numpy(self.kinds[members % KINDS] + noise)


def peak_gibibytes() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(system: str, clients: int, parameters: int, block: int) -> None:
    """Make the strata once and draw a round from them."""
    config, streams, cluster = load_config(None, [f"preset={system}"]), Streams(0), Cluster.connect()
    source, sizes = SyntheticClients(parameters, block), np.full(clients, 20, np.int64)
    nobody = np.zeros((0, 0), np.int64)
    stratifier = Stratifier(
        config, cluster, (0, clients), clients, parameters, lambda members: nobody, source.probe, streams
    )
    started = time.perf_counter()
    stratifier.observe(0, torch.zeros(parameters))
    made = time.perf_counter() - started
    assert stratifier.strata is not None
    planner = Planner(config, sizes, streams, CohortDraw(config, sizes, None, streams, values=parameters))
    started = time.perf_counter()
    planner.plan(1, stratifier.strata)
    planned = time.perf_counter() - started
    found = f"{len(stratifier.strata.sizes)} strata in {made:.1f} s, a round drawn in {1000 * planned:.1f} ms"
    print(f"{system}: {found}, peak {peak_gibibytes():.2f} GiB", flush=True)
    cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for system in asked.systems:
        measure(system, asked.clients, asked.parameters, asked.block)


if __name__ == "__main__":
    main()
