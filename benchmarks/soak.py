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
from typing import Any

import numpy as np
import psutil

from fedmpi.config import Config, load_config
from fedmpi.process.guard import run_guarded
from fedmpi.records.recorder import Recorder
from fedmpi.rounds.assemble import Experiment
from fedmpi.rounds.loop import Simulation

SAMPLES = 20


class Watched(Simulation):
    """A simulation that notes its process's resident memory now and then."""

    def __init__(self, experiment: Experiment, recorder: Recorder | None):
        super().__init__(experiment, recorder)
        self.process = psutil.Process()
        self.resident: list[int] = []

    def _note(self, plan: Any, totals: Any, started: float) -> None:
        super()._note(plan, totals, started)
        if (plan.round + 1) % max(1, self.config.rounds // SAMPLES) == 0:
            self.resident.append(self.process.memory_info().rss)


def growth(resident: np.ndarray) -> float:
    """Megabytes between the first tenth of the moments and the last."""
    return float(resident[-1] - resident[SAMPLES // 10]) / 1e6


def soak(config: Config, folder: Path, report: Callable[[str], None] = print) -> float:
    """Run; the largest growth of all ranks in megabytes, on all ranks. Rank 0 reports what every rank holds."""
    experiment = Experiment.connect(config)
    recorder = Recorder(folder / "run", config, resume=False) if experiment.cluster.is_server else None
    simulation = Watched(experiment, recorder)
    simulation.run()
    resident = np.array(simulation.resident, np.int64)
    for rank, held in enumerate(experiment.cluster.gather(resident) or []):
        settled, end = held[SAMPLES // 10] / 1e6, held[-1] / 1e6
        report(f"rank {rank}: {settled:.1f} MB after a tenth of the rounds, {end:.1f} MB at the end")
    worst = experiment.cluster.maximum(int(1e6 * growth(resident))) / 1e6
    experiment.close()
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
