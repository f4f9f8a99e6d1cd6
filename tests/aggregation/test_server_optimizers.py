"""Server optimizers: their state, the update that they see, and steps in blocks; tests/reference has their formulas."""

import numpy as np
import pytest
import torch

from fedmpi import server_optimizer
from fedmpi.aggregation.server_optimizers import BLOCK, ServerOptimizer
from fedmpi.common.registry import resolve

UPDATES = [[0.5, -1.0, 0.0, 2e-3], [0.1, 3.0, -0.2, 0.0], [-0.4, 0.2, 0.2, 1.0]]


def made(kind: str, w: torch.Tensor, trainable: int | None = None, **options: float) -> ServerOptimizer:
    """The built-in optimizer of this name, with those of the options that it has."""
    part = resolve("server optimizer", kind)
    return ServerOptimizer(part, {name: value for name, value in options.items() if name in part.fields}, w, trainable)


def run(optimizer: ServerOptimizer, w: torch.Tensor, updates: list[list[float]] = UPDATES) -> torch.Tensor:
    for update in updates:
        optimizer.step(w, torch.tensor(update))
    return w


@server_optimizer
class Keeping:
    """Remembers an array, a tensor without axes and a number; sets values in start() that no checkpoint contains."""

    state = ("array", "scalar", "number")

    def __init__(self) -> None:
        self.array, self.number = np.zeros(2), 0

    def start(self, w: torch.Tensor) -> None:
        self.scalar, self.length = torch.zeros(()), w.numel()
        w.fill_(9)  # a copy of the model

    def step(self, w: torch.Tensor, update: torch.Tensor) -> None:
        self.array = np.append(self.array[1:], float(update[0]))
        self.scalar.add_(1)
        self.number += self.length
        w.add_(update, alpha=float(self.array.sum() / self.scalar) / self.number)


def test_what_is_remembered_comes_back_in_its_form_and_after_start():
    initial = torch.zeros(4)
    whole, first, second, third = (ServerOptimizer(resolve("server optimizer", Keeping), {}, initial) for _ in range(4))
    assert not initial.any()
    expected = run(whole, torch.zeros(4), UPDATES)
    w = run(first, torch.zeros(4), UPDATES[:2])
    second.load(first.state(), 2)
    third.load(second.state(), 2)  # a run that was stopped again before its first step
    assert run(third, w, UPDATES[2:]).tolist() == expected.tolist()
    assert type(third._chosen.array) is np.ndarray and type(third._chosen.number) is int


def test_a_custom_optimizer_cannot_change_the_update():
    @server_optimizer
    def greedy(w: torch.Tensor, update: torch.Tensor) -> None:
        w.add_(update)
        update.zero_()

    update = torch.tensor(UPDATES[1])
    ServerOptimizer(resolve("server optimizer", greedy), {}, torch.zeros(4)).step(torch.zeros(4), update)
    assert update.tolist() == torch.tensor(UPDATES[1]).tolist()


@pytest.mark.parametrize("kind", ["sgd", "yogi"])
def test_a_step_divides_the_sum_as_it_goes_bit_for_bit(kind: str):
    values = BLOCK + 100
    w, update = torch.randn(values), torch.randn(values)
    whole, parted, kept = w.clone(), w.clone(), update.clone()
    made(kind, w, lr=0.3).step(whole, update / 7)
    made(kind, w, trainable=values - 10, lr=0.3).step(parted, update, divisor=7)
    assert torch.equal(whole[:-10], parted[:-10])
    assert torch.equal(parted[-10:], (w + update / 7)[-10:])
    assert torch.equal(update, kept)
