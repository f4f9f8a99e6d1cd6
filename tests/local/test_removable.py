"""Without the batched engine, which a child process cannot import, runs end with the same models up to rounding."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from fedmpi import run

FEW: dict[str, Any] = {"data.source": "digits:clients=10", "rounds": 2}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"preset": "fedavg", "local.batch_size": 8},
    "fedsampling": {"preset": "fedsampling", "samples.budget": 64},
    "fedsso": {"preset": "fedsso"},
    "scaffold": {"preset": "fedavg", "local.algorithm": "scaffold", "local.batch_size": 8},
    "adam": {"preset": "fedavg", "local.optimizer": "adam", "local.lr": 0.003},
}
WITHOUT = """
import json, sys
sys.modules["fedmpi.local.batched"] = None
from tests.local.test_removable import RUNS, ended
print(json.dumps({name: ended(name) for name in RUNS}))
"""


def ended(name: str) -> tuple[str, list[float]]:
    """Return the engine of a short run and the first parameters of its model."""
    done = run(FEW | RUNS[name])
    values = [value for tensor in done.model.state_dict().values() for value in tensor.flatten()[:200].tolist()]
    return str(done.summary["engine"]), values


@pytest.fixture(scope="module")
def without() -> dict[str, tuple[str, list[float]]]:
    child = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    found: dict[str, tuple[str, list[float]]] = json.loads(child.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_run_without_the_batched_engine_gives_the_same_model(
    name: str, without: dict[str, tuple[str, list[float]]]
) -> None:
    (engine, values), (other, expected) = ended(name), without[name]
    assert "batched" in engine and "sequential" in other
    assert values == pytest.approx(expected, rel=1e-5, abs=1e-5)
