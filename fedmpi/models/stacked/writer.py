"""A traced model is written as one Python function over the samples of many clients, node by node: see `graph`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedmpi.models.dropout_calls import CALLS
from fedmpi.models.stacked.base import NotStackable, Slot
from fedmpi.models.stacked.client_weights import Weight
from fedmpi.models.stacked.forms import (
    DROPPING,
    ELEMENT_BY_ELEMENT,
    FUNCTIONS,
    JOINED,
    LAYERS,
    Form,
    mapped,
    mapped_layer,
    separately,
)
from fedmpi.models.stacked.graph import (
    CLIENT,
    NUMBER,
    SHARED,
    Broadcast,
    Call,
    Drops,
    GraphLayer,
    GraphOp,
    without_samples,
)
from fedmpi.models.stacked.overwritten import gives_its_own, overwriting
from fedmpi.models.stacked.peaks import highest
from fedmpi.models.stacked.peaks_of_graph import find_peaks
from fedmpi.models.stacked.small_attention import attend
from fedmpi.models.stacked.trace import DROPOUTS, Along, Traced, in_place, named

OWN: dict[Any, Callable[..., Any]] = {functional.scaled_dot_product_attention: attend}
"""Functions without parameters that are computed in another way than torch's."""


@dataclass
class Writer:
    """Turns a traced graph into a `GraphLayer`."""

    traced: Traced
    slots: dict[int, Slot]  # Parameter (by id) -> where it lies
    words: fx.Node | None  # The look-up that the layer before does
    lines: list[str] = field(default_factory=list)  # The function's source so far, and the objects that it refers to
    names: dict[str, Any] = field(default_factory=dict)
    # Of every written node what its value is: an `Along`, CLIENT, SHARED or NUMBER
    kinds: dict[fx.Node, Any] = field(default_factory=dict)
    dropouts: list[tuple[int, float]] = field(default_factory=list)
    uses: Counter[int] = field(default_factory=Counter)  # How often each parameter (by id) is read
    # Convolutions computed together with the maximum behind them (`find_peaks`), and the nodes up to the maximum
    peaks: dict[fx.Node, tuple[list[fx.Node], bool]] = field(default_factory=dict)
    passed: set[fx.Node] = field(default_factory=set)
    # Those that make a tensor of their own which no backward pass of theirs reads (`overwriting`)
    own: set[fx.Node] = field(default_factory=set)

    def layer(self, outputs: int, feature_shape: tuple[int, ...], text: bool) -> GraphLayer:
        """The graph as a layer."""
        self._count_uses()
        self.peaks = find_peaks(self.traced)
        self.passed = {node for nodes, _ in self.peaks.values() for node in nodes}
        for node in self.traced.nodes:
            self._write(node)
        source = "def run(bound, samples, words):\n" + "".join(f"    {line}\n" for line in self.lines)
        exec(compile(source, "<stacked graph>", "exec"), self.names)
        placeholder = next(node for node in self.traced.nodes if node.op == "placeholder")
        return GraphLayer(
            run=self.names["run"],
            slots=self.slots,
            alone=frozenset(key for key, count in self.uses.items() if count == 1),
            dropouts=tuple(self.dropouts),
            values=self._values(),
            outputs=outputs,
            token_dtype=torch.int32 if text else None,
            feature_shape=feature_shape,
            words=self.words is not None,
            reads_tokens=self.words is not None and any(user is not self.words for user in placeholder.users),
        )

    def _count_uses(self) -> None:
        for node in self.traced.nodes:
            if node.op == "call_module":
                self.uses.update(id(one) for one in self.traced.part(node).parameters())
            elif node.op == "get_attr":
                self.uses.update([id(self.traced.examples[node][0])] * 2)

    def _values(self) -> int:
        values = 0
        for node in self.traced.nodes:
            if node.op == "output":
                break
            one, along = self.traced.tensor(node), self.traced.along(node)
            if one is not None and isinstance(along, Along) and along.axis >= 0:
                values += 2 * one.numel() * along.times // one.shape[along.axis]
        return values

    def refuse(self, node: fx.Node, why: str) -> NotStackable:
        name = named(node.op, node.target, self.traced.module)
        return NotStackable(f"{name} ({node.meta.get('line', '?')}) {why}")

    def _write(self, node: fx.Node) -> None:
        if node is self.words:
            self._note(node, "words")
        elif node.op == "placeholder":
            self._note(node, "samples")
        elif node in self.passed:
            self._pass(node)
        elif node.op == "get_attr":
            self._get(node)
        elif self._overwrites(node):
            pass
        elif node.op == "output":
            self._return(node)
        elif node.op == "call_module" and isinstance(self.traced.part(node), DROPOUTS):
            self._drop(node)
        elif node.op == "call_function" and node in self.traced.masks:
            self._drop_in_call(node)
        elif node.op == "call_module":
            self._module(node)
        else:
            self._function(node)

    def _note(self, node: fx.Node, expression: str, kind: Any = None) -> None:
        self.lines.append(f"{self._name(node)} = {expression}")
        self.kinds[node] = self.traced.along(node) if kind is None else kind

    def _pass(self, node: fx.Node) -> None:
        """A node between a convolution and its maximum: `highest` has done its work, the last one gives the shape."""
        example, name = self.traced.examples[node][0], self._name(node.all_input_nodes[0])
        shape = tuple(example.shape[1:]) if isinstance(example, Tensor) else None
        last = any(nodes[-1] is node for nodes, _ in self.peaks.values())
        self._note(node, f"{name}.view(-1, *{shape})" if last else name)

    def _overwrites(self, node: fx.Node) -> bool:
        """Write a node that puts its result over an operand, where it may; says whether it does."""
        found = overwriting(self.traced, node, self.own)
        if found is None or self._reads_parameters(node):
            return False
        function, operands = found
        self._note(node, f"{self._held(function)}({', '.join(map(self._name, operands))})")
        if len(operands) > 1:
            self.own.add(node)
        return True

    def _name(self, node: fx.Node) -> str:
        return "v_" + node.name

    def _held(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _get(self, node: fx.Node) -> None:
        value = self.traced.examples[node][0]
        if isinstance(value, nn.Parameter) and value.requires_grad:
            if id(value) not in self.slots:
                raise self.refuse(node, "is read beside the look-up of words")
            self._note(node, f"bound.weights[{id(value)}].natural.value", CLIENT)
        else:  # a buffer itself: what it holds travels
            detached = isinstance(value, Tensor) and value.requires_grad or isinstance(value, nn.Parameter)
            self._note(node, self._held(value.detach() if detached else value))

    def _return(self, node: fx.Node) -> None:
        (returned,) = node.args
        if not isinstance(returned, fx.Node) or self.kinds[returned] != Along(0, 1):
            raise NotStackable("the forward pass does not return one row of outputs a sample")
        self.lines.append(f"return {self._name(returned)}")

    def _written(self, entry: Any) -> str:
        """An argument as source."""
        if isinstance(entry, fx.Node):
            return self._name(entry)
        if isinstance(entry, list | tuple):
            inner = "".join(f"{self._written(one)}, " for one in entry)
            return f"[{inner}]" if isinstance(entry, list) else f"({inner})"
        if isinstance(entry, slice):
            return f"slice({self._written(entry.start)}, {self._written(entry.stop)}, {self._written(entry.step)})"
        return repr(entry) if entry is None or type(entry) in (bool, int, str) else self._held(entry)

    def _arguments(self, node: fx.Node, skip: int = 0) -> str:
        given = dict(node.kwargs)
        if given.get("inplace") and self._last_reader(node):
            given["inplace"] = False  # as `_not_in_place`
        named_ones = [f"{name}={self._written(value)}" for name, value in given.items()]
        return ", ".join([*(self._written(value) for value in node.args[skip:]), *named_ones])

    def _plain(self, node: fx.Node, function: str, skip: int = 0) -> None:
        self._note(node, f"{function}({self._arguments(node, skip)})")
        self._single(node)

    def _single(self, node: fx.Node) -> None:
        """Where a node is a number made of the number of samples: write also `o_…`, what it is for one client alone."""
        if isinstance(self.traced.examples[node][0], Tensor | tuple | list):
            return
        self.kinds[node] = NUMBER
        if node.op == "call_method" and node.target in ("size", "numel"):
            self.lines.append(f"o_{node.name} = {self._name(node)} // bound.clients")
            return
        if node.op != "call_function" or any(self.kinds[given] != NUMBER for given in node.all_input_nodes):
            raise self.refuse(node, "makes a number of the samples' values")
        line = self.lines[-1]
        for given in [node, *node.all_input_nodes]:
            line = line.replace(self._name(given), f"o_{given.name}")
        self.lines.append(line)

    def _drop(self, node: fx.Node) -> None:
        part: Any = self.traced.part(node)
        (given,) = node.all_input_nodes
        along, example = self.kinds[given], self.traced.tensor(given)
        name = self._name(given)
        if part.p in (0, 1):
            self._note(node, name if part.p == 0 else f"{name} * 0")
            return
        channels = getattr(part, "channels", not isinstance(part, nn.Dropout))
        if not isinstance(along, Along) or along.axis != 0 or (channels and along.times > 1) or example is None:
            raise self.refuse(node, "on values whose first axis is not the samples")
        count = example.numel() * along.times // len(example)
        units = example.shape[1] if channels else count
        shape = f"{name}.shape[:2] + (1,) * {example.dim() - 2}" if channels else f"{name}.shape"
        self._note(node, f"{name} * bound.dropouts[{len(self.dropouts)}].mask.view({shape})")
        self.dropouts.append((units, part.p))

    def _drop_in_call(self, node: fx.Node) -> None:
        """A function that drops values of samples: see `models.dropout_calls`."""
        if self._reads_parameters(node):
            raise self.refuse(node, "drops what parameters take part in")
        asked, places = CALLS[node.target], self._masks(node)

        def function(bound: GraphOp, *args: Any, **kwargs: Any) -> Any:
            call = asked(*args, **kwargs)
            assert call is not None  # as it was on the made-up batches
            return call.made(Drops(bound, places, call.channels))

        self._note(node, f"{self._held(function)}({', '.join(['bound', self._arguments(node)])})")

    def _masks(self, node: fx.Node) -> list[int]:
        """The places of a node's masks among the graph's."""
        masks = self.traced.masks_of(node)
        first = len(self.dropouts)
        self.dropouts += masks
        return list(range(first, len(self.dropouts)))

    def _module(self, node: fx.Node) -> None:
        part = self.traced.part(node)
        parameters = dict(part.named_parameters())
        frozen = not any(one.requires_grad for one in parameters.values())
        if frozen and not self._reads_parameters(node) and node not in self.traced.masks:
            self._plain(node, self._held(_not_in_place(part) if self._last_reader(node) else part))
            return
        keys = {name: id(one) for name, one in parameters.items()}
        if any(one.requires_grad and id(one) not in self.slots for one in parameters.values()):
            raise self.refuse(node, "reads the vectors of the words again")
        form: Form = LAYERS.get(type(part), mapped_layer)
        if node in self.peaks:
            _, cut = self.peaks[node]
            form = lambda part, weights, x: highest(weights, x, cut)  # noqa: E731
        joined = form in JOINED and all(self._first(one) for one in [node, *node.all_input_nodes])
        if joined:
            self.own.add(node)
        elif form in JOINED:
            form = separately(form)
        constant = {name: one for name, one in parameters.items() if not one.requires_grad}
        places = self._masks(node)
        if places and form not in DROPPING:
            raise self.refuse(node, "drops values and has no stacked form that does")

        def function(bound: GraphOp, *args: Any, **kwargs: Any) -> Any:
            if places:
                kwargs["drop"] = Drops(bound, places)
            weights = {name: bound.weights[key] for name, key in keys.items() if name not in constant}
            weights |= {name: Weight.constant(one, bound.clients) for name, one in constant.items()}
            return form(part, weights, *args, **kwargs)

        self._call(node, function, joined)

    def _first(self, node: fx.Node) -> bool:
        """Whether the samples are a value's first axis."""
        along = self.traced.along(node)
        return isinstance(along, Along) and along.axis == 0

    def _last_reader(self, node: fx.Node) -> bool:
        """Whether a node's result is read, and its operands by nobody else: they need not be changed in place then."""
        return bool(node.users) and all(list(given.users) == [node] for given in node.all_input_nodes)

    def _reads_parameters(self, node: fx.Node) -> bool:
        return any(self.kinds[given] == CLIENT for given in node.all_input_nodes)

    def _function(self, node: fx.Node) -> None:
        if not self._reads_parameters(node):
            method = node.op == "call_method"
            # images may lie pixel by pixel (`convolution`), which some shapes are no view of
            shapes = node.target == "view" and not any(isinstance(one, torch.dtype) for one in node.args)
            name = "reshape" if shapes and not node.kwargs else node.target
            plain = OWN.get(node.target, node.target)
            function = f"{self._written(node.args[0])}.{name}" if method else self._held(plain)
            self._plain(node, function, skip=int(method))
            if gives_its_own(self.traced, node):
                self.own.add(node)
            return
        first = self.kinds.get(node.all_input_nodes[0])
        if in_place(node) and not isinstance(first, Along) or first == CLIENT and "data" in node.args[1:]:
            raise self.refuse(node, "may change what parameters are made of")
        own = FUNCTIONS.get(node.target)
        simple = ELEMENT_BY_ELEMENT.get(node.target)
        example = self.traced.tensor(node)
        if own is not None:
            self._call(node, lambda bound, *args, **kwargs: own(*args, **kwargs))
        elif simple is not None and example is not None:
            self._call(node, Broadcast(simple, example.dim()))
        else:
            name = node.target
            target = (lambda x, *rest, **more: getattr(x, name)(*rest, **more)) if isinstance(name, str) else name
            self._call(node, lambda bound, *args, **kwargs: mapped(target, *args, **kwargs))

    def _call(self, node: fx.Node, function: Callable[..., Any], joined: bool = False) -> None:
        along = self.traced.along(node)
        inputs: dict[fx.Node, Any] = {}
        for given in node.all_input_nodes:
            kind = self.kinds[given]
            if isinstance(kind, tuple) or _unclear(kind):
                raise self.refuse(node, "reads values whose axis of samples is not clear")
            inputs[given] = SHARED if kind is None else kind
        if _unclear(along):
            raise self.refuse(node, "gives values whose axis of samples is not clear")
        if _mixed(self.traced.examples[node][0], along):
            raise self.refuse(node, "gives values of samples beside others of parameters alone")
        names = [f"o_{one.name}" if kind == NUMBER else self._name(one) for one, kind in inputs.items()]
        call = self._held(Call(function, node, inputs, along, joined))
        self._note(node, f"{call}({', '.join(['bound', *names])})", CLIENT if without_samples(along) else None)


def _not_in_place(part: nn.Module) -> nn.Module:
    """A layer with `inplace`, without it: autograd forbids changes of what a custom autograd.Function returned."""
    if not getattr(part, "inplace", False):
        return part
    changed: Any = copy.copy(part)
    changed.inplace = False
    return changed  # type: ignore[no-any-return]


def _unclear(along: Any) -> bool:
    if isinstance(along, tuple):
        return any(map(_unclear, along))
    return isinstance(along, Along) and along.axis < 0


def _mixed(value: Any, along: Any) -> bool:
    """Whether a tuple holds tensors that depend on the samples and such that do not."""
    if not isinstance(along, tuple) or without_samples(along):
        return False
    pairs = list(zip(value, along, strict=True))
    return any(isinstance(one, Tensor) and without_samples(place) or _mixed(one, place) for one, place in pairs)
