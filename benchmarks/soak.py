"""Does memory grow with the rounds? Resident memory of every rank while a small federation trains on and on.

    mpiexec -n 3 python -m benchmarks.soak --rounds 2000

Prints, for every rank, the resident set after the first tenth of the rounds (imports, caches and buffers are in place
by then) and at the end, and exits with 1 if it grew by more than --margin megabytes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

import fedmpi
from fedmpi.cluster import Cluster
from fedmpi.config import Config, load_config
from fedmpi.process.guard import run_guarded

SAMPLES = 20


class Watch:
    """Notes this process's resident memory now and then; asked once a round, and never for a stop."""

    def __init__(self, rounds: int):
        self.every = max(1, rounds // SAMPLES)
        self.process = psutil.Process()
        self.asked = 0
        self.resident: list[int] = []

    def __call__(self) -> bool:
        self.asked += 1
        if self.asked % self.every == 0:
            self.resident.append(self.process.memory_info().rss)
        return False


def growth(resident: np.ndarray) -> float:
    """Megabytes between the first tenth of the moments and the last."""
    return float(resident[-1] - resident[SAMPLES // 10]) / 1e6


def soak(config: Config, folder: Path, report: Callable[[str], None] = print) -> float:
    """Run; the largest growth of all ranks in megabytes, on all ranks. Rank 0 reports what every rank holds."""
    watch = Watch(config.rounds)
    fedmpi.run(config, out=folder / "run", stop=watch)
    cluster = Cluster.connect()
    for rank, held in enumerate(cluster.gather(np.array(watch.resident, np.int64)) or []):
        settled, end = held[SAMPLES // 10] / 1e6, held[-1] / 1e6
        report(f"rank {rank}: {settled:.1f} MB after a tenth of the rounds, {end:.1f} MB at the end")
    worst = cluster.maximum(int(1e6 * growth(np.array(watch.resident)))) / 1e6
    cluster.close()
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--margin", type=float, default=5.0, help="megabytes of growth that are allowed (5)")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a key of the configuration")
    asked = parser.parse_args()
    config = load_config(None, ["preset=fedavg", f"rounds={asked.rounds}", *asked.settings])
    with tempfile.TemporaryDirectory(prefix="fedmpi-soak-") as folder:
        return int(soak(config, Path(folder)) > asked.margin)


if __name__ == "__main__":
    run_guarded(main)
