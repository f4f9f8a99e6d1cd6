"""Values of attributes are told apart from what they become, and put back in place."""

from __future__ import annotations

import random
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmpi.models.first_values import MOST_ENTRIES, FirstValue

SCALARS: list[tuple[Any, Any]] = [
    (1, 2),
    (1.5, 2.5),
    (1j, 2j),
    ("cold", "warm"),
    (None, 0),
    (1, 1.0),
    (True, False),
    (np.int64(1), np.int64(2)),
    (np.float32(1), np.float32(2)),
    (np.float32(1), np.float64(1)),
    (torch.zeros(3), torch.zeros(3)),
    (np.zeros(3), np.zeros(3)),
    ((1, 2), (1, 3)),
    ([1, 2], (1, 2)),
    ({"a": 1}, {"a": 2}),
    ({1, 2}, {1}),
    (random.Random(3), random.Random(3)),
]


@dataclass
class Meter:
    """As many a user's code keeps books."""

    count: int = 0
    seen: list[Tensor] = field(default_factory=list)
    beside: Any = None


class InSlots:
    """Keeps books without a dictionary of attributes, one of them under a private name."""

    __slots__ = ("__seen", "beside", "count")

    def __init__(self) -> None:
        self.count, self.__seen = 0, [torch.zeros(2)]

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        assert name != "count" or value < 3

    def __repr__(self) -> str:
        return f"{self.count} {self.__seen} {hasattr(self, 'beside')}"

    def note(self) -> None:
        self.__seen[0].add_(1)
        self.beside = 1


class InSlotsAndBeside(InSlots):
    """The same with a dictionary of attributes."""

    def note(self) -> None:
        super().note()
        self.further = 1

    def __repr__(self) -> str:
        return f"{super().__repr__()} {vars(self)}"


class Book(dict[str, Any]):
    """Keeps what it is given under other names, and says how often."""

    def __init__(self) -> None:
        super().__init__(a_=1)
        self.written = 0

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(f"{name}_", value)
        self.written += 1

    def clear(self) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{super().__repr__()} {self.written}"


class Row(list[int]):
    """A list with an attribute."""

    longest = 0


def lengthened(row: Row) -> None:
    row.longest = 5


def rekeyed(held: dict[Tensor, int]) -> None:
    held.clear()
    held[torch.ones(2)] = 1


def counted(meter: Any) -> None:
    meter.count += 1


def noted(meter: Meter) -> None:
    meter.seen[0].add_(1)
    meter.first = True  # type: ignore[attr-defined]


class PassingFor:
    """Hands on what is asked of it to another object, and passes for one of its class, as proxies do."""

    def __init__(self, other: Any) -> None:
        self.other = other

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return type(self.other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)

    def __iter__(self) -> Any:
        return iter(self.other)

    def __len__(self) -> int:
        return len(self.other)

    def __getitem__(self, key: Any) -> Any:
        return self.other[key]

    def __setitem__(self, key: Any, to: Any) -> None:
        self.other[key] = to

    def __repr__(self) -> str:
        return f"for {self.other}"


class AnsweringToAll:
    """In slots, with an answer to whatever name it is asked for."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> None:
        return None

    def __repr__(self) -> str:
        return f"{self.count}"


class Part(nn.Module):
    """A module that is no part of the model that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))

    def extra_repr(self) -> str:
        return f"{self.weight.tolist()} {self.calls}"


def followed(part: Part) -> None:
    part.weight.data.mul_(0.9)
    part.calls += 1


IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a tensor of several values": (lambda: torch.arange(3.0), lambda one: one.add_(1)),
    "a tensor of one number, spread out": (lambda: torch.zeros(()).expand(1), lambda one: one.add_(1)),
    "complex numbers": (lambda: torch.ones(2, dtype=torch.complex64), lambda one: one.mul_(1j)),
    "a tensor's data": (lambda: torch.arange(3.0), lambda one: one.data.add_(1)),
    "an array": (lambda: np.arange(3), lambda one: np.add(one, 1, out=one)),
    "a list that grows": (lambda: [1], lambda one: one.append(2)),
    "a list that shrinks": (lambda: [1, 2], lambda one: one.pop()),
    "another number in a list": (lambda: [1, 2], lambda one: one.__setitem__(0, 5)),
    "a queue": (lambda: deque([1, 2], maxlen=2), lambda one: one.append(3)),
    "a dictionary that fills": (dict, lambda one: one.__setitem__("a", 1)),
    "another number in a dictionary": (lambda: {"a": 1}, lambda one: one.__setitem__("a", 2)),
    "a dictionary with an order": (lambda: OrderedDict(a=1, b=2), lambda one: one.move_to_end("a")),
    "a set": (lambda: {1}, lambda one: one.add(2)),
    "a tensor in a tuple": (lambda: (torch.zeros(2), "a"), lambda one: one[0].add_(1)),
    "a list in a dictionary": (lambda: {"a": [1]}, lambda one: one["a"].append(2)),
    "an object": (Meter, counted),
    "a module": (Part, followed),
    "a buffer of a module in an object": (lambda: Meter(seen=[Part()]), lambda one: one.seen[0].calls.add_(1)),
    "a slot": (InSlots, counted),
    "what lies in a slot": (InSlots, InSlots.note),
    "slots in a list": (lambda: [InSlots()], lambda one: one[0].note()),
    "slots beside attributes": (InSlotsAndBeside, InSlotsAndBeside.note),
    "a dictionary of a user's class": (Book, lambda one: one.__setitem__("a", 2)),
    "an attribute of a list of a user's class": (lambda: Row([1]), lengthened),
    "a list of a user's class": (lambda: Row([1]), lambda one: one.append(1)),
    "a dictionary in an object": (lambda: UserDict(a=[1]), lambda one: one["a"].append(2)),
    "a list in an object": (lambda: UserList([1]), lambda one: one.append(2)),
    "such a list within an object": (lambda: Meter(beside=UserList([1])), lambda one: one.beside.append(2)),
    "several dictionaries": (lambda: ChainMap({"a": 1}, {}), lambda one: one.__setitem__("a", 2)),
    "a dictionary that makes entries": (lambda: defaultdict(list), lambda one: one["a"].append(1)),
    "counts": (lambda: Counter("ab"), lambda one: one.update("b")),
    "a dictionary by tensors": (lambda: {torch.zeros(2): 1}, rekeyed),
    "what passes for a list": (lambda: PassingFor([1]), lambda one: one.append(2)),
    "what passes for a dictionary": (lambda: PassingFor({"a": [1]}), lambda one: one["a"].append(2)),
    "what passes for a set": (lambda: PassingFor({1}), lambda one: one.add(2)),
    "an object that answers to every name": (AnsweringToAll, counted),
    "bytes": (lambda: bytearray(b"ab"), lambda one: one.append(1)),
    "an array of Python's": (lambda: array("d", [float("nan"), 1]), lambda one: one.__setitem__(1, 2)),
    "a namespace": (lambda: SimpleNamespace(count=0), counted),
    "a tensor in an object in a list": (lambda: [Meter(seen=[torch.zeros(2)])], lambda one: noted(one[0])),
    "a tensor in a list in a dictionary": (lambda: {"a": [torch.zeros(2)]}, lambda one: one["a"][0].add_(1)),
}


