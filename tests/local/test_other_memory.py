"""Values that a forward pass has lie where other values do, or elsewhere: clients are trained as by a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi import UserError
from fedmpi.local.batched.engine import BatchedEngine, why_not_side_by_side
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import forward_traits
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel, travelling_buffers
from tests.local.stacks import Source, relative_difference, train
from tests.local.test_drawing_modules import FLAT, STREAMS, Net, evaluated, set_up

WHOLE = LocalRule(lr=0.1, epochs=3, batch_size=None)


def travelling(module: nn.Module) -> list[Tensor]:
    return [*(one for one in module.parameters() if one.requires_grad), *travelling_buffers(module)]


def by_a_plain_loop(net: Callable[[], nn.Module], source: Source, client: int, start: Tensor) -> Tensor:
    """What a client makes of a model of its own in three steps on all its samples."""
    torch.manual_seed(1)
    module = net().double()
    with torch.no_grad():
        nn.utils.vector_to_parameters(start.clone(), travelling(module))
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.1)
    names = [name for name, one in module.named_buffers() if any(one is other for other in travelling_buffers(module))]
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(module(source.x[client]), source.y[client]).backward()
        optimizer.step()
    buffers = dict(module.named_buffers())
    ends = [one for one in module.parameters() if one.requires_grad] + [buffers[name] for name in names]
    return torch.cat([one.detach().reshape(-1) for one in ends])


def assert_trained_as_alone(net: Callable[[], nn.Module], away: float = 0.0) -> None:
    """Clients one after another, with evaluations between them, end where plain loops do; `away` from the first values
    they start."""
    model, source, tasks = set_up(net)
    start = model.initial + away
    engine, score = SequentialEngine(model, source, STREAMS), evaluated(model)
    torch.manual_seed(2)
    first = score(0)
    for client in np.argsort(-source.sizes)[:3]:
        found = train(engine, [tasks[client]], start, WHOLE)[0] - start
        coefficient = tasks[client].coefficient
        alone = coefficient * (by_a_plain_loop(net, source, int(client), start) - start)
        assert relative_difference(found, alone) < 1e-9
        assert score(0) == first


class Target(Net):
    """A frozen copy of a layer, updated by the forward pass in one of many ways."""

    def __init__(self, update: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.target, self.update = nn.Linear(16, 16).requires_grad_(False), update

    def within(self, x: Tensor) -> Tensor:
        for target, own in zip(self.target.parameters(), self.b.parameters(), strict=True):
            self.update(target, own)
        return self.b(x) + self.target(x)


def same_memory(target: Tensor, own: Tensor) -> None:
    target.data = own.data


def mean_in_place(target: Tensor, own: Tensor) -> None:
    target.data.mul_(0.9).add_(own.data, alpha=0.1)


def mean_anew(target: Tensor, own: Tensor) -> None:
    target.data = target.data * 0.9 + own.data * 0.1


@pytest.mark.parametrize("update", [same_memory, mean_in_place, mean_anew])
def test_a_frozen_target_begins_anew_and_leaves_what_travels_alone(update: Any) -> None:
    assert_trained_as_alone(lambda: Target(update))


class Exchanging(Net):
    """Two layers, one of them frozen, that exchange their weights in every pass."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.target, self.copied = nn.Linear(16, 16).requires_grad_(False), copied

    def within(self, x: Tensor) -> Tensor:
        if self.training:
            own, other = self.b.weight.data, self.target.weight.data
            self.b.weight.data, self.target.weight.data = other, own.clone() if self.copied else own
        return self.b(x) + self.target(x)


def test_memory_that_a_parameter_leaves_to_a_frozen_one_is_refused_and_copies_are_not() -> None:
    model, source, tasks = set_up(lambda: Exchanging(copied=False))
    with pytest.raises(UserError, match=r"leaves target\.weight the memory of b\.weight"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, WHOLE)
    assert_trained_as_alone(lambda: Exchanging(copied=True))


class Before(Net):
    """Mixes its weights with those that it had at first, which it keeps as they are or as a copy."""

    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.keep, self.old = keep, None

    def within(self, x: Tensor) -> Tensor:
        weight = self.b.weight
        if self.training and self.old is None:
            self.old = self.keep(weight.data)
        if self.training:
            weight.data = 0.9 * weight.data + 0.1 * next(values_in(self.old))
        return self.b(x)


