"""Hand-written rounds of federated averaging in plain PyTorch: a bound of the machine without any framework.

    python -m benchmarks.floors W1 tight --processes 2 --folder DATA --out RESULT.json
    python -m benchmarks.floors W1 naive --device cuda --folder DATA --out RESULT.json

Processes are forked and share memory. Clients are assigned longest first to the least loaded process. The variants:

naive     the usual first version: load_state_dict, DataLoader, torch.optim.SGD
tight     flat parameters, autograd.grad, update in place, slices of one shuffled copy; any network
merged    clients with one step as one weighted gradient, the few others tight; exact for SGD
gradient  one data-parallel gradient of K samples of the pool, no clients at all
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import CPU, wait_for
from benchmarks.networks import parameters_of
from benchmarks.workloads import Workload, all_samples, client_tensors, find, mean_loss, prepare
from fedmpi.common.types import Ints
from fedmpi.data.shards import ShardStore

MERGED_ROWS = 256
"""Samples per pass of a merged gradient: few enough for the activations to stay in the cache."""


class Flat:
    """A network and its parameters as views of flat vectors.

    `chosen` returns the clients of a round (or, without clients, the samples) and `weights` the samples of each.
    `train` adds this process's part of the round's new model to `share` (d,) and returns the number of steps.
    """

    def __init__(self, workload: Workload, network: nn.Module):
        self.workload, self.network = workload, network
        self.parameters: list[Tensor] = list(network.parameters())
        self.counts = [p.numel() for p in self.parameters]
        network.train()

    def views(self, flat: Tensor) -> list[Tensor]:
        return [part.view(p.shape) for part, p in zip(torch.split(flat, self.counts), self.parameters, strict=True)]

    def bind(self, flat: Tensor) -> None:
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.data = view


class Averaging(Flat):
    """Common part of the variants of federated averaging."""

    def __init__(self, workload: Workload, network: nn.Module, store: ShardStore, device: torch.device):
        super().__init__(workload, network)
        self.clients = [(x.to(device), y.to(device)) for x, y in client_tensors(store)]
        self.sizes = store.sizes

    def chosen(self, round: int) -> Ints:
        return self.workload.participants(round)

    def weights(self, clients: Ints) -> Ints:
        return self.sizes[clients]


class Naive(Averaging):
    """Sequential training with PyTorch's own tools; batches are assembled on the CPU, then moved."""

    def __init__(self, workload: Workload, network: nn.Module, store: ShardStore, device: torch.device):
        super().__init__(workload, network, store, CPU)
        self.device = device

    def train(self, clients: Ints, round: int, total: int, model: Tensor, share: Tensor) -> int:
        names = [name for name, _ in self.network.named_parameters()]
        received = dict(zip(names, self.views(model), strict=True))
        mean = dict(zip(names, self.views(share), strict=True))
        steps = 0
        for client in clients.tolist():
            self.network.load_state_dict(received)
            optimizer = torch.optim.SGD(self.network.parameters(), lr=self.workload.lr)
            data = TensorDataset(*self.clients[client])
            loader = DataLoader(data, batch_size=self.workload.batch, shuffle=True)
            for x, y in itertools.chain.from_iterable(itertools.repeat(loader, self.workload.epochs)):
                optimizer.zero_grad()
                loss = cross_entropy(self.network(x.to(self.device)), y.to(self.device))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                steps += 1
            for name, value in self.network.state_dict().items():
                mean[name].add_(value, alpha=len(data) / total)
        return steps


