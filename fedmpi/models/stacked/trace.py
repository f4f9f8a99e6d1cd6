"""A model's forward pass as a graph (torch.fx), with every value on two made-up batches of different size beside it.

Shapes are known, so that loops over time, `if x.dim() == 3` and sizes computed from shapes are followed; only the
number of samples stays open. A forward pass whose course depends on the samples' values, or on how many they are,
cannot be followed.
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from fedmpi.common.errors import raised
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
from fedmpi.models.stacked.base import NotStackable

ROWS = 3, 5
"""Samples of the two made-up batches."""
SHAPE_METHODS = {"size", "dim", "ndimension", "numel", "is_floating_point", "is_complex", "element_size", "get_device"}
SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "layout", "is_sparse", "requires_grad", "is_nested"}
FACTORIES = ("zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "randint")
AUGMENTED = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"}
FLAT_WEIGHTS = {"_flat_weights", "_flat_weight_refs"}
"""What torch's recurrent layers make of their parameters again when these are others than in the call before."""
DROPOUTS = (Dropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parent)


@dataclass(frozen=True)
class Along:
    """The axis of a tensor along which the samples lie.

    Parameters
    ----------
    axis : int
        −1 where several axes depend on the number of samples.
    times : int
        Entries a sample: more than 1 where the axis was joined with another one.
    """

    axis: int
    times: int