def written(value: Any) -> str:
    return repr(value)


@pytest.mark.parametrize(("value", "other"), SCALARS, ids=[f"{one!r:.20}" for one, _ in SCALARS])
def test_another_value_is_found_and_the_same_is_not(value: Any, other: Any) -> None:
    first = FirstValue.of(value)
    assert not first.changed(value)
    assert first.changed(other)
    assert first.put_back() is value


@pytest.mark.parametrize("value", [3, 2.5, 1j, "word " * 3, np.int64(3), (1, (2, "a")), [1.5], {"a": [1]}, {1}])
def test_equal_values_are_the_same(value: Any) -> None:
    again = eval(repr(value), {"np": np})
    assert not FirstValue.of(value).changed(again)


@pytest.mark.parametrize("how", IN_PLACE)
def test_what_is_changed_in_place_is_found_and_put_back_in_place(how: str) -> None:
    make, change = IN_PLACE[how]
    value = make()
    first = FirstValue.of(value)
    change(value)
    assert first.changed(value)
    assert first.put_back() is value
    assert written(value) == written(make())
    assert not first.changed(value)
    change(value)
    first.put_back()
    assert written(value) == written(make())


@pytest.mark.parametrize("make", [lambda one: torch.tensor(one), lambda one: np.array(one)])
def test_numbers_that_are_none_stay_none(make: Callable[[list[float]], Any]) -> None:
    value = make([float("nan"), 1.0])
    first = FirstValue.of(value)
    assert not first.changed(value)
    value[1] = float("nan")
    assert first.changed(value)
    value[0], value[1] = 0.0, 1.0
    assert first.changed(value)


def test_a_dictionary_that_two_hold_stays_that_of_both() -> None:
    shared = {"calls": 0}
    holders = [[shared], [shared]]
    firsts = [FirstValue.of(one) for one in holders]
    shared["calls"] = 3
    assert all(first.changed(first.value) for first in firsts)
    for first in firsts:
        first.put_back()
    assert holders[0][0] is holders[1][0] is shared
    assert shared == {"calls": 0}


def test_numbers_of_tensors_that_travel_are_left() -> None:
    weight = nn.Parameter(torch.zeros(2))
    first = FirstValue.of([weight], {id(weight)})
    weight.data.add_(1)
    assert not first.changed([weight])
    assert first.changed([nn.Parameter(torch.zeros(2))])
    first.put_back()
    assert float(weight.detach().sum()) == 2


def test_a_list_that_holds_itself_is_compared_once() -> None:
    value: list[Any] = [1]
    value.append(value)
    first = FirstValue.of(value)
    assert not first.changed(value)
    value[0] = 2
    assert first.changed(value)
    assert first.put_back()[0] == 1


def test_another_object_with_the_same_attributes_is_another() -> None:
    assert FirstValue.of(Meter()).changed(Meter())


def test_objects_within_objects_are_not_looked_into() -> None:
    value = Meter(beside=[Meter()])
    first = FirstValue.of(value)
    value.beside[0].count += 1
    assert not first.changed(value)
    value.beside = [Meter()]
    assert first.changed(value)
    assert first.put_back().beside[0].count == 1
    assert not first.lies_in({torch.zeros(1).untyped_storage().data_ptr()})


def opaque() -> list[Any]:
    unwritable = np.zeros(2)
    unwritable.flags.writeable = False
    tensors: list[Tensor] = [torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), torch.zeros(1).expand(2)]
    return [*tensors, unwritable, np.array([[1], None], object), [0] * (MOST_ENTRIES + 1), nn.LazyLinear(2).weight]


@pytest.mark.parametrize("value", opaque(), ids=lambda value: type(value).__name__)
def test_of_anything_else_it_counts_which_object_it_is(value: Any) -> None:
    first = FirstValue.of(value)
    assert first.content is None
    assert not first.changed(value)
    assert first.changed(object())
    assert first.put_back() is value
