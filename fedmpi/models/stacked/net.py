"""From a module to its stacked form: layers one after another by hand, any other forward pass as a graph."""

from __future__ import annotations

import math
import operator
from collections.abc import MutableMapping
from typing import Any

from torch import fx, nn

import fedmpi.models.stacked.attention
import fedmpi.models.stacked.convolution
import fedmpi.models.stacked.recurrent  # noqa: F401
from fedmpi.common.errors import raised
from fedmpi.data.schema import DataDescription
from fedmpi.models.stacked.base import ALIGNMENT, Layer, NotStackable, Slot
from fedmpi.models.stacked.chain import chain
from fedmpi.models.stacked.form_check import check_form
from fedmpi.models.stacked.forms import ARRANGED, LAYERS
from fedmpi.models.stacked.sequence import StackedNet, parts_of, sequence
from fedmpi.models.stacked.text import Embedding
from fedmpi.models.stacked.trace import Traced, trace
from fedmpi.models.stacked.writer import Writer

__all__ = ["NotStackable", "StackedNet", "stacked_form", "translate", "why_not_stackable"]

CASTS = {"long", "int", "to", "type", "contiguous"}


def stacked_form(module: nn.Module, description: DataDescription) -> StackedNet | None:
    """The stacked form of a model, or None where it has none (`why_not_stackable` says why)."""
    try:
        return translate(module, description)
    except NotStackable:
        return None


def why_not_stackable(
    module: nn.Module, description: DataDescription, known: MutableMapping[Any, Any] | None = None
) -> str | None:
    """The reason why a model has no stacked form, None if it has one; `known` as for `translate`."""
    try:
        translate(module, description, known)
    except NotStackable as reason:
        return str(reason)
    return None


def translate(
    module: nn.Module, description: DataDescription, known: MutableMapping[Any, Any] | None = None
) -> StackedNet:
    """The stacked form of a model."""
    try:
        return sequence(module, description, parts_of(module))
    except NotStackable:
        pass
    known = {} if known is None else known
    if description not in known:
        try:
            known[description] = _followed(module, description)
        except NotStackable as reason:
            known[description] = str(reason)
    found: StackedNet | str = known[description]
    if isinstance(found, str):
        raise NotStackable(found)
    return found


def _followed(module: nn.Module, description: DataDescription) -> StackedNet:
    """The stacked form of what the module's forward pass does."""
    traced = trace(module, description, LAYERS)
    try:
        net = _by_hand(traced, description) or _graph_net(traced, description)
    except NotStackable:
        raise
    except Exception as error:  # whatever a form cannot do, the sequential engine can
        raise NotStackable(f"{type(module).__name__} has no stacked form: {raised(error)}") from error
    check_form(net, module, description)
    return net


def _by_hand(traced: Traced, description: DataDescription) -> StackedNet | None:
    """The form of a graph that is one layer after another, and nothing else."""
    parts = chain(traced)
    if parts is None:
        return None
    try:
        return sequence(traced.module, description, parts)
    except NotStackable:
        return None


def _graph_net(traced: Traced, description: DataDescription) -> StackedNet:
    """The graph as one layer, after the look-up of words where there is one."""
    words = _look_up(traced, tuple(description.feature_shape))
    table = traced.part(words) if words is not None else None
    layers: list[Layer] = []
    slots: dict[int, Slot] = {}
    offset = start = 0
    axes = _axes(traced)
    for parameter in traced.module.parameters():
        if not parameter.requires_grad:
            continue
        shape = tuple(parameter.shape)
        if isinstance(table, nn.Embedding) and parameter is table.weight:
            slot, padding = Slot(offset, shape, 0), table.padding_idx
            layers.append(Embedding(description.feature_shape[0], table.embedding_dim, slot, padding=padding))
        else:
            slots[id(parameter)] = slot = Slot(offset, shape, start, axes.get(id(parameter)))
            start += -(-slot.size // ALIGNMENT) * ALIGNMENT
        offset += slot.size
    feature_shape, text = tuple(description.feature_shape), description.task == "text"
    outputs = math.prod(description.output_shape)
    layers.append(Writer(traced, slots, words).layer(outputs, feature_shape, text))
    return StackedNet(tuple(layers), tuple(slots.values()), offset, start, description)


def _axes(traced: Traced) -> dict[int, tuple[int, ...]]:
    """Parameter (by id) -> the order of its axes in the stack, where its layer wants another one."""
    found = {}
    for node in traced.nodes:
        if node.op == "call_module":
            part = traced.part(node)
            for name, axes in ARRANGED.get(type(part), {}).items():
                found[id(getattr(part, name))] = axes
    return found


def _look_up(traced: Traced, feature_shape: tuple[int, ...]) -> fx.Node | None:
    """The node that looks up the vectors of the sample's tokens, where one alone does and the vectors are trained."""
    found = []
    for node in traced.nodes:
        part = traced.part(node) if node.op == "call_module" else None
        if type(part) is not nn.Embedding or part.max_norm is not None or part.scale_grad_by_freq:
            continue
        if part.weight.requires_grad and len(node.args) == 1 and _of_tokens(node.args[0]):
            found.append(node)
    if len(found) != 1 or len(feature_shape) != 1:
        return None
    (node,) = found
    weight = operator.attrgetter(str(node.target))(traced.module).weight
    calls = [other for other in traced.nodes if other.op == "call_module" and other is not node]
    shared = any(one is weight for call in calls for one in _parameters(traced, call))
    read = any(other.op == "get_attr" and traced.examples[other][0] is weight for other in traced.nodes)
    return None if shared or read else node


def _of_tokens(node: object) -> bool:
    while isinstance(node, fx.Node) and node.op == "call_method" and node.target in CASTS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _parameters(traced: Traced, node: fx.Node) -> list[nn.Parameter]:
    return list(traced.part(node).parameters())