@dataclass(frozen=True)
class Traced:
    """The forward pass of a module.

    Parameters
    ----------
    module : nn.Module
    graph : fx.Graph
        One placeholder: the samples.
    examples : dict
        The two values of every node.
    masks : dict
        Of nodes that drop values without being a layer for it: (units a sample, p) of every mask, in the order in which
        they are asked for.
    """

    module: nn.Module
    graph: fx.Graph
    examples: dict[fx.Node, tuple[Any, Any]]
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
    """The graph of a module's forward pass in training mode.

    Parameters
    ----------
    module : nn.Module
        Left as it is.
    description : DataDescription
        Shape and type of a sample.
    leaves : collection of type
        Layers that are one node each, beside torch's own; others are followed into.

    Raises
    ------
    NotStackable
        The forward pass cannot be followed; says which line and why.
    """
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in module.modules()):
        raise NotStackable(f"{type(module).__name__} has hooks")
    if any(parameter._backward_hooks for parameter in module.parameters()):
        raise NotStackable("a parameter has hooks")
    own = held_generators(module)
    tracer = _Tracer(leaves, tuple(made_up(module, description, rows) for rows in ROWS))
    was_training = module.training
    module.train()
    try:
        with torch.enable_grad(), kept_generators(), _undone(module), _factories(tracer), _own_gradients_refused():
            before, stood = generator_states(), held_states(own)
            graph = tracer.trace(module)
            if drawn_from_held(own, stood):
                raise NotStackable(f"{type(module).__name__} draws from a generator of its own")
            if drawn := drawn_from(before):
                raise NotStackable(f"{type(module).__name__} draws from the global generator of {drawn[0]}")
    except NotStackable:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise NotStackable(f"{type(module).__name__} cannot be followed: {_where(error)}{_why(error)}") from None
    finally:
        module.train(was_training)
    _drop_unused(graph, tracer.masks)
    return Traced(module, graph, tracer.examples, tracer.masks)


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

    def __init__(self, leaves: Collection[type[nn.Module]], inputs: tuple[Tensor, ...]):
        super().__init__()
        self.leaves, self.inputs = leaves, inputs
        self.examples: dict[fx.Node, tuple[Any, Any]] = {}
        self.masks: dict[fx.Node, list[tuple[int, float]]] = {}
        self._asked = _AskedMasks()
        self.devices = [one.device for one in inputs[:1] if one.device.type == "cuda"]
        self.trying = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        kind = type(m)
        if kind in self.leaves or kind in DROPOUTS or kind is nn.MultiheadAttention:
            return True
        return kind.__module__.startswith("torch.nn") and not any(True for _ in m.children())

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        return root_fn, [self.root, self.create_proxy("placeholder", "samples", (), {})]

    def create_arg(self, a: Any) -> Any:
        made = super().create_arg(a)
        if isinstance(a, Tensor) and isinstance(made, fx.Node):
            self.examples[made] = a, a
        return made

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self.trying else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.trying else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **named)
        proxy.node.meta["line"] = _line()
        one, other = (self._value(kind, target, args, kwargs, which) for which in (0, 1))
        self.examples[proxy.node] = one, other
        if masks := self._asked.taken():
            self.masks[proxy.node] = masks
        shape = target is getattr and args[1] in SHAPE_ATTRIBUTES or kind == "call_method" and target in SHAPE_METHODS
        if kind.startswith("call_") and target != "detach" and isinstance(one, Tensor) and not torch.is_grad_enabled():
            return proxy.detach()  # within torch.no_grad()
        return self._known(proxy, args[0], one, other) if shape else proxy

    def _known(self, proxy: fx.Proxy, of: fx.Proxy, one: Any, other: Any) -> Any:
        """The value itself where it is the same on both batches, else the proxy; of a shape axis by axis."""
        if isinstance(one, tuple):
            sizes = zip(one, other, strict=True)
            return tuple(
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
        self.trying, before = True, self._generators()
        try:
            with torch.no_grad(), DropoutCalls(self._asked.of_batch(which)):
                found = self._found(kind, target, args, kwargs)
        finally:
            self.trying = False
        if any(not torch.equal(a, b) for a, b in zip(before, self._generators(), strict=True)):
            raise NotStackable(f"{_line()}: {named(kind, target, self.root)} draws from torch's own generator")
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
        """Units a sample and p of each mask.

        Raises
        ------
        NotStackable
            Values are dropped whose first axis is not the samples.
        """
        found = []
        for (rows, units, p), (more, same, _) in zip(*self._of, strict=True):
            times = rows // ROWS[0]
            if (rows, more) != (times * ROWS[0], times * ROWS[1]) or units != same:
                raise NotStackable(f"{_line()}: dropout of values whose first axis is not the samples")
            found.append((times * units, p))
        for asked in self._of:
            asked.clear()
        return found


class _Proxy(fx.Proxy):
    """Stands for a value of the forward pass; attributes and lengths are those of its values on the two batches."""

    tracer: _Tracer

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise NotStackable(f"{_line()}: .{name} of a tensor is set")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if callable(getattr(self.tracer.examples[self.node][0], name)):
            return fx.proxy.Attribute(self, name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __len__(self) -> int:
        one, other = (len(value) for value in self.tracer.examples[self.node])
        if one != other:
            raise NotStackable(f"{_line()}: len() of the samples; write .shape[0]")
        return one

    def __iter__(self) -> Iterator[Any]:
        whole: Any = self
        return iter([whole[place] for place in range(len(self))])


def named(kind: str, target: Any, root: nn.Module) -> str:
    """What a node does, for a message."""
    if kind == "call_module":
        return type(root.get_submodule(target)).__name__
    return str(target) if isinstance(target, str) else str(getattr(target, "__name__", target))


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


def _line() -> str:
    """The line of the forward pass that is being followed."""
    frame = _outside(sys._getframe(1))
    if frame is None or frame.f_code.co_filename.startswith("<"):
        return "?"
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""


def _why(error: BaseException) -> str:
    if "cannot assign" in str(error):  # a value of the samples to a parameter or buffer
        return "it keeps something from one call to the next"
    if isinstance(error, fx.proxy.TraceError) or "Proxy" in str(error):
        return "what happens depends on the samples' values or on how many they are"
    return raised(error)


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """Within: attributes may be set on the module and its parts, buffers changed; afterwards they are as before.

    Raises
    ------
    NotStackable
        Some were: the module keeps something from call to call.
    """
    before = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
    buffers = [(part, one, one.clone(), one._version) for part in module.modules() for one in part.buffers(False)]
    changed = ""
    try:
        yield
    finally:
        for part, buffer, value, version in buffers:
            if buffer._version != version:
                changed = changed or type(part).__name__
                buffer.copy_(value)
        for part, held, own in before:
            now = part.__dict__
            for name, one in own.items():
                if name not in part._buffers or part._buffers[name] is not one:
                    changed = changed or type(part).__name__
                    part._buffers[name] = one
            for name in [name for name in now if name.startswith("_tensor_constant") and name not in held]:
                del now[name]  # where torch.fx puts tensors that the forward pass makes
            mine = now.keys() - FLAT_WEIGHTS if isinstance(part, nn.RNNBase) else now.keys()
            if now.keys() != held.keys() or any(now[key] is not held[key] for key in mine):
                changed = changed or type(part).__name__
                now.clear()
                now.update(held)
    if changed:
        raise NotStackable(f"{changed} keeps something from one call to the next")


@contextmanager
def _factories(tracer: _Tracer) -> Iterator[None]:
    """Within: torch.zeros and the like take the open number of samples among their sizes."""
    originals = {name: getattr(torch, name) for name in FACTORIES}

    def following(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            found: list[fx.Proxy] = []
            map_aggregate((args, kwargs), lambda entry: found.append(entry) if isinstance(entry, fx.Proxy) else None)
            return tracer.create_proxy("call_function", original, args, kwargs) if found else original(*args, **kwargs)

        return make

    for name, original in originals.items():
        setattr(torch, name, following(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


@contextmanager
def _own_gradients_refused() -> Iterator[None]:
    """Within: a torch.autograd.Function of somebody's own raises, since following it would lose its backward pass."""
    base: Any = torch.autograd.Function
    original = base.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch.") and any(isinstance(one, fx.Proxy) for one in args):
            raise NotStackable(f"{_line()}: {cls.__name__} has a backward pass of its own")
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
