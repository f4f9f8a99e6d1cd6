"""Plain PyTorch ways of a FedAvg round with resident data, which fedmpi has to beat on a GPU.

A way is made from a `Task` and returns a function round(w) -> Tensor (d,): the mean update of the clients after one
epoch of SGD. Clients are of one size, a multiple of the batch size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fedmpi.local.graphs import Graphs

Round = Callable[[Tensor], Tensor]


class Task:
    """Clients of n samples: x (K, n, ...), y (K, n), and a module that shares the flat vector `work` (d,)."""

    def __init__(self, module: nn.Module, x: Tensor, y: Tensor, batch: int, lr: float):
        self.module, self.x, self.y, self.batch, self.lr = module.train(), x, y, batch, lr
        self.parameters: list[Tensor] = list(module.parameters())
        self.sizes = [p.numel() for p in self.parameters]
        self.work = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        for own, part in zip(self.parameters, self.views(self.work), strict=True):
            own.data = part

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters' views of the flat vectors (..., d)."""
        parts = flat.split(self.sizes, -1)
        return [v.view(*flat.shape[:-1], *p.shape) for v, p in zip(parts, self.parameters, strict=True)]

    def orders(self) -> Tensor:
        """Draw the order of every client's samples, int64 (K, n)."""
        return torch.rand(self.y.shape, device=self.y.device).argsort(1)

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take one step of SGD on the module."""
        gradients = torch.autograd.grad(cross_entropy(self.module(x), y), self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-self.lr)


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return what replays `step` as a CUDA graph; on a CPU, the step itself."""
    if device.type == "cpu":
        return step
    step()
    return Graphs(device).capture(step)


def loop(task: Task) -> Round:
    """One client after another, without waiting for the GPU."""

    def round(w: Tensor) -> Tensor:
        total = torch.zeros_like(w)
        for x, y, order in zip(task.x, task.y, task.orders(), strict=True):
            task.work.copy_(w)
            for rows in order.split(task.batch):
                task.step(x[rows], y[rows])
            total.add_(task.work - w, alpha=1 / len(task.y))
        return total

    return round


def graph_per_client(task: Task) -> Round:
    """One client after another, each epoch as one CUDA graph."""
    x, y = task.x[0].clone(), task.y[0].clone()
    order = torch.arange(len(y), device=y.device)

    def epoch() -> None:
        for rows in order.split(task.batch):
            task.step(x.index_select(0, rows), y.index_select(0, rows))

    replay = captured(epoch, x.device)

    def round(w: Tensor) -> Tensor:
        total = torch.zeros_like(w)
        for own_x, own_y, own_order in zip(task.x, task.y, task.orders(), strict=True):
            for buffer, value in ((task.work, w), (x, own_x), (y, own_y), (order, own_order)):
                buffer.copy_(value)
            replay()
            total.add_(task.work - w, alpha=1 / len(task.y))
        return total

    return round


def vmapped(task: Task, graph: bool = False) -> Round:
    """All clients at once by vmap(grad), also with the whole round as one CUDA graph."""
    names = [name for name, _ in task.module.named_parameters()]
    values = task.work.repeat(len(task.y), 1)
    stacked = task.views(values)
    clients = torch.arange(len(task.y), device=task.y.device)[:, None]
    orders = task.orders()

    def loss(parameters: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(task.module, dict(zip(names, parameters, strict=True)), (x,)), y)

    gradient = vmap(grad(loss), randomness="different")

    def epoch() -> None:
        for rows in orders.split(task.batch, 1):
            gradients = gradient(tuple(stacked), task.x[clients, rows], task.y[clients, rows])
            torch._foreach_add_(stacked, list(gradients), alpha=-task.lr)

    run = captured(epoch, values.device) if graph else epoch

    def round(w: Tensor) -> Tensor:
        with torch.no_grad():
            values.copy_(w.expand_as(values))
            orders.copy_(task.orders())
            run()
            return values.mean(0) - w

    return round


WAYS: dict[str, Callable[[Task], Round]] = {
    "loop": loop,
    "loop, one graph per client": graph_per_client,
    "vmap(grad)": vmapped,
    "vmap(grad), one graph per round": lambda task: vmapped(task, graph=True),
}
