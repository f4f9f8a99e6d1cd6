"""A model's forward pass as a graph (torch.fx), with every value on two made-up batches of different size beside it.

Shapes are known, so that loops over time, `if x.dim() == 3` and sizes computed from shapes are followed; only the
number of samples stays open. A forward pass whose course depends on the samples' values, or on how many they are,
cannot be followed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.nn.utils.weight_norm import WeightNorm

from fedmpi.common.generators import (
    drawn_from,
    drawn_from_held,
    generator_states,
    held_generators,
    held_states,
    kept_generators,
)
from fedmpi.data.schema import DataDescription
from fedmpi.models.dropout import Dropout, Masks
from fedmpi.models.dropout_calls import DropoutCalls
from fedmpi.models.flat import travelling_buffers
from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.lines import line, where, why
from fedmpi.models.stacked.undone import alike, undone
from fedmpi.models.stacked.untouched import Untouched
from fedmpi.models.stacked.values import (
    SHAPE_ATTRIBUTES,
    SHAPE_FUNCTIONS,
    SHAPE_METHODS,
    Sizes,
    ValueProxy,
    following,
    made_of,
    same_number,
)

ROWS = 3, 5
"""Samples of the two made-up batches."""
AUGMENTED = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"}
DROPOUTS = (Dropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True)
class Along:
    """The axis of a tensor along which the samples lie."""

    axis: int  # −1 where several axes depend on the number of samples
    times: int  # Entries a sample: more than 1 where the axis was joined with another one


@dataclass(frozen=True)
class Traced:
    """The forward pass of a module."""

    module: nn.Module
    graph: fx.Graph  # One placeholder: the samples
    examples: dict[fx.Node, tuple[Any, Any]]  # The two values of every node
    # Of nodes that drop values without being a layer for it: (units a sample, p) of every mask, in the order in which
    # they are asked for
    masks: dict[fx.Node, list[tuple[int, float]]]

    @property
    def nodes(self) -> Iterable[fx.Node]:
        """Those of the graph, in the order of the forward pass."""
        return self.graph.nodes

    def part(self, node: fx.Node) -> nn.Module:
        """The module that a node of the kind "call_module" calls."""
        return self.module.get_submodule(str(node.target))

    def along(self, node: fx.Node) -> Any:
        """Where the samples lie in a node's value: an `Along`, None where its shape does not depend on them; of tuples
        a tuple of these."""
        return _along(*self.examples[node])

    def masks_of(self, node: fx.Node) -> list[tuple[int, float]]:
        """Units a sample and p of the masks that a node asks for; none where it drops nothing."""
        return self.masks.get(node, [])

    def tensor(self, node: fx.Node) -> Tensor | None:
        """A node's value on the first batch, where it is a tensor."""
        value = self.examples[node][0]
        return value if isinstance(value, Tensor) else None


def _along(one: Any, other: Any) -> Any:
    if isinstance(one, tuple | list):
        return tuple(_along(a, b) for a, b in zip(one, other, strict=True))
    if not isinstance(one, Tensor):
        return None
    if one.dim() != other.dim():
        return Along(-1, 0)
    axes = [axis for axis in range(one.dim()) if one.shape[axis] != other.shape[axis]]
    if not axes:
        return None
    times = one.shape[axes[0]] // ROWS[0]
    if len(axes) > 1 or (times * ROWS[0], times * ROWS[1]) != (one.shape[axes[0]], other.shape[axes[0]]):
        return Along(-1, 0)
    return Along(axes[0], times)


