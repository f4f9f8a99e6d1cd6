"""Work spread by measured seconds: a slow worker gets less of it, and the result of the run is the same.

`mpiexec -n 3 python tests/mpi/test_measured_balance.py OUT.npz` runs `RUNS` with synthetic seconds.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.core.placement import STATE
from fedmpi.core.reduce import RoundTotals
from fedmpi.process.exit_codes import run_guarded
from tests.mpi.launch import run_mpi
from tests.mpi.trace import Tracer
from tests.quick_end import end_quickly

SMALL = (
    "preset=fedavg clients.count=12 rounds=10 logging.tensorboard=false cluster.placement=shared "
    "cluster.server_trains=never local.engine=sequential local.batch_size=10 local.epochs=1 server.exact=true"
)
RUNS = [
    f"{SMALL}{sampled} cluster.balance={balance}"
    for sampled in ("", " samples.sampler=bernoulli samples.budget=300")
    for balance in ("planned", "measured")
]
SLOWNESS, STEP_ROWS, SLOW_RANK = 3.0, 20.0, 1
"""Slowness of rank 1, the first worker, and the cost of a step in rows."""


@pytest.mark.slow
def test_the_slow_worker_gets_less_and_the_model_is_the_same(tmp_path: Path) -> None:
    """One third as quick, it gets about a quarter of the work."""
    result = run_mpi(3, [Path(__file__), tmp_path / "found.npz"])
    assert result.returncode == 0, result.stderr
    found = dict(np.load(tmp_path / "found.npz"))
    for planned, measured in ((0, 1), (2, 3)):
        for key in ("cohorts", "rows", "model"):
            assert np.array_equal(found[f"{key}{planned}"], found[f"{key}{measured}"]), key
        _, slow, quick = found[f"shares{planned}"]
        assert slow == pytest.approx(quick, abs=0.1)
        _, slow, quick = found[f"shares{measured}"]
        assert slow < 0.6 * quick
        assert found[f"speeds{measured}"][-1] == pytest.approx([0.5, 1.5], rel=0.1)
        assert (found[f"speeds{measured}"][-3:] @ [1, -1] < 0).all() and found[f"speeds{planned}"].size == 0
        assert found[f"saved{measured}"].tolist() == [STATE] and found[f"saved{planned}"].size == 0


def slow_down(experiment: Experiment) -> None:
    """Let rank 0 learn from the seconds of a machine on which one rank is slow, whatever this one's are."""
    learn = experiment.decisions.learn

    def learn_from_made_up(totals: RoundTotals) -> None:
        seconds = 1e-4 * (totals.rows + STEP_ROWS * totals.steps)
        seconds[SLOW_RANK] *= SLOWNESS
        learn(replace(totals, busy=seconds))

    experiment.decisions.learn = learn_from_made_up  # type: ignore[method-assign]


def main() -> int:
    found: dict[str, np.ndarray] = {}
    for number, settings in enumerate(RUNS):
        experiment = Experiment.connect(load_config(None, settings.split()))
        slow_down(experiment)
        tracer, records = Tracer(experiment), list[dict[str, Any]]()
        simulation = Simulation(experiment, on_round=records.append)
        assert simulation.run() == "finished"
        gathered = experiment.cluster.gather(np.array([row for rows in tracer.rows for row in rows]).reshape(-1, 3))
        saved, _ = simulation.saved.gathered()
        if gathered is not None:
            whole = np.concatenate(gathered)
            found[f"rows{number}"] = whole[np.lexsort(whole.T[::-1])]
            found[f"shares{number}"] = np.array([len(part) for part in gathered]) / len(whole)
            found[f"cohorts{number}"] = np.concatenate(tracer.cohorts)
            found[f"speeds{number}"] = np.array([r.get("worker_speeds", []) for r in records[2:]])
            found[f"model{number}"] = simulation.model.numpy()
            found[f"saved{number}"] = np.array(sorted(name for name in saved if name.startswith("balance")))
        experiment.close()
    if found:
        np.savez(Path(sys.argv[1]), **found)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