def values_in(kept: Any) -> Iterator[Tensor]:
    kept = kept.kept if isinstance(kept, SimpleNamespace) else kept
    yield from (kept,) if isinstance(kept, Tensor) else kept.values() if isinstance(kept, dict) else kept


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda one: one,
    "a row": lambda one: one[3],
    "in a list": lambda one: [one],
    "in a dictionary": lambda one: {"b": one},
    "in an object": lambda one: SimpleNamespace(kept=[one]),
}


@pytest.mark.parametrize("how", KEPT)
def test_memory_that_a_parameter_leaves_to_an_attribute_is_refused_and_a_copy_is_not(how: str) -> None:
    keep = KEPT[how]
    model, source, tasks = set_up(lambda: Before(keep))
    with pytest.raises(UserError, match=r"leaves old the memory of b\.weight \(old = a\.data; a\.data = …"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, WHOLE)
    assert_trained_as_alone(lambda: Before(lambda one: keep(one.clone())))


def test_memory_that_nothing_puts_back_is_named_where_a_later_vector_is_bound() -> None:
    kept: list[Tensor] = []

    class Keeping(Net):
        def within(self, x: Tensor) -> Tensor:
            if not kept:
                kept.append(self.b.weight.data)
            self.b.weight.data = kept[0]
            return self.b(x)

    model, source, tasks = set_up(Keeping)
    with pytest.raises(UserError, match=r"gives b\.weight memory that it lay in before \(old = self\.b\.weight\.data"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, WHOLE)


class Shadowed(Net):
    """Is evaluated with a mean of its weights, and trained with themselves again."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow, self.kept = self.b.weight.detach().double() + 1, None

    def within(self, x: Tensor) -> Tensor:
        if self.training and self.kept is not None:
            self.b.weight.data, self.kept = self.kept, None
        if not self.training and self.kept is None:
            self.kept, self.b.weight.data = self.b.weight.data, self.shadow
        return self.b(x)


def test_memory_that_the_next_pass_gives_back_is_seen_to_have_been_left() -> None:
    model = set_up(Shadowed)[0]
    assert forward_traits(model, FLAT).writes


class Late(Net):
    """A copy of a layer that lies in the memory of this from the first pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.b).requires_grad_(False)

    def within(self, x: Tensor) -> Tensor:
        y = self.b(x) + self.target(x)
        self.target.weight.data = self.b.weight.data
        return y


def test_a_copy_that_is_as_its_layer_at_first_begins_in_memory_of_its_own() -> None:
    assert_trained_as_alone(Late, away=0.02)


class Mean(Net):
    """A running mean of a layer's weights, which begins with these: nothing that a first pass could change."""

    def __init__(self, held: str) -> None:
        super().__init__()
        first = self.b.weight.detach().clone()
        self.held = held
        if held == "frozen":
            self.mean = nn.Parameter(first, requires_grad=False)
        elif held == "buffer":
            self.register_buffer("mean", first, persistent=False)
        else:
            layer = nn.Linear(16, 16, bias=False)
            layer.weight.data = first
            self.mean = {
                "dictionary": {"b": [first]},
                "attribute": first,
                "no part": {"b": [layer]},
                "object": SimpleNamespace(b=first),
            }[held]

    def within(self, x: Tensor) -> Tensor:
        mean = self.mean["b"][0] if self.held in ("dictionary", "no part") else self.mean
        mean = mean.weight if self.held == "no part" else mean.b if self.held == "object" else mean
        if self.training:
            with torch.no_grad():
                mean.lerp_(self.b.weight.to(mean.dtype), 0.5)
        return self.b(x) + x @ mean.to(x.dtype).t()


@pytest.mark.parametrize("held", ["frozen", "buffer", "attribute", "dictionary", "no part", "object"])
def test_a_mean_of_weights_that_begins_with_them_begins_anew_with_every_client(held: str) -> None:
    assert_trained_as_alone(lambda: Mean(held))