def trace(module: nn.Module, description: DataDescription, leaves: Collection[type[nn.Module]]) -> Traced:
    """The graph of a module's forward pass in training mode."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise NotStackable(f"{type(module).__name__} is compiled by TorchScript, whole or in part")
    if any(map(_hooked, module.modules())):
        raise NotStackable(f"{type(module).__name__} has hooks")
    if any(parameter._backward_hooks for parameter in module.parameters()):
        raise NotStackable("a parameter has hooks")
    own = held_generators(module)
    batches = tuple(made_up(module, description, rows) for rows in ROWS)
    tracer, again = (_Tracer(module, leaves, tuple(one.clone() for one in batches)) for _ in range(2))
    was_training = module.training
    module.train()
    try:
        with kept_generators(), undone(module) as left:
            before, stood = generator_states(), held_states(own)
            graph = tracer.follow(module)
            if (notes := left.notes(tracer)) and again.follows(module, tracer, graph):
                later = left.notes(again)
                left.allow(place for place in notes if place in later and alike(notes[place], later[place]))
            if drawn_from_held(own, stood):
                raise NotStackable(f"{type(module).__name__} draws from a generator of its own")
            if drawn := drawn_from(before):
                raise NotStackable(f"{type(module).__name__} draws from the global generator of {drawn[0]}")
    except NotStackable:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise NotStackable(f"{type(module).__name__} cannot be followed: {where(error)}{why(error)}") from None
    finally:
        module.train(was_training)
    return Traced(module, graph, tracer.examples, tracer.masks)


def _hooked(part: nn.Module) -> bool:
    """Whether hooks do something before or after a part's passes; `nn.utils.weight_norm`, which is one, is followed."""
    before = [hook for hook in part._forward_pre_hooks.values() if not isinstance(hook, WeightNorm)]
    return bool(part._forward_hooks or before or part._backward_hooks or part._backward_pre_hooks)


def made_up(module: nn.Module, description: DataDescription, rows: int) -> Tensor:
    """Samples as the module reads them: (rows, …)."""
    parameter = next(module.parameters())
    generator = np.random.Generator(np.random.Philox(rows))
    shape = (rows, *description.feature_shape)
    if description.task == "text":
        return torch.from_numpy(_texts(generator, max(description.vocabulary, 1), shape)).to(parameter.device)
    return torch.from_numpy(generator.standard_normal(shape)).to(device=parameter.device, dtype=parameter.dtype)


