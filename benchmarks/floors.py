"""Hand-written rounds of federated averaging in plain PyTorch: a bound of the machine without any framework.

    python -m benchmarks.floors W1 tight --processes 2 --folder DATA --out RESULT.json
    python -m benchmarks.floors W1 naive --device cuda --folder DATA --out RESULT.json

Processes are forked and share memory. Clients are assigned longest first to the least loaded process. The variants are
in `floor_steps`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch

from benchmarks.devices import CPU, wait_for
from benchmarks.floor_steps import VARIANTS
from benchmarks.workloads import Workload, find, mean_loss, prepare
from fedmpi.common.types import Ints
from fedmpi.data.shards import ShardStore


class Rounds:
    """Rounds of one floor; the same object in every forked process."""

    def __init__(self, workload: Workload, store: ShardStore, variant: str, processes: int, device: torch.device = CPU):
        torch.set_num_threads(1)
        self.workload, self.store, self.processes, self.device = workload, store, processes, device
        self.network = workload.network(store).to(device)
        self.initial = torch.cat([p.detach().reshape(-1) for p in self.network.parameters()])
        size = len(self.initial)
        shared = torch.zeros((1 + processes) * size, device=device)
        if processes > 1:
            shared.share_memory_()  # type: ignore[no-untyped-call]
        self.model, self.shares = shared[:size], shared[size:].view(processes, size)
        self.steps = torch.zeros(processes, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.model.copy_(self.initial)
        self.trainer = VARIANTS[variant](workload, self.network, store, device)

    def run(self, place: int, barrier: Barrier) -> list[tuple[float, int, int]]:
        """Return seconds, samples and steps of every round, as process `place` measures them."""
        records = []
        barrier.wait()
        for round in range(self.workload.rounds):
            started = time.perf_counter()
            clients = self.trainer.chosen(round)
            samples = int(self.trainer.weights(clients).sum())
            self.shares[place].zero_()
            mine = clients if self.processes == 1 else self._dealt(clients)[place]
            self.steps[place] = self.trainer.train(mine, round, samples, self.model, self.shares[place])
            barrier.wait()
            if place == 0:
                torch.sum(self.shares, 0, out=self.model)
            wait_for(self.device)
            barrier.wait()
            records.append((time.perf_counter() - started, samples, int(self.steps.sum())))
        return records

    def _dealt(self, clients: Ints) -> list[Ints]:
        """Return the clients of every process: longest first, to the one with the least work."""
        cost = self.trainer.weights(clients)
        loads, hands = np.zeros(self.processes), [[] for _ in range(self.processes)]  # type: ignore[var-annotated]
        for i in np.argsort(-cost, kind="stable").tolist():
            least = int(loads.argmin())
            hands[least].append(clients[i])
            loads[least] += cost[i]
        return [np.array(hand, np.int64) for hand in hands]


def run_floor(
    workload: Workload, store: ShardStore, variant: str, processes: int, device: torch.device = CPU
) -> dict[str, object]:
    """Run all rounds in `processes` forked processes; return the measurements of the first."""
    rounds = Rounds(workload, store, variant, processes, device)
    before = mean_loss(store, rounds.network)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes)
    others = [context.Process(target=rounds.run, args=(place, barrier)) for place in range(1, processes)]
    for other in others:
        other.start()
    records = rounds.run(0, barrier)
    for other in others:
        other.join()
    torch.nn.utils.vector_to_parameters(rounds.model, rounds.network.parameters())
    seconds, samples, steps = zip(*records, strict=True)
    return {
        "seconds": seconds,
        "samples": samples,
        "steps": steps,
        "loss": [before, mean_loss(store, rounds.network)],
        "moved": float((rounds.model - rounds.initial).norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default=CPU)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.device != CPU and (asked.processes > 1 or asked.variant == "stacked"):
        parser.error("one process, and not stacked, where the device is not the processor")
    workload = find(asked.workload, asked.quick)
    if workload.epochs > 1 and asked.variant not in ("naive", "tight"):
        parser.error("naive or tight where clients train several epochs")
    result = run_floor(workload, prepare(workload, asked.folder), asked.variant, asked.processes, asked.device)
    asked.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    os._exit(0)  # skip the exit handlers of torch's threads in forked processes