class Growing(Net):
    """A table that grows to the number of samples, of one of two kinds and in one of two ways."""

    def __init__(self, frozen: bool, resized: bool) -> None:
        super().__init__()
        table = torch.ones(1)
        self.table = nn.Parameter(table, requires_grad=False) if frozen else table
        self.resized = resized

    def within(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            grown = torch.linspace(0.5, 1, len(x), dtype=torch.float64)
            if self.resized:
                self.table.resize_(len(x)).copy_(grown)
            else:
                self.table.data = grown
        return self.b(x) * self.table[: len(x), None]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("resized", [False, True])
def test_what_grows_has_its_first_size_for_every_client(frozen: bool, resized: bool) -> None:
    assert_trained_as_alone(lambda: Growing(frozen, resized))


class Turned(Net):
    """A weight that is transposed in its memory by every pass."""

    def within(self, x: Tensor) -> Tensor:
        self.b.weight.data = self.b.weight.data.t()
        return self.b(x)


def test_a_weight_that_is_transposed_in_its_memory_is_trained_so() -> None:
    assert_trained_as_alone(Turned)


class TwoMeans(Net):
    """A mean, and what it was a step before: taken over in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("before", torch.ones(16))

    def within(self, x: Tensor) -> Tensor:
        x = self.b(x)
        if self.training:
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.how == "replaced":
                self.before = self.mean
                self.mean = mean
            elif self.how == "data":
                self.before.data = self.mean.data
                self.mean.data = mean
            else:
                self.mean, self.before = self.before, self.mean
        return x - self.mean + 0.1 * self.before


@pytest.mark.parametrize("how", ["replaced", "data", "exchanged"])
def test_a_buffer_that_takes_the_place_of_another_keeps_its_value_there(how: str) -> None:
    assert_trained_as_alone(lambda: TwoMeans(how))


def test_a_parameter_that_is_given_the_memory_of_another_is_refused() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.Linear(16, 16)

        def within(self, x: Tensor) -> Tensor:
            self.d.weight.data = self.b.weight.data
            return self.d(torch.tanh(self.b(x)))

    model, source, tasks = set_up(Tied)
    forward_traits(model, FLAT)
    with pytest.raises(UserError, match=r"gives d.weight the memory of another value that travels"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, WHOLE)


SHARING: dict[str, Callable[[Any], Any]] = {
    "d.weight": lambda net: setattr(net.d.weight, "data", net.b.weight.data),
    "d.bias": lambda net: setattr(net.d.bias, "data", net.b.weight.data[0]),
    "first": lambda net: net.register_buffer("first", net.b.weight.data),
    "own": lambda net: setattr(net, "own", net.b.weight.detach()),
    "part": lambda net: setattr(net, "part", [net.b.weight.data[2:4, 3]]),
    "d.turned": lambda net: setattr(net.d, "turned", {"b": net.b.weight.t()}),
}
"""The name of what lies in the memory of a weight -> how it comes there."""


def two_layers() -> Net:
    net = Net()
    net.d = nn.Linear(16, 16)
    return net


@pytest.mark.parametrize("name", SHARING)
def test_a_parameter_that_lies_where_another_value_does_is_refused(name: str) -> None:
    net = two_layers()
    SHARING[name](net)
    with pytest.raises(
        UserError, match=rf"parameter (b.weight lies in the memory of {name}|{name} .* of b.weight), wh"
    ):
        FlatModel(net)


def test_names_parts_and_neighbours_of_a_parameter_share_nothing() -> None:
    net = two_layers()
    both = torch.randn(16, 32)
    net.b.weight.data, net.d.weight.data = both[:, :16], both[:, 16:]
    net.again, net.all, net.d.bias = net.b.weight, list(net.b.parameters()), net.b.bias
    net.copied, net.sparse, net.empty = net.b.weight.detach().clone(), torch.eye(3).to_sparse(), torch.zeros(0)
    net.frozen, net.part = nn.Parameter(both.clone(), False), nn.Parameter(both, False)
    net.part.data = net.frozen.data[:2]
    net.normed, net.layers = nn.utils.spectral_norm(nn.Linear(3, 3)), nn.LSTM(3, 3)
    FlatModel(net)


class SharedStatistics(Net):
    """A mean that lies in a table, of which one is written and the other read."""

    def __init__(self, held: str, how: str, travels: bool = True) -> None:
        super().__init__()
        self.how = how
        table = torch.zeros(2, 16, dtype=torch.float64)
        if held == "buffer":
            self.register_buffer("table", table, persistent=travels)
        elif held == "frozen":
            self.table = nn.Parameter(table, requires_grad=False)
        else:
            self.table = SimpleNamespace(rows=[table]) if held == "object" else table
        if held == "batch norm":
            self.norm = nn.BatchNorm1d(16).double()
            self.norm.running_mean = table[0]
        else:
            self.register_buffer("mean", table[0], persistent=travels)

    def within(self, x: Tensor) -> Tensor:
        x = self.b(x)
        table = self.table.rows[0] if isinstance(self.table, SimpleNamespace) else self.table
        if self.how == "only read":
            return x + self.mean + table[1]
        if self.how == "put back":
            table[0] = 2.0
            x = x + self.mean
            table[0] = 0.0
        elif self.how == "table":
            table.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x - self.mean
        elif self.how == "norm":
            x = self.norm(x) - table[0]
        else:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x - table[0]
        return x


WRITTEN = [
    ("buffer", "table"),
    ("buffer", "mean"),
    ("buffer", "put back"),
    ("frozen", "table"),
    ("attribute", "mean"),
    ("object", "table"),
    ("batch norm", "norm"),
]


@pytest.mark.parametrize(("held", "how"), WRITTEN)
def test_a_buffer_that_travels_and_shares_memory_that_is_written_is_refused(held: str, how: str) -> None:
    model = set_up(lambda: SharedStatistics(held, how))[0]
    with pytest.raises(UserError, match=r"buffer .* lies in the memory of .*, and its forward pass writes there"):
        forward_traits(model, FLAT)


@pytest.mark.parametrize(("held", "how"), [*WRITTEN[:6], ("buffer", "only read"), ("attribute", "only read")])
def test_buffers_that_share_memory_and_stay_where_they_are_are_trained_as_alone(held: str, how: str) -> None:
    assert_trained_as_alone(lambda: SharedStatistics(held, how, travels=how == "only read"))


def test_what_is_written_in_shared_memory_and_put_back_is_followed_side_by_side() -> None:
    model, source, tasks = set_up(lambda: SharedStatistics("buffer", "put back", travels=False))
    assert why_not_side_by_side(model, FLAT) is None
    found, expected = (
        train(kind(model, source, STREAMS), tasks, model.initial, WHOLE)[0]
        for kind in (BatchedEngine, SequentialEngine)
    )
    assert relative_difference(found, expected) < 1e-12


class BesideStatistics(SharedStatistics):
    """Such values that do not travel, beside statistics that do."""

    def __init__(self) -> None:
        super().__init__("buffer", "table", travels=False)
        self.norm = nn.BatchNorm1d(16)

    def within(self, x: Tensor) -> Tensor:
        return self.norm(super().within(x))


def test_what_shares_memory_and_stays_may_be_written_beside_buffers_that_travel() -> None:
    assert_trained_as_alone(BesideStatistics)


class Grown(Net):
    """What is a view of a buffer first, the forward pass makes anew and writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(16, dtype=torch.float64))
        self.held = self.table[:4]

    def within(self, x: Tensor) -> Tensor:
        held = torch.zeros(16, dtype=torch.float64)
        held[:4] = self.table[:4]
        self.held = held
        return self.b(x) * self.held


