"""Federated averaging as one writes it first: load_state_dict, DataLoader, torch.optim.SGD, one client at a time.

python -m benchmarks.naive W1 --folder DATA --out RESULT.json
python -m benchmarks.naive W1 --device cuda --folder DATA --out RESULT.json
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import wait_for
from benchmarks.peers.race import Race
from benchmarks.workloads import Workload


def train_round(workload: Workload, network: nn.Module, cohort: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Train the network on the clients of a cohort, average by their samples, and return the number of steps."""
    device = next(network.parameters()).device
    received = {name: value.clone() for name, value in network.state_dict().items()}
    mean = {name: torch.zeros_like(value) for name, value in received.items()}
    total, steps = sum(len(y) for _, y in cohort), 0
    for samples in cohort:
        network.load_state_dict(received)
        optimizer = torch.optim.SGD(network.parameters(), lr=workload.lr)
        loader = DataLoader(TensorDataset(*samples), batch_size=workload.batch, shuffle=True)
        for x, y in itertools.chain.from_iterable(itertools.repeat(loader, workload.epochs)):
            optimizer.zero_grad()
            loss = cross_entropy(network(x.to(device)), y.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
        for name, value in network.state_dict().items():
            mean[name].add_(value, alpha=len(samples[1]) / total)
    network.load_state_dict(mean)
    return steps


def main() -> None:
    race = Race(__doc__)
    network = race.network.to(race.device)
    for round in range(race.workload.rounds):
        started = time.perf_counter()
        cohort = [race.clients[client] for client in race.workload.participants(round).tolist()]
        steps = train_round(race.workload, network, cohort)
        wait_for(race.device)
        race.note(time.perf_counter() - started, steps)
    race.finish(network)


if __name__ == "__main__":
    main()
