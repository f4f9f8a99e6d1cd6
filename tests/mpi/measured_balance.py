"""A program for tests of the balance learned from seconds: by made-up ones, rank 1, the first worker, is slow.

mpiexec -n 3 python tests/mpi/measured_balance.py OUT.npz SETTINGS [SETTINGS ...]     (settings joined by spaces)
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.core.reduce import RoundTotals
from fedmpi.process.exit_codes import run_guarded
from tests.mpi.trace import Tracer
from tests.quick_end import end_quickly

SLOWNESS, STEP_ROWS = 3.0, 20.0
"""How much slower rank 1 is, and how many rows a step costs."""
SLOW_RANK = 1


def slow_down(experiment: Experiment) -> None:
    """Let rank 0 learn from the seconds of a machine on which rank 1 is slow, whatever this one's are."""
    learn = experiment.decisions.learn

    def learn_from_made_up(totals: RoundTotals) -> None:
        seconds = 1e-4 * (totals.rows + STEP_ROWS * totals.steps)
        seconds[SLOW_RANK] *= SLOWNESS
        learn(replace(totals, busy=seconds))

    experiment.decisions.learn = learn_from_made_up  # type: ignore[method-assign]


def main() -> int:
    found: dict[str, np.ndarray] = {}
    for number, settings in enumerate(sys.argv[2:]):
        experiment = Experiment.connect(load_config(None, settings.split()))
        slow_down(experiment)
        tracer, records = Tracer(experiment), list[dict[str, Any]]()
        simulation = Simulation(experiment, on_round=records.append)
        assert simulation.run() == "finished"
        rows = np.array([row for rows in tracer.rows for row in rows], np.int64).reshape(-1, 3)
        gathered = experiment.cluster.gather(rows)
        if gathered is not None:
            whole = np.concatenate(gathered)
            found[f"rows{number}"] = whole[np.lexsort(whole.T[::-1])]
            found[f"shares{number}"] = np.array([len(part) for part in gathered]) / len(whole)
            found[f"cohorts{number}"] = np.concatenate(tracer.cohorts)
            found[f"speeds{number}"] = np.array([r.get("worker_speeds", []) for r in records[2:]])
            found[f"model{number}"] = simulation.model.numpy()
            saved, _ = simulation.saved.gathered()
            found[f"saved{number}"] = np.array(sorted(name for name in saved if name.startswith("balance")))
        else:
            simulation.saved.gathered()
        experiment.close()
    if found:
        np.savez(Path(sys.argv[1]), **found)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
