"""What stands for the values of a forward pass that is followed, and functions that take it as they take values."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, SupportsIndex, overload

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.nn import functional

from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.lines import line

SHAPE_METHODS = {"size", "dim", "ndimension", "numel", "is_floating_point", "is_complex", "element_size", "get_device"}
SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "layout", "is_sparse", "is_nested"}
SHAPE_FUNCTIONS = {torch.is_floating_point, torch.is_complex, torch.numel}
FACTORIES = ("zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "randint")
PICKING = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "bincount"}
"""What gives as many values as the values of what is given say."""
OF_KIND = "new", "new_zeros", "new_ones", "new_full", "new_empty"


class Followed(Protocol):
    """The tracer of a forward pass."""

    examples: dict[fx.Node, tuple[Any, Any]]
    """The values of every node on two batches of unlike size."""
    batches: tuple[int, int]
    """How many samples these have."""

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        """Add a node."""


class Sizes(tuple[Any, ...]):
    """The shape of a value, with what torch.Size has beside a tuple: sizes may be proxies of the number of samples."""

    @overload
    def __getitem__(self, place: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Sizes: ...
    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return Sizes(found) if isinstance(place, slice) else found

    def numel(self) -> Any:
        """Their product."""
        return math.prod(self)


class ValueProxy(fx.Proxy):
    """Stands for a value of the forward pass; attributes and lengths are those of its values on two batches."""

    tracer: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise NotStackable(f"{line()}: .{name} of a tensor is set")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        with self.tracer.noting():
            calls = callable(getattr(self.tracer.examples[self.node][0], name))
        if calls:
            return fx.proxy.Attribute(self, name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", assign_, (self, index, value), {})

    def __len__(self) -> int:
        one, other = (len(value) for value in self.tracer.examples[self.node])
        if one != other:
            raise NotStackable(f"{line()}: a loop over the samples, or len() of them: write .shape[0]")
        return one

    def __iter__(self) -> Iterator[Any]:
        whole: Any = self
        return iter([whole[place] for place in range(len(self))])


def assign_(x: Tensor, index: Any, value: Any) -> Tensor:
    """x[index] = value, and x."""
    x[index] = value
    return x


def same_number(target: Any, args: tuple[Any, ...], tracer: Followed) -> bool | None:
    """What == or != says of two numbers that both grow with the number of samples; None where this is no such question.

    Lengths of axes and their multiples are as many times the number of samples on any batch as on the two examples: so
    the answer is the same for all.
    """
    if target not in (operator.eq, operator.ne) or not all(isinstance(one, ValueProxy) for one in args):
        return None
    times = [_times(one.node, tracer) for one in args]
    if None in times:
        return None
    return bool(target(*times))


def _times(node: fx.Node, tracer: Followed) -> float | None:
    """How many times the number of samples a number is; None where it is not known to be a multiple."""
    multiple = node.op == "call_function" and node.target is operator.mul
    if multiple and not all(isinstance(one, int) or _times(one, tracer) for one in node.args):  # type: ignore[arg-type]
        return None
    if not multiple and (node.op, node.target) != ("call_method", "size"):
        return None
    if any(_picked(one, tracer) for one in made_of(node)):
        return None
    one, other = (found / rows for found, rows in zip(tracer.examples[node], tracer.batches, strict=True))
    return one if one == other else None


def made_of(node: fx.Node) -> Iterator[fx.Node]:
    """A node and all that its value is made of, each once."""
    met, waiting = {node}, [node]
    while waiting:
        one = waiting.pop()
        yield one
        new = [given for given in one.all_input_nodes if given not in met]
        met.update(new)
        waiting += new


def _picked(node: fx.Node, tracer: Followed) -> bool:
    """Whether samples' values say which others are picked, and so how many: a mask, or a function that is one."""
    if node.target is operator.getitem:
        found: list[fx.Node] = []
        map_aggregate(node.args[1], lambda one: found.append(one) if isinstance(one, fx.Node) else None)
        return any(isinstance(tracer.examples[one][0], Tensor) for one in found)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in PICKING or name == "where" and len(node.args) == 1


@contextmanager
def following(tracer: Followed, module: nn.Module) -> Iterator[None]:
    """Within: torch.zeros, tensor.new_zeros and the like take the open number of samples, len gives it, and isinstance
    takes a value for the tensor that it is."""

    def made(original: Callable[..., Any], of_kind: bool = False) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            found: list[fx.Proxy] = []
            map_aggregate((args, kwargs), lambda entry: found.append(entry) if isinstance(entry, fx.Proxy) else None)
            if not found:
                return original(*args, **kwargs)
            if of_kind and isinstance(args[0], Tensor):  # its type counts, not its values
                args = (args[0].new_empty(0), *args[1:])
            return tracer.create_proxy("call_function", original, args, kwargs)

        return make

    def length(of: Any) -> Any:
        pair = tracer.examples[of.node] if type(of) is ValueProxy else ()
        lengths = [builtins.len(one) for one in pair if isinstance(one, Tensor)]
        alike = builtins.len(set(lengths)) < 2
        return builtins.len(of) if alike else tracer.create_proxy("call_method", "size", (of, 0), {})

    def instance(of: Any, kinds: Any) -> bool:
        return builtins.isinstance(tracer.examples[of.node][0] if type(of) is ValueProxy else of, kinds)

    own = {"len": length, "isinstance": instance}
    of_torch = {name: made(getattr(torch, name)) for name in FACTORIES} | {"is_tensor": lambda of: instance(of, Tensor)}
    with ExitStack() as undo:
        for name, function in of_torch.items():
            undo.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, function)
        for name in (*OF_KIND, "expand"):  # inherited ones
            undo.callback(delattr, Tensor, name)
            setattr(Tensor, name, made(getattr(Tensor, name), name in OF_KIND))
        for names in _globals_of(module):
            new = {name: function for name, function in own.items() if name not in names}
            names.update(new)
            for name in new:
                undo.callback(names.pop, name)
        yield


def _globals_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The global names that the forward passes of a module and its parts see, and torch's functions."""
    yield vars(functional)
    for kind in {type(part) for part in module.modules()}:
        function = getattr(kind.forward, "__globals__", None)
        if function is not None and not kind.__module__.startswith("torch."):
            yield function
