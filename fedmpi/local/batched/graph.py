"""Batched form of a forward pass that torch.fx can trace: the clients' samples are one batch (k · b, …).

Layers with trained parameters are exchanged for their batched forms (`forms.LAYERS`), which get (k, b, …); everything
else is computed once for the whole batch. Autograd differentiates the result. The samples must be the first axis of
what a layer with parameters reads, except for recurrent layers. `translation.check_form` compares the result with the
module itself, which shows whether samples influence one another or the trace is incomplete.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

import fedmpi.local.batched.forms
import fedmpi.local.batched.text  # noqa: F401
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.chain import DROPOUTS, ROWS, StackedNet, Traced
from fedmpi.local.batched.forms import ARRANGED, LAYERS, Form, Weight, finish
from fedmpi.local.batched.layers import Layer, NotStackable, Place, Slot, StackedDropout
from fedmpi.local.batched.text import Embedding
from fedmpi.models.lora import LoraLinear


class GraphLayer(Layer):
    """Whole model, or its part after the look-up of words."""

    trained: ClassVar[bool] = True

    def __init__(self, traced: Traced, description: DataDescription, slots: Mapping[int, Slot], words: str | None):
        self.slots, self.words, self.text = slots, words, description.task == "text"
        self.feature_shape, self.outputs = tuple(description.feature_shape), traced.value(traced.last).numel() // ROWS
        self.values = sum(2 * one.numel() // ROWS for one in traced.values.values() if isinstance(one, Tensor))
        self.drops: list[StackedDropout] = []
        self.module = _exchanged(traced, self)
        modules = [one for one in self.module.modules() if isinstance(one, _Batched)]
        uses = Counter(key for one in modules for key in one.keys.values())
        self.alone = {key for key, count in uses.items() if count == 1}

    def attach(self, place: Place, x: Tensor) -> None:
        self.clients = place.clients
        self.output = place.take("output", place.clients, place.rows, self.outputs)
        self.weights: dict[int, Weight] = {}
        for key, slot in self.slots.items():
            value, target = place.parameter(slot, *slot.arranged)
            self.weights[key] = Weight(value.data.requires_grad_(), target, place.step, key in self.alone)
        self.drops = [
            drop.bind(replace(place, number=(place.number, number)), self.output)
            for number, drop in enumerate(self.drops)
        ]
        count, words = place.clients * place.rows, self.words is not None
        self.x = x.view(count, *x.shape[2:]) if words else x.view(count, *self.feature_shape)
        self.input = self.x.data.requires_grad_() if words and not place.first else self.x
        self.words_of_rows: tuple[Tensor, Tensor] | None = None  # rows of the table (k, b, L), and their words
        self._ordered = list(self.weights.values())
        self._leaves = [weight.value for weight in self._ordered]
        self._leaves += [self.input] if self.input.requires_grad else []

    def forward(self) -> None:
        for drop in self.drops:
            drop.arrange()
        given = self.x
        if self.words_of_rows is not None:
            rows, words = self.words_of_rows
            given = words[rows.flatten(0, 1)]
        CURRENT.append(self)
        try:
            with torch.enable_grad():
                self._result = self.module(given.to(torch.int32) if self.text else given)
        finally:
            CURRENT.pop()
        self.output.copy_(self._result.detach().view(self.output.shape))

    def backward(self, gradient: Tensor) -> Tensor:
        result = self.__dict__.pop("_result")
        gradients = torch.autograd.grad(result, self._leaves, gradient.reshape(result.shape), allow_unused=True)
        finish(self._ordered, gradients[: len(self._ordered)])
        if not self.input.requires_grad:
            return gradient
        of_words = gradients[-1]
        return torch.zeros_like(self.input) if of_words is None else of_words.contiguous()


CURRENT: list[GraphLayer] = []
"""The bound layer whose forward pass runs; its exchanged layers read the parameters and masks of its clients."""


class _Batched(nn.Module):
    """Layer with trained parameters, computed by its batched form."""

    def __init__(self, layer: nn.Module, form: Form):
        super().__init__()
        self.form, self.__dict__["layer"] = form, layer  # no submodule: its parameters are not the bound clients'
        self.keys = {name: id(one) for name, one in layer.named_parameters() if one.requires_grad}
        self.axis = int(isinstance(layer, nn.GRU | nn.LSTM) and not layer.batch_first)  # the samples' axis in inputs

    def forward(self, x: Tensor) -> Any:
        bound = CURRENT[-1]
        weights = {name: bound.weights[key] for name, key in self.keys.items()}
        x = torch.unflatten(x, self.axis, (bound.clients, -1)).movedim(self.axis, 0)
        found = self.form(self.layer, weights, x)
        if isinstance(found, tuple):  # states of all steps, and the last ones of each layer
            return _joined(found[0], self.axis), _joined(found[1], 1)
        return _joined(found, self.axis)


class _Mask(nn.Module):
    """Dropout: multiplication by the next mask, per channel or per value."""

    def __init__(self, number: int, channels: bool):
        super().__init__()
        self.number, self.channels = number, channels

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channels else x.shape
        return x * CURRENT[-1].drops[self.number].mask.view(shape)


class _Vectors(nn.Module):
    """Vectors of the samples' words, which the previous layer has looked up."""

    def forward(self, tokens: Tensor) -> Tensor:
        return CURRENT[-1].input