class Tight(Averaging):
    """Sequential training without any overhead that plain PyTorch can avoid."""

    def __init__(self, workload: Workload, network: nn.Module, store: ShardStore, device: torch.device):
        super().__init__(workload, network, store, device)
        self.flat = torch.zeros(sum(self.counts), device=device)

    def train(self, clients: Ints, round: int, total: int, model: Tensor, share: Tensor) -> int:
        self.bind(self.flat)
        batch, steps = self.workload.batch, 0
        for client in clients.tolist():
            self.flat.copy_(model)
            x, y = self.clients[client]
            for _ in range(self.workload.epochs):
                if len(y) > batch:
                    order = torch.randperm(len(y), device=y.device)
                    x, y = x[order], y[order]
                for some_x, some_y in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
                    gradients = torch.autograd.grad(cross_entropy(self.network(some_x), some_y), self.parameters)
                    with torch.no_grad():
                        torch._foreach_add_(self.parameters, gradients, alpha=-self.workload.lr)
                    steps += 1
            share.add_(self.flat, alpha=len(y) / total)
        return steps


class Merged(Tight):
    """One-step clients as one gradient; embedding rows only of occurring words."""

    def train(self, clients: Ints, round: int, total: int, model: Tensor, share: Tensor) -> int:
        alone = self.sizes[clients] > self.workload.batch
        steps = super().train(clients[alone], round, total, model, share)
        x, y = self._joined(clients[~alone])
        share.add_(model, alpha=len(y) / total)
        self.bind(model)
        add_summed_gradient(self, x, y, -self.workload.lr / total, share)
        return steps + int(np.count_nonzero(~alone))

    def _joined(self, clients: Ints) -> tuple[Tensor, Tensor]:
        x, y = zip(*(self.clients[client] for client in clients.tolist()), strict=True)
        return torch.cat(x), torch.cat(y)


class Gradient(Flat):
    """Centralized SGD, data-parallel: K samples of the pool, drawn in every round."""

    def __init__(self, workload: Workload, network: nn.Module, store: ShardStore, device: torch.device):
        super().__init__(workload, network)
        self.x, self.y = (part.to(device) for part in all_samples(store))

    def chosen(self, round: int) -> Ints:
        return np.random.default_rng(round).choice(len(self.y), self.workload.wanted, replace=False)

    def weights(self, clients: Ints) -> Ints:
        return np.ones(len(clients), np.int64)

    def train(self, clients: Ints, round: int, total: int, model: Tensor, share: Tensor) -> int:
        rows = torch.from_numpy(clients).to(self.y.device)
        self.bind(model)
        share.add_(model, alpha=len(rows) / total)
        add_summed_gradient(self, self.x[rows], self.y[rows], -self.workload.lr / total, share)
        return 1


def add_summed_gradient(variant: Flat, x: Tensor, y: Tensor, factor: float, share: Tensor) -> None:
    """Add factor · Σ ∇ℓ_i at the bound parameters; embedding tables change only in the rows of occurring words."""
    for some_x, some_y in zip(torch.split(x, MERGED_ROWS), torch.split(y, MERGED_ROWS), strict=True):
        table, network = variant.parameters[0], variant.network
        words, places = torch.unique(some_x, return_inverse=True)
        touched = table.data[words].requires_grad_()
        named = [name for name, _ in network.named_parameters()]
        values = dict(zip(named, [touched, *variant.parameters[1:]], strict=True))
        loss = cross_entropy(torch.func.functional_call(network, values, (places,)), some_y, reduction="sum")
        first, *others = torch.autograd.grad(loss, list(values.values()))
        views = variant.views(share)
        views[0].index_add_(0, words, first, alpha=factor)
        torch._foreach_add_(views[1:], others, alpha=factor)


VARIANTS = {"naive": Naive, "tight": Tight, "merged": Merged, "gradient": Gradient}


class Rounds:
    """Rounds of one floor; the same object in every forked process."""

    def __init__(self, workload: Workload, store: ShardStore, variant: str, processes: int, device: torch.device = CPU):
        torch.set_num_threads(1)
        self.workload, self.store, self.processes, self.device = workload, store, processes, device
        self.network = workload.network().to(device)
        self.initial = parameters_of(self.network)
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
    workload = find(asked.workload, asked.quick)
    result = run_floor(workload, prepare(workload, asked.folder), asked.variant, asked.processes, asked.device)
    asked.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    os._exit(0)  # skip the exit handlers of torch's threads in forked processes
