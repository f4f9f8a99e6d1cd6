"""The real program, run with a folder and watched: what every round planned, drew and recorded, and the model after it.

mpiexec -n N python tests/reference/program.py OUT.npz FOLDER CONFIG.toml [CONFIG.toml ...]

runs every configuration, stopped after its first round and resumed.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi import Config, UserError
from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.process.exit_codes import run_guarded
from fedmpi.records.recorder import open_recorder
from tests.quick_end import end_quickly

Trace = dict[str, np.ndarray]


def traced(config: Config, folder: Path, cut: bool = False) -> Trace | None:
    """A run of `config` into `folder`, `cut` in two after its first round; None on ranks other than 0."""
    parts = [part for resume in ((False, True) if cut else (False,)) if (part := _part(config, folder, resume, cut))]
    if not parts:
        return None
    found = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return found | {"records": np.array((folder / "metrics.jsonl").read_text())}


def _part(config: Config, folder: Path, resume: bool, cut: bool) -> Trace | None:
    experiment = Experiment.connect(config)
    cohorts, groups, normalized, models = [], [], [], []
    rows, factors = [], []
    trainer, train = experiment.trainer, experiment.trainer.train

    def watched(plan: Plan, *others: Any) -> Any:
        cohorts.append(np.concatenate([[-1 - plan.round], plan.clients]))
        groups.append(np.concatenate([[-1 - plan.round], plan.mediators]))
        normalized.append(plan.normalize)
        for task in trainer.worker.tasks(plan, trainer.worker.members(plan)):
            own = np.arange(experiment.data.sizes[task.client]) if task.rows is None else task.rows
            rows.extend((plan.round, task.client, int(row)) for row in own)
            factors.append((plan.round, task.client, task.coefficient))
        return train(plan, *others)

    trainer.train = watched  # type: ignore[method-assign]
    recorder = open_recorder(experiment.cluster, folder, config, resume)
    simulation = Simulation(experiment, recorder, stop=lambda: cut and not resume)
    apply = simulation._apply

    def applied(*round: Any) -> None:
        apply(*round)
        models.append(simulation.model.cpu().numpy().copy())

    simulation._apply = applied  # type: ignore[method-assign]
    assert simulation.run() == ("stopped" if cut and not resume else "finished")
    all_rows = experiment.cluster.gather(np.array(rows, np.int64).reshape(-1, 3))
    all_factors = experiment.cluster.gather(np.array(factors, np.float64).reshape(-1, 3))
    found = None
    if all_rows is not None and all_factors is not None:
        found = {
            "cohorts": np.concatenate(cohorts),
            "groups": np.concatenate(groups),
            "rows": np.concatenate([part.reshape(-1, 3) for part in all_rows]),
            "factors": np.concatenate([part.reshape(-1, 3) for part in all_factors]),
            "normalized": np.array(normalized),
            "models": np.array(models),
        }
    if recorder is not None:
        recorder.close()
    experiment.close()
    return found


def main() -> int:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    traces: Trace = {}
    for path in map(Path, sys.argv[3:]):
        config = load_config(path)
        try:
            found = traced(config, folder / path.stem, cut=True)
        except UserError as refusal:
            found = {"refusal": np.array(str(refusal))}
        traces |= {f"{path.stem}/{key}": value for key, value in (found or {}).items()}
    if traces:
        np.savez(out, **traces)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
