"""A program for tests of reading ahead: notes whom every worker announces in a round and whom it trains.

mpiexec -n 3 python tests/mpi/announced.py OUT.npz SETTINGS [SETTINGS ...]     (settings joined by spaces)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.assemble import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.process.exit_codes import run_guarded
from tests.quick_end import end_quickly


def main() -> int:
    found: dict[str, np.ndarray] = {}
    for number, settings in enumerate(sys.argv[2:]):
        experiment = Experiment.connect(load_config(None, settings.split()))
        trainer, announced, trained = experiment.trainer, [], []
        train, expect = trainer.train, trainer.store.expect

        def noted_train(plan: Plan, *others: Any, go: Any = train, kept: Any = trained, own: Any = trainer) -> Any:
            kept.extend((plan.round, client) for client in plan.clients[own.worker.members(plan)].tolist())
            own.round = plan.round
            return go(plan, *others)

        def noted_expect(clients: np.ndarray, go: Any = expect, kept: Any = announced, own: Any = trainer) -> None:
            kept.extend((own.round + 1, client) for client in clients.tolist())
            go(clients)

        trainer.train, trainer.store.expect = noted_train, noted_expect  # type: ignore[method-assign]
        assert Simulation(experiment, None).run() == "finished"
        for name, pairs in (("announced", announced), ("trained", trained)):
            gathered = experiment.cluster.gather(np.array(pairs, np.int64).reshape(-1, 2))
            for rank, part in enumerate(gathered or []):
                found[f"{name}{number}.{rank}"] = part
        experiment.close()
    if found:
        np.savez(Path(sys.argv[1]), **found)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
