"""The real program, run with a folder and watched: what every round planned, drew and recorded, and the model after it.

mpiexec -n N python tests/reference/program.py OUT.npz FOLDER CONFIG.json [CONFIG.json ...]
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi import Config
from fedmpi.common.plan import Plan
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.process.exit_codes import run_guarded
from fedmpi.records.recorder import open_recorder
from tests.quick_end import end_quickly


def traced(config: Config, folder: Path) -> dict[str, np.ndarray] | None:
    """A run of `config` into `folder`; None on ranks other than 0."""
    experiment = Experiment.connect(config)
    cohorts, rows, factors, normalized, models = [], [], [], [], []
    trainer, train = experiment.trainer, experiment.trainer.train

    def watched(plan: Plan, *others: Any) -> Any:
        cohorts.append(np.concatenate([[-1 - plan.round], plan.clients]))
        normalized.append(plan.normalize)
        for task in trainer.worker.tasks(plan, trainer.worker.members(plan)):
            own = np.arange(experiment.data.sizes[task.client]) if task.rows is None else task.rows
            rows.extend((plan.round, task.client, int(row)) for row in own)
            factors.append((plan.round, task.client, task.coefficient))
        return train(plan, *others)

    trainer.train = watched  # type: ignore[method-assign]
    simulation = Simulation(experiment, open_recorder(experiment.cluster, folder, config, False))
    apply = simulation._apply

    def applied(*round: Any) -> None:
        apply(*round)
        models.append(simulation.model.cpu().numpy().copy())

    simulation._apply = applied  # type: ignore[method-assign]
    assert simulation.run() == "finished"
    all_rows = experiment.cluster.gather(np.array(rows, np.int64).reshape(-1, 3))
    all_factors = experiment.cluster.gather(np.array(factors, np.float64).reshape(-1, 3))
    found = None
    if all_rows is not None and all_factors is not None:
        found = {
            "cohorts": np.concatenate(cohorts),
            "rows": np.concatenate([part.reshape(-1, 3) for part in all_rows]),
            "factors": np.concatenate([part.reshape(-1, 3) for part in all_factors]),
            "normalized": np.array(normalized),
            "models": np.array(models),
            "records": np.array((folder / "metrics.jsonl").read_text()),
        }
    experiment.close()
    return found


def main() -> int:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    traces: dict[str, np.ndarray] = {}
    for number, path in enumerate(sys.argv[3:]):
        config = Config.model_validate(json.loads(Path(path).read_text()))
        found = traced(config, folder / f"run{number}")
        traces |= {f"{key}{number}": value for key, value in (found or {}).items()}
    if traces:
        np.savez(out, **traces)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
