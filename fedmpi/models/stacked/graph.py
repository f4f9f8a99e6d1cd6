"""Batched form of any forward pass that torch.fx can trace: the clients' samples are one batch (k · b, …).

A node without trained parameters is computed once for this batch. A layer with a batched form (`forms.LAYERS`) gets (k,
b, …); other nodes with trained parameters are computed client by client. Autograd differentiates the result. `check`
compares with the module itself, which shows whether samples influence one another or the trace is incomplete.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate, map_arg

from fedmpi.data.schema import DataDescription
from fedmpi.models.flat import travelling_buffers
from fedmpi.models.stacked.base import NotStackable, Op, Place, Slot
from fedmpi.models.stacked.dense import DropoutOp, StackedDropout
from fedmpi.models.stacked.forms import LAYERS, Weight, finish, of_one
from fedmpi.models.stacked.text import find_peaks, highest
from fedmpi.models.stacked.trace import DROPOUTS, NUMBER, ROWS, Along, Traced

CLIENT = "client"
"""Kind of a value computed from parameters only: (k, …). Others are an `Along`, a NUMBER, or None: the same for all
clients."""
PLAIN = (int, float, str, torch.dtype, torch.device, torch.Size, torch.layout, type(None))


@dataclass(frozen=True, eq=False)
class GraphLayer:
    """Whole model, or its part after the look-up of words."""

    trained: ClassVar[bool] = True

    steps: tuple[_Step, ...]
    slots: dict[int, Slot]  # parameter (by id) -> its slot
    alone: frozenset[int]  # parameters (by id) that only one layer reads
    dropouts: tuple[tuple[int, float], ...]  # (units, p) in the order of the forward pass
    buffers: tuple[tuple[int, Tensor], ...]  # averaged buffers: (position in the flat vector, values)
    values: int  # floats per sample
    outputs: int  # values of one sample's outputs
    feature_shape: tuple[int, ...]
    text: bool  # True if samples are token ids
    words: fx.Node | None  # look-up of words, done by the previous layer
    reads_tokens: bool  # True if the token ids are read besides the words' vectors

    def read_buffers(self, flat: Tensor) -> None:
        """Copy the buffers from a flat vector (d,)."""
        for offset, buffer in self.buffers:
            buffer.copy_(flat[offset : offset + buffer.numel()].view(buffer.shape))

    def bind(self, place: Place, x: Tensor) -> Op:
        return GraphOp(self, place, x)


class GraphOp:
    """Graph bound to k clients of b samples."""

    def __init__(self, layer: GraphLayer, place: Place, x: Tensor):
        self.layer, self.clients = layer, place.clients
        self.output = place.take("output", place.clients, place.rows, layer.outputs)
        self.weights = {key: Weight.of(slot, place.parameters, key in layer.alone) for key, slot in layer.slots.items()}
        self.dropouts = [
            StackedDropout(units, p, columns=False).bind(replace(place, number=(place.number, number)), self.output)
            for number, (units, p) in enumerate(layer.dropouts)
        ]
        words = layer.words is not None
        self.x = x.view(place.clients * place.rows, *x.shape[2:] if words else layer.feature_shape)
        self.input = self.x.data.requires_grad_() if not place.first and words else None
        self.tokens: tuple[Tensor, Tensor] | None = None
        self._result: Tensor | None = None
        self._ordered = list(self.weights.values())
        self._leaves = [weight.value for weight in self._ordered] + ([] if self.input is None else [self.input])

    def forward(self) -> None:
        for dropout in self.dropouts:
            dropout.arrange()
        values: dict[fx.Node, Any] = {}
        with torch.enable_grad():
            for step in self.layer.steps:
                step.run(self, values)
        (self._result,) = values.values()
        self.output.copy_(self._result.detach().view(self.output.shape))

    def samples(self) -> Tensor:
        """Return the samples (k · b, …) as the module reads them."""
        if self.layer.words is not None and self.layer.reads_tokens:
            assert self.tokens is not None
            ids, words = self.tokens
            return words[ids.flatten(0, 1)].to(torch.int32)
        return self.x.to(torch.int32) if self.layer.text and self.layer.words is None else self.x

    def backward(self, gradient: Tensor) -> Tensor:
        result, self._result = self._result, None
        assert result is not None
        gradients = torch.autograd.grad(result, self._leaves, gradient.reshape(result.shape), allow_unused=True)
        finish(self._ordered, gradients[: len(self._ordered)])
        if self.input is None:
            return gradient
        of_words = gradients[-1]
        return torch.zeros_like(self.input) if of_words is None else of_words.contiguous()


def dropouts_of(op: Op) -> list[DropoutOp]:
    """Return the dropout of a bound layer, in the order in which a client's stream serves it."""
    if isinstance(op, GraphOp):
        return op.dropouts
    return [op] if isinstance(op, DropoutOp) else []