def _texts(generator: np.random.Generator, words: int, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Token ids as texts have them, where what is done about padding or about a word's number shows: from the second
    text on the end is padding (0); half of the others are one of few, those that mostly stand for padding among them.
    """
    tokens = generator.integers(0, words, shape, dtype=np.int32)
    few = np.array([0, 1, 2, 3, words - 1], np.int32) % words
    tokens = np.where(generator.random(shape) < 0.5, few[generator.integers(0, len(few), shape)], tokens)
    tokens[..., 0] = generator.integers(min(1, words - 1), words, shape[:-1])
    for row in range(1, len(tokens)):
        tokens[row, ..., max(1, tokens.shape[-1] // (row + 1)) :] = 0
    return tokens


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    batches = ROWS

    def __init__(self, module: nn.Module, leaves: Collection[type[nn.Module]], inputs: tuple[Tensor, ...]):
        super().__init__()
        self.leaves, self.inputs, self._parts = leaves, inputs, set(module.modules())
        self._own = {id(parameter) for parameter in module.parameters()}
        self._called = self._own | {id(buffer) for buffer in module.buffers()}
        self._travelling = {id(buffer) for buffer in travelling_buffers(module)}
        self.examples: dict[fx.Node, tuple[Any, Any]] = {}
        self.masks: dict[fx.Node, list[tuple[int, float]]] = {}
        self._asked, self._untouched = _AskedMasks(), Untouched(module)
        self.devices = [one.device for one in inputs[:1] if one.device.type == "cuda"]
        self.trying = False

    def follow(self, module: nn.Module) -> fx.Graph:
        """The graph of the module's forward pass."""
        with following(self, module), _own_gradients_refused(), self._untouched:
            graph = self.trace(module)
        _drop_unused(graph, self.masks)
        return graph

    def follows(self, module: nn.Module, first: _Tracer, graph: fx.Graph) -> bool:
        """Whether another forward pass is the same as the first one, whose tracer and graph are given."""

        def written(tracer: _Tracer, graph: fx.Graph) -> list[Any]:
            places: dict[Any, int] = {node: place for place, node in enumerate(graph.nodes)}

            def placed(entry: Any) -> Any:
                return ("node", places[entry]) if isinstance(entry, fx.Node) else entry

            def step(node: fx.Node) -> list[Any]:
                if node.op == "get_attr":
                    return [tracer.examples[node][0]]
                return [node.op, node.target, map_aggregate(node.args, placed), map_aggregate(node.kwargs, placed)]

            return [step(node) for node in graph.nodes]

        return alike(written(first, graph), written(self, self.follow(module)))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within: what is computed is what the graph notes."""
        before, self._untouched.noting = self._untouched.noting, True
        try:
            yield
        finally:
            self._untouched.noting = before

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        kind = type(m)
        if m._forward_pre_hooks:  # of the layer's weights
            return False
        if kind in self.leaves or kind in DROPOUTS or kind is nn.MultiheadAttention:
            return True
        return kind.__module__.startswith("torch.nn") and not any(True for _ in m.children())

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        return root_fn, [self.root, self.create_proxy("placeholder", "samples", (), {})]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, ValueProxy):
            if a.tracer is not self:
                raise NotStackable(f"{line()}: what was kept from the call before is read")
            return a.node
        if isinstance(a, nn.utils.rnn.PackedSequence):
            raise NotStackable(f"{line()}: packed sequences")
        if isinstance(a, nn.Parameter) and id(a) not in self._own:
            raise NotStackable(f"{line()}: a parameter that is none of the model's (layers in a list: nn.ModuleList)")
        if isinstance(a, Tensor) and id(a) not in self._called:
            self._untouched.check_read(a)
        made = super().create_arg(a)
        if isinstance(a, Tensor) and isinstance(made, fx.Node):
            self.examples[made] = a, a
        return made

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ValueProxy(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A layer that the forward pass makes (`nn.Softmax(dim=1)(x)`) is followed into."""
        inside = self.trying or m not in self._parts
        return forward(*args, **kwargs) if inside else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.trying else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        if kind == "call_function" and (answer := same_number(target, args, self)) is not None:
            return answer
        if kind == "call_module":
            args, kwargs = map_aggregate((args, kwargs), self._entries)
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **named)
        proxy.node.meta["line"] = line()
        one, other = (self._value(kind, target, args, kwargs, which) for which in (0, 1))
        self.examples[proxy.node] = one, other
        if masks := self._asked.taken():
            self.masks[proxy.node] = masks
        shape = target is getattr and args[1] in SHAPE_ATTRIBUTES
        shape |= target is getattr and args[1] == "requires_grad" and args[0].node.op == "get_attr"
        shape |= target in (SHAPE_METHODS if kind == "call_method" else SHAPE_FUNCTIONS)
        if kind.startswith("call_") and target != "detach" and isinstance(one, Tensor) and not torch.is_grad_enabled():
            return proxy.detach()  # within torch.no_grad()
        if shape:
            return self._known(proxy, args[0], one, other)
        return one if isinstance(one, int | float) and self._fixed(proxy.node) else proxy

    def _entries(self, given: Any) -> Any:
        """A tuple of values that a layer gave as one (the state of an LSTM), entry by entry; those of torch.sort and
        its kin have names besides."""
        whole = isinstance(given, ValueProxy) and type(self.examples[given.node][0]) is tuple
        return tuple(given) if whole else given

    def to_bool(self, obj: fx.Proxy) -> bool:
        """What a condition says that depends on nothing but buffers that stay as they are."""
        return bool(self.examples[obj.node][0]) if self._fixed(obj.node) else super().to_bool(obj)

    def _fixed(self, node: fx.Node) -> bool:
        """Whether a value is made of neither samples nor what travels."""
        parts = list(made_of(node))
        held = [self.examples[one][0] for one in parts if one.op == "get_attr"]
        travels = any(one.requires_grad or id(one) in self._travelling for one in held)
        return not travels and not any(one.op in ("placeholder", "call_module") for one in parts)

    def _known(self, proxy: fx.Proxy, of: fx.Proxy, one: Any, other: Any) -> Any:
        """The value itself where it is the same on both batches, else the proxy; of a shape axis by axis."""
        if isinstance(one, tuple):
            sizes = zip(one, other, strict=True)
            return Sizes(
                a if a == b else self.create_proxy("call_method", "size", (of, axis), {})
                for axis, (a, b) in enumerate(sizes)
            )
        return one if one == other else proxy

    def _value(self, kind: str, target: Any, args: Any, kwargs: Any, which: int) -> Any:
        if kind == "placeholder":
            return self.inputs[which]

        def value(entry: Any) -> Any:
            return self.examples[entry.node][which] if isinstance(entry, fx.Proxy) else entry

        args, kwargs = map_aggregate(args, value), map_aggregate(kwargs, value)
        before = self._generators()
        self.trying = True
        try:
            with torch.no_grad(), self.noting(), DropoutCalls(self._asked.of_batch(which)):
                found = self._found(kind, target, args, kwargs)
        finally:
            self.trying = False
        if any(not torch.equal(a, b) for a, b in zip(before, self._generators(), strict=True)):
            raise NotStackable(f"{line()}: {named(kind, target, self.root)} draws from torch's own generator")
        return found

    def _found(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "get_attr":
            return operator.attrgetter(target)(self.root)
        if kind == "call_function":
            return target(*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        part = self.root.get_submodule(target)
        return args[0] if isinstance(part, DROPOUTS) else part(*args, **kwargs)

    def _generators(self) -> list[Tensor]:
        """The states of torch's own generators."""
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.devices)]


