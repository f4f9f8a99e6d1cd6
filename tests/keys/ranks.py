"""Runs on several ranks, watched from within: mpiexec -n N python tests/keys/ranks.py OUT.npz SETTINGS..."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.process.exit_codes import run_guarded
from tests.keys.watched import QUIET
from tests.quick_end import end_quickly


class KeepsLines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def watched(settings: str) -> dict[str, Any] | None:
    """Return the results of a run on all ranks; None on ranks other than 0."""
    log, handler = logging.getLogger("fedmpi"), KeepsLines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    records: list[dict[str, Any]] = []
    experiment = Experiment.connect(load_config(None, f"{QUIET} {settings}".split()))
    trained, trainer, rank = [], experiment.trainer, experiment.cluster.rank
    train = trainer.train

    def noted(plan: Plan, *others: Any) -> Any:
        tasks = trainer.worker.tasks(plan, trainer.worker.members(plan))
        trained.extend((plan.round, task.client, rank) for task in tasks)
        return train(plan, *others)

    trainer.train = noted  # type: ignore[method-assign]
    simulation = Simulation(experiment, on_round=records.append)
    assert simulation.run() == "finished"
    everything = experiment.cluster.gather(np.array(trained, np.int64).reshape(-1, 3))
    boundaries = trainer.layout.boundaries.tolist()
    experiment.close()
    log.removeHandler(handler)
    if everything is None:
        return None
    facts = {"records": records, "log": handler.lines, "boundaries": boundaries}
    return {
        "trained": np.concatenate([part.reshape(-1, 3) for part in everything]),
        "model": simulation.model.cpu().numpy(),
        "facts": np.array(json.dumps(facts)),
    }


def main() -> int:
    found: dict[str, Any] = {}
    for number, settings in enumerate(sys.argv[2:]):
        seen = watched(settings)
        found |= {f"{key}{number}": value for key, value in (seen or {}).items()}
    if found:
        np.savez(Path(sys.argv[1]), **found)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
