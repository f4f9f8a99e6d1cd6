"""Real runs inside the test's own process: their records, final models, curves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

import fedmpi
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.process.signals import STOPPED_AFTER_SAVING

SMALL = (
    *("data.source=digits:clients=16,alpha=0.3", "model.name=mlp", "model.hidden=[8]"),
    *("clients.count=7", "rounds=3"),
)
"""Settings of a run of few small clients."""
QUIET = ("logging.tensorboard=false", "cluster.threads=1", "checkpoint.every=0")


@dataclass(frozen=True)
class Run:
    """Result of a run."""

    experiment: Experiment  # After the last round
    records: list[dict[str, Any]]  # One a round
    summary: dict[str, Any]
    start: torch.Tensor  # (d,): First and last global model
    model: torch.Tensor


def run(*settings: str, evaluate: bool = False) -> Run:
    """Run to the end without a folder."""
    seldom = () if evaluate else ("evaluation.every=1000000",)
    experiment = Experiment.connect(load_config(None, [*QUIET, *seldom, *settings]))
    records: list[dict[str, Any]] = []
    simulation = Simulation(experiment, on_round=records.append)
    start = simulation.model.clone()
    assert simulation.run() == "finished"
    experiment.close()
    return Run(experiment, records, simulation.summary, start, simulation.model)


def run_into(folder: Path, *settings: str, resume: bool = False, stop_after: int | None = None) -> int:
    """Run into a folder, stopped as by a signal after some rounds if wished; returns the exit code."""
    rounds = count(1)

    def stop() -> bool:
        return next(rounds) == stop_after

    config = load_config(None, [*QUIET, *settings])
    done = fedmpi.run(config, out=folder, resume=resume, progress=True, stop=stop)
    return STOPPED_AFTER_SAVING if done.ending == "stopped" else 0