class _AskedMasks:
    """Notes which masks a node asks for on either batch; nothing is dropped."""

    def __init__(self) -> None:
        self._of: tuple[list[tuple[int, int, float]], ...] = ([], [])
        self._now = self._of[0]

    def of_batch(self, which: int) -> Masks:
        """The source while a node is computed on one of the two batches."""
        self._now, masks = self._of[which], Masks()
        self._now.clear()
        masks.source = self
        return masks

    def mask(self, rows: int, units: int, p: float) -> Tensor:
        self._now.append((rows, units, p))
        return torch.ones(rows, units)

    def taken(self) -> list[tuple[int, float]]:
        """Units a sample and p of each mask."""
        found = []
        for (rows, units, p), (more, same, _) in zip(*self._of, strict=True):
            times = rows // ROWS[0]
            if (rows, more) != (times * ROWS[0], times * ROWS[1]) or units != same:
                raise NotStackable(f"{line()}: dropout of values whose first axis is not the samples")
            found.append((times * units, p))
        for asked in self._of:
            asked.clear()
        return found


def named(kind: str, target: Any, root: nn.Module) -> str:
    """What a node does, for a message."""
    if kind == "call_module":
        return type(root.get_submodule(target)).__name__
    return str(target) if isinstance(target, str) else str(getattr(target, "__name__", target))


@contextmanager
def _own_gradients_refused() -> Iterator[None]:
    """Within: a torch.autograd.Function of somebody's own raises, since following it would lose its backward pass."""
    base: Any = torch.autograd.Function
    original = base.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch.") and any(isinstance(one, fx.Proxy) for one in args):
            raise NotStackable(f"{line()}: {cls.__name__} has a backward pass of its own")
        return original.__func__(cls, *args, **kwargs)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = original


def in_place(node: fx.Node) -> bool:
    """Whether a function changes its first operand."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in AUGMENTED or name.endswith("_") and not name.endswith("__") or bool(node.kwargs.get("inplace"))


def _drop_unused(graph: fx.Graph, drawing: Collection[fx.Node]) -> None:
    """Remove nodes that nothing reads, unless they change a value in place or draw masks."""
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output") or node in drawing:
            continue
        if node.op != "call_module" and not in_place(node):
            graph.erase_node(node)
