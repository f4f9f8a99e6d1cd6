"""Without the batched engine, which a child process cannot import, runs end with the same models up to rounding."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest

FEW: dict[str, Any] = {"data.source": "digits:clients=10", "rounds": 2}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"preset": "fedavg", "local.batch_size": 8},
    "fedsampling": {"preset": "fedsampling", "samples.budget": 64},
    "scaffold": {"preset": "fedavg", "local.algorithm": "scaffold", "local.batch_size": 8},
}
Models = dict[str, tuple[str, list[float]]]


def final_models() -> Models:
    """Return the engine of each short run and the first parameters of its model."""
    found = {}
    for name, settings in RUNS.items():
        done = importlib.import_module("fedmpi").run(FEW | settings)
        values = [value for tensor in done.model.state_dict().values() for value in tensor.flatten()[:200].tolist()]
        found[name] = str(done.summary["engine"]), values
    return found


def send_models_without_engine(result: Connection) -> None:
    """Import the package again without the batched engine, and send the models of its runs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedmpi"]:
        del sys.modules[name]
    sys.modules["fedmpi.local.batched"] = None  # type: ignore[assignment]
    result.send(final_models())


def test_runs_without_the_batched_engine_give_the_same_models() -> None:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=send_models_without_engine, args=(sender,))
    child.start()
    sender.close()
    others = receiver.recv()
    child.join()
    for name, (engine, values) in final_models().items():
        other, expected = others[name]
        assert "batched" in engine and "sequential" in other
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-5)