class _Step:
    """Computation of one node's value; nodes among the arguments are replaced by their values."""

    def __init__(self, node: fx.Node, function: Callable[..., Any], args: Any = (), kwargs: Any = None):
        self.node, self.function, self.args, self.kwargs = node, function, tuple(args), kwargs or {}
        self.flat = not self.kwargs and not any(isinstance(one, tuple | list | dict | slice) for one in self.args)
        self.nodes: list[fx.Node] = []
        map_arg((self.args, self.kwargs), self.nodes.append)
        self.forget: tuple[fx.Node, ...] = ()  # nodes whose values no later step reads

    def run(self, bound: GraphOp, values: dict[fx.Node, Any]) -> None:
        def value(entry: Any) -> Any:
            return values[entry] if isinstance(entry, fx.Node) else entry

        if self.flat:
            values[self.node] = self.function(bound, *map(value, self.args))
        else:
            args, kwargs = map_aggregate((self.args, self.kwargs), value)
            values[self.node] = self.function(bound, *args, **kwargs)
        for node in self.forget:
            del values[node]


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda bound, *args, **kwargs: function(*args, **kwargs)


class _Call:
    """Call of a node that reads trained parameters or values computed from them."""

    def __call__(self, bound: GraphOp, *values: Any) -> Any:
        raise NotImplementedError

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, kinds: Mapping[fx.Node, Any], along: Any):
        self.function, self.args, self.kwargs, self.along = function, args, kwargs, along
        self.order, self.kinds = list(kinds), list(kinds.values())

    def filled(self, given: Sequence[Any]) -> tuple[Any, Any]:
        """Return the arguments with these values of the nodes."""
        found = dict(zip(self.order, given, strict=True))
        filled = map_aggregate((self.args, self.kwargs), lambda one: found[one] if isinstance(one, fx.Node) else one)
        return filled


class _Batched(_Call):
    """Call of function(bound, …) on tensors (k, …) whose remaining axes are those of a single client."""

    def __call__(self, bound: GraphOp, *values: Any) -> Any:
        given = [_to_clients(value, kind, bound.clients) for value, kind in zip(values, self.kinds, strict=True)]
        args, kwargs = self.filled(given)
        return _from_clients(self.function(bound, *args, **kwargs), self.along)


class _EachClient(_Call):
    """Call of function(bound), which returns one function per client on that client's values."""

    def __call__(self, bound: GraphOp, *values: Any) -> Any:
        split = [_split(value, kind, bound.clients) for value, kind in zip(values, self.kinds, strict=True)]
        found = []
        for function, given in zip(self.function(bound), zip(*split, strict=True), strict=True):
            args, kwargs = self.filled(given)
            found.append(function(*args, **kwargs))
        return _joined(found, self.along)


def _to_clients(value: Any, kind: Any, clients: int) -> Any:
    if isinstance(kind, tuple):
        return tuple(_to_clients(one, of, clients) for one, of in zip(value, kind, strict=True))
    if isinstance(kind, Along):
        return torch.unflatten(value, kind.axis, (clients, -1)).movedim(kind.axis, 0)
    if kind == NUMBER:
        return value // clients
    return value.expand(clients, *value.shape) if kind is None and isinstance(value, Tensor) else value


def _from_clients(value: Any, along: Any) -> Any:
    if isinstance(along, tuple):
        return tuple(_from_clients(one, of) for one, of in zip(value, along, strict=True))
    if not isinstance(along, Along):
        return value
    return value.movedim(0, along.axis).flatten(along.axis, along.axis + 1)


