"""Runs of samplers that depend on past rounds or on the current model, on all ranks of the job; rank 0 prints JSON.

`python sampler_runs.py FOLDER SETTING…`: for each sampler a whole run, and one that is stopped and resumed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.records.recorder import open_recorder
from tests.quick_end import end_quickly

ROUNDS, STOP = 5, 3
COMMON = (
    f"rounds={ROUNDS}",
    "data.shards=digits:clients=24,partition=dirichlet,alpha=0.3",
    "participation.count=5",
    "local.lr=0.1",
    "aggregation.exact=true",
    "logging.tensorboard=false",
    "cluster.threads=1",
    "checkpoint.every=0",
    "evaluation.every=10",
    "system.availability=bernoulli",
    "system.probability=0.8",
    "system.clock=true",
    "system.speed=lognormal",
)
SAMPLERS = {
    "oort": ("participation.clients=oort",),
    "power-of-choice": ("participation.clients=power-of-choice", "participation.candidates=9"),
    "clustered-md": ("participation.clients=clustered-md", "aggregation.weights=uniform"),
    "loudest": ("participation.clients=mine:loudest", "participation.keep=0.7"),
    "foreign power of choice": ("participation.clients=mine:PowerOfChoice", "participation.candidates=8"),
    "on trial": ("participation.clients=mine:OnTrial", "local.algorithm=scaffold"),
    "numbers": ("participation.clients=mine:looks_at_all",),
}


def run(folder: Path, settings: tuple[str, ...], resume: bool = False, stop: int | None = None) -> dict[str, Any]:
    """The cohorts of the rounds run, and the digest of the last global model."""
    config = load_config(None, [*COMMON, *settings])
    experiment = Experiment.connect(config)
    recorder = open_recorder(experiment.cluster, folder, config, resume, experiment.model.module)
    rounds = count(1)
    simulation = Simulation(experiment, recorder, stop=lambda: next(rounds) == stop)
    cohorts: list[Any] = []
    plan = experiment.decisions.plan

    def planned(t: int) -> Any:
        found = plan(t)
        cohorts.append([found.clients.tolist(), found.coefficients.tolist()])
        return found

    experiment.decisions.plan = planned  # type: ignore[method-assign]
    simulation.run()
    if recorder is not None:
        recorder.close()
    digest = hashlib.sha256(simulation.model.numpy().tobytes()).hexdigest()
    experiment.close()
    return {"cohorts": cohorts, "model": digest, "rank": experiment.cluster.rank}


def main() -> None:
    folder = Path(sys.argv[1])
    found = {}
    for name, settings in SAMPLERS.items():
        whole = run(folder / name / "whole", settings)
        before = run(folder / name / "parts", settings, stop=STOP)
        after = run(folder / name / "parts", settings, resume=True)
        found[name] = {"whole": whole, "before": before, "after": after}
    if whole["rank"] == 0:
        print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    end_quickly()
    sys.path.append(str(Path.cwd()))
    main()
