"""Modules that are easily trained wrongly side by side: each is trained as alone, or left to the sequential engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.streams import Streams
from fedmpi.local.batched.engine import BatchedEngine, why_not_side_by_side
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.stacks import CLASSES, IMAGES, TEXTS, Source, ragged_sizes, relative_difference, tasks_for, train

STREAMS = Streams(7)
EPOCHS = LocalRule(lr=0.1, epochs=2, batch_size=7)


class Own(nn.Module):
    """Two dense layers and a forward pass that is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: object):
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(196, 12), nn.Linear(12, CLASSES), nn.Dropout(0.3)
        self._forward = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part, persistent=False)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class Leaky(torch.autograd.Function):
    """ReLU whose gradient passes everywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return functional.relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def unlearned(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = functional.relu(self.fc1(x.flatten(1)))
    return self.fc2(x)


def leaky(self: Any, x: Tensor) -> Tensor:
    return self.fc2(Leaky.apply(self.fc1(x.flatten(1))))


def shifted(self: Any, x: Tensor) -> Tensor:
    def shift(h: Tensor) -> None:
        h += 0.7

    h = self.fc1(x.flatten(1))
    shift(h)
    return self.fc2(functional.relu(h))


def in_place(self: Any, x: Tensor) -> Tensor:
    h = self.fc1(x.flatten(1))
    h += self.shift
    h.mul_(2).add_(0.1)
    part = h[:, 2:5]
    part.sub_(0.3)
    functional.relu(h, inplace=True)
    return self.fc2(h)


def lucky(self: Any, x: Tensor) -> Tensor:
    h = functional.relu(self.fc1(x.flatten(1)))
    return self.fc2(h if random.random() > 1e-9 else h * 0)


def noisy(self: Any, x: Tensor) -> Tensor:
    h = self.fc1(x.flatten(1)) + torch.as_tensor(np.random.normal(size=12) * 1e-12)  # noqa: NPY002
    return self.fc2(functional.relu(h))


def counting(self: Any, x: Tensor) -> Tensor:
    self.count.add_(1)
    return self.fc2(functional.relu(self.fc1(x.flatten(1))) * (self.count > 1))


def clipped(self: Any, x: Tensor) -> Tensor:
    self.fc1.weight.data = self.fc1.weight.data.clamp(-self.bound, self.bound)
    return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def clipped_in_place(self: Any, x: Tensor) -> Tensor:
    self.fc1.weight.data.clamp_(-self.bound, self.bound)
    return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def clipped_detached(self: Any, x: Tensor) -> Tensor:
    self.fc1.weight.detach().clamp_(-self.bound, self.bound)
    return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def named_input(self: Any, x: Tensor) -> Tensor:
    return self.fc2(functional.relu(self.fc1(torch.flatten(input=x, start_dim=1))))


def split(self: Any, x: Tensor) -> Tensor:
    x = x.flatten(1)
    return self.fc2(self.fc1(x) + self.fc1(x.split(2)[0][:1]))


def time_first(self: Any, x: Tensor) -> Tensor:
    h = self.fc1(x.flatten(1)).view(-1, 4, 3).transpose(0, 1)
    h = self.drop(h.reshape(-1, 3)).view(4, -1, 3).transpose(0, 1)
    return self.fc2(h.flatten(1))


def time_last(self: Any, x: Tensor) -> Tensor:
    h = self.fc1(x.flatten(1)).view(-1, 4, 3)
    h = self.drop(h.reshape(-1, 3)).view(-1, 12)
    return self.fc2(h)


def twins(self: Any, x: Tensor) -> Tensor:
    h = self.fc1(x.flatten(1))
    a, b = self.drop(torch.cat([h, h * 2], 0)).chunk(2, 0)
    return self.fc2(a - b)


def dropped_twice(self: Any, x: Tensor) -> Tensor:
    x = self.wide(self.drop(x)).flatten(1)
    h = torch.tanh(self.drop(self.fc1(x)))
    return self.drop(self.fc2(self.other(h) + self.drop(h)))


def stable(self: Any, x: Tensor) -> Tensor:
    h = self.fc1(x.flatten(1))
    shares = (h - h.max().detach()).exp()
    return self.fc2(shares / shares.sum(1, keepdim=True))


def over_batch(self: Any, x: Tensor) -> Tensor:
    return self.fc2(self.fc1(x.flatten(1)).softmax(0))


def counted(self: Any, x: Tensor) -> Tensor:
    return self.fc2(self.fc1(x.flatten(1))) + self.shift[:CLASSES] / x.shape[0]


def row_numbers(self: Any, x: Tensor) -> Tensor:
    h = functional.relu(self.fc1(x.flatten(1)))
    return self.fc2(h[torch.arange(h.shape[0]), :])


def detached(self: Any, x: Tensor) -> Tensor:
    h = self.fc1(x.flatten(1))
    return self.fc2(h + (h.round() - h).detach() * self.scale)


def scalars(self: Any, x: Tensor) -> Tensor:
    h = self.fc1(x.flatten(1))[:, 1:] * self.scale + (1 - self.scale) ** 2
    a, b = self.shift.chunk(2)
    return self.fc2(torch.cat([h, h[:, -1:] / (2 + self.scale.exp())], 1).flip(1)) + torch.cat([a, b])[-5:]


def tied(self: Any, x: Tensor) -> Tensor:
    h = functional.relu(self.fc1(x.flatten(1)))
    return self.fc2(h + functional.linear(functional.linear(h, self.fc2.weight), self.fc2.weight.T))


def again(self: Any, x: Tensor) -> Tensor:
    h = torch.utils.checkpoint.checkpoint(self.fc1, x.flatten(1), use_reentrant=False)
    return self.fc2(functional.relu(h))


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(196, 12), nn.ReLU(), nn.Linear(12, CLASSES))
    module[1].weight.register_hook(lambda gradient: gradient * 0.1)
    return module


def patched() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(196, 12), nn.ReLU(), nn.Linear(12, CLASSES))
    forward = module[1].forward
    module[1].forward = lambda x: 3 * forward(x)
    return module


def layers(*between: nn.Module, size: int = 12) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(196, 12), *between, nn.Linear(size, CLASSES))


def dropped_by_one() -> nn.Module:
    drop = nn.Dropout(0.3)
    between = nn.ReLU(), drop, nn.Linear(12, 12), nn.ReLU(), drop
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 12), *between, nn.Linear(12, CLASSES))


def windows() -> nn.Module:
    pools = (nn.MaxPool2d([2, 2]), nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d([2, 1]))
    return nn.Sequential(nn.Conv2d(1, 3, 3), *pools, nn.Flatten(), nn.Linear(8, CLASSES))


def normalized() -> nn.Module:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(196, 12))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(12, CLASSES))


def orthogonal() -> nn.Module:
    first = nn.utils.parametrizations.orthogonal(nn.Linear(196, 12))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(12, CLASSES))


class Gated(nn.Module):
    """A small share of the outputs comes from what is not trained."""

    def __init__(self):
        super().__init__()
        self.gate, self.fc = nn.Linear(196, 12), nn.Linear(196, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        with torch.no_grad():
            gate = self.gate(x).mean(1, keepdim=True)
        return self.fc(x) * (1 + gate * 1e-3)


class TiedWords(nn.Module):
    """The table of words is also what scores the classes."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8, padding_idx=2), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.fc(self.words(tokens).mean(1)).tanh()
        return h @ self.words.weight[:CLASSES].T


