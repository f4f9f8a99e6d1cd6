"""Conversion of a module to its batched form: hand-written for a chain of layers, a graph for any other."""

from __future__ import annotations

import copy
import math
from collections.abc import MutableMapping
from typing import Any

from torch import fx, nn

import fedmpi.models.stacked.recurrent  # noqa: F401
from fedmpi.common.errors import raised
from fedmpi.common.generators import kept_generators
from fedmpi.data.schema import DataDescription
from fedmpi.models.stacked.base import ALIGNMENT, Layer, NotStackable, Slot
from fedmpi.models.stacked.chain import StackedNet, by_hand
from fedmpi.models.stacked.check import check_form
from fedmpi.models.stacked.forms import ARRANGED
from fedmpi.models.stacked.graph import graph_layer
from fedmpi.models.stacked.text import Embedding
from fedmpi.models.stacked.trace import Traced, trace

__all__ = ["NotStackable", "StackedNet", "translate", "why_not_stackable"]

CASTS = {"long", "int", "to", "type", "contiguous"}


def why_not_stackable(
    module: nn.Module, description: DataDescription, known: MutableMapping[Any, Any] | None = None
) -> str | None:
    """Return the reason why a model has no batched form, None if it has one; `known` as for `translate`."""
    try:
        translate(module, description, known)
    except NotStackable as reason:
        return str(reason)
    return None


def translate(
    module: nn.Module, description: DataDescription, known: MutableMapping[Any, Any] | None = None
) -> StackedNet:
    """Return the batched form of a model; `known` caches it, or the reason why there is none."""
    known = {} if known is None else known
    if description not in known:
        try:
            known[description] = _translated(module, description)
        except NotStackable as reason:
            known[description] = str(reason)
    found: StackedNet | str = known[description]
    if isinstance(found, str):
        raise NotStackable(found)
    return found


def _translated(module: nn.Module, description: DataDescription) -> StackedNet:
    """Return the batched form of the module's forward pass, tested against a copy of the module."""
    try:
        copied = copy.deepcopy(module).train()
        with kept_generators():
            traced = trace(module, copied, description)
            try:
                net = by_hand(traced, description)
            except NotStackable:
                net = _graph_net(traced, description)
            check_form(net, copied, description)
    except NotStackable:
        raise
    except Exception as error:  # the sequential engine supports everything that a form does not
        raise NotStackable(f"{type(module).__name__} has no batched form: {raised(error)}") from error
    return net


def _graph_net(traced: Traced, description: DataDescription) -> StackedNet:
    """Return the graph as one layer, after the look-up of words if there is one."""
    words = _look_up(traced, tuple(description.feature_shape))
    table: Any = None if words is None else traced.part(words)
    layers: list[Layer] = []
    slots: dict[int, Slot] = {}
    offset = start = 0
    axes = {
        id(getattr(part, name)): order
        for part in traced.module.modules()
        for name, order in ARRANGED.get(type(part), {}).items()
    }
    for parameter in traced.module.parameters():
        if not parameter.requires_grad:
            continue
        shape = tuple(parameter.shape)
        if table is not None and parameter is table.weight:
            slot = Slot(offset, shape, 0)
            layers.append(Embedding(description.feature_shape[0], shape[1], slot, padding=table.padding_idx))
        else:
            slots[id(parameter)] = slot = Slot(offset, shape, start, axes.get(id(parameter)))
            start += -(-slot.size // ALIGNMENT) * ALIGNMENT
        offset += slot.size
    layers.append(graph_layer(traced, slots, words, description, math.prod(description.output_shape)))
    return StackedNet(tuple(layers), tuple(slots.values()), offset, start, description)


def _look_up(traced: Traced, feature_shape: tuple[int, ...]) -> fx.Node | None:
    """Return the node that looks up the sample's token vectors, if it is the only one and the vectors are trained."""
    found = []
    for node in traced.graph.nodes:
        part = traced.part(node) if node.op == "call_module" else None
        if type(part) is not nn.Embedding or part.max_norm is not None or part.scale_grad_by_freq:
            continue
        if part.weight.requires_grad and len(node.args) == 1 and _of_tokens(node.args[0]):
            found.append((node, part.weight))
    if len(found) != 1 or len(feature_shape) != 1:
        return None
    node, weight = found[0]
    calls = [other for other in traced.graph.nodes if other.op == "call_module" and other is not node]
    shared = any(one is weight for call in calls for one in traced.part(call).parameters())
    names = {name for name, one in traced.module.named_parameters(remove_duplicate=False) if one is weight}
    read = any(other.op == "get_attr" and other.target in names for other in traced.graph.nodes)
    return None if shared or read else node


def _of_tokens(node: object) -> bool:
    while isinstance(node, fx.Node) and node.op == "call_method" and node.target in CASTS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op == "placeholder"