def _split(value: Any, kind: Any, clients: int) -> Sequence[Any]:
    """Return the value of each client."""
    if isinstance(kind, tuple):
        parts = [_split(one, of, clients) for one, of in zip(value, kind, strict=True)]
        return list(zip(*parts, strict=True))
    if isinstance(kind, Along):
        return value.chunk(clients, kind.axis) if clients > 1 else [value]
    if kind == CLIENT and isinstance(value, Tensor):
        return value.unbind(0)
    return [value // clients if kind == NUMBER else value] * clients


def _joined(found: Sequence[Any], along: Any) -> Any:
    """Join what `_split` has split."""
    if isinstance(along, tuple):
        return tuple(_joined([one[place] for one in found], of) for place, of in enumerate(along))
    if isinstance(along, Along):
        return found[0] if len(found) == 1 else torch.cat(list(found), along.axis)
    return torch.stack(list(found)) if isinstance(found[0], Tensor) else found[0]


def graph_layer(
    traced: Traced, slots: dict[int, Slot], words: fx.Node | None, description: DataDescription, outputs: int
) -> GraphLayer:
    """Return a traced graph as a layer; `words` is the look-up done by the previous layer."""
    return _Translation(traced, slots, words).layer(description, outputs)


class _Translation:
    """Conversion of the nodes of a graph to steps."""

    def __init__(self, traced: Traced, slots: dict[int, Slot], words: fx.Node | None):
        self.traced, self.slots, self.words = traced, slots, words
        self.steps: list[_Step] = []
        self.kinds: dict[fx.Node, Any] = {}
        self.dropouts: list[tuple[int, float]] = []
        self.buffers: dict[int, tuple[int, Tensor]] = {}
        offset = sum(one.numel() for one in traced.module.parameters() if one.requires_grad)
        for buffer in travelling_buffers(traced.module):
            self.buffers[id(buffer)] = offset, buffer.detach().clone()
            offset += buffer.numel()
        self.uses: Counter[int] = Counter()
        self.peaks, self.passed = find_peaks(traced)

    def layer(self, description: DataDescription, outputs: int) -> GraphLayer:
        nodes = list(self.traced.graph.nodes)
        for node in nodes:
            self._add(node)
        (returned,) = nodes[-1].args
        if not isinstance(returned, fx.Node) or self.kinds[returned] != Along(0, 1):
            raise NotStackable("the forward pass does not return one row of outputs per sample")
        steps = self._needed(returned)
        return GraphLayer(
            steps=steps,
            slots=self.slots,
            alone=frozenset(key for key, count in self.uses.items() if count == 1),
            dropouts=tuple(self.dropouts),
            buffers=tuple(self.buffers.values()),
            values=sum(map(self._values, nodes[:-1])),
            outputs=outputs,
            feature_shape=tuple(description.feature_shape),
            text=description.task == "text",
            words=self.words,
            reads_tokens=self.words is not None and any(nodes[0] in step.nodes for step in steps),
        )

    def _needed(self, returned: fx.Node) -> tuple[_Step, ...]:
        """Return the steps that the result needs, each with the values that no later step needs."""
        needed, kept = {returned}, []
        for step in reversed(self.steps):
            drops = isinstance(step.function, _Drop)
            if step.node not in needed and not drops:
                continue
            step.forget = tuple(node for node in dict.fromkeys(step.nodes) if node not in needed)
            step.forget += (step.node,) if step.node not in needed else ()
            needed.update(step.nodes)
            kept.append(step)
        return tuple(reversed(kept))

    def _values(self, node: fx.Node) -> int:
        one, along = self.traced.value(node), self.traced.along(node)
        if not isinstance(one, Tensor) or not isinstance(along, Along) or along.axis < 0:
            return 0
        return 2 * one.numel() * along.times // one.shape[along.axis]

    def refuse(self, node: fx.Node, why: str) -> NotStackable:
        target = type(self.traced.part(node)).__name__ if node.op == "call_module" else node.target
        return NotStackable(f"{getattr(target, '__name__', target)} {why}")

    def _step(self, node: fx.Node, function: Callable[..., Any], args: Any = (), kwargs: Any = None) -> None:
        self.steps.append(_Step(node, function, *self._constant((args, kwargs or {}))))
        self.kinds[node] = self.traced.along(node)

    def _constant(self, given: Any) -> Any:
        """Replace nodes among the arguments by their values if these are no tensors and the same for all batches."""

        def known(node: fx.Node) -> Any:
            value = self.traced.value(node)
            return value if isinstance(value, PLAIN) and self.traced.along(node) is None else node

        return map_arg(given, known)

    def _add(self, node: fx.Node) -> None:
        value = self.traced.value(node)
        if node.op == "output" or (isinstance(value, PLAIN) and self.traced.along(node) is None):
            return
        if node is self.words:
            self._step(node, lambda bound: bound.x if bound.input is None else bound.input)
        elif node.op == "placeholder":
            self._step(node, lambda bound: bound.samples())
        elif node in self.passed:
            self._pass(node)
        elif node.op == "get_attr":
            self._get(node)
        elif node.op == "call_module" and isinstance(self.traced.part(node), DROPOUTS):
            self._drop(node)
        elif node.op == "call_module":
            self._module(node)
        else:
            self._function(node)

    def _pass(self, node: fx.Node) -> None:
        """Skip a node between a convolution and its maximum, found by `highest`; the last one gives the shape."""
        value = self.traced.value(node)
        last = any(one is node for _, one in self.peaks.values())
        shape = tuple(value.shape[1:]) if last else None
        before = next(given for given in node.all_input_nodes if given in self.passed or given in self.peaks)
        self._step(node, _plain(lambda x: x if shape is None else x.view(-1, *shape)), [before])
        self.kinds[node] = Along(0, 1)

    def _get(self, node: fx.Node) -> None:
        name = str(node.target)
        constant = self.traced.value(node) if name.startswith("_tensor_constant") else None
        value = operator.attrgetter(name)(self.traced.module) if constant is None else constant
        if isinstance(value, nn.Parameter) and value.requires_grad:
            if id(value) not in self.slots:
                raise self.refuse(node, "is read beside the look-up of words")
            key = id(value)
            self.uses[key] += 2
            self._step(node, lambda bound: bound.weights[key].natural.value)
            self.kinds[node] = CLIENT
        elif id(value) in self.buffers:
            _, own = self.buffers[id(value)]
            self._step(node, lambda bound: own)
        else:
            self._step(node, lambda bound: value.detach() if value.requires_grad else value)

    def _drop(self, node: fx.Node) -> None:
        part: Any = self.traced.part(node)
        (given,) = node.all_input_nodes
        if part.p in (0, 1):
            self._step(node, _plain(lambda x: x if part.p == 0 else x * 0), [given])
            return
        along, example = self.kinds[given], self.traced.value(given)
        channels = getattr(part, "channels", not isinstance(part, nn.Dropout))
        if along != Along(0, 1):
            raise self.refuse(node, "on values whose first axis is not the samples")
        units = example.shape[1] if channels else example.numel() // len(example)
        self._step(node, _Drop(len(self.dropouts), channels), [given])
        self.dropouts.append((units, part.p))

    def _module(self, node: fx.Node) -> None:
        part = self.traced.part(node)
        parameters = dict(part.named_parameters())
        self.uses.update(map(id, parameters.values()))
        if not any(one.requires_grad for one in parameters.values()):
            self._without_parameters(node, _not_in_place(part))
            return
        if any(one.requires_grad and id(one) not in self.slots for one in parameters.values()):
            raise self.refuse(node, "reads the vectors of the words again")
        keys = {name: id(one) for name, one in parameters.items()}
        frozen = {name: one for name, one in parameters.items() if not one.requires_grad}

        def weights(bound: GraphOp) -> dict[str, Weight]:
            found = {name: Weight.constant(one, bound.clients) for name, one in frozen.items()}
            return found | {name: bound.weights[key] for name, key in keys.items() if name not in frozen}

        form = LAYERS.get(type(part))
        if node in self.peaks:
            cut, _ = self.peaks[node]
            self._call(_Batched, node, lambda bound, x: highest(weights(bound), x, cut), Along(0, 1))
        elif form is not None:
            self._call(_Batched, node, lambda bound, *args, **more: form(part, weights(bound), *args, **more))
        else:
            self._call(_EachClient, node, lambda bound: of_one(part, weights(bound)))

    def _function(self, node: fx.Node) -> None:
        args, kwargs = node.args, dict(node.kwargs)
        if in_place(node):
            if not isinstance(self.kinds.get(node.args[0]), Along):  # type: ignore[arg-type]
                raise self.refuse(node, "changes parameters or buffers")
            kwargs.pop("inplace", None)
        self._without_parameters(node, _function_of(node), args, kwargs)

    def _without_parameters(
        self, node: fx.Node, function: Callable[..., Any], args: Any = None, kwargs: Any = None
    ) -> None:
        """Add a node without parameters: computed once, unless it reads values computed from parameters only."""
        args, kwargs = (node.args, node.kwargs) if args is None else (args, kwargs)
        if any(_made_of_parameters(self.kinds.get(given)) for given in node.all_input_nodes):
            self._call(_EachClient, node, lambda bound: [function] * bound.clients, args=args, kwargs=kwargs)
        else:
            self._step(node, _plain(function), args, kwargs)

    def _call(
        self,
        kind: type[_Call],
        node: fx.Node,
        function: Callable[..., Any],
        along: Any = None,
        args: Any = None,
        kwargs: Any = None,
    ) -> None:
        along = self.traced.along(node) if along is None else along
        args, kwargs = self._constant((node.args, node.kwargs) if args is None else (args, kwargs))
        inputs: list[fx.Node] = []
        map_arg((args, kwargs), inputs.append)
        kinds = {given: self.kinds[given] for given in inputs}
        for given, of in kinds.items():
            one, other = (values[given] for values in self.traced.values)
            if _unclear(of) or (of == NUMBER and (not isinstance(one, int) or one * ROWS[1] != other * ROWS[0])):
                raise self.refuse(node, "reads values whose axis of samples is not clear")
        if _unclear(along):
            raise self.refuse(node, "gives values whose axis of samples is not clear")
        self.steps.append(_Step(node, kind(function, args, kwargs, kinds, along), list(kinds)))
        self.kinds[node] = _of_clients(along)


class _Drop:
    """Dropout: multiplication by the next mask, per channel or per value."""

    def __init__(self, place: int, channels: bool):
        self.place, self.channels = place, channels

    def __call__(self, bound: GraphOp, x: Tensor) -> Tensor:
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channels else x.shape
        return x * bound.dropouts[self.place].mask.view(shape)


def in_place(node: fx.Node) -> bool:
    """Check whether a function changes its first operand."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if vars(operator).get(name) is node.target:
        return name in AUGMENTED
    return (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))


AUGMENTED = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")}


def _function_of(node: fx.Node) -> Callable[..., Any]:
    """Return the function that a node calls; an in-place function is replaced by its equivalent."""
    target: Any = node.target
    if isinstance(target, str):
        name = target.removesuffix("_") if in_place(node) else target
        if name == "view" and not any(isinstance(one, torch.dtype) for one in node.args):
            name = "reshape"
        return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    name = getattr(target, "__name__", "")
    if in_place(node) and name in AUGMENTED:
        return getattr(operator, name.removeprefix("i"))  # type: ignore[no-any-return]
    if in_place(node) and name.endswith("_"):
        return getattr(torch, name.removesuffix("_"))  # type: ignore[no-any-return]
    return target  # type: ignore[no-any-return]


def _not_in_place(part: nn.Module) -> nn.Module:
    """Return a layer with `inplace` off: autograd forbids changes of the results of an autograd.Function."""
    if not getattr(part, "inplace", False):
        return part
    changed: Any = copy.copy(part)
    changed.inplace = False
    return changed  # type: ignore[no-any-return]


def _unclear(kind: Any) -> bool:
    return any(map(_unclear, kind)) if isinstance(kind, tuple) else isinstance(kind, Along) and kind.axis < 0


def _made_of_parameters(kind: Any) -> bool:
    return any(map(_made_of_parameters, kind)) if isinstance(kind, tuple) else kind == CLIENT


def _of_clients(along: Any) -> Any:
    """Return the kind of a result computed from parameters."""
    return tuple(map(_of_clients, along)) if isinstance(along, tuple) else CLIENT if along is None else along
