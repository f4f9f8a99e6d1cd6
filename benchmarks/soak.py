"""Check that memory and time of every rank do not grow with the rounds, while a small federation trains for long.

    mpiexec -n 3 python -m benchmarks.soak --rounds 2000

For every rank, prints the resident set after the first tenth of the rounds (when imports, caches and buffers are in
place) and at the end. Exits with 1 if it grew by more than --margin megabytes. For each fifth of the rounds, prints the
median milliseconds per round by the clock and by rank 0's CPU time, which other programs disturb less. Waiting ranks
use CPU time too, so CPU times are meaningful for a single process only.
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
"""Number of parts of the rounds whose medians are compared."""


class Watch:
    """Callback per round that records the time and sometimes the resident memory, and never stops the run."""

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
    """Return the megabytes of growth between the first tenth of the moments and the last."""
    return float(resident[-1] - resident[SAMPLES // 10]) / 1e6


def medians(clocks: Floats) -> Floats:
    """Return the median milliseconds per round in each fifth of the rounds, by both clocks."""
    return np.array([np.median(part, axis=0) for part in np.array_split(1e3 * np.diff(clocks, axis=0), PARTS)])


def soak(config: Config, folder: Path, report: Callable[[str], None] = print) -> float:
    """Run and return the largest growth of all ranks in megabytes, on all ranks; rank 0 reports every rank's memory."""
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
