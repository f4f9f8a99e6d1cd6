"""Runs in which one of three ranks differs from the others; see test_api_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedmpi import UserError, server_optimizer
from fedmpi.common.errors import RanksDisagree
from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.local.sequential import SequentialEngine

FEDAVG = "preset=fedavg clients.count=7 rounds=2 local.engine=sequential logging.tensorboard=false"
Patch = pytest.MonkeyPatch


@server_optimizer
class ByRank:
    """Server optimizer with another step on rank 2."""

    def step(self, w: Tensor, update: Tensor) -> None:
        from mpi4py import MPI

        w.add_(update, alpha=1.0 + (MPI.COMM_WORLD.rank == 2))


def gpu_on_one(rank: int, patch: Patch) -> None:
    if rank == 2:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "set_device", lambda device: None)


def last_client_left_out(rank: int, patch: Patch) -> None:
    own = SequentialEngine.train
    patch.setattr(
        SequentialEngine,
        "train",
        lambda engine, tasks, *others: own(engine, tasks[:-1] if rank == 2 else tasks, *others),
    )


def changed_after_round_0(change: Callable[[Simulation], None]) -> Callable[[int, Patch], None]:
    own = Simulation._apply

    def apply(simulation: Simulation, plan: Plan, totals: Any) -> None:
        own(simulation, plan, totals)
        if simulation.cluster.rank == 2 and plan.round == 0:
            change(simulation)

    return lambda rank, patch: patch.setattr(Simulation, "_apply", apply)


last_bit = changed_after_round_0(lambda simulation: simulation.model.view(torch.int32)[3:4].bitwise_xor_(1))
variate = changed_after_round_0(
    lambda simulation: [v[3:4].add_(1) for v in simulation.trainer.hooks.server.values()][0]
)
OTHER_MODELS = r"the models of ranks \[2\] differ from that of rank 0 after round \d"
SCENARIOS: dict[str, tuple[str, Callable[[int, Patch], None] | None, str, str]] = {
    "GPU": (FEDAVG, gpu_on_one, "UserError", r"the device is cpu on rank 0 \(.*\) and cuda on rank 2 "),
    "left out": (FEDAVG, last_client_left_out, "RanksDisagree", "7 participants have samples .*, but 6 were trained"),
    "another model": (f"{FEDAVG} checkpoint.every=1", last_bit, "RanksDisagree", rf"{OTHER_MODELS}; do the CPUs"),
    "another vector of the server": (
        f"{FEDAVG} checkpoint.every=1 local.algorithm=scaffold server.weights=uniform",
        variate,
        "RanksDisagree",
        OTHER_MODELS,
    ),
    "a custom component": (
        f"{FEDAVG} checkpoint.every=0 server.optimizer=tests.mpi.differing:ByRank",
        None,
        "RanksDisagree",
        rf"{OTHER_MODELS}.*server optimizer tests.mpi.differing:ByRank",
    ),
    "a key": (
        FEDAVG + " local.lr=0.{rank}1",
        None,
        "UserError",
        r"local.lr is 0.01 on rank 0 \(.*\) and 0.11 on rank 1 ",
    ),
    "coordinates": (  # some ranks have no coordinate to combine, and raise the error too
        f"{FEDAVG} model.hidden=[1] server.aggregator=krum server.aggregator.byzantine=5",
        None,
        "UserError",
        "krum.* needs more than 12 clients",
    ),
}


def run(name: str, rank: int, patch: Patch) -> None:
    """Run a scenario to its end."""
    settings, change, *_ = SCENARIOS[name]
    if change is not None:
        change(rank, patch)
    parts = Experiment.connect(load_config(None, settings.replace("{rank}", str(rank)).split()))
    simulation = Simulation(parts, None)
    assert simulation.run() == "finished"
    parts.close()


def error_of(name: str, rank: int) -> dict[str, str]:
    """Return the error of a scenario by its type."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            run(name, rank, patch)
            return {}
        except (UserError, RanksDisagree) as error:
            return {type(error).__name__: str(error)}
