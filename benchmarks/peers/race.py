"""Common part of the drivers: the command line, the workload's clients, and the result file for the table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.networks import parameters_of
from benchmarks.workloads import client_tensors, find, mean_loss, prepare


class Race:
    """One measurement of a peer."""

    running: ClassVar[Race]  # The one of this process, for peers that load their modules from other files

    def __init__(self, description: str | None):
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("workload")
        parser.add_argument("--processes", type=int, default=1)
        parser.add_argument("--folder", type=Path, required=True)
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--quick", action="store_true")
        asked = parser.parse_args()
        torch.set_num_threads(1)
        self.workload = find(asked.workload, asked.quick)
        self.processes: int = asked.processes
        self.store = prepare(self.workload, asked.folder)
        self.clients: list[tuple[Tensor, Tensor]] = client_tensors(self.store)
        self.network: nn.Module = self.workload.network(self.store).train()
        self._initial = parameters_of(self.network)
        self._loss = mean_loss(self.store, self.network)
        self.folder: Path = asked.folder
        self.quick: bool = asked.quick
        self._out: Path = asked.out
        self._seconds: list[float] = []
        self._counted: list[int] = []
        self._taken: int | None = None
        Race.running = self

    def count_steps(self) -> None:
        """Count the steps of torch's optimizers in this process instead of using the expected number."""
        self._taken = 0
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        assert self._taken is not None
        self._taken += 1

    def note(self, seconds: float, steps: int | None = None) -> None:
        """Record a finished round; `steps` is given by drivers that count them elsewhere."""
        if self._taken is not None:
            steps, self._taken = self._taken, 0
        self._counted.append(self._expected(len(self._seconds)) if steps is None else steps)
        self._seconds.append(seconds)

    def finish(self, network: nn.Module) -> None:
        """Write the result; `network` has the final model."""
        cohorts = [self.workload.participants(round) for round in range(len(self._seconds))]
        result: dict[str, Any] = {
            "seconds": self._seconds,
            "samples": [int(self.store.sizes[cohort].sum()) for cohort in cohorts],
            "steps": self._counted,
            "loss": [self._loss, mean_loss(self.store, network)],
            "moved": float((parameters_of(network).cpu() - self._initial).norm()),
        }
        self._out.write_text(json.dumps(result))

    def _expected(self, round: int) -> int:
        """Return the number of batches of the round's cohort."""
        batches = -(-self.store.sizes[self.workload.participants(round)] // self.workload.batch)
        return self.workload.epochs * int(batches.sum())