def _joined(value: Any, axis: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_joined(one, axis) for one in value)
    return value.movedim(0, axis).flatten(axis, axis + 1)


def graph_net(traced: Traced, description: DataDescription) -> StackedNet:
    """Return a traced forward pass as one layer, after the look-up of words if there is one."""
    words = _look_up(traced)
    table: Any = None if words is None else traced.part(words)
    layers: list[Layer] = []
    slots: dict[int, Slot] = {}
    offset = start = 0
    parts = [(part, ARRANGED[type(part)]) for part in traced.copied.modules() if type(part) in ARRANGED]
    axes = {id(getattr(part, name)): order for part, orders in parts for name, order in orders.items()}
    for parameter in traced.copied.parameters():
        if not parameter.requires_grad:
            continue
        shape = tuple(parameter.shape)
        if table is not None and parameter is table.weight:
            slot = Slot(offset, shape, 0)
            layers.append(Embedding(description.feature_shape[0], slot, table.padding_idx))
        else:
            slots[id(parameter)] = slot = Slot(offset, shape, start, axes.get(id(parameter)))
            start += slot.aligned_size
        offset += slot.size
    layers.append(GraphLayer(traced, description, slots, None if words is None else str(words.target)))
    return StackedNet(tuple(layers), tuple(slots.values()), offset, start, description)


def _look_up(traced: Traced) -> fx.Node | None:
    """Return the node that looks up the sample's token vectors, if they are trained and read nowhere else."""
    samples, tables = next(iter(traced.graph.nodes)), Counter[int]()
    found = []
    for node in traced.graph.nodes:
        part = traced.part(node) if node.op == "call_module" else None
        tables.update(map(id, part.parameters()) if part is not None else ())
        if type(part) is not nn.Embedding or part.max_norm is not None or part.scale_grad_by_freq:
            continue
        ids, tokens = traced.value(node.args[0]), traced.value(samples)
        if part.weight.requires_grad and tokens.dim() == 2 and torch.equal(ids, tokens.to(ids.dtype)):
            found.append(node)
    alone = len(found) == 1 and tables[id(traced.part(found[0]).weight)] == 1
    return found[0] if alone else None


def _exchanged(traced: Traced, layer: GraphLayer) -> fx.GraphModule:
    """Return the traced forward pass with batched forms instead of layers with trained parameters, and masks."""
    graph, parts = copy.deepcopy(traced.graph), {}
    nodes = {node.name: node for node in traced.graph.nodes}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            parts[str(node.target)] = value = operator.attrgetter(str(node.target))(traced.copied)
            if isinstance(value, nn.Parameter) and value.requires_grad:
                raise NotStackable(f"the parameter {node.target} is read outside of a layer")
        if node.op != "call_module":
            continue
        part: Any = traced.part(node)
        if layer.words == str(node.target):
            part = _Vectors()
        elif isinstance(part, DROPOUTS):
            part = _dropped(traced, nodes[node.name], layer)
        elif any(one.requires_grad for one in part.parameters()):
            if type(part) not in LAYERS:
                raise NotStackable(f"{type(part).__name__} has no batched form")
            if type(part) is not LoraLinear and not all(one.requires_grad for one in part.parameters()):
                raise NotStackable(f"some parameters of {type(part).__name__} are frozen")
            part = _Batched(part, LAYERS[type(part)])
        elif any(True for _ in part.buffers()):
            raise NotStackable(f"{type(part).__name__} keeps values between batches")
        elif getattr(part, "inplace", False):  # autograd forbids changes of the results of an autograd.Function
            part = copy.copy(part)
            part.inplace = False
        node.target = f"part{len(parts)}"
        parts[node.target] = part
    return fx.GraphModule(parts, graph)


def _dropped(traced: Traced, node: fx.Node, layer: GraphLayer) -> nn.Module:
    """Return the layer that multiplies by the masks of a dropout."""
    part: Any = traced.module.get_submodule(str(node.target))
    if part.p == 0:
        return nn.Identity()
    example = traced.value(node)
    if part.p == 1 or example.shape[0] != ROWS:
        raise NotStackable("Dropout of everything, or on values whose first axis is not the samples")
    channels = getattr(part, "channels", not isinstance(part, nn.Dropout))
    layer.drops.append(StackedDropout(example.shape[1] if channels else example.numel() // ROWS, part.p))
    return _Mask(len(layer.drops) - 1, channels)
