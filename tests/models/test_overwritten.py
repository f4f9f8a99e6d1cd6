"""ReLU and sums take the place of what they read where nothing else reads it: the same bits, and the same training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.streams import Streams
from fedmpi.local.batched.engine import BatchedEngine, why_not_side_by_side
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from fedmpi.models.stacked import forms, overwritten, writer
from tests.local.stacks import CLASSES, COLOURED, Source, ragged_sizes, relative_difference, tasks_for, train

STREAMS = Streams(7)
RULE = LocalRule(lr=0.05, epochs=1, batch_size=7)
BUILDS = {
    "relu of a convolution": lambda n, x: functional.relu(n.conv(x)),
    "relu_ of a convolution": lambda n, x: n.conv(x).relu_(),
    "a layer on a convolution": lambda n, x: n.rectifier(n.conv(x)),
    "a layer in place": lambda n, x: n.in_place(n.conv(x)),
    "relu of a norm": lambda n, x: torch.relu(n.norm(n.conv(x))),
    "a residual": lambda n, x: functional.relu(n.norm(n.conv(x)) + n.side(x)),
    "a residual, the other way round": lambda n, x: functional.relu(n.side(x).tanh() + n.norm(n.conv(x))),
    "relu of relu": lambda n, x: n.conv(x).relu().relu(),
    "a sum with relu": lambda n, x: n.conv(x).relu() + n.side(x).tanh(),
    "a sum in place": lambda n, x: n.conv(x).add_(n.side(x)).relu(),
    "a sum in place by its sign": lambda n, x: _iadd(n.conv(x), n.side(x)).relu(),
    "of a product": lambda n, x: functional.relu(n.conv(x) * n.side(x)),
    "of a sum with a number": lambda n, x: functional.relu(n.conv(x).tanh() + 1),
}  # fmt: skip
HOW_MANY = {"a residual": 2, "a residual, the other way round": 2, "a sum in place": 2, "a sum in place by its sign": 2}
LEFT = {
    "the convolution is read again": lambda n, x: (h := n.conv(x)).relu() + h,
    "the convolution is read before": lambda n, x: (h := n.conv(x)).tanh() * h.relu(),
    "a view of it is read": lambda n, x: (h := n.conv(x)).flatten(2)[..., :1].unsqueeze(3) * h.relu(),
    "tanh needs its result": lambda n, x: n.conv(x).tanh().relu(),
    "relu needs its result": lambda n, x: n.conv(x).tanh().relu().relu(),
    "an exponential needs its result": lambda n, x: n.conv(x).tanh().exp() + n.side(x).sigmoid(),
    "the samples are nobody's": lambda n, x: torch.cat([x.relu(), n.conv(x)[:, :1]], 1),
    "relu of a view": lambda n, x: n.conv(x)[:, :3].relu(),
    "a sum that is larger": lambda n, x: n.conv(x).mean(1, keepdim=True) + (n.conv(x).amax((2, 3), True) * 2),
    "a sum of one": lambda n, x: (h := n.conv(x)) + h,
    "a sum with a share": lambda n, x: torch.add(n.conv(x), n.side(x), alpha=2),
    "a sum of something else into a convolution": lambda n, x: functional.avg_pool2d(n.conv(x), 1).add_(n.side(x)),
    "a sum that is more precise": lambda n, x: n.conv(x).float() * 2 + n.side(x).tanh(),
    "a sum with what is trained": lambda n, x: n.conv(x) + n.side.bias.view(4, 1, 1),
    "a product in a tensor that is read": lambda n, x: n.conv(torch.mul(x, 2, out=(t := x * 1)).relu() - t),
    "the module changes it and reads it": lambda n, x: torch.maximum(functional.relu(h := n.conv(x), True) * 0, h),
}  # fmt: skip


APART = {
    "groups over a text": lambda n, x: n.grouped(x.flatten(2)).unflatten(2, (16, 16)),
    "a norm without weights, of what is trained": lambda n, x: (
        n.conv(x) * n.plain(n.side.weight).mean((1, 2, 3))[:, None, None]
    ),
    "a norm of what is trained": lambda n, x: n.conv(x) * n.norm(n.side.weight.flatten(1).t()).mean(0)[:, None, None],
    "a convolution of what is trained": lambda n, x: n.conv(x) * n.conv(n.side.weight).mean((0, 2, 3))[:, None, None],
}


def _iadd(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


class Net(nn.Module):
    def __init__(self, inner: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.conv, self.side, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)
        self.grouped, self.plain = nn.Conv1d(3, 6, 3, padding=1, groups=3), nn.GroupNorm(1, 3, affine=False)
        self.rectifier, self.in_place = nn.ReLU(), nn.ReLU(inplace=True)
        self.inner, self.fc = inner, nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(functional.adaptive_avg_pool2d(self.inner(self, x).mean(1), 8).flatten(1))


def make(inner: Callable[[Any, Tensor], Tensor], dtype: torch.dtype = torch.float64) -> FlatModel:
    torch.manual_seed(2)
    net = Net(inner)
    with torch.no_grad():  # a pixel that is not above 0 for about half of all
        net.norm.bias.normal_()
    return FlatModel(net.to(dtype))


@pytest.fixture
def done(monkeypatch) -> list[str]:
    """What is called in place of what it reads, in every forward pass that follows."""
    found: list[str] = []

    def noting(traced, node, own):
        given = overwritten.overwriting(traced, node, own)
        return given and (lambda *x: (given[0](*x), found.append(given[0].__name__))[0], given[1])

    monkeypatch.setattr(writer, "overwriting", noting)
    return found


def rounds(inner: Callable[[Any, Tensor], Tensor], dtype: torch.dtype, chunk: int) -> Tensor:
    sizes = ragged_sizes(5, 12)
    model, source = make(inner, dtype), Source(COLOURED, sizes, dtype)
    assert why_not_side_by_side(model, COLOURED) is None
    return train(BatchedEngine(model, source, STREAMS, chunk=chunk), tasks_for(sizes), model.initial, RULE)[0]


def assert_as_alone(inner: Callable[[Any, Tensor], Tensor], chunk: int) -> None:
    sizes = ragged_sizes(5, 12)
    model, source = make(inner), Source(COLOURED, sizes, torch.float64)
    alone, _ = train(SequentialEngine(model, source, STREAMS), tasks_for(sizes), model.initial, RULE)
    assert relative_difference(rounds(inner, torch.float64, chunk) - model.initial, alone - model.initial) < 1e-11


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", BUILDS)
def test_what_nothing_else_reads_is_overwritten_with_the_same_bits(name: str, chunk: int, done, monkeypatch):
    assert_as_alone(BUILDS[name], chunk)
    assert len(set(done)) == HOW_MANY.get(name, 1) and "rectified" in done
    calls = len(done)
    found = rounds(BUILDS[name], torch.float32, chunk)
    assert len(done) > calls
    monkeypatch.setattr(writer, "overwriting", lambda *_: None)
    assert torch.equal(rounds(BUILDS[name], torch.float32, chunk), found)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", LEFT)
def test_what_something_else_reads_is_left(name: str, chunk: int, done):
    assert_as_alone(LEFT[name], chunk)
    assert not done


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", APART)
def test_layers_of_anything_but_samples_are_done_client_by_client(name: str, chunk: int):
    assert_as_alone(APART[name], chunk)


@pytest.mark.parametrize("largest", [0, 1 << 30], ids=["torch's own norm", "scaled afterwards"])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", ["relu of a norm", "a residual", "a residual, the other way round"])
def test_a_norm_is_overwritten_where_its_result_is_no_view(name: str, largest: int, chunk: int, done, monkeypatch):
    monkeypatch.setattr(forms, "LARGE", largest)
    written: list[bool] = []
    monkeypatch.setattr(torch, "relu_", noting_whether_written(written, torch.relu_))
    monkeypatch.setattr(Tensor, "add_", noting_whether_written(written, Tensor.add_))
    assert_as_alone(BUILDS[name], chunk)
    assert not any(written) and (len(written) == len(done) if largest == 0 else len(written) < len(done))


def noting_whether_written(written: list[bool], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which notes whether what it writes to is a view, of images that autograd follows."""

    def call(x: Tensor, *more: Any, **named: Any) -> Tensor:
        if x.dim() == 4 and torch.is_grad_enabled():
            written.append(x._is_view())
        return function(x, *more, **named)

    return call


def test_convolutions_and_sums_are_really_written_over(monkeypatch):
    places: list[bool] = []
    for name in ("rectified", "added"):
        function = getattr(overwritten, name)

        def recording(x: Tensor, *more: Tensor, function: Callable[..., Tensor] = function) -> Tensor:
            made = function(x, *more)
            places.append(made.data_ptr() == x.data_ptr())
            return made

        monkeypatch.setattr(overwritten, name, recording)
    for chunk in (1, 3):
        assert_as_alone(lambda n, x: functional.relu(n.conv(x) + n.side(x)), chunk)
    assert places and all(places)
