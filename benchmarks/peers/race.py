"""What the drivers share: the command line, the workload's clients, and the result that the table reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks import parameters_of
from benchmarks.workloads import QUICK, WORKLOADS, Ints, client_tensors, mean_loss, prepare


class Race:
    """One measurement of a peer.

    Attributes
    ----------
    workload : Workload
    processes : int
    clients : list of (x, y)
        All clients' samples.
    network : nn.Module
        With the initial weights.
    """

    def __init__(self, description: str | None):
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("workload")
        parser.add_argument("--processes", type=int, default=1)
        parser.add_argument("--folder", type=Path, required=True)
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--quick", action="store_true")
        asked = parser.parse_args()
        torch.set_num_threads(1)
        self.workload = (QUICK if asked.quick else WORKLOADS)[asked.workload]
        self.processes: int = asked.processes
        self.store = prepare(self.workload, asked.folder)
        self.clients: list[tuple[Tensor, Tensor]] = client_tensors(self.store)
        self.network: nn.Module = self.workload.network(self.store).train()
        self._initial = parameters_of(self.network)
        self._loss = mean_loss(self.store, self.network)
        self._out: Path = asked.out
        self._seconds: list[float] = []

    def note(self, seconds: float) -> None:
        """A round is over."""
        self._seconds.append(seconds)

    def finish(self, network: nn.Module) -> None:
        """Write the result; `network` holds the final model."""
        cohorts = [self.workload.participants(round) for round in range(len(self._seconds))]
        result: dict[str, Any] = {
            "seconds": self._seconds,
            "samples": [int(self.store.sizes[cohort].sum()) for cohort in cohorts],
            "steps": [self._steps(cohort) for cohort in cohorts],
            "loss": [self._loss, mean_loss(self.store, network)],
            "moved": float((parameters_of(network) - self._initial).norm()),
        }
        self._out.write_text(json.dumps(result))

    def _steps(self, cohort: Ints) -> int:
        return int((-(-self.store.sizes[cohort] // self.workload.batch)).sum())
