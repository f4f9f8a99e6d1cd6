"""Runs of algorithms with state, sequentially on the ranks of one job:

mpiexec -n N python tests/mpi/algorithm_runs.py OUT.npz JOBS.json

A job is {"settings": […], "folder": …, "stop_after": rounds or null, "resume": bool}; OUT.npz holds the model of each
job (`model0`, …), and how many clients' vectors each rank kept, in all and in its file (`kept0` (ranks, 2)),
and how many went from rank to rank (`moved0`).
"""

from __future__ import annotations

import json
import logging
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.process.exit_codes import run_guarded
from fedmpi.records.recorder import open_recorder
from tests.quick_end import end_quickly


def run(settings: list[str], folder: str, stop_after: int | None = None, resume: bool = False) -> dict[str, Any]:
    """One run; what rank 0 knows of it in the end."""
    config = load_config(None, settings)
    experiment = Experiment.connect(config)
    rounds = count(1)
    recorder = open_recorder(experiment.cluster, Path(folder), config, resume)
    simulation = Simulation(experiment, recorder, stop=lambda: next(rounds) == stop_after)
    assert simulation.run() == ("stopped" if stop_after else "finished")
    if recorder is not None:
        recorder.close()
    hooks = experiment.local_state.hooks
    own = np.array([0, 0] if hooks is None else [len(hooks.state), len(hooks.state._places)], np.int64)
    kept = experiment.cluster.gather(own)
    moved = experiment.local_state.homes.moved if experiment.local_state.homes is not None else 0
    experiment.close()
    return {"model": simulation.model.numpy().copy(), "kept": None if kept is None else np.array(kept), "moved": moved}


def main() -> int:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)
    found: dict[str, np.ndarray] = {}
    for number, job in enumerate(json.loads(Path(sys.argv[2]).read_text())):
        for key, value in run(**job).items():
            if value is not None:
                found[f"{key}{number}"] = value
    if "kept0" in found:
        np.savez(sys.argv[1], **found)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
