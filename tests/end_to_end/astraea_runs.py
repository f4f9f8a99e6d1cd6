"""Helpers of the tests of Astraea: small runs in this process, with their records, summary and final model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.records.recorder import open_recorder
from tests.end_to_end.runs import Record, records

SMALL = (
    "data.source=digits:clients=16,alpha=0.3",
    "model.name=mlp",
    "model.hidden=[8]",
    "clients.count=7",
    "rounds=3",
    "logging.tensorboard=false",
    "checkpoint.every=0",
)


@dataclass(frozen=True)
class Run:
    """Files that a run left."""

    model: Tensor
    records: list[Record]
    summary: dict[str, Any]
    values: int
    clients: int
    classes: int


def run_here(folder: Path, *settings: str) -> Run:
    """Run `SMALL` with further settings in this process, on one thread."""
    threads = torch.get_num_threads()
    config = load_config(None, [*settings[:1], *SMALL, "cluster.threads=1", *settings[1:]])
    experiment = Experiment.connect(config)
    try:
        simulation = Simulation(experiment, open_recorder(experiment.cluster, folder, config, resume=False))
        assert simulation.run() == "finished"
    finally:
        experiment.close()
        torch.set_num_threads(threads)
    summary = json.loads((folder / "summary.json").read_text())
    data = experiment.data
    size = experiment.model.size
    return Run(simulation.model, records(folder), summary, size, len(data.sizes), data.description.classes)
