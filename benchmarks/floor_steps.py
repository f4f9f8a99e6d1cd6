"""Variants of the floors: the training of the clients assigned to a process.

naive     the usual first version: load_state_dict, DataLoader, torch.optim.SGD
tight     flat parameters, autograd.grad, update in place, slices of one shuffled copy; any network
stacked   five clients batched: batched matrix products, backward written by hand (`floor_stacks`)
merged    clients with one step as one weighted gradient, the few others tight; exact for SGD
gradient  one data-parallel gradient of K samples of the pool, no clients at all
"""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.devices import CPU
from benchmarks.floor_stacks import Stack
from benchmarks.workloads import Workload, all_samples, client_tensors
from fedmpi.common.types import Ints
from fedmpi.data.shards import ShardStore

MERGED_ROWS = 256
"""Samples per pass of a merged gradient: few enough for the activations to stay in the cache."""
STACKED_CLIENTS = 5


class Variant(Protocol):
    def __init__(self, workload: Workload, network: nn.Module, store: ShardStore, device: torch.device): ...

    def chosen(self, round: int) -> Ints:
        """Return the clients of a round (or, without clients, the samples)."""

    def weights(self, clients: Ints) -> Ints:
        """Return the number of samples of each."""

    def train(self, clients: Ints, round: int, total: int, model: Tensor, share: Tensor) -> int:
        """Add this process's part of the round's new model to `share` (d,); return the number of steps."""


class Flat:
    """A network and its parameters as views of flat vectors."""

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


class Stacked(Averaging):
    """Five clients batched."""

    def __init__(self, workload: Workload, network: nn.Module, store: ShardStore, device: torch.device):
        super().__init__(workload, network, store, device)
        self.stack = Stack(network, STACKED_CLIENTS, workload.lr)

    @torch.no_grad()
    def train(self, clients: Ints, round: int, total: int, model: Tensor, share: Tensor) -> int:
        batch, steps = self.workload.batch, 0
        longest_first = clients[np.argsort(-self.sizes[clients], kind="stable")].tolist()
        for first in range(0, len(longest_first), STACKED_CLIENTS):
            members = longest_first[first : first + STACKED_CLIENTS]
            counts = self.sizes[members]
            x, y = self._padded(members, int(counts[0]))
            self.stack.load(self.views(model), len(members))
            for low in range(0, int(counts[0]), batch):
                left = np.clip(counts - low, 0, batch)
                active, rows = int(np.count_nonzero(left)), int(left[0])
                self.stack.step(x[:active, low : low + rows], y[:active, low : low + rows], left[:active])
                steps += active
            self.stack.add_mean(torch.from_numpy(counts / total).float(), self.views(share))
        return steps

    def _padded(self, members: list[int], longest: int) -> tuple[Tensor, Tensor]:
        """Return the members' samples in a random order, padded with zeros."""
        x0, _ = self.clients[members[0]]
        x, y = x0.new_zeros(len(members), longest, *x0.shape[1:]), torch.zeros(len(members), longest, dtype=torch.int64)
        for into_x, into_y, member in zip(x, y, members, strict=True):
            own_x, own_y = self.clients[member]
            order = torch.randperm(len(own_y))
            torch.index_select(own_x, 0, order, out=into_x[: len(own_y)])
            torch.index_select(own_y, 0, order, out=into_y[: len(own_y)])
        return x, y


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
    """Centralised SGD, data-parallel: K samples of the pool, drawn anew every round."""

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


VARIANTS: dict[str, type[Variant]] = {
    "naive": Naive,
    "tight": Tight,
    "stacked": Stacked,
    "merged": Merged,
    "gradient": Gradient,
}
