"""Common part of the drivers: the command line, the workload's clients, and the result file for the table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.measure import CPU
from benchmarks.networks import parameters_of
from benchmarks.workloads import client_tensors, find, mean_loss, prepare


class Race:
    """One measurement of a peer."""

    def __init__(self, description: str | None):
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("workload")
        parser.add_argument("--processes", type=int, default=1)
        parser.add_argument("--device", type=torch.device, default=CPU, help="of the naive loop")
        parser.add_argument("--folder", type=Path, required=True)
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--quick", action="store_true")
        asked = parser.parse_args()
        torch.set_num_threads(1)
        self.workload = find(asked.workload, asked.quick)
        self.processes: int = asked.processes
        self.device: torch.device = asked.device
        self.store = prepare(self.workload, asked.folder)
        self.clients: list[tuple[Tensor, Tensor]] = client_tensors(self.store)
        self.network: nn.Module = self.workload.network().train()
        self.folder: Path = asked.folder
        self.quick: bool = asked.quick
        self._initial = parameters_of(self.network)
        self._loss = mean_loss(self.store, self.network)
        self._out: Path = asked.out
        self._seconds: list[float] = []
        self._steps: list[int] = []

    def note(self, seconds: float, steps: int | None = None) -> None:
        """Record a finished round; without `steps`, its number of batches follows from its cohort."""
        batches = -(-self.store.sizes[self.workload.participants(len(self._seconds))] // self.workload.batch)
        self._steps.append(self.workload.epochs * int(batches.sum()) if steps is None else steps)
        self._seconds.append(seconds)

    def finish(self, network: nn.Module) -> None:
        """Write the result; `network` has the final model."""
        cohorts = [self.workload.participants(round) for round in range(len(self._seconds))]
        result = {
            "seconds": self._seconds,
            "samples": [int(self.store.sizes[cohort].sum()) for cohort in cohorts],
            "steps": self._steps,
            "loss": [self._loss, mean_loss(self.store, network)],
            "moved": float((parameters_of(network).cpu() - self._initial).norm()),
        }
        self._out.write_text(json.dumps(result))
