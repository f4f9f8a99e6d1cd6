"""Real runs inside the test's own process: their records, final models, curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmpi.config import load_config
from fedmpi.records.recorder import Recorder
from fedmpi.rounds.assemble import Experiment
from fedmpi.rounds.loop import Simulation

QUIET = ("logging.tensorboard=false", "cluster.threads=1", "checkpoint.every=0")


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes
    ----------
    experiment : Experiment
        After the last round.
    records : list of dict
        One a round, without what evaluation adds.
    test_losses : float64 (T,)
        After every round, where they were asked for.
    start, model : Tensor (d,)
        First and last global model.
    """

    experiment: Experiment
    records: list[dict[str, Any]]
    test_losses: np.ndarray
    start: torch.Tensor
    model: torch.Tensor


def run(*settings: str, evaluate: bool = False) -> Run:
    """Run to the end without a folder."""
    experiment = Experiment.connect(load_config(None, [*QUIET, *settings]))
    simulation = Simulation(experiment, None)
    start, note = simulation.model.clone(), simulation._note
    records: list[dict[str, Any]] = []
    losses: list[float] = []

    def noted(*round: Any) -> None:
        note(*round)
        assert simulation.unsettled is not None
        records.append(dict(simulation.unsettled))
        if evaluate:
            losses.append(simulation._evaluate()["test_loss"])

    simulation._note = noted  # type: ignore[method-assign]
    assert simulation.run() == 0
    experiment.close()
    return Run(experiment, records, np.array(losses), start, simulation.model)


def run_into(folder: Path, *settings: str, resume: bool = False, stop_after: int | None = None) -> int:
    """Run into a folder, stopped as by a signal after some rounds if wished; returns the exit code."""
    config = load_config(None, [*QUIET, *settings])
    experiment = Experiment.connect(config)
    simulation = Simulation(experiment, Recorder(folder, config, resume))
    plan = experiment.plan

    def planned(t: int) -> Any:
        simulation.interrupt.requested = simulation.interrupt.requested or t + 1 == stop_after
        return plan(t)

    experiment.plan = planned  # type: ignore[method-assign]
    code = simulation.run()
    experiment.close()
    return code
