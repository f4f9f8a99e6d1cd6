"""A program for MPI tests: runs configurations and saves what every rank planned, drew and computed.

mpiexec -n N python tests/mpi/trace.py OUT.npz SETTINGS [SETTINGS ...]     (settings joined by spaces)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.process.exit_codes import run_guarded
from tests.quick_end import end_quickly


class Tracer:
    """Notes the participants, their rows and their coefficients of every round before it is trained."""

    def __init__(self, experiment: Experiment):
        self.trainer = experiment.trainer
        self.sizes = experiment.data.sizes
        self.tasks = self.trainer.worker.tasks
        self.train = self.trainer.train
        self.trainer.train = self.noted  # type: ignore[method-assign]
        self.cohorts: list[np.ndarray] = []
        self.facts: list[list[float]] = []
        self.rows: list[list[tuple[int, int, int]]] = []

    def noted(self, plan: Plan, *others: Any) -> Any:
        tasks = self.tasks(plan, self.trainer.worker.members(plan))
        self.cohorts.append(np.concatenate([[plan.round], plan.clients]))
        self.facts.append([plan.round, plan.probability, plan.lr, plan.facts.get("size_estimate", 0.0)])
        for task in tasks:
            rows = np.arange(self.sizes[task.client]) if task.rows is None else task.rows
            self.rows.append([(plan.round, task.client, int(row)) for row in rows])
        return self.train(plan, *others)


def main() -> int:
    out, traces = Path(sys.argv[1]), {}
    for number, settings in enumerate(sys.argv[2:]):
        experiment = Experiment.connect(load_config(None, settings.split()))
        tracer = Tracer(experiment)
        simulation = Simulation(experiment)
        assert simulation.run() == "finished"
        flat = np.array(sorted(row for rows in tracer.rows for row in rows), np.int64).reshape(-1, 3)
        gathered = experiment.cluster.gather(flat)
        if gathered is not None:
            rows = np.concatenate([part.reshape(-1, 3) for part in gathered])
            traces[f"rows{number}"] = rows[np.lexsort(rows.T[::-1])]
            traces[f"cohorts{number}"] = np.concatenate(tracer.cohorts)
            traces[f"facts{number}"] = np.array(tracer.facts)
            traces[f"model{number}"] = simulation.model.cpu().numpy()
        experiment.close()
    if traces:
        np.savez(out, **traces)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
