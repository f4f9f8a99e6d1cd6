"""Do memory and time grow with the rounds? Every rank while a small federation trains on and on.

    mpiexec -n 3 python -m benchmarks.soak --rounds 2000

Prints, for every rank, the resident set after the first tenth of the rounds (imports, caches and buffers are in place
by then) and at the end, and exits with 1 if it grew by more than --margin megabytes. Of each fifth of the rounds it
prints the median milliseconds that a round took by the clock, and those that rank 0's processor spent on it, which
other programs on the machine disturb less (ranks that wait for others keep it busy, so: of a single process).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

import fedmpi
from fedmpi import Config
from fedmpi.common.types import Floats, Ints
from fedmpi.config import load_config
from fedmpi.mpi import Cluster
from fedmpi.process.exit_codes import run_guarded

SAMPLES = 20
PARTS = 5
"""Of the rounds, whose medians are compared."""


class Watch:
    """Notes the time, and this process's resident memory now and then; asked once a round, and never for a stop."""

    def __init__(self, rounds: int):
        self.every = max(1, rounds // SAMPLES)
        self.process = psutil.Process()
        self.asked = 0
        self.resident: list[int] = []
        self.clocks = np.zeros((rounds, 2))

    def __call__(self) -> bool:
        self.clocks[self.asked] = time.perf_counter(), time.process_time()
        self.asked += 1
        if self.asked % self.every == 0:
            self.resident.append(self.process.memory_info().rss)
        return False


def growth(resident: Ints) -> float:
    """Megabytes between the first tenth of the moments and the last."""
    return float(resident[-1] - resident[SAMPLES // 10]) / 1e6


def medians(clocks: Floats) -> Floats:
    """Median milliseconds a round in each fifth of the rounds, by both clocks."""
    return np.array([np.median(part, axis=0) for part in np.array_split(1e3 * np.diff(clocks, axis=0), PARTS)])


def soak(config: Config, folder: Path, report: Callable[[str], None] = print) -> float:
    """Run; the largest growth of all ranks in megabytes, on all ranks. Rank 0 reports what every rank holds."""
    watch = Watch(config.rounds)
    fedmpi.run(config, out=folder / "run", stop=watch)
    cluster = Cluster.connect()
    for rank, held in enumerate(cluster.gather(np.array(watch.resident, np.int64)) or []):
        settled, end = held[SAMPLES // 10] / 1e6, held[-1] / 1e6
        report(f"rank {rank}: {settled:.1f} MB after a tenth of the rounds, {end:.1f} MB at the end")
    if cluster.is_server:
        for name, fifths in zip(("by the clock", "of rank 0's processor"), medians(watch.clocks).T, strict=True):
            change = 100 * (fifths[-1] / fifths[1:-1].mean() - 1)
            listed = ", ".join(f"{fifth:.2f}" for fifth in fifths)
            report(f"milliseconds a round {name}, by fifths: {listed} (the last to those between: {change:+.1f} %)")
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