class Replaced(nn.Module):
    """Tokens changed in place before they are looked up."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        tokens.clamp_(max=30)
        return self.fc(self.words(tokens).mean(1))


class Learned(nn.Module):
    """Learned first states, time first, a mask that is no gradient's."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(60, 6), nn.GRU(6, 5)
        self.first, self.drop, self.fc = nn.Parameter(torch.randn(1, 1, 5)), nn.Dropout(0.2), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.words(tokens)).transpose(0, 1)
        out, _ = self.rnn(x, self.first.expand(-1, tokens.shape[0], -1).contiguous())
        return self.fc(self.drop(out.transpose(0, 1)[:, -1]))


class Listed(nn.Module):
    """Layers under names of their own that also stand in a sequence, which is what runs."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(196, 12), nn.Linear(12, CLASSES)
        self.layers = nn.Sequential(self.fc1, nn.Tanh(), self.fc2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1)).clamp(-2, 2)


def one(forward: Callable[[Any, Tensor], Tensor], **parts: Any) -> Callable[[], nn.Module]:
    return lambda: Own(forward, **{name: part() if callable(part) else part for name, part in parts.items()})


def shift() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 12))


def scale() -> nn.Parameter:
    return nn.Parameter(torch.tensor(0.3))


CASES: dict[str, tuple[object, Callable[[], nn.Module], bool]] = {
    "no gradient": (IMAGES, one(unlearned), False),
    "a gate without a gradient": (IMAGES, lambda: Gated(), False),
    "a gradient of one's own": (IMAGES, one(leaky), False),
    "hooks of a parameter": (IMAGES, hooked, False),
    "another forward": (IMAGES, patched, False),
    "changed by a helper": (IMAGES, one(shifted), False),
    "in place": (IMAGES, one(in_place, shift=shift), False),
    "random": (IMAGES, one(lucky), False),
    "numpy's generator": (IMAGES, one(noisy), False),
    "counting": (IMAGES, one(counting, count=lambda: torch.tensor(0)), False),
    "clipped later": (IMAGES, one(clipped, bound=0.1), False),
    "clipped at once": (IMAGES, one(clipped_in_place, bound=0.01), False),
    "clipped later in place": (IMAGES, one(clipped_in_place, bound=0.075), False),
    "clipped later detached": (IMAGES, one(clipped_detached, bound=0.075), False),
    "an input by its name": (IMAGES, one(named_input), True),
    "batches cut": (IMAGES, one(split), False),
    "dropout, time first": (IMAGES, one(time_first), False),
    "dropout, sample by sample": (IMAGES, one(time_last), False),
    "dropout of twins": (IMAGES, one(twins), False),
    "dropout at several places": (
        IMAGES,
        one(
            dropped_twice,
            wide=lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout2d(0.1)),
            other=lambda: nn.Dropout(0.5),
        ),
        True,
    ),
    "dropout by one layer at two places": (IMAGES, dropped_by_one, True),
    "stable": (IMAGES, one(stable), True),
    "over the batch": (IMAGES, one(over_batch), False),
    "counted": (IMAGES, one(counted, shift=shift), False),
    "row numbers": (IMAGES, one(row_numbers), True),
    "detached": (IMAGES, one(detached, scale=scale), True),
    "scalars": (IMAGES, one(scalars, scale=scale, shift=shift), True),
    "tied": (IMAGES, one(tied), True),
    "computed again": (IMAGES, one(again), True),
    "relu, sigmoid": (IMAGES, layers(nn.ReLU(), nn.Sigmoid()), True),
    "relu, dropout, sigmoid": (IMAGES, layers(nn.ReLU(), nn.Dropout(0.2), nn.Sigmoid()), True),
    "relu, tanh, dropout": (IMAGES, layers(nn.ReLU(), nn.Tanh(), nn.Dropout(0.2)), True),
    "dropout, tanh, relu": (IMAGES, layers(nn.Dropout(0.2), nn.Tanh(), nn.ReLU()), True),
    "tanh, relu, dropout": (IMAGES, layers(nn.Tanh(), nn.ReLU(), nn.Dropout(0.4)), True),
    "prelu": (IMAGES, layers(nn.PReLU(12), nn.Unflatten(1, (3, 4)), nn.PReLU(3), nn.Flatten()), True),
    "windows given as lists": (IMAGES, windows, True),
    "weight norm": (IMAGES, normalized, True),
    "orthogonal": (IMAGES, orthogonal, False),
    "words tied": (TEXTS, TiedWords, True),
    "words replaced": (TEXTS, Replaced, False),
    "states learned": (TEXTS, Learned, True),
    "layers of two names": (IMAGES, Listed, True),
}
"""Name -> data, module, whether it has a stacked form."""


def both(name: str, sizes: np.ndarray, rule: LocalRule = EPOCHS) -> tuple[str | None, Any]:
    description, make, _ = CASES[name]
    torch.manual_seed(1)
    model = FlatModel(make().double())
    reason = why_not_side_by_side(model, description)
    if reason is not None:
        return reason, None
    source = Source(description, sizes, torch.float64)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks_for(sizes), model.initial, rule)
    found, _ = train(BatchedEngine(model, source, STREAMS), tasks_for(sizes), model.initial, rule)
    return None, (relative_difference(expected, model.initial), relative_difference(found, expected))


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_trained_as_alone_or_left_to_the_sequential_engine(name: str):
    reason, apart = both(name, ragged_sizes(6, 20))
    if reason is None:
        assert apart[0] > 1e-4, "training must have changed the model"
        assert apart[1] < 1e-12
    assert (reason is None) == CASES[name][2], reason


@pytest.mark.parametrize("sizes", [np.full(5, 5), np.ones(6, np.int64)], ids=["as many clients as rows", "single rows"])
@pytest.mark.parametrize("name", ["dropout at several places", "tied", "words tied", "states learned"])
def test_numbers_of_clients_and_rows_are_not_taken_for_one_another(name: str, sizes: np.ndarray):
    reason, apart = both(name, sizes, LocalRule(lr=0.1, epochs=2, batch_size=5))
    assert reason is None
    assert apart[1] < 1e-12