def test_what_forward_passes_make_in_the_place_of_shared_memory_may_be_written() -> None:
    assert_trained_as_alone(Grown)


class FormerMean(Net):
    """Keeps the mean of the batch before, itself or a copy, and puts another in its place."""

    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.keep, self.last = keep, keep(torch.zeros(16, dtype=torch.float64))

    def within(self, x: Tensor) -> Tensor:
        x = self.b(x)
        y = x - self.mean - next(values_in(self.last))
        if self.training:
            self.last = self.keep(self.mean)
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y


class FormerMeanInNew(Net):
    """Keeps the former mean in an attribute that its first pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def within(self, x: Tensor) -> Tensor:
        self.last = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.b(x)


def test_a_former_buffer_in_an_attribute_that_is_new_is_refused() -> None:
    model, source, tasks = set_up(FormerMeanInNew)
    with pytest.raises(UserError, match=r"keeps its former buffer mean in last .* keep a copy"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, WHOLE)


@pytest.mark.parametrize("how", [how for how in KEPT if how != "a row"])
def test_a_former_buffer_in_an_attribute_is_refused_and_a_copy_is_not(how: str) -> None:
    keep = KEPT[how]
    model, source, tasks = set_up(lambda: FormerMean(keep))
    with pytest.raises(UserError, match=r"keeps its former buffer mean in last .* keep a copy"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, WHOLE)
    assert_trained_as_alone(lambda: FormerMean(lambda one: keep(one.clone())))
